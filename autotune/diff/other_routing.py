"""Stage 6: the two decisions were timed with tokens routed differently."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

from fitune.diff.pair import Pair
from fitune.diff.verdict import FieldDifference, Verdict


@dataclass(frozen=True, slots=True)
class OtherRouting:
    """Evidence: routing profiles or seeds that differ."""

    verdict: ClassVar[Verdict] = Verdict.OTHER_ROUTING
    fields: tuple[FieldDifference, ...]

    def sentence(self) -> str:
        return f"timed with other routing: {', '.join(map(str, self.fields))}"


def find(pair: Pair) -> OtherRouting | None:
    fields = tuple(_fields(pair))
    return OtherRouting(fields) if fields else None


def _fields(pair: Pair) -> Iterator[FieldDifference]:
    x, y = pair.a.key.layer.routing, pair.b.key.layer.routing
    if x != y:
        yield FieldDifference("profile", x, y)
    a, b = pair.a.regime, pair.b.regime
    if a is None or b is None:
        return
    if x == y and a.routing != b.routing:
        yield FieldDifference("profile timed", a.routing, b.routing)
    if a.seed != b.seed:
        yield FieldDifference("seed", str(a.seed), str(b.seed))
