"""The example plugin of docs/plugins.md: enumerated, predicted, compiled and run like a family of fitune's own."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from fitune import cost, space
from fitune.families import families, library_terms
from fitune.kernels import reference
from fitune.kernels.layer import LayerArgs, Workspace, row_of_slots, run_layer
from fitune.measure.compile import compile_stage
from fitune.problem import LayerShape, Problem
from fitune.record import Status
from fitune.search.pool import FEATURES, StagePool
from fitune.tactic import STAGES, LibraryGemm, Stage, Tactic, parse_stage, parse_tactic
from fitune.target import KNOWN_TARGETS

SM_90 = KNOWN_TARGETS["sm_90"]
SHAPE = LayerShape(72, 40, 6, 2, "fp32")
TEXT = "naive t1 gather:fused act:fused g1:auto g2:auto fin:reduce"


@pytest.mark.usefixtures("naive")
def test_it_is_one_of_the_candidates() -> None:
    problem = Problem(SHAPE, 3, 64)
    for name in STAGES:
        stage = parse_tactic(TEXT).stage(name)
        assert space.candidates(problem, SM_90, name)[-1] == space.Candidate(stage, "")
        assert space.pool(problem, SM_90, name)[-1] == stage
        assert cost.terms(stage, problem, SM_90) == library_terms(stage, problem, SM_90)
        assert cost.predict_us(stage, problem, SM_90) > 0.0
    assert space.tactic_legality(parse_tactic(TEXT), problem, SM_90) == ""
    odd = parse_stage("naive t1 g2:mode=odd fin:reduce")
    assert space.rule_of(space.legality(odd, problem, SM_90)) == "form"


@pytest.mark.usefixtures("naive")
@pytest.mark.parametrize("offset", [0, 2])
def test_it_runs_the_layer(offset: int) -> None:
    draw = torch.Generator().manual_seed(3)
    ids = torch.rand((9, 6), generator=draw).argsort(dim=1)[:, :2].int()
    ids[0] = -1
    args = LayerArgs(
        torch.randn((9, 72), generator=draw),
        torch.randn((3, 80, 72), generator=draw) / 9.0,
        torch.randn((3, 72, 40), generator=draw) / 6.0,
        torch.rand((9, 2), generator=draw),
        ids,
        offset,
    )
    ws = Workspace.allocate(SHAPE, 3, 9, "cpu")
    ws.hidden.fill_(float("nan"))
    out = torch.full((9, 72), float("nan"))
    run_layer(parse_tactic(TEXT), args, ws, out)
    expected = reference.layer(args.x, args.w13, args.w2, args.topk_weights, ids, offset)
    torch.testing.assert_close(out, expected, rtol=3e-5, atol=3e-5)
    rows = row_of_slots("naive", args, ws).long()
    hidden = reference.gemm1(args.x, args.w13, ids, offset)
    torch.testing.assert_close(ws.hidden[rows[rows >= 0]], hidden[rows >= 0], rtol=3e-5, atol=3e-5)


def test_the_compile_workers_do_with_a_family_without_kernels(naive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(naive), os.environ.get("PYTHONPATH", "")]))
    report = compile_stage(parse_tactic(TEXT).stage("gemm1"), Problem(SHAPE, 3, 64), SM_90)
    assert (report.status, report.error, report.binary, report.registers) == (Status.OK, "", "", None)


@pytest.mark.usefixtures("naive")
def test_a_search_pool_holds_it_beside_our_own() -> None:
    first = space.pool(Problem(SHAPE, 3, 64), SM_90, "gemm1")
    options = [LibraryGemm((("a", value),)) for value in (0, 1, -1, 2, "x", "y")]
    options += [LibraryGemm((("b", 1),)), LibraryGemm((("a", 1), ("b", 1)))]
    first += [Stage("gemm1", "naive", 1, gemm, "fused", "fused") for gemm in options]
    pool = StagePool(first)
    assert pool.features.shape == (len(first), len(FEATURES))
    assert len({tuple(row) for row in pool.features.tolist()}) == len(first)
    assert [pool.index_of_params(params) for params in pool.params] == list(range(len(first)))


@pytest.mark.usefixtures("naive")
def test_a_launching_half_that_cannot_be_imported_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(families()["naive"], "launching", "fitune_naive.gone:run_stage", raising=False)
    args = LayerArgs(*(torch.zeros(size) for size in ((1, 72), (3, 80, 72), (3, 72, 40), (1, 2), (1, 2))))
    with pytest.raises(ValueError, match=r"fitune_naive.gone:run_stage cannot launch .*fix or uninstall"):
        run_layer(parse_tactic(TEXT), args, Workspace.allocate(SHAPE, 3, 1, "cpu"), torch.zeros(1, 72))


def test_the_documentation_shows_this_plugin(repository: Path) -> None:
    text = (repository / "docs" / "plugins.md").read_text()
    for file in (Path(__file__).parent / "plugin" / "fitune_naive").glob("*.py"):
        assert file.read_text() in text, file.name


def test_a_tactic_of_both_stages_reads_back() -> None:
    tactic = parse_tactic(TEXT)
    assert str(tactic) == TEXT
    assert Tactic.of(tactic.stage("gemm1"), tactic.stage("gemm2")) == tactic
