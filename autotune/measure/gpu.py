"""The GPU measurer: one child process does everything that can hang, crash or poison a CUDA context."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Final, Protocol

from fitune.errors import MeasureError, NoGpuError
from fitune.measure.child import ChildDied, ChildProcess, ChildTimeout
from fitune.measure.protocol import Outcome
from fitune.measure.wire import environment_from_wire, outcome_from_wire, problem_to_wire, target_from_wire
from fitune.problem import LayerShape, Problem
from fitune.record import Status
from fitune.tactic import Stage, Tactic
from fitune.target import Environment, Target

MAX_RESTARTS_WITHOUT_RESULT: Final = 3


@dataclass(frozen=True, slots=True)
class Limits:
    """How long a child may stay silent, in seconds, before it is killed."""

    start_s: float = 180.0
    open_s: float = 180.0
    compile_s: float = 60.0
    run_s: float = 20.0
    race_s: float = 180.0


class Precompiler(Protocol):
    """What the measurer asks of a compile pool."""

    def submit(self, problem: Problem, stages: Sequence[Stage], *, urgent: bool = True) -> None: ...
    def failure(self, problem: Problem, stage: Stage) -> Outcome | None: ...
    def next_ready(self, problem: Problem, stages: Sequence[Stage]) -> int: ...
    def close(self) -> None: ...


class GpuMeasurer:
    """Measures on the GPU of this machine through a child process (protocol.Measurer).

    A candidate that crashes, hangs or loses the GPU context costs a new child and becomes that candidate's outcome;
    the others go on. `problems`, if given, says what will be asked for, so that weights are drawn once for the most
    local experts of each shape. Raises NoGpuError when the child finds no usable GPU.
    """

    name = "gpu"
    worker_module = "fitune.measure.worker"

    def __init__(
        self,
        *,
        problems: Sequence[Problem] = (),
        seed: int = 0,
        histograms: Mapping[str, Sequence[float]] | None = None,
        device: str = "cuda:0",
        limits: Limits | None = None,
    ) -> None:
        self._seed = seed
        self._histograms = {name: [float(v) for v in values] for name, values in (histograms or {}).items()}
        self._device = device
        self._limits = limits or Limits()
        self._experts: dict[LayerShape, int] = {}
        for problem in problems:
            self._experts[problem.shape] = max(self._experts.get(problem.shape, 0), problem.local_experts)
        self._precompiler: Precompiler | None = None
        self._child: ChildProcess | None = None
        self._problem: Problem | None = problems[0] if problems else None
        self._open: Problem | None = None
        self._current = -1
        self.restarts = 0
        self.target: Target
        self.environment: Environment
        self._start()

    def __enter__(self) -> GpuMeasurer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def stages(self, problem: Problem, candidates: Sequence[Stage], hopeless_us: float | None) -> Iterator[Outcome]:
        """See protocol.Measurer. With a precompiler, candidates come in the order in which they are compiled."""
        self._problem = problem
        if self._precompiler is not None:
            self._precompiler.submit(problem, candidates)
        waiting = deque(candidates)
        while waiting:
            stage = self._take(problem, waiting)
            failure = None if self._precompiler is None else self._precompiler.failure(problem, stage)
            yield failure or self._stage(problem, stage, hopeless_us)

    def finals(self, problem: Problem, candidates: Sequence[Tactic], rounds: int) -> list[Outcome]:
        """See protocol.Measurer."""
        request = {"op": "finals", "rounds": rounds, "careful": False}
        return self._together(problem, candidates, request, self._limits.race_s)

    def check_cells(
        self, problem: Problem, tactics: Sequence[Tactic], seed: int, *, foreign: bool = True
    ) -> list[Outcome]:
        """Accuracy of whole layers against a pure float32 reference on fresh inputs of `seed`, in order, not timed.

        With `foreign`, one slot in sixteen is given the id -1 besides what routing sends to other ranks.
        """
        request = {"op": "check", "seed": seed, "foreign": foreign, **self._request(problem)} | {"seed": seed}
        self._open = None
        return self._together(problem, tactics, request, self._limits.race_s, needs_open=False)

    def noise(self, problem: Problem, tactic: Tactic) -> float:
        """See protocol.Measurer. Raises MeasureError when the tactic itself fails."""
        if problem.num_tokens == 0:
            return 0.0
        for _ in range(2):
            try:
                answer = self._ask({"op": "noise", "tactic": str(tactic)}, self._limits.race_s, problem)
            except (ChildDied, ChildTimeout) as end:
                last = str(end)
                continue
            if answer["kind"] == "done":
                return float(answer["noise"])
            last = answer["text"]
        raise MeasureError(f"A/A measurement of {tactic} failed: {last}")

    def warm(self, problem: Problem, candidates: Sequence[Stage]) -> None:
        """See protocol.Measurer: compile ahead, after what is waited for."""
        if self._precompiler is not None:
            self._precompiler.submit(problem, candidates, urgent=False)

    def use_precompiler(self, precompiler: Precompiler) -> None:
        """From now on let `precompiler` compile ahead; it is closed with this measurer."""
        self._precompiler = precompiler

    def close(self) -> None:
        """See protocol.Measurer."""
        if self._precompiler is not None:
            self._precompiler.close()
        if self._child is not None:
            self._child.close()
            self._child = None

    def _take(self, problem: Problem, waiting: deque[Stage]) -> Stage:
        if self._precompiler is None:
            return waiting.popleft()
        index = self._precompiler.next_ready(problem, tuple(waiting))
        stage = waiting[index]
        del waiting[index]
        return stage

    def _stage(self, problem: Problem, stage: Stage, hopeless_us: float | None) -> Outcome:
        if problem.num_tokens == 0:
            return Outcome(stage, Status.REJECTED, error="no tokens: there is nothing to measure")
        request = {"op": "stage", "tactic": str(stage), "hopeless_us": hopeless_us}
        try:
            answer = self._ask(request, self._limits.compile_s, problem)
        except (ChildDied, ChildTimeout) as end:
            return _casualty(stage, end)
        if answer["kind"] == "error":
            return Outcome(stage, Status.LAUNCH_ERROR, error=answer["text"])
        return outcome_from_wire(stage, answer["outcome"])

    def _together(
        self,
        problem: Problem,
        tactics: Sequence[Tactic],
        request: dict[str, Any],
        limit_s: float,
        needs_open: bool = True,
    ) -> list[Outcome]:
        """Measure tactics in one request; whoever brings the child down is left out of the next try."""
        if problem.num_tokens == 0:
            return [Outcome(tactic, Status.REJECTED, error="no tokens: nothing to measure") for tactic in tactics]
        fallen: dict[int, Outcome] = {}
        unclear = 0
        while len(fallen) < len(tactics):
            left = [index for index in range(len(tactics)) if index not in fallen]
            request["tactics"] = [str(tactics[index]) for index in left]
            self._current = -1
            try:
                answer = self._ask(request, limit_s, problem if needs_open else None)
            except (ChildDied, ChildTimeout) as end:
                answer = {"kind": "error", "text": str(end), "end": end}
            if answer["kind"] == "done" and not answer["broken"]:
                done = {
                    i: outcome_from_wire(tactics[i], each) for i, each in zip(left, answer["outcomes"], strict=True)
                }
                return [(fallen | done)[index] for index in range(len(tactics))]
            if answer["kind"] == "done":
                position = len(answer["outcomes"]) - 1
                fallen[left[position]] = outcome_from_wire(tactics[left[position]], answer["outcomes"][-1])
            elif self._current >= 0:
                culprit = left[self._current]
                fallen[culprit] = _casualty(tactics[culprit], answer.get("end"), answer["text"])
            else:
                unclear += 1
                request["careful"] = True
                if unclear >= MAX_RESTARTS_WITHOUT_RESULT:
                    raise MeasureError(
                        f"measuring {problem.num_tokens} tokens failed {unclear} times: {answer['text']}"
                    )
        return [fallen[index] for index in range(len(tactics))]

    def _ask(self, request: Mapping[str, Any], limit_s: float, problem: Problem | None) -> dict[str, Any]:
        """Send a request, with `problem` open, and wait for its answer. Raises ChildDied or ChildTimeout."""
        child = self._ready_child(problem)
        answer = self._exchange(child, request, limit_s)
        if answer.get("broken"):
            self._drop_child()
        if answer["kind"] == "error" and answer["user"]:
            raise MeasureError(answer["text"])
        return answer

    def _exchange(self, child: ChildProcess, request: Mapping[str, Any], limit_s: float) -> dict[str, Any]:
        phase = "compiling"
        try:
            child.send(request)
            while True:
                answer = child.receive(limit_s)
                if answer["kind"] in ("done", "error"):
                    return answer
                if answer["kind"] == "running" and request["op"] == "stage":
                    phase, limit_s = "running", self._limits.run_s
                if answer["kind"] == "candidate":
                    self._current = int(answer["index"])
        except ChildTimeout as end:
            self._drop_child()
            raise ChildTimeout(f"{phase} took longer than {limit_s:g} s") from end
        except ChildDied as end:
            self._drop_child()
            raise ChildDied(f"the measuring process {end} while {phase}") from end
        except BaseException:  # Ctrl-C: an answer that nobody waits for must not be taken for the next one's
            self._drop_child()
            raise

    def _ready_child(self, problem: Problem | None) -> ChildProcess:
        """A living child with `problem` open. Raises MeasureError when that cannot be had."""
        last = ""
        for _ in range(MAX_RESTARTS_WITHOUT_RESULT):
            if self._child is None or not self._child.alive:
                self._drop_child()
                self._start()
            child = self._child
            assert child is not None
            if problem is None or self._open == problem:
                return child
            try:
                answer = self._exchange(child, {"op": "open", **self._request(problem)}, self._limits.open_s)
            except (ChildDied, ChildTimeout) as end:
                last = str(end)
                continue
            if answer["kind"] == "done":
                self._open = problem
                return child
            self._drop_child()
            if answer["user"]:
                raise MeasureError(answer["text"])
            last = answer["text"]
        raise MeasureError(f"cannot set up {problem.num_tokens if problem else 0} tokens on the GPU: {last}")

    def _request(self, problem: Problem) -> dict[str, Any]:
        """The fields by which a child finds or makes a problem's tensors."""
        return {
            "problem": problem_to_wire(problem),
            "seed": self._seed,
            "experts": self._experts.get(problem.shape, problem.local_experts),
            "histogram": self._histograms.get(problem.routing),
        }

    def _start(self) -> None:
        """Start a child and learn the target from it. Raises NoGpuError."""
        child = ChildProcess(self.worker_module, ["--device", self._device], child_environment(self._device))
        try:
            child.send({"op": "hello"})
            answer = child.receive(self._limits.start_s)
        except (ChildDied, ChildTimeout) as end:
            child.kill()
            raise NoGpuError(f"the measuring process did not start: {end}; see `fitune env`") from end
        if answer["kind"] == "error":
            child.kill()
            raise NoGpuError(
                f"no usable GPU: {answer['text']}; use a machine with one, or --measurer recording for the shipped one"
            )
        self._child, self._open = child, None
        self.target = target_from_wire(answer["target"])
        self.environment = environment_from_wire(answer["environment"])

    def _drop_child(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child, self._open = None, None
            self.restarts += 1


def child_environment(device: str) -> dict[str, str]:
    """Environment of a measuring child: Triton compiles for a GPU, and interprets on the CPU."""
    environment = dict(os.environ)
    environment.pop("TRITON_INTERPRET", None)
    if not device.startswith("cuda"):
        environment["TRITON_INTERPRET"] = "1"
    return environment


def _casualty(tactic: Tactic | Stage, end: Exception | None, text: str = "") -> Outcome:
    """The outcome of the candidate during which the child ended."""
    if isinstance(end, ChildTimeout):
        return Outcome(tactic, Status.TIMEOUT, error=str(end))
    if isinstance(end, ChildDied):
        return Outcome(tactic, Status.CRASHED, error=str(end))
    return Outcome(tactic, Status.LAUNCH_ERROR, error=text)
