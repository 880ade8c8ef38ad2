"""Whether independent tunes of the same keys agree: searches on a recording whose times are drawn anew each time.

    python scripts/bench_flips.py [--recording FILE] [--tunes 4] [--budget 50] [--spread 1.0] [--json FILE]

Each tune has its own seed and its own measurement noise: every time that the recording plays back is multiplied by a
factor with the spread that its recorded interval implies (in finals at least the A/A noise of its key), times
`--spread`. Two tunes agree on a key where they chose the same tactic, or where each one's choice is in the other's
equivalence set (`fitune.search.equivalence`). Where they do not, the choices' recorded times say what the flip costs.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Final

import numpy as np

from fitune.cache import Store
from fitune.cache.recording import embedded_recordings, load_recording
from fitune.measure.protocol import Outcome
from fitune.measure.recording import RecordingMeasurer
from fitune.problem import Key, Problem
from fitune.record import Decision, Measurement
from fitune.search import Event, KeyDecided, SearchPlan, TrialDone, restrict_to_recording, run_search
from fitune.search.equivalence import is_in_set
from fitune.tactic import Stage, Tactic

HALFWIDTHS_PER_SIGMA: Final = 1.96
WIDEST: Final = 0.05
"""Wider intervals come of the few samples of a stage that was given up: an outlier among three, not its noise."""


class NoisyMeasurer:
    """A recording with measurement noise: the same stage asked twice gives two times, both within what was recorded."""

    name = "recording"

    def __init__(self, inner: RecordingMeasurer, seed: int, spread: float) -> None:
        self.inner = inner
        self.target, self.environment = inner.target, inner.environment
        self._rng = np.random.default_rng(seed)
        self._spread = spread

    def stages(self, problem: Problem, candidates: Sequence[Stage], hopeless_us: float | None) -> Iterator[Outcome]:
        for outcome in self.inner.stages(problem, candidates, hopeless_us):
            yield self._drawn(outcome, 0.0)

    def finals(self, problem: Problem, candidates: Sequence[Tactic], rounds: int) -> list[Outcome]:
        # Finals take turns within seconds: what tells two of them apart is the A/A noise, not the drift of a whole run.
        noise = self.noise(problem, candidates[0]) / 2.0
        return [self._drawn(outcome, noise) for outcome in self.inner.finals(problem, candidates, rounds)]

    def noise(self, problem: Problem, tactic: Tactic) -> float:
        return self.inner.noise(problem, tactic)

    def warm(self, problem: Problem, candidates: Sequence[Stage]) -> None:
        return

    def close(self) -> None:
        return

    def _drawn(self, outcome: Outcome, least: float) -> Outcome:
        found = outcome.measurement
        if found is None:
            return outcome
        sigma = max(min(found.relative_halfwidth, WIDEST), least) / HALFWIDTHS_PER_SIGMA
        return replace(outcome, measurement=scaled(found, float(np.exp(self._rng.normal(0.0, sigma * self._spread)))))


def scaled(found: Measurement, factor: float) -> Measurement:
    return replace(
        found,
        median_us=found.median_us * factor,
        ci_low_us=found.ci_low_us * factor,
        ci_high_us=found.ci_high_us * factor,
    )


@dataclass(frozen=True, slots=True)
class Pair:
    """Two tunes of one key."""

    key: Key
    same: bool
    agree: bool
    apart: float
    """Recorded time of the slower choice over that of the faster, less 1."""
    noise: float


@dataclass(slots=True)
class Tune:
    """What one search decided, and the stages that it timed."""

    decisions: dict[Key, Decision] = field(default_factory=dict)
    stages: dict[Key, dict[Stage, Measurement]] = field(default_factory=dict)

    def listen(self, event: Event) -> None:
        if isinstance(event, KeyDecided):
            self.decisions[event.decision.key] = event.decision
        elif isinstance(event, TrialDone) and event.outcome.measurement is not None:
            assert isinstance(event.outcome.tactic, Stage)
            timed = self.stages.setdefault(event.key, {})
            timed[event.outcome.tactic] = event.outcome.measurement

    def holds(self, key: Key, tactic: Tactic) -> bool:
        return bool(is_in_set(self.decisions[key], tactic, self.stages.get(key, {})))


def tune(path: Path, seed: int, budget: int, spread: float) -> Tune:
    """One search over all keys of a recording, with its own noise."""
    exact, found = RecordingMeasurer(load_recording(path)), Tune()

    with tempfile.TemporaryDirectory(prefix="bench-flips-") as folder:
        plan = SearchPlan(exact.problems(), budget, seed=seed, force=True)
        run_search(
            plan, NoisyMeasurer(exact, seed, spread), Store.open(Path(folder), create=True), found.listen,
            space=restrict_to_recording(exact),
        )  # fmt: skip
    return found


def compared(exact: RecordingMeasurer, key: Key, first: Tune, second: Tune) -> Pair:
    one, two = first.decisions[key], second.decisions[key]
    same = one.chosen == two.chosen
    agree = same or (first.holds(key, two.chosen) and second.holds(key, one.chosen))
    times = [
        outcome.measurement.median_us
        for outcome in exact.finals(key.problem(), [one.chosen, two.chosen], 1)
        if outcome.measurement is not None
    ]
    apart = max(times) / min(times) - 1.0 if len(times) == 2 else float("nan")
    return Pair(key, same, agree, apart, max(one.noise, two.noise))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recording", type=Path, help="default: the shipped one")
    parser.add_argument("--tunes", type=int, default=4)
    parser.add_argument("--budget", type=int, default=50, help="measurements per GEMM")
    parser.add_argument("--spread", type=float, default=1.0, help="noise, in multiples of what was recorded")
    parser.add_argument("--json", type=Path, help="write a line per pair")
    given = parser.parse_args()
    path = given.recording or embedded_recordings()[0]
    exact = RecordingMeasurer(load_recording(path))
    tunes = []
    for seed in range(given.tunes):
        tunes.append(tune(path, seed, given.budget, given.spread))
        print(f"\r{seed + 1}/{given.tunes} tunes", end="", file=sys.stderr)
    print(file=sys.stderr)
    pairs = [
        compared(exact, key, first, second)
        for first, second in itertools.combinations(tunes, 2)
        for key in sorted(first.decisions.keys() & second.decisions.keys())
    ]
    same, agree = (sum(getattr(pair, name) for pair in pairs) / len(pairs) for name in ("same", "agree"))
    flips = sorted((pair for pair in pairs if not pair.agree), key=lambda pair: -pair.apart)
    within = sum(pair.apart <= pair.noise for pair in flips)
    print(f"{exact.recording.name}: {len(pairs)} pairs of {given.tunes} tunes, {given.budget} measurements per GEMM")
    print(f"same tactic {same:.1%}, agree (same, or each in the other's set) {agree:.1%}")
    print(f"{len(flips)} flips, {within} of them closer than the A/A noise of their key; dearest first:")
    for pair in flips[:12]:
        print(
            f"  {pair.key.layer.ep_label} {pair.key.num_tokens} tokens: {pair.apart:.2%} apart, noise {pair.noise:.2%}"
        )
    if given.json:
        lines = [
            {"ep": pair.key.layer.ep_label, "tokens": pair.key.num_tokens, "same": pair.same, "agree": pair.agree,
             "apart": pair.apart, "noise": pair.noise}
            for pair in pairs
        ]  # fmt: skip
        given.json.write_text("\n".join(map(json.dumps, lines)) + "\n")


if __name__ == "__main__":
    main()
