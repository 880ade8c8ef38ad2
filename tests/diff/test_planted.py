"""Pairs of sides with one planted cause each: the cascade must name exactly that cause."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest

from fitune import space
from fitune.diff import (
    NotEnumerated,
    NotLegal,
    OtherBucket,
    OtherRegime,
    OtherRouting,
    Stale,
    Verdict,
    diff_sides,
)
from fitune.record import Status
from fitune.tactic import STAGES, Stage, Tactic, parse_tactic

# 1 not enumerated


@pytest.mark.parametrize("swapped", [False, True])
def test_an_axis_that_lacks_the_winners_value(make: SimpleNamespace, swapped: bool) -> None:
    odd = replace(make.SMALL, gemm1=replace(make.SMALL.gemm1, group_m=4))
    a = make.side("A", [make.decided(make.key(), [(odd, 100.0)])])
    b = make.side("B", [make.decided(make.key(), [(make.SMALL, 101.0)])])
    row = make.only_row(b, a) if swapped else make.only_row(a, b)
    assert isinstance(row.evidence, NotEnumerated)
    (missing,) = row.evidence.missing
    assert (missing.lacking, missing.winner, missing.found_by) == ("B", "A", "space")
    assert missing.rule.startswith("group_m: 4 ")
    assert missing.stage == odd.stage("gemm1")


def test_a_pruning_rule_that_only_one_ep_size_meets(make: SimpleNamespace) -> None:
    gemv = parse_tactic(
        "gemv t1 gather:fused act:fused g1:8x1024/g1/w4/s1/grid/ptr g2:4x1024/g1/w4/s1/grid/ptr fin:fused"
    )
    one, sixteen = make.key(4, 256), make.key(4, 16)
    assert not space.tactic_legality(gemv, sixteen.problem(), make.TARGET)
    small = space.default_tactic(one.problem(), make.TARGET)
    row = make.only_row(
        make.side("EP 1", [make.decided(one, [(small, 100.0)])]),
        make.side("EP 16", [make.decided(sixteen, [(gemv, 10.0)])]),
    )
    assert isinstance(row.evidence, NotEnumerated)
    assert {missing.lacking for missing in row.evidence.missing} == {"EP 1"}
    assert row.evidence.missing[0].rule.startswith("load: ")


def sampled(make: SimpleNamespace, at: Any, allowed: Any, count: int, **more: Any) -> list[Any]:
    records = []
    for name in STAGES:
        stages = [stage for stage in space.pool(at.problem(), make.TARGET, name) if allowed(stage)]
        step = max(1, len(stages) // count)
        records += [make.tried(at, stage, 50.0, **more) for stage in stages[::step][:count]]
    return records


@pytest.mark.parametrize("origin", ["sampler", "exhaustive"])
def test_a_tile_size_that_an_older_space_had_lost(make: SimpleNamespace, origin: str) -> None:
    at = make.key()
    a = make.side("A", [make.decided(at, [(make.SMALL, 100.0)])], sampled(make, at, lambda _: True, 200, origin=origin))
    cut = sampled(make, at, lambda stage: stage.tile_size != 64, 200, origin=origin)
    b = make.side("B", [make.decided(at, [(make.LARGE, 105.0)])], cut)
    row = make.only_row(a, b)
    assert isinstance(row.evidence, NotEnumerated)
    assert {(missing.lacking, missing.found_by) for missing in row.evidence.missing} == {("B", "records")}
    assert "tile_size 64" in row.sentence


def test_a_pair_of_values_missing_from_an_exhaustive_sweep(make: SimpleNamespace) -> None:
    at = make.key()

    def allowed(stage: Stage) -> bool:
        return not (stage.tile_size == 64 and stage.gemm.block_n == 128)

    full = sampled(make, at, lambda _: True, 2000, origin="exhaustive")
    a = make.side("A", [make.decided(at, [(make.SMALL, 100.0)])], full)
    b = make.side("B", [make.decided(at, [(make.LARGE, 105.0)])], sampled(make, at, allowed, 2000, origin="exhaustive"))
    row = make.only_row(a, b)
    assert row.verdict is Verdict.NOT_ENUMERATED
    assert "tile_size 64 with block_n 128" in row.sentence


def test_a_short_search_that_never_met_the_winner_proves_nothing(make: SimpleNamespace) -> None:
    at = make.key()
    full = sampled(make, at, lambda _: True, 200)
    few = sampled(make, at, lambda stage: stage.tile_size != 64, 15)
    row = make.only_row(
        make.side("A", [make.decided(at, [(make.SMALL, 100.0)])], full),
        make.side("B", [make.decided(at, [(make.LARGE, 105.0)])], few),
    )
    assert row.verdict is Verdict.UNDECIDED


def test_a_rejection_noted_by_the_run_itself(make: SimpleNamespace) -> None:
    at = make.key()
    note = make.tried(at, make.SMALL.stage("gemm1"), None, status=Status.REJECTED, error="padding: planted rule")
    row = make.only_row(
        make.side("A", [make.decided(at, [(make.SMALL, 100.0)])]),
        make.side("B", [make.decided(at, [(make.LARGE, 100.0)])], [note]),
    )
    assert isinstance(row.evidence, NotEnumerated)
    assert row.evidence.missing[0].rule == "padding: planted rule"


# 2 not legal


@pytest.mark.parametrize(
    "status", [Status.OUT_OF_RESOURCES, Status.COMPILE_ERROR, Status.WRONG_RESULT, Status.TIMEOUT, Status.CRASHED]
)
def test_a_stage_that_failed_on_the_other_side(make: SimpleNamespace, status: Status) -> None:
    one, sixteen = make.key(2048, 256), make.key(2048, 16)
    failed = make.tried(sixteen, make.LARGE.stage("gemm2"), None, status=status, error="planted failure")
    row = make.only_row(
        make.side("EP 1", [make.decided(one, [(make.LARGE, 1000.0)])]),
        make.side("EP 16", [make.decided(sixteen, [(make.SMALL, 100.0)])], [failed]),
    )
    assert isinstance(row.evidence, NotLegal)
    (found,) = row.evidence.illegal
    assert (found.refusing, found.winner, found.status) == ("EP 16", "EP 1", status)
    assert "planted failure" in row.sentence


def test_too_much_shared_memory_for_the_other_chip(make: SimpleNamespace) -> None:
    ada = replace(make.ENVIRONMENT, device="NVIDIA L40S", arch="sm_89", num_sms=142)
    big = replace(make.LARGE, gemm1=replace(make.LARGE.gemm1, block_n=256, num_stages=4, loads="pointer"))
    fits = space.default_tactic(make.key().problem(), replace(make.TARGET, arch="sm_89", shared_bytes=101_376))
    row = make.only_row(
        make.side("H200", [make.decided(make.key(), [(big, 100.0)])]),
        make.side("L40S", [make.decided(make.key(device="NVIDIA L40S"), [(fits, 400.0)], environment=ada)], (), ada),
    )
    assert isinstance(row.evidence, NotLegal)
    assert row.evidence.illegal[0].reason.startswith("shared memory: ")


def test_a_failure_beside_a_success_is_no_cause(make: SimpleNamespace) -> None:
    a, b = make.two_ep(0.001, 0.001)
    stage = make.LARGE.stage("gemm1")
    at = make.key(2048, 16)
    records = [make.tried(at, stage, None), make.tried(at, stage, 40.0)]
    assert make.only_row(a, replace(b, records=tuple(records))).verdict is Verdict.TIE


# 3 other bucket


def test_a_grid_that_lacks_the_point(make: SimpleNamespace) -> None:
    a = make.side("A", [make.decided(make.key(3072), [(make.LARGE, 100.0)])])
    b = make.side("B", [make.decided(make.key(tokens), [(make.SMALL, 90.0)]) for tokens in (2048, 8192)])
    first, second = diff_sides(a, b).rows
    assert isinstance(first.evidence, OtherBucket)
    loads = first.evidence
    assert (loads.compared_tokens, loads.a.num_tokens, loads.b.num_tokens) == (3072, 3072, 2048)
    assert loads.a.expected_rows_per_expert == pytest.approx(96.0)
    assert second.verdict is Verdict.ONLY_B


def test_a_capped_grid(make: SimpleNamespace) -> None:
    a = make.side("A", [make.decided(make.key(tokens), [(make.SMALL, 100.0)]) for tokens in (4096, 8192)])
    capped = [(4096, make.LARGE), (16384, make.LARGE)]
    b = make.side("B", [make.decided(make.key(tokens), [(tactic, 190.0)]) for tokens, tactic in capped])
    same_load, missing, beyond = diff_sides(a, b).rows
    assert same_load.verdict is Verdict.UNDECIDED
    assert isinstance(missing.evidence, OtherBucket)
    assert (missing.evidence.a.num_tokens, missing.evidence.b.num_tokens) == (8192, 4096)
    assert beyond.verdict is Verdict.ONLY_B


def test_dispatch_kinds_give_different_loads(make: SimpleNamespace) -> None:
    a = make.side("gather", [make.decided(make.key(1024, 16), [(make.LARGE, 100.0)])])
    b = make.side("all to all", [make.decided(make.key(1024, 16, dispatch="all_to_all"), [(make.SMALL, 90.0)])])
    row = make.only_row(a, b)
    assert isinstance(row.evidence, OtherBucket)
    assert row.evidence.b.expected_rows_per_expert > 2 * row.evidence.a.expected_rows_per_expert


# 4 stale or other binary


@pytest.mark.parametrize(("field", "value"), [("kernels", "k2"), ("triton", "3.7.1"), ("driver", "580")])
def test_other_code(make: SimpleNamespace, field: str, value: str) -> None:
    other = replace(make.ENVIRONMENT, **{field: value})
    row = make.only_row(
        make.side("A", [make.decided(make.key(), [(make.SMALL, 100.0), (make.LARGE, 110.0)])]),
        make.side(
            "B", [make.decided(make.key(), [(make.LARGE, 90.0), (make.SMALL, 100.0)], environment=other)], (), other
        ),
    )
    assert isinstance(row.evidence, Stale)
    (found,) = row.evidence.fields
    assert (found.a, found.b) == (getattr(make.ENVIRONMENT, field), value)


def test_unknown_versions_are_no_difference(make: SimpleNamespace) -> None:
    other = replace(make.ENVIRONMENT, driver="", triton="")
    times = [(make.SMALL, 100.0), (make.LARGE, 100.1)]
    row = make.only_row(
        make.side("A", [make.decided(make.key(), times, tied=[make.LARGE])]),
        make.side("B", [make.decided(make.key(), times[::-1], tied=[make.SMALL], environment=other)], (), other),
    )
    assert row.verdict is Verdict.TIE


@pytest.mark.parametrize("local_experts", [256, 16])
def test_the_same_stage_compiled_to_another_binary(make: SimpleNamespace, local_experts: int) -> None:
    stage = make.SMALL.stage("gemm1")
    one, other = make.key(2048, 256), make.key(2048, local_experts)
    times = [(make.SMALL, 100.0), (make.LARGE, 108.0)]
    a = make.side("A", [make.decided(one, times)], [make.tried(one, stage, 40.0, binary="aaaa")])
    b = make.side("B", [make.decided(other, times[::-1])], [make.tried(other, stage, 40.0, binary="bbbb")])
    row = make.only_row(a, b)
    assert isinstance(row.evidence, Stale)
    (found,) = row.evidence.binaries
    assert (found.tactic, found.a, found.b) == (stage, "aaaa", "bbbb")


def test_specialised_arguments_may_compile_differently(make: SimpleNamespace) -> None:
    stage = make.SMALL.stage("gemm1")
    one, other = make.key(2048, 256), make.key(2048, 8)
    a = make.side("A", [make.decided(one, [(make.SMALL, 100.0)])], [make.tried(one, stage, 40.0, binary="aaaa")])
    b = make.side("B", [make.decided(other, [(make.LARGE, 50.0)])], [make.tried(other, stage, 9.0, binary="bbbb")])
    assert make.only_row(a, b).verdict is Verdict.UNDECIDED


# 5 other regime


@pytest.mark.parametrize(
    ("field", "value"), [("timer", "events"), ("execution", "eager"), ("l2", "warm"), ("interleaved", False)]
)
def test_other_regime(make: SimpleNamespace, field: str, value: object) -> None:
    regime = replace(make.REGIME, **{field: value})
    times = [(make.SMALL, 100.0), (make.LARGE, 108.0)]
    row = make.only_row(
        make.side("A", [make.decided(make.key(), times)]),
        make.side("B", [make.decided(make.key(), times[::-1], regime=regime)]),
    )
    assert isinstance(row.evidence, OtherRegime)
    (found,) = row.evidence.fields
    assert (found.field, found.b) == (field, str(value))


def test_other_clocks(make: SimpleNamespace) -> None:
    times = [(make.SMALL, 100.0), (make.LARGE, 108.0)]
    a = make.side("A", [make.decided(make.key(), times, sm_mhz=1965.0)])
    row = make.only_row(a, make.side("B", [make.decided(make.key(), times[::-1], sm_mhz=1580.0)]))
    assert isinstance(row.evidence, OtherRegime)
    capped = replace(make.ENVIRONMENT, power_cap_w=450.0)
    free = replace(make.ENVIRONMENT, power_cap_w=700.0)
    row = make.only_row(
        make.side("A", [make.decided(make.key(), times, environment=free)], (), free),
        make.side("B", [make.decided(make.key(), times[::-1], environment=capped)], (), capped),
    )
    assert isinstance(row.evidence, OtherRegime)
    assert "700 W and 450 W" in row.sentence


def test_ep_sizes_draw_their_own_power(make: SimpleNamespace) -> None:
    a, b = make.two_ep(0.001, 0.001, sm_mhz=1965.0)
    slow = make.two_ep(0.001, 0.001, sm_mhz=1580.0)[1]
    assert make.only_row(a, slow).verdict is make.only_row(a, b).verdict is Verdict.TIE


# 6 other routing


def test_other_routing_profile(make: SimpleNamespace) -> None:
    times = [(make.SMALL, 100.0), (make.LARGE, 108.0)]
    a = make.side("A", [make.decided(make.key(), times)])
    skewed = replace(make.REGIME, routing="zipf:1.2")
    row = make.only_row(a, make.side("B", [make.decided(make.key(routing="zipf:1.2"), times[::-1], regime=skewed)]))
    assert isinstance(row.evidence, OtherRouting)
    assert [(found.a, found.b) for found in row.evidence.fields] == [("random", "zipf:1.2")]


def test_other_seed(make: SimpleNamespace) -> None:
    times = [(make.SMALL, 100.0), (make.LARGE, 108.0)]
    row = make.only_row(
        make.side("A", [make.decided(make.key(), times)]),
        make.side("B", [make.decided(make.key(), times[::-1], regime=replace(make.REGIME, seed=7))]),
    )
    assert isinstance(row.evidence, OtherRouting)
    assert row.evidence.fields[0].field == "seed"


def test_the_order_of_the_cascade(make: SimpleNamespace) -> None:
    """Every planted cause at once: removing the first that holds brings up the next."""
    other = replace(make.ENVIRONMENT, kernels="k2")
    failed = make.tried(make.key(3072), make.SMALL.stage("gemm1"), None, error="planted")
    odd = replace(make.SMALL, gemm2=replace(make.SMALL.gemm2, group_m=4))
    regime, seed = replace(make.REGIME, l2="warm", seed=3), replace(make.REGIME, seed=3)
    home = make.ENVIRONMENT

    def verdict(tactic: Tactic, tokens: int, records: list[Any], environment: Any, timed: Any) -> Verdict:
        a = make.decided(make.key(3000), [(tactic, 100.0)])
        b = [
            make.decided(make.key(at), [(make.LARGE, 100.0)], environment=environment, regime=timed)
            for at in (tokens, 1024)
        ]
        rows = diff_sides(make.side("A", [a]), make.side("B", b, records, other)).rows
        (row,) = (row for row in rows if row.key_a is not None)
        return row.verdict

    assert verdict(odd, 3072, [failed], other, regime) is Verdict.NOT_ENUMERATED
    assert verdict(make.SMALL, 3072, [failed], other, regime) is Verdict.NOT_LEGAL
    assert verdict(make.SMALL, 3072, [], other, regime) is Verdict.OTHER_BUCKET
    assert verdict(make.SMALL, 3000, [], other, regime) is Verdict.STALE
    assert verdict(make.SMALL, 3000, [], home, regime) is Verdict.OTHER_REGIME
    assert verdict(make.SMALL, 3000, [], home, seed) is Verdict.OTHER_ROUTING
    assert verdict(make.SMALL, 3000, [], home, make.REGIME) is Verdict.UNDECIDED
