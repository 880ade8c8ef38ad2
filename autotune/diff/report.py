"""What a diff ends with: one row for each pair of keys, each with its verdict, evidence and costs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

from fitune.diff.cross import Regret
from fitune.diff.join import Align
from fitune.diff.not_enumerated import NotEnumerated
from fitune.diff.not_legal import NotLegal
from fitune.diff.other_bucket import OtherBucket
from fitune.diff.other_regime import OtherRegime
from fitune.diff.other_routing import OtherRouting
from fitune.diff.real import Real
from fitune.diff.stale import Stale
from fitune.diff.tie import Tie
from fitune.diff.undecided import Undecided
from fitune.diff.verdict import Verdict
from fitune.problem import Key
from fitune.tactic import Tactic


@dataclass(frozen=True, slots=True)
class Same:
    """Evidence: both sides chose one tactic."""

    verdict: ClassVar[Verdict] = Verdict.SAME

    def sentence(self) -> str:
        return "the same tactic"


@dataclass(frozen=True, slots=True)
class NoPartner:
    """Evidence: nothing on the `absent` side answers this load."""

    verdict: Verdict
    absent: str

    def sentence(self) -> str:
        return f"{self.absent} has no decision for this load"


Evidence = (
    NotEnumerated
    | NotLegal
    | OtherBucket
    | Stale
    | OtherRegime
    | OtherRouting
    | Tie
    | Real
    | Undecided
    | Same
    | NoPartner
)


@dataclass(frozen=True, slots=True)
class DiffRow:
    """Two decisions compared, or one without a partner (then its other key and tactic are None).

    `num_tokens` is the load they are compared at, as side A counts tokens. `fields` names the tactic's fields that
    differ. `unchecked` says which stages of the cascade lacked the facts to hold, each in a few words.
    """

    num_tokens: int
    key_a: Key | None
    key_b: Key | None
    tactic_a: Tactic | None
    tactic_b: Tactic | None
    verdict: Verdict
    evidence: Evidence
    regret_a_on_b: Regret
    regret_b_on_a: Regret
    fields: tuple[str, ...]
    sentence: str
    unchecked: tuple[str, ...] = ()

    @property
    def differs(self) -> bool:
        """Whether both sides have a decision and chose differently."""
        return self.tactic_a is not None and self.tactic_b is not None and self.tactic_a != self.tactic_b


@dataclass(frozen=True, slots=True)
class DiffReport:
    """Every row, sorted by layer and load, and what they add up to."""

    label_a: str
    label_b: str
    align: Align
    rows: tuple[DiffRow, ...]

    @property
    def counts(self) -> Mapping[Verdict, int]:
        """Rows by verdict, in the cascade's order; verdicts that no row has are left out."""
        found = Counter(row.verdict for row in self.rows)
        return {verdict: found[verdict] for verdict in Verdict if found[verdict]}

    @property
    def differing(self) -> tuple[DiffRow, ...]:
        return tuple(row for row in self.rows if row.differs)

    def sentence(self) -> str:
        """The whole diff in plain words."""
        compared = [row for row in self.rows if row.key_a is not None and row.key_b is not None]
        both, counts = f"{self.label_a} and {self.label_b}", self.counts
        if compared:
            text = f"{both} chose differently in {len(self.differing)} of {len(compared)} rows"
        else:
            text = f"{both} have no load in common"
        found = [f"{counts[verdict]} {_WORDS[verdict]}" for verdict in _WORDS if verdict in counts]
        if found:
            text += f": {', '.join(found)}"
        real = sorted({row.num_tokens for row in self.rows if row.verdict is Verdict.REAL})
        if real:
            text += f"; real at {_listed(real)} tokens"
        alone = [(self.label_a, Verdict.ONLY_A), (self.label_b, Verdict.ONLY_B)]
        for label, verdict in alone:
            if verdict in counts:
                text += f"; {counts[verdict]} only in {label}"
        return text


_WORDS: Mapping[Verdict, str] = {
    Verdict.REAL: "real",
    Verdict.TIE: "tied",
    Verdict.UNDECIDED: "undecided",
    Verdict.NOT_ENUMERATED: "not enumerated",
    Verdict.NOT_LEGAL: "not legal",
    Verdict.OTHER_BUCKET: "of another bucket",
    Verdict.STALE: "stale or of another binary",
    Verdict.OTHER_REGIME: "under another regime",
    Verdict.OTHER_ROUTING: "under other routing",
}


def _listed(numbers: list[int]) -> str:
    texts = [str(number) for number in numbers]
    return texts[0] if len(texts) == 1 else f"{', '.join(texts[:-1])} and {texts[-1]}"
