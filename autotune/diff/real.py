"""Stage 8: one side's tactic is truly slower on the other's problem; the counts say by what."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fitune.diff.cross import Regret
from fitune.diff.pair import Pair
from fitune.diff.sides import Cell
from fitune.diff.verdict import Verdict, percent
from fitune.explain import Mechanism, Place, mechanism
from fitune.families import find_family


@dataclass(frozen=True, slots=True)
class Real:
    """Evidence: the costs both ways, and the mechanism of the larger measured one.

    `foreign`'s tactic is what costs `host` time. `mechanism` is None where the chip is not known.
    """

    verdict: ClassVar[Verdict] = Verdict.REAL
    a_on_b: Regret
    b_on_a: Regret
    foreign: str
    host: str
    mechanism: Mechanism | None

    def sentence(self) -> str:
        regret = self.regret
        assert regret.ratio is not None
        text = f"{self.foreign}'s tactic costs {self.host} {percent(regret.ratio)} ({regret.source})"
        if self.mechanism is None:
            return f"{text}; the chip is not known, so no counts"
        model = f"predicted {percent(self.mechanism.predicted)}, unexplained {percent(self.mechanism.unexplained)}"
        return f"{text}. {self.mechanism.sentence}. {model}"

    @property
    def regret(self) -> Regret:
        """The larger of the costs that are beyond noise."""
        slower = [regret for regret in (self.a_on_b, self.b_on_a) if regret.judgement == "slower"]
        return max(slower, key=lambda regret: regret.ratio or 0.0)


def find(pair: Pair) -> Real | None:
    """Two tunes of one problem are never really different: what differs there is noise or a search that missed."""
    a, b = pair.a_on_b, pair.b_on_a
    words = {a.judgement, b.judgement}
    if pair.same_problem or "slower" not in words or not words <= {"slower", "tie", "unknown"}:
        return None
    ways = [(a, pair.a, pair.b), (b, pair.b, pair.a)]
    regret, guest, host = max(
        (way for way in ways if way[0].judgement == "slower"), key=lambda way: way[0].ratio or 0.0
    )
    assert regret.ratio is not None
    return Real(a, b, guest.label, host.label, _mechanism(guest, host, regret.ratio))


def _mechanism(guest: Cell, host: Cell, ratio: float) -> Mechanism | None:
    away, here = _place(guest), _place(host)
    if away is None or here is None or any(find_family(place.tactic.family) is None for place in (away, here)):
        return None
    return mechanism(away, here, ratio)


def _place(cell: Cell) -> Place | None:
    return None if cell.target is None else Place(cell.label, cell.tactic, cell.problem, cell.target)
