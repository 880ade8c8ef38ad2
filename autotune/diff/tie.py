"""Stage 7: both tactics are equal, beyond what the times can tell, on both problems."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Final

from fitune.diff.cross import WIDE, Regret
from fitune.diff.pair import Pair
from fitune.diff.verdict import Verdict, percent

KNOWN: Final = frozenset({"tie", "slower", "faster", "unclear"})


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
    words = {a.judgement, b.judgement}
    opposed = False
    if pair.same_problem:
        opposed = _opposed(a, b)
        tied = opposed or ("tie" in words and (words <= {"tie", "unknown"} or _mean_within_band(a, b)))
    else:
        tied = words == {"tie"}
    return Tie(a, b, pair.same_problem, opposed, pair.a.label, pair.b.label) if tied else None


def _opposed(a: Regret, b: Regret) -> bool:
    """Both tunes say that the other's tactic is the slower one, and not by so much that something else is wrong."""
    if not {a.judgement, b.judgement} <= KNOWN or a.judgement == b.judgement == "tie":
        return False
    assert a.ratio is not None and b.ratio is not None
    return a.ratio > 0.0 and b.ratio > 0.0 and max(a.ratio, b.ratio) <= WIDE


def _mean_within_band(a: Regret, b: Regret) -> bool:
    """One problem timed twice: the mean of both tunes' differences lies within the wider band."""
    if a.ratio is None or b.ratio is None or "unknown" in {a.judgement, b.judgement}:
        return False
    return abs(a.ratio - b.ratio) / 2.0 <= max(a.band, b.band)


def _cost(regret: Regret) -> str:
    if regret.ratio is None:
        return "an unknown time"
    if regret.low is None or regret.high is None:
        return f"{percent(regret.ratio)} ({regret.source})"
    return f"{percent(regret.ratio)} [{percent(regret.low)}, {percent(regret.high)}], {regret.source}"
