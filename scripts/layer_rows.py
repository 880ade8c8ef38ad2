"""Rows of the layer benchmark: loads and floors, the CSV that grows line by line, the terminal's table and means."""

from __future__ import annotations

import csv
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Final

from results_data import DRAM_BYTES_PER_US, TENSOR_FLOPS_PER_US, Load, PeerCell, geometric_mean

from fitune.errors import InputError
from fitune.problem import LayerShape

CONTENDERS: Final = ("fitune", "default", "grouped_mm", "cublas")
FP8_FLOPS_PER_US: Final = 1530e6
FP8_GROUP: Final = 128
OK: Final = "ok"
NOT_ASKED: Final = "not asked for"


def is_fp8(dtype: str) -> bool:
    return dtype.startswith("fp8")


def tensor_flops_per_us(dtype: str) -> float:
    """What the tensor cores reach in a dense GEMM."""
    return FP8_FLOPS_PER_US if is_fp8(dtype) else TENSOR_FLOPS_PER_US


def flops_of(shape: LayerShape, load: Load) -> float:
    """Multiplications and additions of both GEMMs, without padding."""
    return 6.0 * load.rows * shape.hidden_size * shape.intermediate_size


def bytes_of(shape: LayerShape, tokens: int, load: Load) -> float:
    """Each active expert's weights, the tokens with a local slot, the hidden rows out and in, and the result, once.

    In fp8 weights, tokens and hidden rows are e4m3 and the result bf16; `fp8_block128` has a float32 scale for every
    128 activations. Scales of weights are not counted, as in the peers' table.
    """
    weights = 3.0 * load.active * shape.hidden_size * shape.intermediate_size
    inward = load.touched * shape.hidden_size + 2.0 * load.rows * shape.intermediate_size
    outward = tokens * shape.hidden_size
    if not is_fp8(shape.dtype):
        return (weights + inward + outward) * shape.item_bytes
    scale = 4.0 / FP8_GROUP if shape.dtype == "fp8_block128" else 0.0
    return weights + inward * (1.0 + scale) + outward * 2.0


def floor_us(shape: LayerShape, tokens: int, load: Load) -> float:
    """The least time at the dense tensor rate and 4.70 TB/s, whichever takes longer."""
    by_flops = flops_of(shape, load) / tensor_flops_per_us(shape.dtype)
    return max(by_flops, bytes_of(shape, tokens, load) / DRAM_BYTES_PER_US)


@dataclass(frozen=True, slots=True)
class Timed:
    """One contender of a cell. Times in µs over the rounds, 0 where it was not timed; `status` then says why not.

    `rms` is the RMS of the error over that of the float32 reference, on inputs that nothing was tuned on.
    """

    status: str = ""
    us: float = 0.0
    min_us: float = 0.0
    max_us: float = 0.0
    rms: float = 0.0

    @property
    def ok(self) -> bool:
        return self.status == OK

    @property
    def spread(self) -> float:
        """Half the way from fastest to slowest round, over the median."""
        return (self.max_us - self.min_us) / (2.0 * self.us) if self.ok else 0.0


@dataclass(frozen=True, slots=True)
class Row:
    """One cell of the benchmark: its load, what ran, under which clocks, and every contender's time."""

    model: str
    dtype: str
    device: str
    ep: int
    local_experts: int
    tokens: int
    routed_rows: int
    active_experts: int
    flops: float
    bytes: float
    floor_us: float
    tensor_flops_per_us: float
    tactic: str
    tuned_tokens: int
    default_tactic: str
    rounds: int
    sustain_s: float
    timer: str
    l2: str
    sm_mhz: float
    power_w: float
    environment: str
    table: str
    peer: str
    peer_us: float
    peer_floor_us: float
    peer_rows: int
    times: Mapping[str, Timed] = field(default_factory=dict)

    @property
    def cell(self) -> tuple[str, str, int, int, int]:
        """What `--resume` knows a cell by."""
        return self.model, self.dtype, self.ep, self.local_experts, self.tokens

    @property
    def us(self) -> float:
        return self.times["fitune"].us

    @property
    def rows_per_expert(self) -> float:
        return self.routed_rows / self.local_experts

    @property
    def tflops(self) -> float:
        return self.flops / self.us / 1e6 if self.us else 0.0

    @property
    def gb_s(self) -> float:
        return self.bytes / self.us / 1e3 if self.us else 0.0

    @property
    def over_floor(self) -> float:
        return self.us / self.floor_us

    @property
    def ratio(self) -> float:
        """fitune's time over the best peer's; 0 where either is missing."""
        return self.us / self.peer_us if self.peer_us else 0.0

    @property
    def ratio_over_floor(self) -> float:
        """The same with each time first divided by the floor of its own load."""
        return self.over_floor / (self.peer_us / self.peer_floor_us) if self.peer_us else 0.0


DERIVED: Final = ("rows_per_expert", "tflops", "gb_s", "over_floor", "ratio", "ratio_over_floor")
_PLAIN: Final = tuple(item.name for item in fields(Row) if item.name != "times")
_TIMED: Final = tuple(item.name for item in fields(Timed))
COLUMNS: Final = (*_PLAIN, *DERIVED, *(f"{name}_{part}" for name in CONTENDERS for part in _TIMED))


def peer_fields(peer: PeerCell | None) -> dict[str, Any]:
    """A row's columns of the best peer; empty where there is none."""
    if peer is None:
        return {"peer": "", "peer_us": 0.0, "peer_floor_us": 0.0, "peer_rows": 0}
    return {"peer": peer.best, "peer_us": peer.best_us, "peer_floor_us": peer.floor_us, "peer_rows": peer.load.rows}


# ---- the CSV


def row_to_line(row: Row) -> dict[str, str]:
    line = {name: _text(getattr(row, name)) for name in (*_PLAIN, *DERIVED)}
    for name in CONTENDERS:
        timed = row.times.get(name, Timed(NOT_ASKED))
        line |= {f"{name}_{part}": _text(getattr(timed, part)) for part in _TIMED}
    return line


def _text(value: object) -> str:
    return f"{value:.7g}" if isinstance(value, float) else str(value)


def row_from_line(line: Mapping[str, str]) -> Row:
    """The inverse of row_to_line. Raises ValueError or KeyError for a line that is none."""
    types: dict[str, Callable[[str], Any]] = {"str": str, "int": int, "float": float}
    plain = {item.name: types[str(item.type)](line[item.name]) for item in fields(Row) if item.name != "times"}
    times = {
        name: Timed(**{item.name: types[str(item.type)](line[f"{name}_{item.name}"]) for item in fields(Timed)})
        for name in CONTENDERS
    }
    return Row(**plain, times=times)


def read_rows(path: Path) -> list[Row]:
    """All rows of a CSV; a last line that was cut off is passed over. Raises InputError."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}; name a CSV of this script") from error
    lines = csv.reader(text[: text.rfind("\n") + 1].splitlines())
    if tuple(next(lines, ())) != COLUMNS:
        raise InputError(f"{path}: its columns are not those of this script; name another file")
    rows = []
    for number, values in enumerate(lines, 2):
        try:
            rows.append(row_from_line(dict(zip(COLUMNS, values, strict=True))))
        except (ValueError, KeyError) as error:
            raise InputError(f"{path}, line {number} is no row of this script ({error}); delete the line") from error
    return rows


class RowFile:
    """A CSV that takes one row after another; each is on disk before the next cell begins.

    With `resume` it goes on behind the rows there are. Raises InputError where a file is there and that was not asked
    for, or where it cannot be written.
    """

    def __init__(self, path: Path, *, resume: bool) -> None:
        self.path = path
        self.rows: list[Row] = []
        try:
            if path.exists() and path.stat().st_size:
                if not resume:
                    raise InputError(f"{path} holds rows already; add --resume to go on with it, or name another file")
                self._cut_torn_line()
            if path.exists() and path.stat().st_size:
                self.rows = read_rows(path)
            else:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._append(dict(zip(COLUMNS, COLUMNS, strict=True)))
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}; name another file") from error

    def append(self, row: Row) -> None:
        self._append(row_to_line(row))
        self.rows.append(row)

    def _append(self, line: Mapping[str, str]) -> None:
        with self.path.open("a", newline="", encoding="utf-8") as file:
            csv.DictWriter(file, COLUMNS, lineterminator="\n").writerow(line)
            file.flush()
            os.fsync(file.fileno())

    def _cut_torn_line(self) -> None:
        data = self.path.read_bytes()
        if not data.endswith(b"\n"):
            os.truncate(self.path, data.rfind(b"\n") + 1)


# ---- the terminal

_HEADINGS: Final = (
    ("EP", 3), ("tokens", 6), ("rows/exp", 8), ("fitune", 8), ("+-", 5), ("default", 8), ("grouped", 8),
    ("cublas", 8), ("floor", 8), ("x floor", 7), ("TFLOP/s", 7), ("GB/s", 6), ("peer", 8), ("ratio", 6), ("MHz", 5),
    ("W", 4),
)  # fmt: skip


def heading() -> str:
    return "  ".join(name.rjust(width) for name, width in _HEADINGS)


def line_of(row: Row) -> str:
    """One aligned line; `-` is what there is not, `wrong` and `failed` what was not timed for that reason."""
    ours = row.times["fitune"]
    cells = (
        str(row.ep),
        str(row.tokens),
        f"{row.rows_per_expert:.3g}",
        _time(ours),
        f"{100.0 * ours.spread:.1f}%" if ours.ok else "-",
        *(_time(row.times[name]) for name in CONTENDERS[1:]),
        f"{row.floor_us:.1f}",
        _number(row.over_floor, ".2f"),
        _number(row.tflops, ".1f"),
        _number(row.gb_s, ".0f"),
        _number(row.peer_us, ".1f"),
        _number(row.ratio, ".3f"),
        _number(row.sm_mhz, ".0f"),
        _number(row.power_w, ".0f"),
    )
    return "  ".join(cell.rjust(width) for cell, (_, width) in zip(cells, _HEADINGS, strict=True))


def _time(timed: Timed) -> str:
    if timed.ok:
        return f"{timed.us:.1f}"
    return "wrong" if timed.status.startswith("wrong") else "failed" if timed.status.startswith("failed") else "-"


def _number(value: float, form: str) -> str:
    return format(value, form) if value else "-"


def means(rows: Sequence[Row]) -> list[str]:
    """Geometric means per EP size and over all, as lines: our time over the floor, the peers', and the others'."""
    names = ("cells", "x floor", "fitune/peer", "each/its floor", "peer x floor", "default/fitune", "grouped/fitune",
             "cublas/fitune")  # fmt: skip
    lines = ["geometric means", "  ".join(["   EP", *names])]
    sizes = sorted({row.ep for row in rows})
    groups = [(str(ep), [row for row in rows if row.ep == ep]) for ep in sizes]
    for label, group in [*groups, ("all", list(rows))]:
        timed = [row for row in group if row.times["fitune"].ok]
        peered = [row for row in timed if row.peer_us]
        values = (
            str(len(timed)),
            _mean(row.over_floor for row in timed),
            _mean(row.ratio for row in peered),
            _mean(row.ratio_over_floor for row in peered),
            _mean(row.peer_us / row.peer_floor_us for row in peered),
            *(
                _mean(row.times[name].us / row.us for row in timed if row.times[name].ok)
                for name in ("default", "grouped_mm", "cublas")
            ),
        )
        lines.append("  ".join([label.rjust(5), *(v.rjust(len(n)) for v, n in zip(values, names, strict=True))]))
    return lines


def _mean(values: Iterable[float]) -> str:
    found = list(values)
    return f"{geometric_mean(found):.3f}" if found else "-"
