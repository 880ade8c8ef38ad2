"""A report as plain data, ready for `json.dumps`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, is_dataclass
from enum import Enum
from typing import Any

from fitune.diff.report import DiffReport, DiffRow
from fitune.problem import Key
from fitune.tactic import Stage, Tactic


def to_json(report: DiffReport) -> dict[str, Any]:
    """The report with every row's evidence. Tactics are texts, keys flat objects, verdicts their names."""
    return {
        "a": report.label_a,
        "b": report.label_b,
        "align": report.align,
        "counts": {str(verdict): count for verdict, count in report.counts.items()},
        "sentence": report.sentence(),
        "rows": [_row(row) for row in report.rows],
    }


def _row(row: DiffRow) -> dict[str, Any]:
    data: dict[str, Any] = {f.name: _plain(getattr(row, f.name)) for f in fields(row)}
    data["evidence"].pop("a_on_b", None)
    data["evidence"].pop("b_on_a", None)
    return data


def _plain(value: Any) -> Any:
    if isinstance(value, Key):
        layer = {f.name: getattr(value.layer, f.name) for f in fields(value.layer)}
        return {**layer, "num_tokens": value.num_tokens, "ep": value.layer.ep_label}
    if isinstance(value, Tactic | Stage):
        return str(value)
    if isinstance(value, Enum):
        return str(value)
    if is_dataclass(value):
        return {f.name: _plain(getattr(value, f.name)) for f in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, tuple | list):
        return [_plain(item) for item in value]
    return value
