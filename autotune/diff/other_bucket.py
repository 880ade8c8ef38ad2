"""Stage 3: one of the two decisions was tuned for another load than the one compared."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from fitune.diff.join import LOAD_TOLERANCE, rows_per_token
from fitune.diff.pair import Pair
from fitune.diff.sides import Cell
from fitune.diff.verdict import Verdict
from fitune.problem import Dispatch


@dataclass(frozen=True, slots=True)
class Load:
    """The load a decision was tuned for."""

    label: str
    num_tokens: int
    expected_rows_per_expert: float
    dispatch: Dispatch

    def __str__(self) -> str:
        return f"{self.label} at {self.num_tokens} tokens ({self.expected_rows_per_expert:.4g} rows per expert)"


@dataclass(frozen=True, slots=True)
class OtherBucket:
    """Evidence: the load compared (tokens as side A counts them) and the loads that both decisions were tuned for."""

    verdict: ClassVar[Verdict] = Verdict.OTHER_BUCKET
    compared_tokens: int
    a: Load
    b: Load

    def sentence(self) -> str:
        if self.a.dispatch != self.b.dispatch:
            why = f"{self.a.dispatch} and {self.b.dispatch} give experts different loads at one token count"
        else:
            why = f"the look-up of {self.compared_tokens} tokens lands on points tuned for different loads"
        return f"{why}: {self.a}, {self.b}"


def find(pair: Pair) -> OtherBucket | None:
    a, b = _load(pair.a), _load(pair.b)
    if pair.align == "rows" or a.dispatch != b.dispatch:
        same = abs(a.expected_rows_per_expert / b.expected_rows_per_expert - 1.0) <= LOAD_TOLERANCE
    else:
        same = a.num_tokens == b.num_tokens
    return None if same else OtherBucket(pair.compared_tokens, a, b)


def _load(cell: Cell) -> Load:
    key = cell.key
    return Load(cell.label, key.num_tokens, key.num_tokens * rows_per_token(key.layer), key.layer.dispatch)
