"""Stage 4: the two decisions were taken with different code: kernel source, Triton, driver, or compiled binary."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Final

from fitune.diff.pair import Pair
from fitune.diff.sides import Cell
from fitune.diff.verdict import FieldDifference, Verdict
from fitune.families import find_family
from fitune.problem import Key
from fitune.tactic import STAGES, Stage, Tactic

CODE_FIELDS: Final[dict[str, str]] = {"kernels": "kernel source", "triton": "Triton", "driver": "driver"}


@dataclass(frozen=True, slots=True)
class BinaryDifference:
    """One tactic, or stage, that compiled to two binaries."""

    tactic: Tactic | Stage
    a: str
    b: str


@dataclass(frozen=True, slots=True)
class Stale:
    """Evidence: version fields that differ, and winners of either side that compiled to different binaries."""

    verdict: ClassVar[Verdict] = Verdict.STALE
    fields: tuple[FieldDifference, ...]
    binaries: tuple[BinaryDifference, ...]

    def sentence(self) -> str:
        if self.fields:
            return f"tuned with other code: {', '.join(map(str, self.fields))}"
        first = self.binaries[0]
        part = first.tactic.stage if isinstance(first.tactic, Stage) else "tactic"
        return f"the same {part} compiled to another binary ({first.a} and {first.b}): {first.tactic}"


def find(pair: Pair) -> Stale | None:
    fields = tuple(_fields(pair))
    binaries = tuple(_binaries(pair)) if _compile_alike(pair.a.key, pair.b.key) else ()
    return Stale(fields, binaries) if fields or binaries else None


def _fields(pair: Pair) -> Iterator[FieldDifference]:
    """Unknown values (empty) never count as a difference."""
    a, b = pair.a.environment, pair.b.environment
    if a is None or b is None:
        return
    for name, word in CODE_FIELDS.items():
        x, y = getattr(a, name), getattr(b, name)
        if x and y and x != y:
            yield FieldDifference(word, x, y)


def _compile_alike(a: Key, b: Key) -> bool:
    """Whether one tactic should compile to one binary on both keys.

    Sizes of the layer are compiled in, and Triton specialises whole-number arguments on being 1 and on being a
    multiple of 16. The sort in front of the stages is compiled for its sizes, so whole layers only compare on equal
    ones (see _binaries).
    """
    counts = [(a.num_tokens, b.num_tokens), (a.layer.local_experts, b.layer.local_experts)]
    alike = all((x == 1, x % 16 == 0) == (y == 1, y % 16 == 0) for x, y in counts)
    return alike and a.layer.shape == b.layer.shape and a.layer.device == b.layer.device


def _binaries(pair: Pair) -> Iterator[BinaryDifference]:
    wholes = (pair.a.tactic, pair.b.tactic)
    stages = [whole.stage(name) for whole in wholes for name in STAGES]
    a_key, b_key = pair.a.key, pair.b.key
    same_tokens = a_key.num_tokens == b_key.num_tokens
    tactics: list[Tactic | Stage] = [stage for stage in stages if same_tokens or not _differs_by_tokens(stage)]
    if same_tokens and a_key.layer.local_experts == b_key.layer.local_experts:
        tactics += wholes
    for tactic in dict.fromkeys(tactics):
        a, b = _hashes(pair.a, tactic), _hashes(pair.b, tactic)
        if a and b and not set(a) & set(b):
            yield BinaryDifference(tactic, a[-1], b[-1])


def _differs_by_tokens(stage: Stage) -> bool:
    """Whether its binary may differ between token counts; a family that is not installed may do anything."""
    family = find_family(stage.family)
    return family is None or family.binary_depends_on_tokens


def _hashes(cell: Cell, tactic: Tactic | Stage) -> list[str]:
    return [record.binary for record in cell.tried.of(tactic) if record.binary]
