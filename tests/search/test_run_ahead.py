"""While one key is measured, the first candidates of the next one are compiled."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace

import pytest

from fitune.cache.store import Store
from fitune.problem import LayerShape, Problem
from fitune.search.plan import SearchPlan
from fitune.search.run import run_search
from fitune.space import default_tactic
from fitune.tactic import STAGES, Stage


def test_the_next_key_is_compiled_ahead(lab: SimpleNamespace, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problems = tuple(Problem(LayerShape(2048, 1024, 64, 4), 8, tokens) for tokens in (16, 256))
    measurer = lab.SyntheticMeasurer()
    before_its_turn: set[Stage] = set()

    def warm(problem: Problem, candidates: Sequence[Stage]) -> None:
        if all(asked != problem for asked, _ in measurer.asked):
            before_its_turn.update(candidates)

    monkeypatch.setattr(measurer, "warm", warm)
    summary = run_search(SearchPlan(problems, trials=12), measurer, Store.open(tmp_path / "store", create=True))
    last = next(problem for problem in problems if problem.num_tokens == summary.decided[-1].key.num_tokens)
    default = default_tactic(last, measurer.target)
    assert {default.stage(part) for part in STAGES} <= before_its_turn
    asked = [stage for problem, stage in measurer.asked if problem == last]
    assert len(before_its_turn) >= 8
    assert before_its_turn & set(asked[:12]), "what was compiled ahead is not what is measured first"
