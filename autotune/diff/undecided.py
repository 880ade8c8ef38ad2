"""After the cascade: the evidence decides nothing, and this is the probe that would."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from fitune.diff.cross import Regret
from fitune.diff.pair import Pair
from fitune.diff.verdict import Verdict, percent

Probe = Literal["swap test", "A/A test"]


@dataclass(frozen=True, slots=True)
class Undecided:
    """Evidence: what is known, what is missing, and the probe that would settle it.

    A swap test times both tactics on both problems in turns; an A/A test times one tactic against itself to see how
    wide the noise is.
    """

    verdict: ClassVar[Verdict] = Verdict.UNDECIDED
    a_on_b: Regret
    b_on_a: Regret
    missing: str
    probe: Probe

    def sentence(self) -> str:
        return f"{self.missing}; a {self.probe} would settle it"


def conclude(pair: Pair) -> Undecided:
    missing, probe = _missing(pair)
    return Undecided(pair.a_on_b, pair.b_on_a, missing, probe)


def _missing(pair: Pair) -> tuple[str, Probe]:
    a, b = pair.a.label, pair.b.label
    ways = [(pair.a_on_b, a, b), (pair.b_on_a, b, a)]
    unknown = [f"{guest}'s tactic was never timed on {host}" for regret, guest, host in ways if not _timed(regret)]
    faster = [way for way in ways if way[0].judgement == "faster"]
    if faster:
        regret, guest, host = faster[0]
        return (
            f"{guest}'s tactic looks faster on {host} than its own ({_seen(regret)}): its search may have missed it",
            "swap test",
        )
    known = [f"{guest}'s tactic on {host} {_seen(regret)}" for regret, guest, host in ways if _timed(regret)]
    if unknown:
        return "; ".join([*known, *unknown]), "swap test"
    if pair.same_problem:
        return f"two tunes of one problem disagree by more than noise ({', '.join(known)})", "A/A test"
    if any(regret.source == "composed" for regret, _, _ in ways):
        return f"sums of stage times are too coarse to tell ({', '.join(known)})", "swap test"
    return f"the times are too close to their noise to tell ({', '.join(known)})", "A/A test"


def _timed(regret: Regret) -> bool:
    return regret.judgement != "unknown"


def _seen(regret: Regret) -> str:
    assert regret.ratio is not None
    words = {"tie": "ties", "slower": "is slower", "faster": "is faster", "unclear": "is unclear"}
    return f"{words[regret.judgement]} at {percent(regret.ratio)}, {regret.source}"
