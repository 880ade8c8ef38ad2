"""Stage 7: both tactics are equal, beyond what the times can tell, on both problems."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from fitune.diff.cross import Regret
from fitune.diff.pair import Pair
from fitune.diff.verdict import Verdict, percent

MOST_LEFT: Final = 0.05
"""Two tunes in opposite order whose mean is further from zero than this leave room for a difference."""


@dataclass(frozen=True, slots=True)
class Tie:
    """Evidence: the cost of either tactic on the other's problem, both inside noise.

    `one_question` says that both sides answered the very same problem, where one time speaks for both; `opposed`
    that they then ranked the tactics in opposite order, which only noise can do.
    """

    verdict: ClassVar[Verdict] = Verdict.TIE
    a_on_b: Regret
    b_on_a: Regret
    one_question: bool
    opposed: bool
    label_a: str
    label_b: str

    def sentence(self) -> str:
        if self.opposed:
            return (
                f"two tunes of one problem rank the tactics in opposite order ({_cost(self.a_on_b)} and "
                f"{_cost(self.b_on_a)}): noise"
            )
        known = [
            f"{self.label_a}'s tactic costs {self.label_b} {_cost(self.a_on_b)}"
            if self.a_on_b.ratio is not None
            else "",
            f"{self.label_b}'s costs {self.label_a} {_cost(self.b_on_a)}" if self.b_on_a.ratio is not None else "",
        ]
        return f"a tie: {', '.join(filter(None, known))}"


def find(pair: Pair) -> Tie | None:
    a, b = pair.a_on_b, pair.b_on_a
    if pair.same_problem:
        opposed = _opposed(a, b)
        tied = opposed or _one_question_tied(a, b)
    else:
        opposed = False
        tied = a.judgement == b.judgement == "tie"
    return Tie(a, b, pair.same_problem, opposed, pair.a.label, pair.b.label) if tied else None


def _opposed(a: Regret, b: Regret) -> bool:
    """Each of two tunes of one problem sees the other's tactic slower: what they disagree by is noise.

    Their mean is what is left of a difference; where that is large after all, nothing is claimed.
    """
    if "unknown" in (a.judgement, b.judgement) or a.judgement == b.judgement == "tie":
        return False
    assert a.ratio is not None and b.ratio is not None
    return min(a.ratio, b.ratio) > 0.0 and abs(a.ratio - b.ratio) / 2.0 <= MOST_LEFT


def _one_question_tied(a: Regret, b: Regret) -> bool:
    """One tune speaks for both where the other timed nothing; where both did, their mean must be within the band."""
    timed = [regret for regret in (a, b) if regret.judgement != "unknown"]
    if not any(regret.judgement == "tie" for regret in timed):
        return False
    if len(timed) == 1 or all(regret.judgement == "tie" for regret in timed):
        return True
    assert a.ratio is not None and b.ratio is not None
    return abs(a.ratio - b.ratio) / 2.0 <= max(a.band, b.band)


def _cost(regret: Regret) -> str:
    if regret.ratio is None:
        return "an unknown time"
    if regret.low is None or regret.high is None:
        return f"{percent(regret.ratio)} ({regret.source})"
    return f"{percent(regret.ratio)} [{percent(regret.low)}, {percent(regret.high)}], {regret.source}"
