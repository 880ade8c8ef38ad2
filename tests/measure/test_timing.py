"""The graph timer's order of replays and events, on a CUDA that only keeps a clock."""

from typing import Any

import pytest
import torch

from fitune.measure import timing


class FakeCuda:
    """A device on which replaying a graph advances a clock; everything that happens is logged."""

    def __init__(self) -> None:
        self.now_ms = 0.0
        self.log: list[str] = []
        self.capturing: list[str] | None = None

    def graph(self) -> "FakeGraph":
        return FakeGraph(self)

    def event(self, enable_timing: bool) -> "FakeEvent":
        assert enable_timing
        return FakeEvent(self)


class FakeGraph:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.kernels: list[str] = []

    def capture_begin(self, pool: Any, capture_error_mode: str) -> None:
        assert (pool, capture_error_mode) == ("pool", "thread_local")
        assert self.cuda.capturing is None
        self.cuda.capturing = self.kernels

    def capture_end(self) -> None:
        self.cuda.capturing = None

    def replay(self) -> None:
        self.cuda.log.append("+".join(self.kernels))
        self.cuda.now_ms += sum(float(name) for name in self.kernels)


class FakeEvent:
    def __init__(self, cuda: FakeCuda) -> None:
        self.cuda = cuda
        self.at_ms = 0.0

    def record(self, stream: Any) -> None:
        assert stream == "stream"
        self.cuda.log.append("event")
        self.at_ms = self.cuda.now_ms

    def elapsed_time(self, end: "FakeEvent") -> float:
        return end.at_ms - self.at_ms


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    fake = FakeCuda()
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: "stream")
    monkeypatch.setattr(torch.cuda, "set_stream", lambda stream: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: "pool")
    monkeypatch.setattr(torch.cuda, "CUDAGraph", fake.graph)
    monkeypatch.setattr(torch.cuda, "Event", fake.event)
    monkeypatch.setattr(torch, "zeros", lambda size, device: torch.ones(size))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: fake.log.append("wait"))
    return fake


def kernel(cuda: FakeCuda, milliseconds: float) -> timing.Body:
    def launch() -> None:
        assert cuda.capturing is not None
        cuda.capturing.append(str(milliseconds))

    return launch


def test_each_replay_stands_between_two_events_behind_a_leading_one(cuda: FakeCuda) -> None:
    timer = timing.GraphTimer("cuda:0")
    one = timer.record([kernel(cuda, 1.0)])
    two = timer.record([kernel(cuda, 2.0), kernel(cuda, 4.0)])
    assert timer.samples([one, two, one]) == [1000.0, 3000.0, 1000.0]
    assert cuda.log == ["1.0", "event", "1.0", "event", "2.0+4.0", "event", "1.0", "event", "wait"]
    assert timer.samples([two]) == [3000.0]


def test_a_failure_while_recording_leaves_capture_mode_and_is_remembered(cuda: FakeCuda) -> None:
    timer = timing.GraphTimer("cuda:0")

    def fail() -> None:
        raise RuntimeError("operation not permitted when stream is capturing")

    with pytest.raises(RuntimeError, match="not permitted"):
        timer.record([fail])
    assert timer.lost and cuda.capturing is None


def test_host_timer_divides_by_calls() -> None:
    calls: list[int] = []
    timer = timing.HostTimer()
    region = timer.record([lambda: calls.append(1)] * 4)
    (us,) = timer.samples([region])
    assert len(calls) == 4 and us > 0.0
