"""Search quality on a recording: regret of the best-so-far and of the decision, by sampler and measurements spent.

    python scripts/bench_search.py [--recording FILE] [--seeds 10] [--jobs 2] [--csv FILE.csv.gz] [--plot FILE.png]
    python scripts/bench_search.py --read FILE.csv.gz       # tables of an earlier run

Every run is `fitune.search.run_search` with `trials` set to the budget. `pool` searches all keys in one run, in its own
order, so a key starts from what its neighbours' searches measured; each budget is a search of its own. `pool-cold`,
`random`, `tpe`, `gp` and `cost` get one store per key and know nothing else; a larger budget goes on where the smaller
one ended. All of them measure the default first.

Regret is time(found) / time(best recorded) - 1 on the same recording, of each GEMM, of the best pair of both (they
must share family and tile_size), and of the decided layer against the best layer that is recorded or composed of
recorded parts.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from multiprocessing import get_context
from pathlib import Path

from search_rows import SAMPLERS, WHATS, Curve, Row, plot, read_rows, report, write_rows

from fitune.cache import Store
from fitune.cache.recording import embedded_recordings, load_recording
from fitune.measure.recording import RecordingMeasurer
from fitune.problem import Key
from fitune.search import Event, KeyDecided, SearchPlan, TrialDone, restrict_to_recording, run_search
from fitune.search.pool import Head, head_of
from fitune.tactic import STAGES, Stage, Tactic

Times = dict[Stage, float]


class Bench:
    """A recording, its truth per key, and searches on it."""

    def __init__(self, recording: Path) -> None:
        self.measurer = RecordingMeasurer(load_recording(recording))
        self.space = restrict_to_recording(self.measurer)
        self._truth: dict[Key, Truth] = {}

    def truth(self, key: Key) -> Truth:
        if key not in self._truth:
            self._truth[key] = Truth(self, key)
        return self._truth[key]

    def searches(
        self, keys: Sequence[Key], sampler: str, seed: int, budgets: Sequence[int]
    ) -> Iterator[tuple[int, Traces]]:
        """The budget and what was found under it: of all keys together for `pool`, else key by key."""
        groups = [keys] if sampler == "pool" else [[key] for key in keys]
        for group in groups:
            problems = tuple(key.problem() for key in group)
            with tempfile.TemporaryDirectory(prefix="bench-search-") as folder:
                store, traces = Store.open(Path(folder), create=True), Traces()
                for budget in budgets:
                    plan = SearchPlan(problems, budget, seed=seed, sampler=SAMPLERS[sampler], force=True)
                    run_search(plan, self.measurer, store, traces.listen, space=self.space)
                    yield budget, traces


class Truth:
    """What the recording knows best of a key."""

    def __init__(self, bench: Bench, key: Key) -> None:
        self._measurer, self._problem = bench.measurer, key.problem()
        self.times: dict[str, Times] = {}
        self.pools: dict[str, int] = {}
        for part in STAGES:
            recorded = bench.measurer.recorded_stages(self._problem, part)
            pool = bench.space.pool(self._problem, bench.measurer.target, part)
            known = {stage: recorded[stage].measurement for stage in pool}
            self.times[part] = {stage: found.median_us for stage, found in known.items() if found is not None}
            self.pools[part] = len(pool)
        self.pools["pair"] = self.pools["layer"] = sum(self.pools.values())

    @cached_property
    def best_us(self) -> dict[str, float]:
        best = {part: min(times.values()) for part, times in self.times.items()}
        return best | {"pair": pair_us(self.times["gemm1"], self.times["gemm2"]), "layer": self._best_layer_us()}

    def layer_us(self, tactics: Sequence[Tactic]) -> list[float]:
        """Recorded or composed times; infinite where a layer failed."""
        outcomes = self._measurer.finals(self._problem, tactics, 1)
        return [float("inf") if item.measurement is None else item.measurement.median_us for item in outcomes]

    def _best_layer_us(self) -> float:
        """The best of all recorded layers and, per head, of the pairs of the eight fastest stages of both GEMMs.

        A composed time adds to its stages' times what all pairs of a head have in common, so a head's best composed
        layer is among those as long as fewer than eight of them were recorded whole.
        """
        first, second = (by_head(self.times[part]) for part in STAGES)
        pairs = [
            Tactic.of(a, b)
            for head in first.keys() & second.keys()
            for a in sorted(first[head], key=first[head].__getitem__)[:8]
            for b in sorted(second[head], key=second[head].__getitem__)[:8]
        ]
        layers = [
            record.tactic
            for record in self._measurer.recording.records
            if isinstance(record.tactic, Tactic)
            and record.key.problem() == self._problem
            and all(record.tactic.stage(part) in self.times[part] for part in STAGES)  # what is legal today
        ]
        return min(self.layer_us(list(dict.fromkeys([*pairs, *layers]))))


class Traces:
    """Listens to a search: stages tried per key and GEMM in order with their µs (None: failed), and decisions."""

    def __init__(self) -> None:
        self.tried: dict[Key, dict[str, dict[Stage, float | None]]] = {}
        self.chosen: dict[Key, Tactic] = {}

    def listen(self, event: Event) -> None:
        if isinstance(event, TrialDone):
            assert isinstance(event.outcome.tactic, Stage)
            measured = event.outcome.measurement
            tried = self.tried.setdefault(event.key, {part: {} for part in STAGES})[event.part]
            assert event.outcome.tactic not in tried, f"{event.outcome.tactic} was measured twice"
            tried[event.outcome.tactic] = None if measured is None else measured.median_us
        elif isinstance(event, KeyDecided):
            self.chosen[event.decision.key] = event.decision.chosen


def by_head(times: Times) -> dict[Head, Times]:
    found: dict[Head, Times] = {}
    for stage, time_us in times.items():
        found.setdefault(head_of(stage), {})[stage] = time_us
    return found


def pair_us(first: Times, second: Times) -> float:
    """The smallest sum of two stages with one head, in µs."""
    a, b = by_head(first), by_head(second)
    sums = [min(a[head].values()) + min(b[head].values()) for head in a.keys() & b.keys()]
    return min(sums, default=float("inf"))


# ---- running


@dataclass(frozen=True, slots=True)
class Job:
    """All keys with one sampler and seed, one budget after another. `curves` asks for the regret after each
    measurement under the largest of them."""

    recording: Path
    keys: tuple[Key, ...]
    sampler: str
    seed: int
    budgets: tuple[int, ...]
    curves: bool


_bench: dict[Path, Bench] = {}
"""One per worker process: truth and pools are the same for all its jobs."""


def run_job(job: Job) -> tuple[Job, list[Row], list[Curve], float]:
    """Rows and curves of a job, and the CPU seconds it took."""
    if job.recording not in _bench:
        _bench[job.recording] = Bench(job.recording)
    bench, began_s = _bench[job.recording], time.process_time()
    rows: list[Row] = []
    curves: list[Curve] = []
    for budget, traces in bench.searches(job.keys, job.sampler, job.seed, job.budgets):
        for key in traces.tried:
            rows += rows_of(job, budget, bench.truth(key), key, traces)
            if job.curves and budget == job.budgets[-1]:
                curves += curves_of(job, bench.truth(key), traces.tried[key])
    return job, rows, curves, time.process_time() - began_s


def rows_of(job: Job, budget: int, truth: Truth, key: Key, traces: Traces) -> list[Row]:
    tried = traces.tried[key]
    worked = {part: {stage: time for stage, time in tried[part].items() if time is not None} for part in STAGES}
    found: dict[str, float] = {part: min(worked[part].values(), default=float("inf")) for part in STAGES}
    found["pair"] = pair_us(worked["gemm1"], worked["gemm2"])
    found["layer"] = truth.layer_us([traces.chosen[key]])[0]
    counts = {part: len(tried[part]) for part in STAGES}
    return [
        Row(
            key.layer.ep_label,
            key.layer.local_experts,
            key.num_tokens,
            what,
            job.sampler,
            job.seed,
            budget,
            counts.get(what, sum(counts.values())),
            truth.pools[what],
            found[what],
            truth.best_us[what],
        )
        for what in WHATS
    ]


def curves_of(job: Job, truth: Truth, tried: dict[str, dict[Stage, float | None]]) -> Iterator[Curve]:
    for part in STAGES:
        best_us, regrets = float("inf"), []
        for time_us in tried[part].values():
            best_us = best_us if time_us is None else min(best_us, time_us)
            regrets.append(best_us / truth.best_us[part] - 1.0)
        regrets += regrets[-1:] * (job.budgets[-1] - len(regrets))
        yield Curve(job.sampler, truth.pools[part], tuple(regrets))


def run_all(jobs: Sequence[Job], workers: int) -> tuple[list[Row], list[Curve]]:
    rows: list[Row] = []
    curves: list[Curve] = []
    spent_s: dict[str, float] = {}
    began_s = time.monotonic()
    with get_context("spawn").Pool(workers) as pool:
        for done, (job, more_rows, more_curves, cpu_s) in enumerate(pool.imap_unordered(run_job, jobs), 1):
            rows += more_rows
            curves += more_curves
            spent_s[job.sampler] = spent_s.get(job.sampler, 0.0) + cpu_s
            print(f"\r{done}/{len(jobs)} runs, {time.monotonic() - began_s:.0f} s", end="", file=sys.stderr)
    print(file=sys.stderr)
    each = ", ".join(f"{name} {value:.0f} s" for name, value in sorted(spent_s.items()))
    print(f"{len(jobs)} runs in {time.monotonic() - began_s:.0f} s with {workers} processes; CPU: {each}")
    rows.sort(key=lambda row: (-row.local_experts, row.tokens, row.what, row.sampler, row.budget, row.seed))
    return rows, curves


# ---- reporting


def numbers(text: str) -> list[int]:
    return [int(item) for item in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--recording", type=Path, help="default: the shipped one")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--budgets", type=numbers, default=[10, 25, 50, 100], help="measurements per GEMM")
    parser.add_argument("--samplers", default="pool,pool-cold,random,tpe,cost", help="gp on request only")
    parser.add_argument("--tokens", type=numbers, help="only these token counts")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--csv", type=Path, help="write a row per key, part, sampler, seed and budget (.csv.gz)")
    parser.add_argument("--plot", type=Path, help="write a PNG of regret against measurements")
    parser.add_argument("--read", type=Path, help="only print the tables of a CSV written before")
    given = parser.parse_args()
    if given.read:
        rows = read_rows(given.read)
        report(rows, sorted({row.budget for row in rows}))
        return
    path = given.recording or embedded_recordings()[0]
    bench = Bench(path)
    keys = tuple(key for key in bench.measurer.keys if not given.tokens or key.num_tokens in given.tokens)
    print(f"{bench.measurer.recording.name}, {len(keys)} keys. {bench.measurer.recording.note}")
    budgets = tuple(sorted(given.budgets))
    longest, samplers = budgets[-1], given.samplers.split(",")
    jobs = [
        Job(path, keys, sampler, seed, part, given.plot is not None and part[-1] == longest)
        for seed in range(given.seeds)
        for sampler in sorted(samplers, key=["cost", "random", "pool", "pool-cold", "tpe", "gp"].index, reverse=True)
        for part in ([(budget,) for budget in reversed(budgets)] if sampler == "pool" else [budgets])
    ]
    rows, curves = run_all(jobs, given.jobs)
    if given.csv:
        write_rows(given.csv, rows)
    if given.plot:
        large = [curve for curve in curves if curve.pool > longest] or curves
        count = len(large) // (given.seeds * len(samplers))
        plot(given.plot, large, f"Search on the recording: {count} GEMMs with pools of more than {longest}")
    report(rows, budgets)


if __name__ == "__main__":
    main()
