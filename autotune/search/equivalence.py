"""Which tactics a search cannot tell from the one it chose: an equivalence set, asked about one tactic at a time."""

from __future__ import annotations

from collections.abc import Mapping

from fitune.record import Decision, Measurement
from fitune.search.decide import MARGIN
from fitune.tactic import STAGES, Stage, Tactic


def is_in_set(decision: Decision, tactic: Tactic, stages: Mapping[Stage, Measurement]) -> bool | None:
    """Whether `tactic` is as good as the decision's best, for all that this search measured; None where it cannot say.

    A finalist is if it was tied. Any other tactic is if the sum of its stages, as `stages` has them of this key,
    overlaps with the same sum of the fastest finalist, or exceeds it by no more than the noise, or MARGIN where that
    is more.
    """
    for member in decision.members:
        if member.tactic == tactic:
            return member.tied
    own, best = ([stages.get(each.stage(name)) for name in STAGES] for each in (tactic, decision.members[0].tactic))
    mine, theirs = [item for item in own if item is not None], [item for item in best if item is not None]
    if len(mine) < len(STAGES) or len(theirs) < len(STAGES):
        return None
    if sum(item.ci_low_us for item in mine) <= sum(item.ci_high_us for item in theirs):
        return True
    limit = 1.0 + max(decision.noise, MARGIN)
    return sum(item.median_us for item in mine) <= limit * sum(item.median_us for item in theirs)
