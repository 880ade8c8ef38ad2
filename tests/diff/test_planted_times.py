"""Pairs of sides whose recorded times decide: ties, real differences, and what stays undecided."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest

from fitune.diff import (
    Real,
    Tie,
    Undecided,
    Verdict,
)

# 7 tie


def test_tie_by_finalists(make: SimpleNamespace) -> None:
    row = make.only_row(*make.two_ep(0.003, 0.002))
    assert isinstance(row.evidence, Tie)
    assert row.regret_a_on_b.source == "measured" and row.regret_a_on_b.interleaved
    assert row.regret_a_on_b.ratio == pytest.approx(0.003)
    assert row.regret_b_on_a.ratio == pytest.approx(0.002)


def test_tie_by_overlapping_intervals(make: SimpleNamespace) -> None:
    row = make.only_row(*make.two_ep(0.02, 0.015, half=0.015))
    assert row.verdict is Verdict.TIE


def test_tie_by_stage_times(make: SimpleNamespace) -> None:
    row = make.only_row(*make.composed_sides(0.01, -0.01))
    assert isinstance(row.evidence, Tie)
    assert row.regret_a_on_b.source == row.regret_b_on_a.source == "composed"
    assert row.regret_a_on_b.ratio == pytest.approx(0.01)
    assert row.regret_b_on_a.ratio == pytest.approx(-0.01)
    assert row.regret_b_on_a.reference_us == pytest.approx(1000.0)


@pytest.mark.parametrize(("extra_us", "verdict"), [(5.0, Verdict.TIE), (200.0, Verdict.REAL)])
def test_the_sort_is_part_of_a_sum(make: SimpleNamespace, extra_us: float, verdict: Verdict) -> None:
    """Both GEMMs are equal on EP 1; only the slot sort of the other tile size tells them apart."""
    a, b = make.composed_sides(0.0, 0.0)
    (at,) = a.decisions
    sorted_by = make.tried(at, replace(make.SMALL, gather="permute"), 3000.0, parts_us=(("sort", 10.0 + extra_us),))
    assert make.only_row(replace(a, records=(*a.records, sorted_by)), b).verdict is verdict


def test_a_result_composed_of_recorded_parts_is_weaker_evidence_not_another_regime(make: SimpleNamespace) -> None:
    a, b = make.composed_sides(0.01, 0.01)
    composed = replace(make.REGIME, execution="composed", interleaved=False)
    ((at, decision),) = b.decisions.items()
    members = (
        replace(decision.members[0], measurement=make.time(100.0, regime=composed)),
        replace(decision.members[0], tactic=make.LARGE, measurement=make.time(150.0, regime=composed), tied=False),
    )
    row = make.only_row(a, replace(b, decisions={at: replace(decision, members=members)}))
    assert row.verdict is Verdict.TIE
    assert row.regret_a_on_b.source == "composed"
    assert any("sum of recorded parts" in note for note in row.unchecked)


def test_two_tunes_in_opposite_order(make: SimpleNamespace) -> None:
    times = [(make.SMALL, 100.0), (make.LARGE, 103.0)]
    row = make.only_row(
        make.side("A", [make.decided(make.key(), times)]),
        make.side("B", [make.decided(make.key(), [(make.LARGE, 100.0), (make.SMALL, 102.0)])]),
    )
    assert isinstance(row.evidence, Tie) and row.evidence.opposed


# 8 real


def test_real_by_finalists(make: SimpleNamespace) -> None:
    row = make.only_row(*make.two_ep(0.089, 0.02))
    assert isinstance(row.evidence, Real)
    assert (row.evidence.foreign, row.evidence.host) == ("EP 1", "EP 16")
    assert row.evidence.regret.ratio == pytest.approx(0.089)
    counts = row.evidence.mechanism
    assert counts is not None
    assert counts.foreign_here.gemm1.tiles == pytest.approx(counts.foreign_away.gemm1.tiles / 16.0, rel=1e-6)
    assert counts.predicted + counts.unexplained == pytest.approx(0.089)
    assert "1/16 of the row tiles" in row.sentence


def test_real_by_stage_times(make: SimpleNamespace) -> None:
    row = make.only_row(*make.composed_sides(0.0, 0.12))
    assert isinstance(row.evidence, Real)
    assert (row.evidence.foreign, row.evidence.host, row.evidence.regret.source) == ("EP 16", "EP 1", "composed")


def test_real_by_layer_records(make: SimpleNamespace) -> None:
    one, sixteen = make.key(2048, 256), make.key(2048, 16)
    a = make.side("EP 1", [make.decided(one, [(make.LARGE, 1000.0)])], [make.tried(one, make.SMALL, 1200.0)])
    b = make.side("EP 16", [make.decided(sixteen, [(make.SMALL, 100.0)])], [make.tried(sixteen, make.LARGE, 101.0)])
    row = make.only_row(a, b)
    assert row.verdict is Verdict.REAL
    assert (row.regret_b_on_a.judgement, row.regret_a_on_b.judgement) == ("slower", "tie")
    assert not row.regret_b_on_a.interleaved


def test_two_devices_can_really_differ(make: SimpleNamespace) -> None:
    other = replace(make.ENVIRONMENT, device="NVIDIA H100", num_sms=114)
    times = [(make.SMALL, 100.0), (make.LARGE, 110.0)]
    swapped = [(make.LARGE, 100.0), (make.SMALL, 110.0)]
    row = make.only_row(
        make.side("H200", [make.decided(make.key(4096), times)]),
        make.side("H100", [make.decided(make.key(4096, device="NVIDIA H100"), swapped, environment=other)], (), other),
    )
    assert row.verdict is Verdict.REAL


# undecided


def test_never_timed_is_undecided_and_shown_as_predicted(make: SimpleNamespace) -> None:
    one, sixteen = make.key(2048, 256), make.key(2048, 16)
    row = make.only_row(
        make.side("EP 1", [make.decided(one, [(make.LARGE, 1000.0)])]),
        make.side("EP 16", [make.decided(sixteen, [(make.SMALL, 100.0)])]),
    )
    assert isinstance(row.evidence, Undecided)
    assert row.evidence.probe == "swap test"
    assert row.regret_a_on_b.source == "predicted" and row.regret_a_on_b.judgement == "unknown"


def test_one_known_way_that_ties_is_not_enough(make: SimpleNamespace) -> None:
    _, b = make.two_ep(0.001, 0.001)
    lonely = make.side("EP 1", [make.decided(make.key(2048, 256), [(make.LARGE, 1000.0)])])
    row = make.only_row(lonely, b)
    assert row.verdict is Verdict.UNDECIDED
    assert "EP 16's tactic was never timed on EP 1" in row.sentence


def test_a_foreign_tactic_that_beats_the_home_one(make: SimpleNamespace) -> None:
    one, sixteen = make.key(2048, 256), make.key(2048, 16)
    a = make.side("EP 1", [make.decided(one, [(make.LARGE, 1000.0), (make.SMALL, 1200.0)])])
    b = make.side("EP 16", [make.decided(sixteen, [(make.SMALL, 100.0)])], [make.tried(sixteen, make.LARGE, 80.0)])
    row = make.only_row(a, b)
    assert row.verdict is Verdict.UNDECIDED
    assert "may have missed it" in row.sentence


def test_times_of_another_kernel_do_not_count(make: SimpleNamespace) -> None:
    old = replace(make.ENVIRONMENT, kernels="k0")
    one, sixteen = make.key(2048, 256), make.key(2048, 16)
    a = make.side("EP 1", [make.decided(one, [(make.LARGE, 1000.0), (make.SMALL, 1001.0)])])
    b = make.side(
        "EP 16",
        [make.decided(sixteen, [(make.SMALL, 100.0)])],
        [make.tried(sixteen, make.LARGE, 150.0, environment=old)],
        old,
    )
    assert make.only_row(a, b).verdict is Verdict.UNDECIDED


def test_times_of_another_regime_do_not_count(make: SimpleNamespace) -> None:
    one, sixteen = make.key(2048, 256), make.key(2048, 16)
    a = make.side("EP 1", [make.decided(one, [(make.LARGE, 1000.0), (make.SMALL, 1001.0)])])
    warm = make.tried(sixteen, make.LARGE, 150.0, regime=replace(make.REGIME, l2="warm"))
    b = make.side("EP 16", [make.decided(sixteen, [(make.SMALL, 100.0)])], [warm])
    assert make.only_row(a, b).verdict is Verdict.UNDECIDED


def test_intervals_too_wide_to_tell(make: SimpleNamespace) -> None:
    row = make.only_row(*make.two_ep(0.05, 0.05, half=0.08))
    assert isinstance(row.evidence, Undecided)
    assert row.evidence.probe == "A/A test"


def test_missing_environment_is_noted(make: SimpleNamespace) -> None:
    a, b = make.two_ep(0.001, 0.001)
    row = make.only_row(a, replace(b, environments={}))
    assert row.verdict is Verdict.TIE
    assert any("versions of EP 16" in note for note in row.unchecked)
