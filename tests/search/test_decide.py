"""Decisions: ties keep the default, winners beat it by more than noise, the same evidence gives the same choice."""

from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fitune.measure.protocol import Outcome
from fitune.problem import LayerShape, Problem, key_of
from fitune.record import Decision, Measurement, Regime, Status
from fitune.search.decide import DEFAULT_MARGIN, decide, is_tied
from fitune.tactic import Tactic, parse_tactic

KEY = key_of(Problem(LayerShape(7168, 2048, 256, 8), 16, 64), "NVIDIA H200")
TEXTS = [
    f"t{tile} gather:fused act:fused g1:128x64/g8/w4/s{stages}/grid/ptr g2:64x64/g8/w4/s3/grid/ptr fin:reduce"
    for tile in (16, 64)
    for stages in (3, 4, 5)
]
TACTICS = [parse_tactic(text) for text in TEXTS]
DEFAULT, FIRST, SECOND, THIRD = TACTICS[:4]


def timed(tactic: Tactic, median_us: float, halfwidth: float = 0.002) -> Outcome:
    low, high = median_us * (1 - halfwidth), median_us * (1 + halfwidth)
    return Outcome(tactic, Status.OK, Measurement(median_us, low, high, 9, Regime(interleaved=True)))


def made(finals: list[Outcome], noise: float = 0.005, **given: object) -> Decision:
    found = decide(KEY, DEFAULT, finals, noise, environment_id="e", run_id="r", time_s=1.0, **given)  # type: ignore[arg-type]
    assert found is not None
    return found


def test_a_tie_keeps_the_default() -> None:
    found = made([timed(DEFAULT, 100.4), timed(FIRST, 100.0)])
    assert found.chosen == DEFAULT and found.state == "default"
    assert [member.tied for member in found.members] == [True, True]
    assert "0.4%" in found.reason


def test_overlapping_intervals_are_a_tie_even_above_the_noise_band() -> None:
    found = made([timed(DEFAULT, 102.0, 0.015), timed(FIRST, 100.0, 0.015)], noise=0.001)
    assert found.chosen == DEFAULT


def test_a_winner_beyond_noise_is_chosen() -> None:
    found = made([timed(DEFAULT, 104.0), timed(FIRST, 100.0)])
    assert found.chosen == FIRST and found.state == "tuned" and found.default_us == 104.0
    assert not found.members[1].tied
    assert found.reason == "3.8% less time than the default (noise 0.5%)"


def test_the_reason_counts_the_choices_time_not_the_fastests() -> None:
    finals = [timed(DEFAULT, 130.0), timed(FIRST, 100.0), timed(SECOND, 100.4)]
    found = made(finals, neighbours=[SECOND])
    assert found.chosen == SECOND
    assert found.reason.startswith("22.8% less time than the default")  # 1 - 100.4 / 130


def test_a_member_that_does_not_clearly_beat_the_default_is_not_chosen() -> None:
    """SECOND is tied with the winner but also with the default: a neighbour that uses it must not bring it in."""
    finals = [timed(DEFAULT, 100.8), timed(FIRST, 100.0), timed(SECOND, 100.49)]
    found = made(finals, neighbours=[SECOND])
    assert found.chosen == FIRST
    assert {member.tactic for member in found.members if member.tied} == {FIRST, SECOND}


def test_among_tied_winners_the_nearest_neighbours_choice_stands() -> None:
    finals = [timed(DEFAULT, 120.0), timed(FIRST, 100.0), timed(SECOND, 100.2), timed(THIRD, 100.3)]
    assert made(finals, neighbours=[TACTICS[5], THIRD, SECOND]).chosen == THIRD


def test_else_known_kernels_then_resources_then_text() -> None:
    finals = [timed(DEFAULT, 120.0), timed(SECOND, 100.0), timed(FIRST, 100.2)]
    assert made(finals).chosen == FIRST  # fewer pipeline stages in flight
    assert made(finals, used_stages={SECOND.stage("gemm1"), SECOND.stage("gemm2")}).chosen == SECOND


def test_a_default_that_fails_does_not_stand() -> None:
    broken = Outcome(DEFAULT, Status.OUT_OF_RESOURCES, error="no")
    found = made([broken, timed(FIRST, 100.0)])
    assert found.chosen == FIRST and found.default_us == 0.0
    assert decide(KEY, DEFAULT, [broken], 0.01, environment_id="e", run_id="r", time_s=1.0) is None


@settings(max_examples=300, deadline=None)
@given(
    st.lists(st.floats(90.0, 110.0), min_size=2, max_size=6),
    st.floats(0.0, 0.03),
    st.floats(0.0005, 0.02),
    st.permutations(range(6)),
)
def test_never_a_choice_within_noise_of_the_default(
    times: list[float], noise: float, halfwidth: float, order: list[int]
) -> None:
    finals = [timed(tactic, time_us, halfwidth) for tactic, time_us in zip(TACTICS, times, strict=False)]
    found = made(finals, noise, neighbours=[TACTICS[row] for row in order])
    default, chosen = found.member(DEFAULT), found.member(found.chosen)
    assert default is not None and chosen is not None and chosen.tied
    if found.chosen != DEFAULT:
        assert chosen.measurement.median_us * (1 + noise) < default.measurement.median_us
        apart = default.measurement.median_us / found.members[0].measurement.median_us - 1.0
        assert chosen.measurement.ci_high_us < default.measurement.ci_low_us or apart > DEFAULT_MARGIN
    else:
        assert is_tied(found.members[0].measurement, default.measurement, noise)
    shuffled = finals[:]
    random.Random(1).shuffle(shuffled)
    again = made(shuffled, noise, neighbours=[TACTICS[row] for row in order])
    assert (again.chosen, again.members, again.reason) == (found.chosen, found.members, found.reason)


def test_two_runs_on_the_same_machine_agree() -> None:
    """Re-tuning with fresh noise must not flip between tied tactics: the point of a canonical member."""
    rng = random.Random(7)
    chosen = set()
    for _ in range(40):
        finals = [timed(DEFAULT, 130.0)]
        finals += [timed(tactic, 100.0 * (1 + rng.uniform(-0.002, 0.002)), 0.003) for tactic in TACTICS[1:]]
        chosen.add(made(finals, 0.005).chosen)
    assert len(chosen) == 1


@pytest.mark.parametrize("pair", list(itertools.combinations([100.0, 100.3, 101.0, 105.0], 2)))
def test_tie_is_symmetric_in_what_it_means(pair: tuple[float, float]) -> None:
    fast, slow = (timed(FIRST, value).measurement for value in pair)
    assert fast is not None and slow is not None
    assert is_tied(fast, slow, 0.005) == (slow.ci_low_us <= fast.ci_high_us or pair[1] <= pair[0] * 1.005)


def test_wide_intervals_do_not_make_a_slow_tactic_a_choice() -> None:
    """Under a drifting clock intervals overlap over 10 %: what is tied is not therefore as good."""
    finals = [timed(DEFAULT, 177.0), timed(FIRST, 100.0, 0.08), timed(SECOND, 110.0, 0.08)]
    found = made(finals, neighbours=[SECOND], used_stages={SECOND.stage("gemm1"), SECOND.stage("gemm2")})
    assert found.chosen == FIRST
    assert all(member.tied for member in found.members[:2])
    near = made([timed(DEFAULT, 177.0), timed(FIRST, 100.0, 0.08), timed(SECOND, 100.4, 0.08)], neighbours=[SECOND])
    assert near.chosen == SECOND


def test_a_choice_gives_away_half_of_what_the_set_allows() -> None:
    """What one search may choose, another finds well inside its set: 1 % here, so 0.5 % for a choice."""
    for given_away, chosen in ((0.4, SECOND), (0.6, FIRST)):
        finals = [timed(DEFAULT, 130.0), timed(FIRST, 100.0, 0.01), timed(SECOND, 100.0 + given_away, 0.01)]
        assert made(finals, neighbours=[SECOND]).chosen == chosen
        assert made(finals).members[1].tied


def test_a_default_far_behind_does_not_stay_because_intervals_are_wide() -> None:
    finals = [timed(DEFAULT, 120.0, 0.15), timed(FIRST, 100.0, 0.15)]
    assert all(member.tied for member in made(finals).members)
    assert made(finals).chosen == FIRST
    assert made([timed(DEFAULT, 102.5, 0.15), timed(FIRST, 100.0, 0.15)]).chosen == DEFAULT
    assert made(finals, noise=0.25).chosen == DEFAULT
