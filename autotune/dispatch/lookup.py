"""From a token count to a table entry: prepared once per layer, one array index per call.

Nothing here imports torch; a look-up can be built and asked on a machine that could never run it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields, replace
from typing import Final

from fitune.bucket import find_bucket
from fitune.cache import Entry, Table
from fitune.problem import DEFAULT_ROUTING, LayerKey

DENSE_LIMIT: Final = 1 << 17
_MOST_NAMED: Final = 8


@dataclass(frozen=True, slots=True)
class LayerLookup:
    """The buckets of one layer, spread out so that a look-up is `dense[num_tokens]`.

    `asked` is the key the caller stands for and `entries` the table's entries under it (none on a mismatch, which
    `mismatch` then explains). `dense` holds an index into `entries` for each count from 0 to the last tuned one, and
    `len(entries)` where no bucket speaks for the count. Counts of DENSE_LIMIT and above are found by bisection.
    """

    asked: LayerKey
    entries: tuple[Entry, ...]
    dense: bytes | array[int]
    mismatch: str

    @property
    def no_entry(self) -> int:
        """The index that stands for "no bucket"."""
        return len(self.entries)

    def index(self, num_tokens: int) -> int:
        """Index into `entries`, or `no_entry`. Nothing is clamped."""
        if 0 <= num_tokens < len(self.dense):
            return self.dense[num_tokens]
        found = find_bucket([entry.bucket for entry in self.entries], num_tokens)
        return self.no_entry if found is None else found

    def entry(self, num_tokens: int) -> Entry | None:
        """The entry for a token count, or None."""
        index = self.index(num_tokens)
        return None if index == self.no_entry else self.entries[index]

    def miss_reason(self, num_tokens: int) -> str:
        """Why a count has no entry: the differing field with what the table has and what was asked."""
        if self.mismatch:
            return self.mismatch
        assert self.entry(num_tokens) is None
        return f"num_tokens: table has {_ranges(self.entries)}; asked {num_tokens}"


def build_lookup(table: Table | None, asked: LayerKey, *, any_routing: bool, absent: str = "") -> LayerLookup:
    """Find `asked` in a table and spread its buckets out.

    With `any_routing` the caller makes no statement about routing: of the profiles the table has for this layer,
    `random` is taken, else the first in alphabetical order, and `asked` is changed to it. `absent` is the reason to
    give where there is no table.
    """
    if table is None:
        return _without_entries(asked, absent or "table: none was given; asked " + describe(asked))
    if any_routing:
        asked = _with_tuned_routing(table, asked)
    entries = table.layers.get(asked, ())
    if not entries:
        return _without_entries(asked, explain_mismatch(asked, table.layers))
    return LayerLookup(asked, tuple(entries), spread(entries), "")


def spread(entries: Sequence[Entry]) -> bytes | array[int]:
    """The dense map of some entries sorted by bucket: a byte for each count where 255 entries or fewer allow it."""
    top = min(entries[-1].bucket.high, DENSE_LIMIT - 1)
    dense = array("H", [len(entries)]) * (top + 1)
    for index, entry in enumerate(entries):
        low, high = entry.bucket.low, min(entry.bucket.high, top)
        dense[low : high + 1] = array("H", [index]) * max(0, high + 1 - low)
    return bytes(dense.tolist()) if len(entries) <= 255 else dense


def explain_mismatch(asked: LayerKey, available: Iterable[LayerKey]) -> str:
    """The fields in which the nearest layers of a table differ from `asked`, with both values.

    Nearest are the layers that differ in the fewest fields. `local_experts: table has 32, 256; asked 16`.
    """
    differing: dict[tuple[str, ...], list[LayerKey]] = {}
    for key in available:
        names = tuple(f.name for f in fields(LayerKey) if getattr(key, f.name) != getattr(asked, f.name))
        assert names, "asked is in the table"
        differing.setdefault(names, []).append(key)
    if not differing:
        return "table: it is empty; asked " + describe(asked)
    fewest = min(len(names) for names in differing)
    nearest = max((names for names in differing if len(names) == fewest), key=lambda names: len(differing[names]))
    keys = differing[nearest]
    return ", ".join(f"{name}: table has {_values(keys, name)}; asked {getattr(asked, name)}" for name in nearest)


def describe(key: LayerKey) -> str:
    """A layer key in one line."""
    return (
        f"hidden_size {key.hidden_size}, intermediate_size {key.intermediate_size}, {key.num_experts} experts, "
        f"top_k {key.top_k}, {key.dtype}, {key.local_experts} local ({key.ep_label}), {key.dispatch}, "
        f"routing {key.routing}, {key.device}"
    )


def _without_entries(asked: LayerKey, mismatch: str) -> LayerLookup:
    return LayerLookup(asked, (), b"", mismatch)


def _with_tuned_routing(table: Table, asked: LayerKey) -> LayerKey:
    """`asked` with a routing profile the table has for it; unchanged where it has none."""
    default = replace(asked, routing=DEFAULT_ROUTING)
    if default in table.layers:
        return default
    profiles = sorted(key.routing for key in table.layers if replace(key, routing=DEFAULT_ROUTING) == default)
    return replace(asked, routing=profiles[0]) if profiles else default


def _values(keys: Sequence[LayerKey], name: str) -> str:
    values = sorted({getattr(key, name) for key in keys})
    shown = ", ".join(str(value) for value in values[:_MOST_NAMED])
    return shown if len(values) <= _MOST_NAMED else f"{shown} and {len(values) - _MOST_NAMED} more"


def _ranges(entries: Sequence[Entry]) -> str:
    """The counts that some entries speak for: `1..16384`, `1..2, 512..2048`."""
    merged: list[list[int]] = []
    for entry in entries:
        low, high = entry.bucket.low, entry.bucket.high
        if merged and low <= merged[-1][1] + 1:
            merged[-1][1] = high
        else:
            merged.append([low, high])
    shown = ", ".join(f"{low}..{high}" for low, high in merged[:_MOST_NAMED])
    return shown if len(merged) <= _MOST_NAMED else f"{shown} and {len(merged) - _MOST_NAMED} more ranges"
