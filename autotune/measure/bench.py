"""Trying tactics on the open problem: compile, run once on poisoned buffers, compare, and only then time."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Final

from fitune.families import family_named
from fitune.kernels.layer import LayerArgs, run_layer, run_sort, run_stage
from fitune.measure import build
from fitune.measure.device import Gauge
from fitune.measure.inputs import ProblemInputs
from fitune.measure.protocol import Outcome
from fitune.measure.stats import measurement_of, noise_band
from fitune.measure.timing import Region, Timer
from fitune.record import Accuracy, Measurement, Regime, Status
from fitune.tactic import Stage, StageName, Tactic

Notify = Callable[[dict[str, Any]], None]

FIRST_SAMPLES: Final = 3
MIN_SAMPLES: Final = 6
MAX_SAMPLES: Final = 15
SAMPLING_US: Final = 30_000.0
REGION_US: Final = 200.0
MAX_CALLS: Final = 32
PARTS_EVERY: Final = 4
NOISE_ROUNDS: Final = (8, 24)
NOISE_US: Final = 1_000_000.0
# By dtype: largest error of an element over (its own size + RMS of the reference), and RMS of the error over that RMS.
# In fp8 a value near the middle of two steps may fall to either side of the reference's choice, 6 % of it away: few
# values, so the RMS stays small, but among some 10^8 results the largest error is a multiple of the bf16 one.
TOLERANCES: Final[dict[str, tuple[float, float]]] = {
    "bf16": (0.15, 1e-2), "fp16": (0.03, 2e-3), "fp32": (1e-3, 1e-4),
    "fp8_block128": (0.6, 4e-2), "fp8_channel": (0.6, 4e-2), "fp8_tensor": (0.6, 4e-2),
}  # fmt: skip
BOTH: Final[tuple[StageName, StageName]] = ("gemm1", "gemm2")


class BadResult(Exception):
    """An output that differs from the reference. Carries its accuracy."""

    def __init__(self, text: str, accuracy: Accuracy) -> None:
        super().__init__(text)
        self.accuracy = accuracy


class Bench:
    """Measures tactics of one problem with one timer. What a candidate does wrong becomes an Outcome."""

    def __init__(self, inputs: ProblemInputs, timer: Timer, gauge: Gauge, seed: int, notify: Notify) -> None:
        self.inputs = inputs
        self.timer = timer
        self.broken = False
        self._compiling = True
        self._gauge = gauge
        self._seed = seed
        self._notify = notify
        self._sorted = ""
        self._hidden = ""
        self._functions: set[Any] = set()

    def stage(self, stage: Stage, hopeless_us: float | None) -> Outcome:
        """Check and time one stage."""
        return self._guard(stage, lambda: self._measure_stage(stage, hopeless_us))

    def check(self, tactic: Tactic) -> Outcome:
        """Run the whole layer once and compare; no time is taken."""
        return self._guard(tactic, lambda: Outcome(tactic, Status.OK, accuracy=self._check_layer(tactic)[0]))

    def finals(self, tactics: Sequence[Tactic], rounds: int, careful: bool) -> list[Outcome]:
        """Check every layer, then time them in turns. `careful` waits for and announces every single replay."""
        outcomes: list[Outcome] = []
        racers: dict[int, dict[str, Region]] = {}
        for index, tactic in enumerate(tactics):
            self._notify({"kind": "candidate", "index": index})
            regions = racers.setdefault(index, {})
            outcomes.append(self._guard(tactic, partial(self._record, tactic, regions)))
            if outcomes[-1].status is not Status.OK:
                del racers[index]
            if self.broken:
                return outcomes
        self._notify({"kind": "candidate", "index": -1})
        samples = self._race(racers, rounds, careful)
        for index in racers:
            measurement = self._layer_measurement(samples[index])
            done = outcomes[index]
            outcomes[index] = Outcome(done.tactic, Status.OK, measurement, done.accuracy, done.binary)
        return outcomes

    def noise(self, tactic: Tactic) -> float:
        """Relative A/A band: the same layer recorded twice and timed in turns."""
        self._check_layer(tactic)
        twins = [self._record_layer(tactic)["layer"] for _ in range(2)]
        first, second = self.timer.samples(twins)
        per_round_us = (first + second) * twins[0].calls
        least, most = NOISE_ROUNDS
        rounds = min(most, max(least, int(NOISE_US / per_round_us)))
        series: tuple[list[float], list[float]] = ([], [])
        for turn in range(rounds):
            order = (0, 1) if turn % 2 == 0 else (1, 0)
            for which, us in zip(order, self.timer.samples([twins[i] for i in order]), strict=True):
                series[which].append(us)
        return noise_band(series[0], series[1], self._resolution_us(twins[0]), self._seed)

    def forget(self) -> None:
        """Let go of compiled kernels, whose texts and handles would pile up over thousands of candidates."""
        for function in self._functions:
            getattr(function, "device_caches", {}).clear()
        self._functions.clear()

    def _guard(self, tactic: Tactic | Stage, attempt: Callable[[], Outcome]) -> Outcome:
        """The measuring border: whatever a candidate raises becomes its outcome."""
        self._compiling = True
        try:
            return attempt()
        except BadResult as bad:
            return Outcome(tactic, Status.WRONG_RESULT, accuracy=bad.accuracy, error=str(bad))
        except Exception as error:  # noqa: BLE001 - the measuring border
            status = build.classify(error, self._compiling)
            self._hidden = self._sorted = ""
            self._see_whether_broken()
            return Outcome(tactic, status, error=build.error_text(error))

    def _see_whether_broken(self) -> None:
        """After an illegal access every later call in this process fails: then only a new process helps."""
        if self.timer.lost:
            self.broken = True
            return
        try:
            self.timer.wait()
            self.inputs.poison("gemm2")
            self.timer.wait()
        except Exception:  # noqa: BLE001 - the measuring border
            self.broken = True

    def _measure_stage(self, stage: Stage, hopeless_us: float | None) -> Outcome:
        inputs, args = self.inputs, self.inputs.args[0]
        self._prepare(stage.family, stage.tile_size)
        collector = build.compile_stage_launches(stage, args, inputs.ws, inputs.out)
        binary = self._built(collector)
        self._launching()
        self._sort(stage.family, stage.tile_size)
        inputs.poison(stage.stage)
        if stage.stage == "gemm1":
            self._hidden = ""
        elif self._hidden != stage.family:
            inputs.restore_hidden(stage.family)
            self._hidden = stage.family
        run_stage(stage, args, inputs.ws, inputs.out)
        if stage.stage == "gemm1":
            accuracy = self._judge(*inputs.hidden_accuracy(stage.family))
        else:
            accuracy = self._judge(*inputs.out_accuracy())
        region = self._record_calls((stage.stage,), lambda each: run_stage(stage, each, inputs.ws, inputs.out))
        samples = self._sample(region, hopeless_us)
        measurement = self._measurement((stage.stage,), samples, region, interleaved=False)
        return Outcome(stage, Status.OK, measurement, accuracy, binary)

    def _prepare(self, family: str, tile_size: int) -> None:
        self._compiling = True
        if self._sorted != f"{family}{tile_size}":
            self._built(build.compile_sort_launches(family, tile_size, self.inputs.args[0], self.inputs.ws))

    def _launching(self) -> None:
        """Compiling is over: from here on the parent's run limit counts."""
        self._compiling = False
        self._notify({"kind": "running"})

    def _sort(self, family: str, tile_size: int) -> None:
        """Leave the sorted slots of this tile size in the workspace."""
        if self._sorted != f"{family}{tile_size}":
            self._sorted = ""
            run_sort(family, tile_size, self.inputs.args[0], self.inputs.ws)
            self._sorted = f"{family}{tile_size}"

    def _built(self, collector: build.Collector) -> str:
        binary = collector.binary()
        build.slim(collector)
        self._functions.update(collector.functions)
        return binary

    def _judge(self, accuracy: Accuracy, largest: float) -> Accuracy:
        """The accuracy, if it is within tolerance. Raises BadResult; NaN never passes."""
        most, rms = TOLERANCES[self.inputs.problem.shape.dtype]
        if largest <= most and accuracy.rms_relative <= rms:
            return accuracy
        if accuracy.rms_relative != accuracy.rms_relative:
            text = "some elements are NaN or were never written"
        else:
            text = f"error {accuracy.rms_relative:.2g} RMS, largest {largest:.2g}, relative to the reference"
        raise BadResult(text, accuracy)

    def _check_layer(self, tactic: Tactic) -> tuple[Accuracy, str]:
        """Compile, run on poisoned buffers and compare the whole layer: (accuracy, binary)."""
        inputs, args = self.inputs, self.inputs.args[0]
        self._compiling = True
        binary = self._built(build.compile_layer_launches(tactic, args, inputs.ws, inputs.out))
        self._launching()
        inputs.poison(*BOTH)
        self._hidden = self._sorted = ""
        run_layer(tactic, args, inputs.ws, inputs.out)
        return self._judge(*inputs.out_accuracy()), binary

    def _record(self, tactic: Tactic, regions: dict[str, Region]) -> Outcome:
        accuracy, binary = self._check_layer(tactic)
        regions.update(self._record_layer(tactic) | self._record_parts(tactic))
        return Outcome(tactic, Status.OK, accuracy=accuracy, binary=binary)

    def _record_layer(self, tactic: Tactic) -> dict[str, Region]:
        inputs = self.inputs
        layer = self._record_calls(BOTH, lambda each: run_layer(tactic, each, inputs.ws, inputs.out))
        return {"layer": layer}

    def _record_parts(self, tactic: Tactic) -> dict[str, Region]:
        """Regions of the parts. They follow a replay of the layer, which leaves the sort of this tile size."""
        inputs, regions = self.inputs, dict[str, Region]()
        for name in BOTH:
            stage = tactic.stage(name)
            regions[name] = self._record_calls((name,), partial(run_stage, stage, ws=inputs.ws, out=inputs.out))
        if family_named(tactic.family).sorts:
            regions["sort"] = self._record_calls(
                (), lambda each: run_sort(tactic.family, tactic.tile_size, each, inputs.ws)
            )
        return regions

    def _record_calls(self, stages: Sequence[StageName], call: Callable[[LayerArgs], None]) -> Region:
        """A region of as many calls as make it long enough to time, taking turns over the weight slices."""
        args = self.inputs.args
        turns = max(1, min(self.inputs.rotations(stages), len(args)))
        calls = self._num_calls(self.inputs.floor_us(stages), turns)
        return self.timer.record([_bind(call, args[index % turns]) for index in range(calls)])

    def _num_calls(self, floor_us: float, turns: int) -> int:
        if self.timer.name == "host":
            return 1
        wanted = min(MAX_CALLS, max(1, -int(-REGION_US // floor_us)))
        return min(MAX_CALLS, -(-wanted // turns) * turns)

    def _sample(self, region: Region, hopeless_us: float | None) -> list[float]:
        samples = self.timer.samples([region] * FIRST_SAMPLES)
        if hopeless_us is not None and min(samples) > hopeless_us:
            return samples
        replay_us = sorted(samples)[1] * region.calls
        total = min(MAX_SAMPLES, max(MIN_SAMPLES, int(SAMPLING_US / replay_us)))
        return samples + self.timer.samples([region] * (total - FIRST_SAMPLES))

    def _race(self, racers: dict[int, dict[str, Region]], rounds: int, careful: bool) -> dict[int, _Series]:
        """Samples of every region of every racer; the racers take turns, and another one starts each round."""
        series = {index: {name: list[float]() for name in regions} for index, regions in racers.items()}
        order = list(racers)
        for turn in range(max(1, rounds) if order else 0):
            start = turn % len(order)
            with_parts = turn % PARTS_EVERY == 0
            line = [
                (index, name)
                for index in order[start:] + order[:start]
                for name in racers[index]
                if with_parts or name == "layer"
            ]
            for group in [[step] for step in line] if careful else [line]:
                if careful:
                    self._notify({"kind": "candidate", "index": group[0][0]})
                times = self.timer.samples([racers[index][name] for index, name in group])
                for (index, name), us in zip(group, times, strict=True):
                    series[index][name].append(us)
        return {index: _Series(racers[index], values) for index, values in series.items()}

    def _layer_measurement(self, series: _Series) -> Measurement:
        parts = tuple(
            (name, sorted(values)[len(values) // 2]) for name, values in series.samples.items() if name != "layer"
        )
        return self._measurement(BOTH, series.samples["layer"], series.regions["layer"], interleaved=True, parts=parts)

    def _measurement(
        self,
        stages: Sequence[StageName],
        samples: Sequence[float],
        region: Region,
        *,
        interleaved: bool,
        parts: tuple[tuple[str, float], ...] = (),
    ) -> Measurement:
        reading = self._gauge.read()
        regime = Regime(
            timer=self.timer.name,
            execution="graph" if self.timer.name == "graph" else "eager",
            l2="cold" if self.inputs.is_cold(stages, region.calls) else "warm",
            routing=self.inputs.problem.routing,
            seed=self._seed,
            interleaved=interleaved,
        )
        return measurement_of(
            samples,
            regime,
            self._resolution_us(region),
            parts_us=parts,
            sm_mhz=reading.sm_mhz,
            power_w=reading.power_w,
        )

    def _resolution_us(self, region: Region) -> float:
        return self.timer.resolution_us / region.calls


class _Series:
    """Samples of one racer's regions, by name."""

    def __init__(self, regions: dict[str, Region], samples: dict[str, list[float]]) -> None:
        self.regions = regions
        self.samples = samples


def _bind(call: Callable[[LayerArgs], None], args: LayerArgs) -> Callable[[], None]:
    return partial(call, args)
