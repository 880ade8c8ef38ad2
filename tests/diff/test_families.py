"""Tactics of a library's GEMM, installed or not, beside those of our own kernels."""

from __future__ import annotations

import json
from types import SimpleNamespace

import pytest

from fitune.diff import NotEnumerated, Stale, diff_sides, to_json
from fitune.diff.cascade import differing_fields
from fitune.diff.spaces import refusal, value_on
from fitune.families.grouped_mm import STAGES as GROUPED
from fitune.tactic import STAGES, Tactic, parse_tactic

LIBRARY = Tactic.of(GROUPED["gemm1"], GROUPED["gemm2"])
FOREIGN = parse_tactic("vendor t128 gather:permute act:separate g1:auto g2:align=128 fin:reduce")


def test_fields_of_a_librarys_gemm(make: SimpleNamespace) -> None:
    assert differing_fields(LIBRARY, FOREIGN) == ("family", "gemm2.options")
    assert {"family", "gemm1.options", "gemm2.options"} <= set(differing_fields(LIBRARY, make.LARGE))
    stage = LIBRARY.stage("gemm1")
    assert [value_on(stage, axis) for axis in ("options", "block_n", "loop", "gather")] == [
        "auto",
        None,
        None,
        "permute",
    ]
    assert value_on(make.LARGE.stage("gemm1"), "options") is None


@pytest.mark.parametrize("tactic", [LIBRARY, FOREIGN], ids=["grouped_mm", "not installed"])
@pytest.mark.parametrize("swapped", [False, True])
def test_two_sides_of_which_one_chose_a_library(make: SimpleNamespace, tactic: Tactic, swapped: bool) -> None:
    """With times for both on both sides, and with none; the report can be written and printed."""
    at = make.key(8192, 256)
    for timed in (False, True):
        both = [make.tried(at, each, us) for each, us in ((tactic, 90.0), (make.LARGE, 100.0))] if timed else []
        a = make.side("A", [make.decided(at, [(tactic, 90.0)])], both)
        b = make.side("B", [make.decided(at, [(make.LARGE, 100.0)])], both)
        report = diff_sides(b, a) if swapped else diff_sides(a, b)
        json.dumps(to_json(report))
        (row,) = report.rows
        assert row.sentence
        if tactic is FOREIGN and not timed:
            assert isinstance(row.evidence, NotEnumerated)
            assert row.evidence.missing[0].rule == "family: 'vendor' is not installed"


def test_another_torch_makes_a_librarys_tactic_stale(make: SimpleNamespace) -> None:
    at = make.key(8192, 256)
    sides = []
    for label, binary in (("A", "torch1"), ("B", "torch2")):
        records = [make.tried(at, LIBRARY.stage(name), 50.0, binary=binary) for name in STAGES]
        chosen = LIBRARY if label == "A" else make.LARGE
        sides.append(make.side(label, [make.decided(at, [(chosen, 100.0)])], records))
    (row,) = diff_sides(*sides).rows
    assert isinstance(row.evidence, Stale) and row.evidence.binaries[0].tactic == LIBRARY.stage("gemm1")


def test_the_space_has_it_or_says_why_not(make: SimpleNamespace) -> None:
    many, few = make.key(8192, 256).problem(), make.key(64, 256).problem()
    assert refusal(LIBRARY.stage("gemm1"), many, make.TARGET) is None
    found = refusal(LIBRARY.stage("gemm1"), few, make.TARGET)
    assert found is not None and found.kind == "dropped" and found.reason.startswith("load: ")
