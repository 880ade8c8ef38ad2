"""From interleaved finals to a decision: an equivalence set and its canonical member, never a bare argmin."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from fitune.families import find_family
from fitune.measure.protocol import Outcome
from fitune.problem import Key, LayerShape
from fitune.record import Decision, Measurement, Member
from fitune.tactic import STAGES, Stage, Tactic

MARGIN: Final = 0.01
"""How far tactics of one equivalence set may lie apart, where the noise is smaller.

A choice among them may cost half of it: what is chosen within half the margin, another search finds within all of it.
"""

DEFAULT_MARGIN: Final = 0.03
"""How far a tied default may lie from the fastest and stay, where the noise is smaller.

Intervals that are wide because the clock drifted overlap over a quarter of a time: that two tactics cannot be told
apart by them is no reason to keep the one that looks slower by far.
"""

UNKNOWN_US: Final = 0.0
"""`Decision.default_us` where the default could not be measured."""


def decide(
    key: Key,
    default: Tactic,
    finals: Sequence[Outcome],
    noise: float,
    *,
    neighbours: Sequence[Tactic] = (),
    used_stages: Collection[Stage] = (),
    environment_id: str,
    run_id: str,
    time_s: float,
    origin: str = "measured",
) -> Decision | None:
    """The decision of a key, or None where no finalist worked.

    Members are tied with the fastest where intervals overlap or medians are closer than `noise`. The default stays
    if it is tied and within DEFAULT_MARGIN, or the noise, of the fastest. Otherwise only tied members can be chosen (of
    a default that is not tied, such as beat it by more than noise), and of those only such whose median is within half
    of MARGIN, or of the noise, of the fastest: wide intervals overlap without making two tactics equal. Among what is
    left: what the nearest of `neighbours` use, else the one that needs the fewest new kernels beside `used_stages`,
    launches and resources, else the first by text.
    """
    timed = [(outcome.tactic, outcome.measurement) for outcome in finals if outcome.measurement is not None]
    whole = [(tactic, measured) for tactic, measured in timed if isinstance(tactic, Tactic)]
    if not whole:
        return None
    whole.sort(key=lambda item: (item[1].median_us, str(item[0])))
    fastest = whole[0][1]
    members = tuple(Member(tactic, measured, is_tied(fastest, measured, noise)) for tactic, measured in whole)
    default_member = next((member for member in members if member.tactic == default), None)
    chosen, reason = _choose(members, default_member, noise, neighbours, key.layer.shape, used_stages)
    return Decision(
        key=key,
        chosen=chosen.tactic,
        members=members,
        default=default,
        default_us=UNKNOWN_US if default_member is None else default_member.measurement.median_us,
        noise=noise,
        reason=reason,
        environment_id=environment_id,
        run_id=run_id,
        time_s=time_s,
        origin=origin,
    )


def is_tied(fastest: Measurement, other: Measurement, noise: float) -> bool:
    """Whether `other` is statistically as fast: intervals overlap, or the medians are within the A/A noise."""
    return other.ci_low_us <= fastest.ci_high_us or other.median_us <= fastest.median_us * (1.0 + noise)


def _choose(
    members: Sequence[Member],
    default: Member | None,
    noise: float,
    neighbours: Sequence[Tactic],
    shape: LayerShape,
    used_stages: Collection[Stage],
) -> tuple[Member, str]:
    tied = [member for member in members if member.tied]
    near_us = members[0].measurement.median_us * (1.0 + max(noise, DEFAULT_MARGIN))
    if default is not None and default.tied and default.measurement.median_us <= near_us:
        if len(tied) == 1:
            return default, "the default is the fastest beyond noise"
        apart = time_saved(members[0], default)
        return default, f"the default is tied with the fastest ({apart:.1%} apart, noise {noise:.1%})"
    candidates = tied
    if default is not None:
        beaten_us = default.measurement.median_us / (1.0 + noise)
        candidates = [
            member
            for member in tied
            if member.measurement.median_us < beaten_us
            and (default.tied or not is_tied(member.measurement, default.measurement, noise))
        ]
    assert candidates, "the fastest itself beats a default that does not stay"
    limit_us = members[0].measurement.median_us * (1.0 + max(noise, MARGIN) / 2.0)
    candidates = [member for member in candidates if member.measurement.median_us <= limit_us]
    best, why = _canonical(candidates, neighbours, shape, used_stages)
    if default is None:
        return best, f"the default did not run{why}"
    return best, f"{time_saved(best, default):.1%} less time than the default (noise {noise:.1%}){why}"


def time_saved(member: Member, default: Member) -> float:
    """Share of the default's time that a member does without, as tables count it: 0.25 where 75 µs replace 100 µs."""
    return 1.0 - member.measurement.median_us / default.measurement.median_us


def _canonical(
    candidates: Sequence[Member], neighbours: Sequence[Tactic], shape: LayerShape, used_stages: Collection[Stage]
) -> tuple[Member, str]:
    """The member of an equivalence set that is used, and the words for it; no words where there is only one."""
    if len(candidates) == 1:
        return candidates[0], ""
    for tactic in neighbours:
        for member in candidates:
            if member.tactic == tactic:
                return member, f"; of {len(candidates)} tied the one a neighbouring key uses"
    best = min(candidates, key=lambda member: effort(member.tactic, shape, used_stages))
    return best, f"; of {len(candidates)} tied the one with the least to compile and launch"


def effort(tactic: Tactic, shape: LayerShape, used_stages: Collection[Stage]) -> tuple[int, int, int, str]:
    """What orders tied tactics: new kernels, launches beside the GEMMs, operand bytes kept in flight, text."""
    stages = [tactic.stage(name) for name in STAGES]
    new = sum(stage not in used_stages for stage in stages)
    launches = (tactic.gather == "permute") + (tactic.activation == "separate") + (tactic.finalize == "fused")
    families = [(find_family(stage.family), stage) for stage in stages]
    flight = sum(family.bytes_in_flight(stage, shape) for family, stage in families if family is not None)
    return new, launches, flight, str(tactic)
