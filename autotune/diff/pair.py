"""Two decisions side by side: what every stage of the cascade looks at."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from fitune.diff.cross import Regret, regret
from fitune.diff.join import Align
from fitune.diff.sides import Cell


@dataclass(frozen=True)
class Pair:
    """Two cells that are compared, and the load (tokens as side A counts them) they are compared at."""

    a: Cell
    b: Cell
    compared_tokens: int
    align: Align

    @cached_property
    def same_problem(self) -> bool:
        """Both sides answer the very same question, so that times of one are times of the other."""
        return self.a.key == self.b.key

    @cached_property
    def a_on_b(self) -> Regret:
        """What using A's tactic for B's problem costs."""
        return regret(self.a, self.b)

    @cached_property
    def b_on_a(self) -> Regret:
        """What using B's tactic for A's problem costs."""
        return regret(self.b, self.a)

    def both_ways(self) -> Iterator[tuple[Cell, Cell]]:
        """(whose tactic, on whose problem): A's on B first, then B's on A."""
        yield self.a, self.b
        yield self.b, self.a
