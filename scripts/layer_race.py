"""One cell of the layer benchmark on the GPU: check every contender, record it, and let all take turns on the clock."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from layer_rivals import Dense, WrongResultError, grouped_chain
from layer_rows import CONTENDERS, NOT_ASKED, OK, Timed, bytes_of, flops_of, tensor_flops_per_us
from results_data import DRAM_BYTES_PER_US, Load, drawn_load

from fitune.errors import MeasureError
from fitune.kernels.layer import LayerArgs, run_layer
from fitune.measure.bench import BOTH, MAX_CALLS, REGION_US, Bench
from fitune.measure.build import error_text
from fitune.measure.compile import CompilePool
from fitune.measure.device import Gauge, Reading, device_environment, device_target
from fitune.measure.inputs import COLD_L2_MULTIPLE, ProblemInputs, WeightBank
from fitune.measure.timing import GraphTimer, HostTimer, Region, Timer
from fitune.problem import LayerShape, Problem
from fitune.record import Status
from fitune.tactic import STAGES, Tactic

FRESH_SEED: Final = 1009
READING_S: Final = 0.03
"""Load that is queued behind a reading of clock and power, so that it is taken under load."""

Attempt = Callable[[], float]
Recording = Callable[[], Region]


@dataclass(frozen=True, slots=True)
class Result:
    """What a cell's race came to. `lost` says why the process can measure nothing more; empty if it can."""

    load: Load
    times: Mapping[str, Timed]
    reading: Reading
    l2: str
    lost: str


@dataclass(frozen=True, slots=True)
class Contender:
    """`check` gives the RMS error of one run, or raises; `record` the region that is timed."""

    check: Attempt
    record: Recording


class Machine:
    """The device with its timer and gauge, and the weights that all cells share."""

    def __init__(self, device: str, seed: int, experts: int, jobs: int | None) -> None:
        self.device, self.seed = device, seed
        self.timer: Timer = GraphTimer(device) if device.startswith("cuda") else HostTimer()
        self.gauge = Gauge(device)
        self.target = device_target(device)
        self.environment = device_environment(self.target, self.gauge)
        self._experts = experts
        self._bank = WeightBank(device, seed)
        self._pool = CompilePool(self.target, workers=jobs) if jobs != 0 and device.startswith("cuda") else None

    def compile_ahead(self, problem: Problem, tactics: Sequence[Tactic]) -> None:
        """Have the kernels compiled by other processes, so that a cell finds them on disk."""
        if self._pool is not None:
            self._pool.submit(problem, [tactic.stage(name) for tactic in tactics for name in STAGES])

    def measure(
        self,
        problem: Problem,
        tactics: Mapping[str, Tactic | str],
        rounds: int,
        sustain_s: float,
        rivals: Sequence[str],
    ) -> Result:
        """Check on fresh inputs, check and record on those that are timed, race.

        A text in place of a tactic says why there is none. Raises MeasureError where the weights do not fit.
        """
        tactics = self._await_compiled(problem, tactics)
        times = {name: Timed(tactic) for name, tactic in tactics.items() if isinstance(tactic, str)}
        times |= {name: Timed(NOT_ASKED) for name in CONTENDERS if name not in (*tactics, *rivals)}
        load = drawn_load(problem, self.seed)
        checked, lost = self._check(problem, tactics, rivals)
        times |= checked
        if lost:
            return Result(load, times, Reading(), "", lost)
        bench = self._bench(problem, self.seed)
        assert (load.rows, load.active) == (bench.inputs.load.rows, len(bench.inputs.load.active)), "one draw a seed"
        regions: dict[str, Region] = {}
        for name, contender in self._contenders(bench, tactics, rivals).items():
            if checked[name].ok:
                times[name] = self._attempt(bench, partial(self._keep, regions, name, contender))
        lost = self._why_lost(bench)
        if lost:  # what was recorded before cannot be replayed
            regions = {}
            times |= {name: Timed(f"not run: {lost}") for name, timed in times.items() if timed.ok}
        series, reading = self._race(regions, rounds, sustain_s)
        for name, samples in series.items():
            times[name] = Timed(OK, statistics.median(samples), min(samples), max(samples), checked[name].rms)
        calls = [region.calls for name, region in regions.items() if name != "cublas"]
        cold = bench.inputs.is_cold(BOTH, max(calls, default=1))
        bench.forget()
        return Result(load, times, reading, "cold" if cold else "warm", lost)

    def close(self) -> None:
        if self._pool is not None:
            self._pool.close()

    def _await_compiled(self, problem: Problem, tactics: Mapping[str, Tactic | str]) -> dict[str, Tactic | str]:
        """The tactics once they are compiled; for one that cannot be, the reason."""
        found, pool = dict(tactics), self._pool
        if pool is None:
            return found
        self.compile_ahead(problem, [tactic for tactic in tactics.values() if isinstance(tactic, Tactic)])
        for name, tactic in tactics.items():
            for stage in [tactic.stage(part) for part in STAGES] if isinstance(tactic, Tactic) else []:
                pool.answer(problem, stage)
                failure = pool.failure(problem, stage)
                if failure is not None:
                    found[name] = f"failed: {failure.status.value}: {failure.error}"
        return found

    def _check(
        self, problem: Problem, tactics: Mapping[str, Tactic | str], rivals: Sequence[str]
    ) -> tuple[dict[str, Timed], str]:
        """Every contender's accuracy on inputs of another seed, dropped on return; and why all is lost, if so."""
        bench = self._bench(problem, self.seed + FRESH_SEED, round_hidden=False)
        contenders = self._contenders(bench, tactics, rivals)
        checked = {name: self._attempt(bench, contender.check) for name, contender in contenders.items()}
        bench.forget()
        return checked, self._why_lost(bench)

    def _bench(self, problem: Problem, seed: int, *, round_hidden: bool = True) -> Bench:
        try:
            inputs = ProblemInputs(
                problem,
                self.target,
                self._bank,
                self.device,
                seed,
                min_experts=self._experts,
                round_hidden=round_hidden,
            )
        except torch.OutOfMemoryError as error:
            raise MeasureError("the GPU's memory does not hold its tensors; measure fewer tokens") from error
        return Bench(inputs, self.timer, self.gauge, seed, lambda _: None)

    def _contenders(
        self, bench: Bench, tactics: Mapping[str, Tactic | str], rivals: Sequence[str]
    ) -> dict[str, Contender]:
        """Those of this cell, in the order of CONTENDERS."""
        found = {
            name: Contender(partial(_check_tactic, bench, tactic), partial(_record_tactic, bench, tactic))
            for name, tactic in tactics.items()
            if isinstance(tactic, Tactic)
        }
        if "grouped_mm" in rivals:
            found["grouped_mm"] = _GroupedContender(bench).contender()
        if "cublas" in rivals:
            found["cublas"] = _DenseContender(bench.inputs, self.timer, self.target.l2_bytes).contender()
        return found

    def _keep(self, regions: dict[str, Region], name: str, contender: Contender) -> float:
        rms = contender.check()
        regions[name] = contender.record()
        return rms

    def _attempt(self, bench: Bench, attempt: Attempt) -> Timed:
        """The measuring border: what a contender raises becomes its status."""
        try:
            if lost := self._why_lost(bench):
                return Timed(f"not run: {lost} before")
            rms = attempt()
            self.timer.wait()
            return Timed(OK, rms=rms)
        except WrongResultError as wrong:
            return Timed(f"wrong result: {wrong}")
        except Exception as error:  # noqa: BLE001 - the measuring border
            self._see_whether_lost(bench)
            return Timed(f"failed: {error_text(error)}")

    def _see_whether_lost(self, bench: Bench) -> None:
        try:
            self.timer.wait()
        except Exception:  # noqa: BLE001 - the measuring border
            bench.broken = True

    def _why_lost(self, bench: Bench) -> str:
        if bench.broken:
            return "the GPU context was lost"
        return "a CUDA graph could not be recorded" if self.timer.lost else ""

    def _race(
        self, regions: Mapping[str, Region], rounds: int, sustain_s: float
    ) -> tuple[dict[str, list[float]], Reading]:
        """Samples in µs by name, one a round, another one starting each; the median clock and power under load."""
        series: dict[str, list[float]] = {name: [] for name in regions}
        if not regions:
            return series, Reading()
        order, began_s = list(regions), time.monotonic()
        while True:
            warmed = self.timer.samples(list(regions.values()))
            if time.monotonic() - began_s >= sustain_s:
                break
        line_us = sum(us * region.calls for us, region in zip(warmed, regions.values(), strict=True))
        readings = []
        for turn in range(rounds):
            start = turn % len(order)
            names = order[start:] + order[:start]
            for name, us in zip(names, self.timer.samples([regions[name] for name in names]), strict=True):
                series[name].append(us)
            readings.append(self._read_under_load(list(regions.values()), line_us))
        clocks, watts = (statistics.median(getattr(each, part) for each in readings) for part in ("sm_mhz", "power_w"))
        return series, Reading(clocks, watts)

    def _read_under_load(self, regions: Sequence[Region], line_us: float) -> Reading:
        if self.timer.name == "host":
            return self.gauge.read()
        for _ in range(max(1, min(100, int(READING_S * 1e6 / line_us)))):
            for region in regions:
                region.replay()
        reading = self.gauge.read()
        self.timer.wait()
        return reading


def _check_tactic(bench: Bench, tactic: Tactic) -> float:
    outcome = bench.check(tactic)
    if outcome.status is Status.WRONG_RESULT:
        raise WrongResultError(outcome.error)
    if outcome.accuracy is None:
        raise MeasureError(f"{outcome.status.value}: {outcome.error}")
    return outcome.accuracy.rms_relative


def _record_tactic(bench: Bench, tactic: Tactic) -> Region:
    inputs = bench.inputs
    return bench._record_calls(BOTH, lambda args: run_layer(tactic, args, inputs.ws, inputs.out))


class _GroupedContender:
    """torch's grouped GEMM chain; its buffers are made at the check, whose failure is then the chain's own."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self._run: Callable[[LayerArgs], None]

    def contender(self) -> Contender:
        return Contender(self._check, lambda: self._bench._record_calls(BOTH, self._run))

    def _check(self) -> float:
        self._run = chain = grouped_chain(self._bench.inputs)
        return chain.check()


class _DenseContender:
    """The dense pair: nothing to compare it with, so its check only runs it."""

    def __init__(self, inputs: ProblemInputs, timer: Timer, l2_bytes: int) -> None:
        self._inputs, self._timer, self._l2_bytes = inputs, timer, l2_bytes
        self._run: Dense

    def contender(self) -> Contender:
        return Contender(self._check, self._record)

    def _check(self) -> float:
        self._run = Dense(self._inputs)
        self._run(0)
        return 0.0

    def _record(self) -> Region:
        shape, rows = self._inputs.problem.shape, self._inputs.load.rows
        turns = dense_turns(shape, self._run.experts, self._l2_bytes)
        calls = 1 if self._timer.name == "host" else dense_calls(shape, rows, turns)
        return self._timer.record([partial(self._run, index % turns) for index in range(calls)])


def dense_turns(shape: LayerShape, experts: int, l2_bytes: int) -> int:
    """Experts whose weights take turns, so that L2 holds none of those that are read next."""
    return max(1, min(experts, -(-COLD_L2_MULTIPLE * l2_bytes // int(shape.expert_bytes))))


def dense_calls(shape: LayerShape, rows: int, turns: int) -> int:
    """Calls of the dense pair that last long enough to time, a whole number of turns."""
    load = Load(rows, 1, float(rows))
    least_us = max(
        flops_of(shape, load) / tensor_flops_per_us(shape.dtype), bytes_of(shape, rows, load) / DRAM_BYTES_PER_US
    )
    wanted = min(MAX_CALLS, max(1, -int(-REGION_US // least_us)))
    return min(MAX_CALLS, -(-wanted // turns) * turns) if turns <= MAX_CALLS else MAX_CALLS


def has_gpu() -> bool:
    return bool(torch.cuda.is_available())
