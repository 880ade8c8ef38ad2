"""Compiling in processes that can be killed: ahead of measuring, and on machines without a GPU."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import Any, Final

from fitune.errors import MeasureError
from fitune.families import family_named
from fitune.measure.child import ChildDied, ChildProcess, ChildTimeout
from fitune.measure.protocol import Outcome
from fitune.measure.wire import problem_to_wire, target_to_wire
from fitune.problem import LayerShape, Problem
from fitune.record import Status
from fitune.tactic import Stage
from fitune.target import Target

COMPILE_LIMIT_S: Final = 60.0
MAX_WORKERS: Final = 15
_NOW, _LATER = 0, 1

JobKey = tuple[LayerShape, str, int]


@dataclass(frozen=True, slots=True)
class CompileReport:
    """What compiling one stage for a target says. Numbers are None where the target's tools do not tell.

    `shared_bytes`, `registers`, `stack_bytes`, `spill_bytes` (stores and loads) and `ptx_hash` are those of the GEMM
    kernel. `binary` is the hash over all kernels of the stage, as records carry it. `serialized_wgmma` is True when
    ptxas says that it waits after every tensor-core instruction.
    """

    stage: Stage
    status: Status
    shared_bytes: int | None = None
    registers: int | None = None
    stack_bytes: int | None = None
    spill_bytes: int | None = None
    serialized_wgmma: bool = False
    ptx_hash: str = ""
    binary: str = ""
    error: str = ""
    seconds: float = 0.0


def default_workers() -> int:
    """Compile processes to run beside one that measures."""
    return max(1, min(len(os.sched_getaffinity(0)) - 1, MAX_WORKERS))


class CompilePool:
    """Compiles stages in child processes, in parallel, each job under a time limit.

    A compiler that aborts or never ends fails its own job only. Without `report` a job fills Triton's disk cache and
    no more, so that a measuring process of the same machine only loads.
    """

    def __init__(
        self,
        target: Target,
        *,
        workers: int | None = None,
        limit_s: float = COMPILE_LIMIT_S,
        report: bool = False,
        module: str = "fitune.measure.compiler",
    ) -> None:
        self._target = target
        self._limit_s = limit_s
        self._report = report
        self._module = module
        self._changed = threading.Condition()
        self._queue: list[tuple[int, int, JobKey, Problem, Stage]] = []
        self._sequence = 0
        self._asked: dict[JobKey, int] = {}
        self._answers: dict[JobKey, Mapping[str, Any]] = {}
        self._closed = False
        self._threads = [
            threading.Thread(target=self._work, name=f"compile-{number}", daemon=True)
            for number in range(default_workers() if workers is None else workers)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, problem: Problem, stages: Sequence[Stage], *, urgent: bool = True) -> None:
        """Compile these, unless that was asked before. Urgent ones go first."""
        rank = _NOW if urgent else _LATER
        with self._changed:
            for stage in stages:
                key = job_key(problem, stage)
                if self._asked.get(key, _LATER + 1) > rank:
                    self._asked[key] = rank
                    self._sequence += 1
                    heappush(self._queue, (rank, self._sequence, key, problem, stage))
            self._changed.notify_all()

    def answer(self, problem: Problem, stage: Stage) -> Mapping[str, Any]:
        """Wait for the answer to a submitted job."""
        key = job_key(problem, stage)
        with self._changed:
            assert key in self._asked
            self._changed.wait_for(lambda: key in self._answers or self._closed)
            return self._answers.get(key) or {"status": Status.CRASHED.value, "error": "the compile pool was closed"}

    def next_ready(self, problem: Problem, stages: Sequence[Stage]) -> int:
        """Index of the first of the submitted stages that is done; waits for one."""
        keys: list[JobKey] = []

        def ready() -> int | None:
            for index, stage in enumerate(stages):
                if index == len(keys):
                    keys.append(job_key(problem, stage))
                if keys[index] in self._answers:
                    return index
            return None

        with self._changed:
            self._changed.wait_for(lambda: self._closed or ready() is not None)
            return ready() or 0

    def failure(self, problem: Problem, stage: Stage) -> Outcome | None:
        """Why a compiled stage need not be run, as its outcome; None when it may be."""
        answer = self._answers.get(job_key(problem, stage))
        if answer is None:
            return None
        status = Status(answer["status"])
        if status is Status.OK or answer.get("unavailable"):
            return None
        return Outcome(stage, status, binary=answer.get("binary", ""), error=answer["error"])

    def reports(self, problem: Problem, stages: Sequence[Stage]) -> Iterator[CompileReport]:
        """Compile stages and report on each, in their order."""
        assert self._report
        self.submit(problem, stages)
        for stage in stages:
            yield _report_of(stage, self.answer(problem, stage))

    def close(self) -> None:
        """End all compile processes, jobs or not."""
        with self._changed:
            self._closed = True
            self._queue.clear()
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        """One worker: its own child, started at its first job and again after every loss.

        The thread lives as long as the pool, since children die with the thread that started them.
        """
        child: ChildProcess | None = None
        while (job := self._next_job()) is not None:
            key, problem, stage = job
            if child is None or not child.alive:
                child = self._replace(child)
            answer = self._compile(child, problem, stage)
            with self._changed:
                self._answers[key] = answer
                self._changed.notify_all()
        if child is not None:
            child.kill()

    def _next_job(self) -> tuple[JobKey, Problem, Stage] | None:
        with self._changed:
            while True:
                self._changed.wait_for(lambda: self._closed or bool(self._queue))
                if self._closed:
                    return None
                _, _, key, problem, stage = heappop(self._queue)
                if key not in self._answers:
                    return key, problem, stage

    def _replace(self, child: ChildProcess | None) -> ChildProcess | None:
        if child is not None:
            child.kill()
        try:
            return ChildProcess(self._module, env=compile_environment())
        except MeasureError:
            return None

    def _compile(self, child: ChildProcess | None, problem: Problem, stage: Stage) -> Mapping[str, Any]:
        """The child's answer, or one that says how it failed."""
        if child is None:
            return {"status": Status.CRASHED.value, "error": "no compile process could be started", "unavailable": True}
        request = {
            "problem": problem_to_wire(problem),
            "target": target_to_wire(self._target),
            "tactic": str(stage),
            "report": self._report,
        }
        try:
            child.send(request)
            answer = self._receive(child)
        except ChildTimeout:
            text = f"the compiler took longer than {self._limit_s:g} s"
            return {"status": Status.TIMEOUT.value, "error": text}
        except ChildDied as end:
            return {"status": Status.COMPILE_ERROR.value, "error": f"the compiler {end}"}
        shared, most = answer.get("shared_bytes", 0), self._target.shared_bytes
        if shared <= most:
            return answer
        text = f"needs {shared:,} B of shared memory, {self._target.device} has {most:,} B"
        return {**answer, "status": Status.OUT_OF_RESOURCES.value, "error": text}

    def _receive(self, child: ChildProcess) -> Mapping[str, Any]:
        """Wait in short steps, so that closing the pool is not held up by a long job."""
        waited_s = 0.0
        while not self._closed:
            step_s = min(0.5, self._limit_s - waited_s)
            answer = child.poll_message(step_s)
            if answer is not None:
                return answer
            waited_s += step_s
            if waited_s >= self._limit_s:
                child.kill()
                raise ChildTimeout
        child.kill()
        raise ChildDied("was stopped")


def job_key(problem: Problem, stage: Stage) -> JobKey:
    """What the binaries of a stage depend on: nothing of the load, but the token count where the family says so."""
    return problem.shape, str(stage), problem.num_tokens if family_named(stage.family).binary_depends_on_tokens else 0


def compile_environment() -> dict[str, str]:
    """Environment of a compile process: never the interpreter, and one thread."""
    environment = dict(os.environ)
    environment.pop("TRITON_INTERPRET", None)
    environment["OMP_NUM_THREADS"] = "1"
    environment["OPENBLAS_NUM_THREADS"] = "1"
    return environment


def compile_stage(stage: Stage, problem: Problem, target: Target, *, limit_s: float = COMPILE_LIMIT_S) -> CompileReport:
    """Compile one stage for `target`, with or without such a GPU, and report."""
    return next(compile_stages([stage], problem, target, limit_s=limit_s, workers=1))


def compile_stages(
    stages: Sequence[Stage],
    problem: Problem,
    target: Target,
    *,
    limit_s: float = COMPILE_LIMIT_S,
    workers: int | None = None,
) -> Iterator[CompileReport]:
    """Compile stages for `target` in parallel and report on each, in their order."""
    pool = CompilePool(target, limit_s=limit_s, report=True, workers=min(len(stages), workers or default_workers()))
    try:
        yield from pool.reports(problem, stages)
    finally:
        pool.close()


def _report_of(stage: Stage, answer: Mapping[str, Any]) -> CompileReport:
    return CompileReport(
        stage,
        Status(answer["status"]),
        answer.get("gemm_shared_bytes"),
        answer.get("registers"),
        answer.get("stack_bytes"),
        answer.get("spill_bytes"),
        bool(answer.get("serialized_wgmma", False)),
        answer.get("ptx_hash", ""),
        answer.get("binary", ""),
        answer["error"],
        float(answer.get("seconds", 0.0)),
    )
