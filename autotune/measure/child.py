"""A child process that may hang or die at any moment, and the parent that outlives it."""

from __future__ import annotations

import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from typing import IO, Any, Final

from fitune.errors import MeasureError
from fitune.measure.wire import HEADER, pack, unpack

STDERR_TAIL_BYTES: Final = 8192
_READ_BYTES: Final = 1 << 16


class ChildDied(Exception):
    """The child ended, or closed its pipe, before it answered. The text says how."""


class ChildTimeout(Exception):
    """The child did not answer in time; it has been killed."""


class ChildProcess:
    """One `python -m MODULE` in a session of its own, spoken to in frames.

    Everything it writes to stderr is read and its tail kept for error texts. `kill` takes the whole process group, so
    a compiler the child started dies with it.
    """

    def __init__(self, module: str, arguments: Sequence[str] = (), env: Mapping[str, str] | None = None) -> None:
        lifeline_read, self._lifeline = os.pipe()
        environment = dict(os.environ if env is None else env)
        environment["FITUNE_LIFELINE"] = str(lifeline_read)
        environment.setdefault("PYTHONUNBUFFERED", "1")
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=environment,
                pass_fds=(lifeline_read,),
                start_new_session=True,
                bufsize=0,
            )
        except OSError as error:
            os.close(self._lifeline)
            raise MeasureError(f"cannot start {sys.executable} -m {module}: {error.strerror}") from error
        finally:
            os.close(lifeline_read)
        assert self._process.stdin and self._process.stdout and self._process.stderr
        self._stdin, self._stdout, self._stderr = self._process.stdin, self._process.stdout, self._process.stderr
        self._buffer = bytearray()
        self._tail = bytearray()
        self._selector = selectors.DefaultSelector()
        self._stderr_watched = True
        for stream in (self._stdout, self._stderr):
            os.set_blocking(stream.fileno(), False)
            self._selector.register(stream, selectors.EVENT_READ)

    @property
    def pid(self) -> int:
        return self._process.pid

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def send(self, message: Mapping[str, Any]) -> None:
        """Send a request. Raises ChildDied."""
        view = memoryview(pack(message))
        try:
            while view:
                view = view[self._stdin.write(view) or 0 :]
        except (BrokenPipeError, ValueError) as error:
            raise ChildDied(self._obituary()) from error

    def receive(self, limit_s: float) -> dict[str, Any]:
        """The next message. Raises ChildDied, or ChildTimeout after killing the child."""
        message = self.poll_message(limit_s)
        if message is None:
            self.kill()
            raise ChildTimeout(f"no answer within {limit_s:g} s")
        return message

    def poll_message(self, wait_s: float) -> dict[str, Any] | None:
        """The next message, or None when none came within `wait_s`. Raises ChildDied."""
        deadline = time.monotonic() + wait_s
        while True:
            message = self._next_frame()
            if message is not None:
                return message
            left_s = deadline - time.monotonic()
            if left_s <= 0.0:
                return None
            for key, _ in self._selector.select(left_s):
                if key.fileobj is self._stderr:
                    self._drain_stderr()
                elif not self._read_stdout():
                    raise ChildDied(self._obituary())

    def stderr_tail(self) -> str:
        """The last lines the child wrote to stderr."""
        self._drain_stderr()
        return bytes(self._tail).decode(errors="replace").strip()

    def kill(self) -> None:
        """End the child and its group at once, and free everything. May be called again."""
        if self._lifeline < 0:
            return
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        self._process.wait()
        self._drain_stderr()
        self._stderr_watched = False
        self._selector.close()
        for stream in (self._stdin, self._stdout, self._stderr):
            stream.close()
        os.close(self._lifeline)
        self._lifeline = -1

    def close(self, patience_s: float = 5.0) -> None:
        """Let the child end by itself (its request pipe is closed), then make sure of it."""
        if self._lifeline >= 0:
            try:
                self._stdin.close()
                self._process.wait(patience_s)
            except (OSError, subprocess.TimeoutExpired):
                pass
        self.kill()

    def _next_frame(self) -> dict[str, Any] | None:
        if len(self._buffer) < HEADER.size:
            return None
        end = HEADER.size + HEADER.unpack_from(self._buffer)[0]
        if len(self._buffer) < end:
            return None
        body = bytes(self._buffer[HEADER.size : end])
        del self._buffer[:end]
        return unpack(body)

    def _read_stdout(self) -> bool:
        """Take what is there; False at the end of the pipe."""
        chunk = _read_available(self._stdout)
        if chunk is None:
            return True
        self._buffer += chunk
        return bool(chunk)

    def _drain_stderr(self) -> None:
        while not self._stderr.closed:
            chunk = _read_available(self._stderr)
            if not chunk:
                if chunk is not None and self._stderr_watched:
                    self._selector.unregister(self._stderr)
                    self._stderr_watched = False
                return
            self._tail += chunk
            del self._tail[:-STDERR_TAIL_BYTES]

    def _obituary(self) -> str:
        """How the child ended, in words; it is reaped on the way."""
        try:
            code = self._process.wait(10.0)
        except subprocess.TimeoutExpired:
            self.kill()
            code = self._process.wait()
        tail = self.stderr_tail()
        self.kill()
        how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with exit code {code}"
        last = tail.splitlines()[-1].strip() if tail else ""
        return f"{how}: {last}" if last else how


def _read_available(stream: IO[bytes]) -> bytes | None:
    """What a non-blocking pipe holds: None when nothing is there yet, empty at its end."""
    try:
        return os.read(stream.fileno(), _READ_BYTES)
    except BlockingIOError:
        return None
