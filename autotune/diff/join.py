"""Which decision of A is compared with which of B."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final, Literal

from fitune.bucket import buckets, find_bucket
from fitune.problem import Key, LayerKey, Problem

Align = Literal["tokens", "rows"]

LOAD_TOLERANCE: Final = 0.05
"""Loads closer than this are one load: redundant or fused shared experts change rows per expert by a few percent."""


@dataclass(frozen=True, slots=True)
class Joined:
    """Two keys to compare, or one that has no partner. `tokens` is the load they are compared at, as A counts it."""

    key_a: Key | None
    key_b: Key | None
    tokens: int


def join(keys_a: Iterable[Key], keys_b: Iterable[Key], align: Align) -> list[Joined]:
    """Pair the keys of two sides, layer by layer, sorted by layer and load.

    `tokens` compares equal token counts. `rows` compares equal expected rows per expert, which differs from the
    former only where num_experts, top_k or the dispatch do; there, layers of another dtype may meet as well. A point
    that the other side has not tuned is compared with the point its look-up would land on; where that is none, it
    has no partner.
    """
    points_a, points_b = _points(keys_a), _points(keys_b)
    partners = _match_layers(list(points_a), list(points_b), align)
    rows: list[Joined] = []
    for layer_a, layer_b in partners:
        rows += _join_points(layer_a, points_a[layer_a], layer_b, points_b[layer_b], align)
    matched_a, matched_b = {pair[0] for pair in partners}, {pair[1] for pair in partners}
    for layer, points in points_a.items():
        if layer not in matched_a:
            rows += [Joined(Key(layer, point), None, point) for point in points]
    for layer, points in points_b.items():
        if layer not in matched_b:
            rows += [Joined(None, Key(layer, point), point) for point in points]
    home = {layer_b: layer_a for layer_a, layer_b in partners}

    def order(row: Joined) -> tuple[LayerKey, int, bool]:
        key = row.key_a or row.key_b
        assert key is not None
        return home.get(key.layer, key.layer) if row.key_a is None else key.layer, row.tokens, row.key_a is None

    return sorted(rows, key=order)


def _points(keys: Iterable[Key]) -> dict[LayerKey, list[int]]:
    points: dict[LayerKey, list[int]] = {}
    for key in keys:
        points.setdefault(key.layer, []).append(key.num_tokens)
    return {layer: sorted(points[layer]) for layer in sorted(points)}


def _family(layer: LayerKey) -> LayerKey:
    """The layer without what may differ inside one side."""
    return replace(layer, local_experts=layer.num_experts, dispatch="all_gather", routing="", device="")


def _match_layers(a: Sequence[LayerKey], b: Sequence[LayerKey], align: Align) -> list[tuple[LayerKey, LayerKey]]:
    """Pair layers one to one, those that differ in least first."""
    candidates = []
    single = _single_ep(a) & _single_ep(b)
    for layer_a in a:
        for layer_b in b:
            cost = _difference(layer_a, layer_b, align, single)
            if cost is not None:
                candidates.append((cost, layer_a, layer_b))
    pairs: list[tuple[LayerKey, LayerKey]] = []
    used_a: set[LayerKey] = set()
    used_b: set[LayerKey] = set()
    for _, layer_a, layer_b in sorted(candidates):
        if layer_a not in used_a and layer_b not in used_b:
            pairs.append((layer_a, layer_b))
            used_a.add(layer_a)
            used_b.add(layer_b)
    return pairs


def _single_ep(layers: Sequence[LayerKey]) -> set[LayerKey]:
    """Families that a side holds for one count of local experts only: it may meet another count."""
    counts: dict[LayerKey, set[int]] = {}
    for layer in layers:
        counts.setdefault(_family(layer), set()).add(layer.local_experts)
    return {family for family, held in counts.items() if len(held) == 1}


def _difference(a: LayerKey, b: LayerKey, align: Align, single: set[LayerKey]) -> tuple[int, ...] | None:
    """How far two layers are apart; None where they are not to be compared."""
    if (a.hidden_size, a.intermediate_size, a.activation) != (b.hidden_size, b.intermediate_size, b.activation):
        return None
    same_layer = (a.num_experts, a.top_k, a.dtype) == (b.num_experts, b.top_k, b.dtype)
    if not same_layer and align == "tokens":
        return None
    same_local = a.local_experts == b.local_experts
    if same_layer and not same_local and _family(a) not in single:
        return None
    return (
        int(not same_layer),
        int(not same_local),
        int(a.dispatch != b.dispatch),
        int(a.routing != b.routing),
        int(a.device != b.device),
    )


def rows_per_token(layer: LayerKey) -> float:
    """Expected rows of one local expert for each token that enters."""
    many = 1 << 20
    return (
        Problem(layer.shape, layer.local_experts, many, layer.routing, layer.dispatch).expected_rows_per_expert / many
    )


def _join_points(a: LayerKey, points_a: list[int], b: LayerKey, points_b: list[int], align: Align) -> list[Joined]:
    scale = rows_per_token(a) / rows_per_token(b) if align == "rows" else 1.0
    rows, exact_b = [], set()
    loose_a = []
    for point in points_a:
        partner = _same_load(point * scale, points_b, LOAD_TOLERANCE if align == "rows" else 0.0)
        if partner is None or partner in exact_b:
            loose_a.append(point)
        else:
            exact_b.add(partner)
            rows.append(Joined(Key(a, point), Key(b, partner), point))
    for point, landed in _look_up(loose_a, scale, points_b):
        rows.append(Joined(Key(a, point), None if landed is None else Key(b, landed), point))
    loose_b = [point for point in points_b if point not in exact_b]
    for point, landed in _look_up(loose_b, 1.0 / scale, points_a):
        tokens = max(1, round(point / scale))
        rows.append(Joined(None if landed is None else Key(a, landed), Key(b, point), tokens))
    return _without_doubles(rows)


def _same_load(wanted: float, points: Sequence[int], tolerance: float) -> int | None:
    at = bisect_left(points, wanted)
    nearest = min(points[max(0, at - 1) : at + 1], key=lambda point: abs(point - wanted))
    return nearest if abs(nearest - wanted) <= tolerance * wanted else None


def _look_up(loads: Iterable[int], scale: float, points: Sequence[int]) -> Iterator[tuple[int, int | None]]:
    """The point each load's look-up lands on, by the same rule that dispatch uses."""
    table = buckets(points)
    for load in loads:
        index = find_bucket(table, max(1, round(load * scale)))
        yield load, None if index is None else table[index].point


def _without_doubles(rows: list[Joined]) -> list[Joined]:
    """Two loose points that land on each other are one row, and a key that landed somewhere is not alone as well."""
    paired = {key for row in rows if row.key_a and row.key_b for key in (row.key_a, row.key_b)}
    seen: set[tuple[Key | None, Key | None]] = set()
    kept = []
    for row in rows:
        both = (row.key_a, row.key_b)
        alone = None in both
        if both in seen or (alone and (row.key_a or row.key_b) in paired):
            continue
        seen.add(both)
        kept.append(row)
    return kept
