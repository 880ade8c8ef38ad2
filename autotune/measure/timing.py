"""Timers: a region is recorded once, then replayed; times are per call of the region, in µs."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Final, Protocol

import torch

Body = Callable[[], object]

GRAPH_RESOLUTION_US: Final = 0.5
HOST_RESOLUTION_US: Final = 1.0


class Region(Protocol):
    """A recorded sequence of `calls` calls that can be replayed."""

    calls: int

    def replay(self) -> None: ...


class Timer(Protocol):
    """Records regions and times their replays."""

    name: str
    resolution_us: float
    lost: bool
    """Whether recording failed in a way that this process does not recover from."""

    def record(self, bodies: Sequence[Body]) -> Region:
        """Record the bodies, run one after another, as one region of len(bodies) calls."""
        ...

    def samples(self, regions: Sequence[Region]) -> list[float]:
        """Replay the regions back to back, the last one also before the first, and return each one's µs per call."""
        ...

    def wait(self) -> None:
        """Wait until the device has done everything. Raises what went wrong there."""
        ...


class GraphRegion:
    """CUDA graph of a region."""

    def __init__(self, graph: torch.cuda.CUDAGraph, calls: int) -> None:
        self._graph = graph
        self.calls = calls

    def replay(self) -> None:
        self._graph.replay()


class GraphTimer:
    """CUDA-graph replays between events, on one stream, with one memory pool for all graphs.

    Events stand between consecutive replays, and one replay goes ahead untimed, so that the device never waits for
    the host inside a timed span.
    """

    name = "graph"
    resolution_us = GRAPH_RESOLUTION_US

    def __init__(self, device: str) -> None:
        self.device = device
        self.lost = False
        self.stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        torch.cuda.set_stream(self.stream)
        self._pool = torch.cuda.graph_pool_handle()
        self._events: list[torch.cuda.Event] = []
        # A pool ends with its last graph, and cannot be used again: this graph never ends.
        anchor = torch.zeros(1, device=device)
        self._anchor = self.record([anchor.zero_])

    def record(self, bodies: Sequence[Body]) -> GraphRegion:
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            for body in bodies:
                body()
        except BaseException:
            self.lost = True
            _abandon(graph)
            raise
        graph.capture_end()
        return GraphRegion(graph, len(bodies))

    def samples(self, regions: Sequence[Region]) -> list[float]:
        events = self._take_events(len(regions) + 1)
        regions[-1].replay()
        events[0].record(self.stream)
        for region, event in zip(regions, events[1:], strict=True):
            region.replay()
            event.record(self.stream)
        self.wait()
        return [
            before.elapsed_time(after) * 1000.0 / region.calls
            for before, after, region in zip(events, events[1:], regions, strict=False)
        ]

    def wait(self) -> None:
        torch.cuda.synchronize(self.device)

    def _take_events(self, count: int) -> list[torch.cuda.Event]:
        while len(self._events) < count:
            self._events.append(torch.cuda.Event(enable_timing=True))  # type: ignore[no-untyped-call]
        return self._events[:count]


def _abandon(graph: torch.cuda.CUDAGraph) -> None:
    """Leave capture mode after a failure inside it."""
    try:
        graph.capture_end()
    except RuntimeError:
        pass


class HostRegion:
    """Bodies to be run anew each time."""

    def __init__(self, bodies: Sequence[Body]) -> None:
        self._bodies = tuple(bodies)
        self.calls = len(self._bodies)

    def replay(self) -> None:
        for body in self._bodies:
            body()


class HostTimer:
    """Wall clock around calls on the CPU, where kernels are interpreted. Good for trying the machinery out only."""

    name = "host"
    resolution_us = HOST_RESOLUTION_US
    lost = False

    def record(self, bodies: Sequence[Body]) -> HostRegion:
        return HostRegion(bodies)

    def samples(self, regions: Sequence[Region]) -> list[float]:
        result = []
        for region in regions:
            start_s = time.perf_counter()
            region.replay()
            result.append((time.perf_counter() - start_s) * 1e6 / region.calls)
        return result

    def wait(self) -> None:
        pass
