"""Recorded expert histograms: how often each expert of a layer was chosen in real traffic."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path
from typing import Any, Final

import msgpack  # type: ignore[import-untyped, unused-ignore]
import numpy as np
from numpy.typing import NDArray

from fitune.errors import InputError
from fitune.inputfile import read_input

MAX_BYTES: Final = 16 << 20
_EXPECTED: Final = "give a JSON or msgpack list, or one number a line: how often each expert was chosen"


def load_histogram(path: str | Path) -> tuple[str, NDArray[np.float64]]:
    """Read weights per expert from a JSON list, a msgpack list, or a text with one number a line.

    Returns the routing text `file:NAME:SHA8` (the digits come from the numbers, not from how they are written) and
    the weights, float64 [experts]. Raises InputError naming the file and the value at fault.
    """
    file = Path(path)
    raw = read_input(file, MAX_BYTES, f"histogram {file}", _EXPECTED)
    weights = _checked(_parse(raw, file), file)
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", file.stem)[:64] or "histogram"
    return f"file:{name}:{weights_digest(weights)}", weights


def weights_digest(weights: NDArray[np.float64]) -> str:
    """Eight hex digits that name these weights."""
    return hashlib.sha256(np.ascontiguousarray(weights, dtype="<f8").tobytes()).hexdigest()[:8]


def _parse(raw: bytes, file: Path) -> Any:
    try:
        text = raw.decode("utf-8-sig").strip()
        if text.startswith(("[", "{")):
            return json.loads(text)
        if text:
            return [float(line) for line in text.split()]
    except (ValueError, RecursionError):
        pass  # no text, or no numbers: msgpack may still read it
    try:
        return msgpack.unpackb(raw, strict_map_key=False)
    except (ValueError, msgpack.UnpackException, RecursionError):
        raise InputError(f"histogram {file}: not readable; {_EXPECTED}") from None


def _checked(loaded: Any, file: Path) -> NDArray[np.float64]:
    if not isinstance(loaded, list) or not loaded:
        raise InputError(f"histogram {file}: no list of numbers in it; {_EXPECTED}")
    for expert, value in enumerate(loaded):
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not 0.0 <= value <= 1e15:
            raise InputError(f"histogram {file}: expert {expert} has {value!r:.60}; it must be a number from 0 to 1e15")
    weights = np.asarray(loaded, dtype=np.float64)
    if not weights.sum() > 0.0:
        raise InputError(f"histogram {file}: all {len(loaded)} experts have 0; at least one must have been chosen")
    return weights
