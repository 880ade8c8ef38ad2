"""Messages between the measuring parent and its children: length-framed msgpack maps over pipes.

A frame is four bytes of little-endian length, then that many bytes of msgpack. Both ends run the same fitune, so the
format carries no version.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, fields
from typing import Any, BinaryIO, Final

import msgpack

from fitune.measure.protocol import Outcome
from fitune.problem import LayerShape, Problem
from fitune.record import Accuracy, Measurement, Regime, Status
from fitune.tactic import Stage, Tactic
from fitune.target import Environment, Target

HEADER: Final = struct.Struct("<I")
MAX_FRAME_BYTES: Final = 1 << 28
_PR_SET_PDEATHSIG: Final = 1


def pack(message: Mapping[str, Any]) -> bytes:
    """One frame."""
    body: bytes = msgpack.packb(message, use_bin_type=True)
    assert len(body) <= MAX_FRAME_BYTES
    return HEADER.pack(len(body)) + body


def unpack(body: bytes) -> dict[str, Any]:
    """The message of one frame's body."""
    message = msgpack.unpackb(body, raw=False, strict_map_key=False)
    assert isinstance(message, dict)
    return message


def read_frame(stream: BinaryIO) -> dict[str, Any] | None:
    """The next message of a blocking stream; None at its end."""
    header = stream.read(HEADER.size)
    if len(header) < HEADER.size:
        return None
    body = stream.read(HEADER.unpack(header)[0])
    return unpack(body)


class ChildPort:
    """A child's end: requests come in on stdin, answers go out on what was stdout.

    File descriptor 1 is pointed at stderr, so that nothing a library prints can break a frame. The whole process
    group is killed when the parent goes away: by the kernel where it offers that, and when the pipe `FITUNE_LIFELINE`
    names reaches its end.
    """

    def __init__(self) -> None:
        self._input = sys.stdin.buffer
        self._output = os.fdopen(os.dup(1), "wb", buffering=0)
        os.dup2(2, 1)
        die_with_parent()

    def receive(self) -> dict[str, Any] | None:
        """The next request; None when the parent closed the pipe."""
        return read_frame(self._input)

    def send(self, message: Mapping[str, Any]) -> None:
        """Send one message, whole."""
        view = memoryview(pack(message))
        while view:
            view = view[self._output.write(view) :]


def die_with_parent() -> None:
    """Arrange for this process, and compilers it started, to end when its parent does."""
    lifeline = os.environ.pop("FITUNE_LIFELINE", "")
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if lifeline:
        threading.Thread(target=_watch, args=(int(lifeline),), name="lifeline", daemon=True).start()


def _watch(descriptor: int) -> None:
    try:
        while os.read(descriptor, 1):
            pass
    except OSError:
        pass
    if os.getpgid(0) == os.getpid():
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def problem_to_wire(problem: Problem) -> dict[str, Any]:
    return asdict(problem)


def problem_from_wire(value: Mapping[str, Any]) -> Problem:
    return Problem(**{**value, "shape": LayerShape(**value["shape"])})


def target_to_wire(target: Target) -> dict[str, Any]:
    return asdict(target)


def target_from_wire(value: Mapping[str, Any]) -> Target:
    return Target(**value)


def environment_to_wire(environment: Environment) -> dict[str, Any]:
    return {f.name: getattr(environment, f.name) for f in fields(environment) if f.init}


def environment_from_wire(value: Mapping[str, Any]) -> Environment:
    return Environment(**value)


def measurement_to_wire(measurement: Measurement) -> dict[str, Any]:
    return asdict(measurement)


def measurement_from_wire(value: Mapping[str, Any]) -> Measurement:
    parts = tuple((str(name), float(us)) for name, us in value["parts_us"])
    return Measurement(**{**value, "regime": Regime(**value["regime"]), "parts_us": parts})


def outcome_to_wire(outcome: Outcome) -> dict[str, Any]:
    """An outcome without its tactic, which the parent knows."""
    return {
        "status": outcome.status.value,
        "measurement": None if outcome.measurement is None else measurement_to_wire(outcome.measurement),
        "accuracy": None if outcome.accuracy is None else asdict(outcome.accuracy),
        "binary": outcome.binary,
        "error": outcome.error,
    }


def outcome_from_wire(tactic: Tactic | Stage, value: Mapping[str, Any]) -> Outcome:
    measurement, accuracy = value["measurement"], value["accuracy"]
    return Outcome(
        tactic,
        Status(value["status"]),
        None if measurement is None else measurement_from_wire(measurement),
        None if accuracy is None else Accuracy(**accuracy),
        value["binary"],
        value["error"],
    )
