"""What a search cannot tell from its choice, by its own evidence."""

from __future__ import annotations

from dataclasses import replace

from fitune.measure.protocol import Outcome
from fitune.problem import LayerShape, Problem, key_of
from fitune.record import Decision, Measurement, Regime, Status
from fitune.search.decide import MARGIN, decide
from fitune.search.equivalence import is_in_set
from fitune.tactic import STAGES, Stage, Tactic, parse_tactic

KEY = key_of(Problem(LayerShape(7168, 2048, 256, 8), 16, 64), "NVIDIA H200")
DEFAULT, BEST, CLOSE, FAR, UNSEEN = (
    parse_tactic(
        f"t16 gather:fused act:fused g1:128x64/g8/w4/s{stages}/grid/ptr g2:64x64/g8/w4/s{stages}/grid/ptr fin:reduce"
    )
    for stages in (2, 3, 4, 5, 6)
)


def measured(median_us: float, halfwidth: float = 0.001) -> Measurement:
    low, high = median_us * (1 - halfwidth), median_us * (1 + halfwidth)
    return Measurement(median_us, low, high, 9, Regime(interleaved=True))


def timed(us: dict[Tactic, float], halfwidth: float = 0.001) -> dict[Stage, Measurement]:
    """Half of each tactic's µs for each of its GEMMs."""
    return {tactic.stage(name): measured(total / 2, halfwidth) for tactic, total in us.items() for name in STAGES}


def decision(noise: float = 0.002) -> Decision:
    finals = [Outcome(tactic, Status.OK, measured(us)) for tactic, us in ((DEFAULT, 120.0), (BEST, 100.0))]
    found = decide(KEY, DEFAULT, finals, noise, environment_id="e", run_id="r", time_s=1.0)
    assert found is not None and found.chosen == BEST
    return found


STAGES_US = timed({DEFAULT: 120.0, BEST: 100.0, CLOSE: 100.0 * (1 + MARGIN) - 0.1, FAR: 102.0})


def test_a_finalist_is_in_the_set_if_it_was_tied() -> None:
    assert is_in_set(decision(), BEST, {}) is True
    assert is_in_set(decision(), DEFAULT, {}) is False
    assert is_in_set(decision(), DEFAULT, timed({DEFAULT: 100.0, BEST: 100.0})) is False  # finals speak louder


def test_others_by_the_sum_of_their_stages() -> None:
    assert is_in_set(decision(), CLOSE, STAGES_US) is True
    assert is_in_set(decision(), FAR, STAGES_US) is False
    assert is_in_set(decision(noise=0.03), FAR, STAGES_US) is True
    mixed = replace(FAR, gemm1=BEST.gemm1)
    assert is_in_set(decision(), mixed, STAGES_US) is True  # half of the difference


def test_overlapping_sums_are_tied() -> None:
    wide = STAGES_US | timed({FAR: 102.0}, halfwidth=0.03)
    assert is_in_set(decision(), FAR, wide) is True


def test_none_where_a_stage_was_never_timed() -> None:
    assert is_in_set(decision(), UNSEEN, STAGES_US) is None
    assert is_in_set(decision(), CLOSE, timed({CLOSE: 100.0})) is None
