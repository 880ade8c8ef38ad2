"""The words a row of a diff can end with."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Verdict(StrEnum):
    """Why two decisions differ; the cascade's stages in order, then what stands outside it."""

    NOT_ENUMERATED = "not_enumerated"
    NOT_LEGAL = "not_legal"
    OTHER_BUCKET = "other_bucket"
    STALE = "stale"
    OTHER_REGIME = "other_regime"
    OTHER_ROUTING = "other_routing"
    TIE = "tie"
    REAL = "real"
    UNDECIDED = "undecided"
    SAME = "same"
    ONLY_A = "only_a"
    ONLY_B = "only_b"


@dataclass(frozen=True, slots=True)
class FieldDifference:
    """One field whose values differ between the sides."""

    field: str
    a: str
    b: str

    def __str__(self) -> str:
        return f"{self.field} {self.a} and {self.b}"


def percent(ratio: float) -> str:
    """A signed share as text: 0.089 -> `+8.9 %`."""
    return f"{100.0 * ratio:+.1f} %"
