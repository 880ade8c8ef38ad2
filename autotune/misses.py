"""The miss log: one JSON line for each kind of call that found no tuned tactic.

Written by dispatch, read back by a later search. Many processes may append to one file: a line is one write() to a
descriptor opened with O_APPEND, so lines of different writers never mix on a local file system. The file is bounded:
once it holds `max_bytes`, lines are dropped (and counted by the writer) instead of written. Writers look at the size
before each write, so the file can pass the bound by at most one line for each writer.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fitune.errors import ShapeError, StoreError
from fitune.problem import LayerKey, LayerShape, Problem

FORMAT: Final = 1
MISS_LOG_NAME: Final = "misses.jsonl"
MAX_BYTES: Final = 1 << 20
MAX_LINE_BYTES: Final = 4096
MAX_REASON: Final = 250
MAX_TOKENS: Final = 1 << 31

_INTEGERS: Final = ("hidden_size", "intermediate_size", "num_experts", "top_k", "local_experts")
_TEXTS: Final = ("dtype", "activation", "dispatch", "routing", "device")
_log: Final = logging.getLogger("fitune.misses")


@dataclass(frozen=True, slots=True)
class Miss:
    """A call that found no tuned tactic: the layer it asked for, its token count and why nothing matched."""

    layer: LayerKey
    num_tokens: int
    reason: str
    time_s: float = field(default_factory=time.time)

    @property
    def problem(self) -> Problem:
        """The problem to tune so that this call, and those near it, hit: its count rounded up to a power of two."""
        layer = self.layer
        return Problem(layer.shape, layer.local_experts, power_of_two(self.num_tokens), layer.routing, layer.dispatch)


@dataclass(frozen=True, slots=True)
class BrokenLine:
    """A line that is no miss: its number in the file (from 1) and what is wrong with it."""

    number: int
    what: str


@dataclass(frozen=True, slots=True)
class MissScan:
    """Everything a miss log holds, in file order."""

    misses: tuple[Miss, ...]
    broken: tuple[BrokenLine, ...]


def power_of_two(num_tokens: int) -> int:
    """The power of two at or above a token count (1 for counts below 1)."""
    return 1 << max(0, num_tokens - 1).bit_length()


@dataclass(frozen=True, slots=True)
class MissLog:
    """Appends misses to a file. The file and its folder are made with the first line."""

    path: Path
    max_bytes: int = MAX_BYTES

    def append(self, miss: Miss) -> bool:
        """Write one line; False when the file is full or the line too long. Raises OSError when writing fails."""
        line = _encode(miss)
        if len(line) > MAX_LINE_BYTES:
            return False
        self.path.parent.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            if os.fstat(descriptor).st_size + len(line) > self.max_bytes:
                return False
            os.write(descriptor, line)
        finally:
            os.close(descriptor)
        return True


def scan_misses(path: Path) -> MissScan:
    """Read a miss log, keeping what is broken in it apart. Raises StoreError when it cannot be read at all.

    A last line without its line end is one that was being written: it is left out and not called broken.
    """
    misses: list[Miss] = []
    broken: list[BrokenLine] = []
    try:
        with path.open("rb") as stream:
            for number, line in _lines(stream):
                try:
                    misses.append(_decode(line))
                except ValueError as error:
                    broken.append(BrokenLine(number, str(error)))
    except OSError as error:
        raise StoreError(f"miss log {path}: {error.strerror or error}; give the file that dispatch wrote") from error
    if broken and not misses:
        first = broken[0]
        raise StoreError(f"miss log {path}: line {first.number}: {first.what}; no line of it is a miss")
    return MissScan(tuple(misses), tuple(broken))


def read_misses(path: Path) -> list[Problem]:
    """The distinct problems a miss log asks for, in the order they first appeared. Raises StoreError.

    Broken lines are passed over with a warning that names file, line and fault.
    """
    scan = scan_misses(path)
    for line in scan.broken:
        _log.warning("miss log %s: line %d: %s; passed over", path, line.number, line.what)
    return list(dict.fromkeys(miss.problem for miss in scan.misses))


def _lines(stream: Any) -> Iterator[tuple[int, bytes]]:
    """Whole lines with their numbers; of an overlong line one piece, which does not decode."""
    number = 0
    inside_overlong = False
    while piece := stream.readline(MAX_LINE_BYTES):
        complete = piece.endswith(b"\n")
        if not inside_overlong:
            number += 1
            overlong = not complete and len(piece) == MAX_LINE_BYTES
            if (complete or overlong) and piece.strip():
                yield number, piece
        inside_overlong = not complete


def _encode(miss: Miss) -> bytes:
    layer = miss.layer
    fields: dict[str, object] = {"v": FORMAT, "num_tokens": miss.num_tokens}
    fields |= {name: getattr(layer, name) for name in (*_INTEGERS, *_TEXTS)}
    fields |= {"reason": miss.reason[:MAX_REASON], "time_s": round(miss.time_s, 3)}
    return json.dumps(fields, separators=(",", ":")).encode() + b"\n"


def _decode(line: bytes) -> Miss:
    """One line. Raises ValueError saying which field is wrong."""
    try:
        fields = json.loads(line)
    except (ValueError, RecursionError):
        raise ValueError("it is not JSON") from None
    if not isinstance(fields, dict):
        raise ValueError("it is not a JSON object")
    version = _integer(fields, "v")
    if version != FORMAT:
        raise ValueError(f"v is {version}; this fitune reads {FORMAT}")
    hidden, intermediate, experts, top_k, local_experts = (_integer(fields, name) for name in _INTEGERS)
    dtype, activation, dispatch, routing, device = (_text(fields, name) for name in _TEXTS)
    num_tokens = _integer(fields, "num_tokens")
    if not 1 <= num_tokens <= MAX_TOKENS:
        raise ValueError(f"num_tokens is {num_tokens}; it must be 1 to {MAX_TOKENS}")
    layer = LayerKey(
        hidden,
        intermediate,
        experts,
        top_k,
        dtype,  # type: ignore[arg-type]
        activation,  # type: ignore[arg-type]
        local_experts,
        dispatch,  # type: ignore[arg-type]
        routing,
        device,
    )
    time_s = fields.get("time_s", 0.0)
    if not isinstance(time_s, (int, float)) or isinstance(time_s, bool):
        raise ValueError(f"time_s is {time_s!r:.40}; it must be a number")
    try:
        shape = LayerShape(hidden, intermediate, experts, top_k, layer.dtype, layer.activation)
        Problem(shape, local_experts, num_tokens, routing, layer.dispatch)
    except ShapeError as error:
        raise ValueError(str(error)) from error
    return Miss(layer, num_tokens, _text(fields, "reason"), float(time_s))


def _integer(fields: dict[str, object], name: str) -> int:
    value = fields.get(name)
    if not isinstance(value, int) or isinstance(value, bool):
        raise ValueError(f"{name} is {value!r:.40}; it must be a whole number")
    return value


def _text(fields: dict[str, object], name: str) -> str:
    value = fields.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} is {value!r:.40}; it must be text")
    return value
