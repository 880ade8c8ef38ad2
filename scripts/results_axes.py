"""What each choice of a kernel costs, from the recorded spaces: the table in docs/kernels.md."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Final

from fitune.cache import Recording
from fitune.tactic import Stage, StageName

Table = Callable[[str, Iterable[Sequence[object]]], str]
Axis = tuple[str, Callable[[Stage], object]]

BEGIN: Final = "<!-- axes: made by scripts/make_results.py -->"
END: Final = "<!-- end of axes -->"
EP: Final = 8
TOKENS: Final = (1, 64, 512, 4096, 16384)
STAGES: Final[tuple[StageName, StageName]] = ("gemm1", "gemm2")
AXES: Final[tuple[Axis, ...]] = (
    ("tile_size", lambda stage: stage.tile_size),
    ("operands", lambda stage: "swapped" if stage.gemm.swap_ab else "rows on the M side"),
    ("loads", lambda stage: "TMA" if stage.gemm.loads == "tma" else "pointers"),
    ("schedule", lambda stage: stage.gemm.schedule),
    ("loop", lambda stage: "flattened" if stage.gemm.flatten else "not flattened"),
    ("group_m", lambda stage: stage.gemm.group_m),
    ("block_n", lambda stage: stage.gemm.block_n),
    ("block_k", lambda stage: stage.gemm.block_k),
    ("num_stages", lambda stage: stage.gemm.num_stages),
    ("num_warps", lambda stage: stage.gemm.num_warps),
    ("gather", lambda stage: stage.gather),
    ("activation", lambda stage: stage.activation),
    ("finalize", lambda stage: stage.finalize),
)


def axis_tables(recording: Recording, table: Table) -> str:
    """One table: for each value of each axis, the best stage with it over the best of all, both GEMMs."""
    best = {(part, tokens): _best(recording, part, tokens) for part in STAGES for tokens in TOKENS}
    names = list(dict.fromkeys(name for found in best.values() for name in found))
    order = {"best": 0, "family": 1, **{axis: number for number, (axis, _) in enumerate(AXES, 2)}}
    names.sort(key=lambda name: (order[name[0]], not isinstance(name[1], int), name[1]))
    rows = []
    for name in names[1:]:
        cells = [_share(best[part, tokens], name) for part in STAGES for tokens in TOKENS]
        rows.append((f"{name[0]} {name[1]}", *cells))
    tops = [best[part, tokens]["best", ""] for part in STAGES for tokens in TOKENS]
    rows.insert(0, ("best, µs", *(f"{us:.1f}" if us < 1000 else f"{us:.0f}" for us in tops)))
    heading = "|".join([" with", *(f"{part}, {tokens:,}" for part in STAGES for tokens in TOKENS)])
    return table(heading, rows)


def _share(found: dict[tuple[str, object], float], name: tuple[str, object]) -> str:
    if name not in found:
        return ""
    return f"{100.0 * (found[name] / found['best', ''] - 1.0):+.0f} %"


def _best(recording: Recording, part: StageName, tokens: int) -> dict[tuple[str, object], float]:
    """Least µs of one cell's recorded stages by (axis, value); those of gemv count for the family alone."""
    found: dict[tuple[str, object], float] = {}
    for record in recording.records:
        layer, stage = record.key.layer, record.tactic
        here = layer.num_experts == EP * layer.local_experts and record.key.num_tokens == tokens and record.part == part
        if here and isinstance(stage, Stage) and record.measurement is not None:
            names: list[tuple[str, object]] = [("best", ""), ("family", stage.family)]
            if stage.family == "tile":
                names += [(axis, value(stage)) for axis, value in AXES if value(stage) is not None]
            for name in names:
                found[name] = min(record.measurement.median_us, found.get(name, float("inf")))
    return found


def with_axes(page: str, tables: str) -> str:
    """The page with the text between its two marks replaced."""
    before, _, rest = page.partition(BEGIN)
    _, mark, after = rest.partition(END)
    assert mark, "docs/kernels.md has lost the marks around its table"
    return f"{before}{BEGIN}\n\n{tables}\n\n{END}{after}"
