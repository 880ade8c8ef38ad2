"""The parent outlives whatever a child does, and no process outlives the parent."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fitune.measure.child import ChildDied, ChildProcess, ChildTimeout

HERE = Path(__file__).parent
PARENT = """
import time
from fitune.measure.child import ChildProcess
child = ChildProcess("bad_child")
child.send({"op": "hang"})
print(child.pid, child.receive(20.0)["pid"], flush=True)
time.sleep(600)
"""


@pytest.fixture
def environment() -> dict[str, str]:
    return os.environ | {"PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}


@pytest.fixture
def child(environment: dict[str, str]) -> Iterator[ChildProcess]:
    process = ChildProcess("bad_child", env=environment)
    yield process
    process.kill()


def gone(pid: int, patience_s: float = 5.0) -> bool:
    """Whether the process ends in time (a zombie has ended)."""
    deadline = time.monotonic() + patience_s
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_messages_of_any_size(child: ChildProcess) -> None:
    value = [list(range(100_000)), "µs", None, 2.5]
    child.send({"op": "echo", "value": value})
    assert child.receive(20.0)["value"] == value


def test_prints_do_not_break_frames(child: ChildProcess) -> None:
    child.send({"op": "print"})
    assert child.receive(20.0)["kind"] == "done"
    child.send({"op": "echo", "value": 1})
    assert child.receive(20.0)["value"] == 1
    assert "noise on stdout" in child.stderr_tail()


def test_a_flood_on_stderr_blocks_nobody_and_keeps_its_end(child: ChildProcess) -> None:
    child.send({"op": "flood"})
    assert child.receive(20.0)["kind"] == "done"
    assert child.stderr_tail().endswith("last words")
    assert len(child.stderr_tail()) <= 8192


def test_a_hang_is_killed_with_everything_it_started(child: ChildProcess) -> None:
    child.send({"op": "hang"})
    grandchild = child.receive(20.0)["pid"]
    with pytest.raises(ChildTimeout):
        child.receive(0.3)
    assert not child.alive
    assert gone(child.pid) and gone(grandchild)


def test_a_crash_names_signal_and_last_words(child: ChildProcess) -> None:
    child.send({"op": "segfault"})
    with pytest.raises(ChildDied, match="SIGSEGV: about to die"):
        child.receive(20.0)


def test_an_exit_names_its_code(child: ChildProcess) -> None:
    child.send({"op": "exit"})
    with pytest.raises(ChildDied, match="exit code 7"):
        child.receive(20.0)
    with pytest.raises(ChildDied):
        child.send({"op": "echo", "value": 1})


def test_close_is_gentle_and_can_be_repeated(environment: dict[str, str]) -> None:
    process = ChildProcess("bad_child", env=environment)
    process.send({"op": "echo", "value": 0})
    process.receive(20.0)
    process.close()
    process.close()
    assert gone(process.pid)


def test_children_die_with_a_killed_parent(environment: dict[str, str]) -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, env=environment, text=True)
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    os.kill(parent.pid, signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    assert gone(pids[0])
    if not gone(pids[1], 1.0):  # the kernel took the child before it could take its own children along
        os.kill(pids[1], signal.SIGKILL)
