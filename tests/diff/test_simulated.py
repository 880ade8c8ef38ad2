"""Diffs of simulated tunes, whose true times are known: what the report claims must be true."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fitune import space
from fitune.diff import Side, Verdict, diff_sides, to_json

TOKENS = (1, 16, 256, 4096)


def tuned(make: SimpleNamespace, label: str, tuner: Any, keys: Any) -> Side:
    decisions, records = [], []
    for at in keys:
        found, decision = tuner.tune(at)
        records += found
        decisions.append(decision)
    return make.side(label, decisions, records)


@pytest.mark.parametrize("noise", [0.002, 0.01, 0.04])
def test_two_tunes_of_the_same_keys_are_never_really_different(make: SimpleNamespace, noise: float) -> None:
    keys = [make.key(tokens, experts) for tokens, experts in zip(TOKENS, (256, 16, 256, 16), strict=True)]
    differing = ties = 0
    for seed in range(4):
        a = tuned(make, "A", make.Tuner(2 * seed, noise, stages=2000), keys)
        b = tuned(make, "B", make.Tuner(2 * seed + 1, noise, stages=2000), keys)
        report = diff_sides(a, b)
        assert Verdict.REAL not in report.counts
        assert set(report.counts) <= {Verdict.SAME, Verdict.TIE, Verdict.UNDECIDED}
        differing += len(report.differing)
        ties += report.counts.get(Verdict.TIE, 0)
    if noise >= 0.01:
        assert differing >= 8
    assert ties >= 0.95 * differing


@pytest.mark.parametrize("noise", [0.002, 0.01, 0.03])
def test_claims_about_ep_sizes_hold_in_truth(make: SimpleNamespace, noise: float) -> None:
    """Exhaustive sweeps of three EP sizes that truly prefer different tactics, by some percent: what is called real
    costs time in truth, and on the side that is named; what is called a tie does not. Claims rest on 95 % intervals:
    one of them may be wrong, by less than the noise."""
    claimed = {Verdict.REAL: 0, Verdict.TIE: 0}
    wrong = []
    for seed in range(4):
        tuner = make.Tuner(seed, noise, stages=2000, place=0.05)
        sides = {
            experts: tuned(make, f"L={experts}", tuner, [make.key(tokens, experts) for tokens in TOKENS])
            for experts in (256, 32, 16)
        }
        for one, other in ((256, 32), (256, 16), (32, 16)):
            for row in diff_sides(sides[one], sides[other]).differing:
                costs = true_costs(tuner, row)
                if row.verdict is Verdict.REAL:
                    cost = costs[row.evidence.regret == row.regret_b_on_a]
                    wrong += [cost] if cost <= 0.0 else []
                if row.verdict is Verdict.TIE:
                    assert max(map(abs, costs)) < 0.03 + 3 * noise
                if row.verdict in claimed:
                    claimed[row.verdict] += 1
    assert all(claimed.values()), claimed
    assert len(wrong) <= 1 and all(cost > -noise for cost in wrong), wrong


def true_costs(tuner: Any, row: Any) -> tuple[float, float]:
    """What A's tactic truly costs on B's problem, and B's on A's."""
    there, home = row.key_b.problem(), row.key_a.problem()
    return (
        tuner.true_layer_us(row.tactic_a, there) / tuner.true_layer_us(row.tactic_b, there) - 1.0,
        tuner.true_layer_us(row.tactic_b, home) / tuner.true_layer_us(row.tactic_a, home) - 1.0,
    )


def test_equal_devices_under_two_names_are_not_really_different(make: SimpleNamespace) -> None:
    """The truth is the same on both sides, but nothing but the times can tell: no false `real` from chance alone."""
    keys = [make.key(tokens) for tokens in TOKENS]
    false_real = rows = 0
    for seed in range(4):
        a = tuned(make, "A", make.Tuner(100 + seed, 0.01, stages=2000), keys)
        b = tuned(make, "B", make.Tuner(200 + seed, 0.01, stages=2000), keys)
        renamed = {}
        for at, decision in b.decisions.items():
            there = replace(at, layer=replace(at.layer, device="other"))
            renamed[there] = replace(decision, key=there)
        records = [
            replace(item, key=replace(item.key, layer=replace(item.key.layer, device="other"))) for item in b.records
        ]
        report = diff_sides(a, replace(b, decisions=renamed, records=records))
        false_real += report.counts.get(Verdict.REAL, 0)
        rows += len(report.rows)
    assert rows == 16
    assert false_real == 0


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    seed=st.integers(0, 10_000), noise=st.floats(0.0, 0.05), align=st.sampled_from(["tokens", "rows"]), data=st.data()
)
def test_a_side_compared_with_itself(make: SimpleNamespace, seed: int, noise: float, align: Any, data: Any) -> None:
    tokens = data.draw(st.sets(st.integers(1, 16384), min_size=1, max_size=5))
    experts = data.draw(st.sets(st.sampled_from([256, 37, 16, 1]), min_size=1, max_size=2))
    tuner = make.Tuner(seed, noise + 1e-6, stages=15)
    side = tuned(make, "A", tuner, _tunable(make, tokens, experts))
    report = diff_sides(side, side, align)
    assert [row.verdict for row in report.rows] == [Verdict.SAME] * len(side.decisions)
    assert not report.differing


def _tunable(make: SimpleNamespace, tokens: set[int], experts: set[int]) -> list[Any]:
    """Keys whose pool is wide enough that 15 picks of each GEMM share a tile size somewhere."""
    return [make.key(count, held) for count in sorted(tokens) for held in sorted(experts)]


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10_000))
def test_swapping_the_sides_swaps_the_report(make: SimpleNamespace, seed: int) -> None:
    keys = {experts: [make.key(tokens, experts) for tokens in (4, 1024)] for experts in (256, 16)}
    a = tuned(make, "A", make.Tuner(seed, 0.01, stages=60), keys[256])
    b = tuned(make, "B", make.Tuner(seed + 1, 0.01, stages=60), keys[16])
    there, back = diff_sides(a, b), diff_sides(b, a)
    assert there.counts == back.counts
    for row, mirrored in zip(there.rows, back.rows, strict=True):
        assert (row.verdict, row.fields) == (mirrored.verdict, mirrored.fields)
        assert row.regret_a_on_b == mirrored.regret_b_on_a


def big_side(make: SimpleNamespace, label: str, experts: int, environment: Any, count: int = 10_000) -> Side:
    """10,000 stage records over 15 token counts, a decision on each."""
    tokens = [2**power for power in range(15)]
    decisions, records = [], []
    for at in (make.key(number, experts) for number in tokens):
        pools = [space.pool(at.problem(), make.TARGET, name) for name in ("gemm1", "gemm2")]
        share = count // len(tokens) // 2 + 1
        for pool in pools:
            records += [
                make.tried(at, pool[index % len(pool)], 50.0 + index, environment=environment) for index in range(share)
            ]
        tactic = make.LARGE if experts == 256 else make.SMALL
        decisions.append(make.decided(at, [(tactic, 100.0)], environment=environment))
    return make.side(label, decisions, records[:count] if len(records) > count else records, environment)


def test_ten_thousand_records_a_side_in_two_seconds(make: SimpleNamespace) -> None:
    a = big_side(make, "EP 1", 256, make.ENVIRONMENT)
    b = big_side(make, "EP 16", 16, make.ENVIRONMENT)
    assert min(len(a.records), len(b.records)) >= 10_000
    begin = time.process_time()
    report = diff_sides(a, b)
    json.dumps(to_json(report))
    elapsed_s = time.process_time() - begin
    assert len(report.differing) == 15
    assert elapsed_s < 2.0


def test_many_decisions_with_few_records_each(make: SimpleNamespace) -> None:
    def side(label: str, experts: int, tactic: Any) -> Side:
        keys = [make.key(number, experts) for number in range(1, 501)]
        stages = space.pool(make.key(64, experts).problem(), make.TARGET, "gemm1")[:20]
        records = [make.tried(at, stage, 50.0) for at in keys for stage in stages]
        return make.side(label, [make.decided(at, [(tactic, 100.0)]) for at in keys], records)

    a, b = side("EP 1", 256, make.LARGE), side("EP 16", 16, make.SMALL)
    assert len(a.records) == 10_000
    begin = time.process_time()
    report = diff_sides(a, b)
    assert time.process_time() - begin < 2.0
    assert len(report.differing) == 500


def test_no_torch_is_imported() -> None:
    code = (
        "import sys; import fitune.diff, fitune.explain; "
        "bad = {'torch', 'triton', 'optuna', 'typer', 'rich', 'matplotlib'} & set(sys.modules); "
        "sys.exit(str(bad) if bad else 0)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
