"""The measuring child with kernels that go wrong: group_m says how."""

import ctypes
import sys
import time
from typing import Any

from fitune.kernels import layer
from fitune.measure import bench, build, timing, worker

SEGFAULT, HANG, UNWRITTEN, ILLEGAL, WRONG, COMPILE_ABORT, COMPILE_ERROR, NO_MEMORY, LATE_SEGFAULT = range(101, 110)


class OutOfResources(Exception):
    """Named like Triton's."""


class FakeContext:
    """A GPU context that an illegal access poisons for good."""

    poisoned = False
    calls = 0


def run_stage(stage: Any, args: Any, ws: Any, out: Any, launch: Any = layer.run) -> None:
    how = stage.gemm.group_m
    compiling = isinstance(launch, build.Collector)
    if FakeContext.poisoned:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if compiling and how == COMPILE_ABORT:
        sys.stderr.write("LLVM ERROR: Cannot select\n")
        sys.stderr.flush()
        ctypes.string_at(0)
    if compiling and how == COMPILE_ERROR:
        raise RuntimeError("PassManager::run failed")
    if not compiling and how == SEGFAULT:
        ctypes.string_at(0)
    if not compiling and how == LATE_SEGFAULT:
        FakeContext.calls += 1
        if FakeContext.calls > 4:
            ctypes.string_at(0)
    if not compiling and how == HANG:
        time.sleep(600)
    if not compiling and how == NO_MEMORY:
        raise OutOfResources("out of resource: shared memory, Required: 300000, Hardware limit: 232448")
    if not compiling and how == ILLEGAL:
        FakeContext.poisoned = True
        raise RuntimeError("CUDA error: an illegal memory access was encountered")
    if how == UNWRITTEN:
        return
    real_run_stage(stage, args, ws, out, launch)
    if not compiling and how == WRONG:
        (ws.hidden if stage.stage == "gemm1" else out)[0, 3] += 100.0


def run_layer(tactic: Any, args: Any, ws: Any, out: Any, launch: Any = layer.run) -> None:
    layer.run_sort(tactic.family, tactic.tile_size, args, ws, launch)
    for name in ("gemm1", "gemm2"):
        run_stage(tactic.stage(name), args, ws, out, launch)


def wait(self: timing.HostTimer) -> None:
    if FakeContext.poisoned:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


real_run_stage = layer.run_stage
bench.run_stage = build.run_stage = run_stage
bench.run_layer = run_layer
timing.HostTimer.wait = wait  # type: ignore[method-assign]

if __name__ == "__main__":
    worker.main()
