"""Which keys meet which, under both alignments."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fitune.diff import join
from fitune.diff.join import LOAD_TOLERANCE, rows_per_token
from fitune.problem import Key


def points(rows: list) -> list[tuple[int | None, int | None]]:
    return [(row.key_a and row.key_a.num_tokens, row.key_b and row.key_b.num_tokens) for row in rows]


def test_ep_sizes_meet_at_equal_tokens(make: SimpleNamespace) -> None:
    rows = join([make.key(n, 256) for n in (1, 2, 4)], [make.key(n, 16) for n in (2, 4, 8)], "tokens")
    assert points(rows) == [(1, None), (2, 2), (4, 4), (None, 8)]
    assert {row.key_b.layer.local_experts for row in rows if row.key_b} == {16}


def test_stores_with_several_ep_sizes_meet_size_by_size(make: SimpleNamespace) -> None:
    a = [make.key(64, experts) for experts in (256, 32, 16)]
    b = [make.key(64, experts) for experts in (16, 256)]
    rows = join(a, b, "tokens")
    assert all(row.key_a == row.key_b for row in rows if row.key_a and row.key_b)
    assert [row.key_a.layer.local_experts for row in rows if row.key_b is None and row.key_a] == [32]


def test_routing_profiles_meet_their_like_first(make: SimpleNamespace) -> None:
    a = [make.key(64, 256, routing=routing) for routing in ("random", "balanced")]
    b = [make.key(64, 16, routing=routing) for routing in ("balanced", "random")]
    rows = join(a, b, "tokens")
    assert len(rows) == 2
    assert all(row.key_a and row.key_b and row.key_a.layer.routing == row.key_b.layer.routing for row in rows)


def test_devices_meet_where_nothing_closer_is_there(make: SimpleNamespace) -> None:
    a = [make.key(64), make.key(64, device="X")]
    rows = join(a, [make.key(64, device="X")], "tokens")
    assert [(row.key_a, row.key_b) for row in rows if row.key_a and row.key_b] == [(a[1], a[1])]
    rows = join([make.key(64)], [make.key(64, device="X")], "tokens")
    assert points(rows) == [(64, 64)]


@pytest.mark.parametrize("field", ["hidden_size", "intermediate_size", "top_k", "dtype"])
def test_other_layers_never_meet_at_equal_tokens(make: SimpleNamespace, field: str) -> None:
    values = {"hidden_size": 4096, "intermediate_size": 1024, "top_k": 4, "dtype": "fp16"}
    rows = join([make.key(64)], [make.key(64, **{field: values[field]})], "tokens")
    assert sorted(points(rows), key=str) == [(64, None), (None, 64)]


def test_rows_align_layers_of_other_expert_counts(make: SimpleNamespace) -> None:
    a = [make.key(n, 256) for n in (64, 128, 256)]
    b = [make.key(n, 32, num_experts=128) for n in (32, 64, 128)]
    rows = join(a, b, "rows")
    assert points(rows) == [(64, 32), (128, 64), (256, 128)]


def test_rows_let_dtypes_meet(make: SimpleNamespace) -> None:
    assert points(join([make.key(64)], [make.key(64, dtype="fp16")], "rows")) == [(64, 64)]


def test_rows_forgive_a_few_redundant_experts(make: SimpleNamespace) -> None:
    rows = join([make.key(64), make.key(128)], [make.key(n, 257, num_experts=257) for n in (64, 128)], "rows")
    assert points(rows) == [(64, 64), (128, 128)]


def test_rows_undo_what_all_to_all_does_to_the_load(make: SimpleNamespace) -> None:
    gather, exchange = make.key(1, 16).layer, make.key(1, 16, dispatch="all_to_all").layer
    ratio = rows_per_token(exchange) / rows_per_token(gather)
    assert ratio > 2.0
    points_b = (round(1024 / ratio), 1024)
    rows = join([Key(gather, 1024)], [Key(exchange, n) for n in points_b], "rows")
    (row,) = (row for row in rows if row.key_a)
    assert row.key_b and row.key_b.num_tokens == points_b[0]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    a=st.sets(st.integers(1, 20_000), max_size=12),
    b=st.sets(st.integers(1, 20_000), max_size=12),
    align=st.sampled_from(["tokens", "rows"]),
)
def test_every_key_appears_and_loads_are_near(make: SimpleNamespace, a: set[int], b: set[int], align: str) -> None:
    base = make.key(1, 256).layer
    other = replace(base, local_experts=16)
    keys_a, keys_b = {Key(base, n) for n in a}, {Key(other, n) for n in b}
    rows = join(keys_a, keys_b, align)  # type: ignore[arg-type]
    assert {row.key_a for row in rows if row.key_a} == keys_a
    assert {row.key_b for row in rows if row.key_b} == keys_b
    for row in rows:
        if row.key_a and row.key_b:
            ratio = row.key_a.num_tokens / row.key_b.num_tokens
            assert 1 / (2 + LOAD_TOLERANCE) <= ratio <= 2 + LOAD_TOLERANCE
    shared = a & b
    both = {
        row.key_a.num_tokens for row in rows if row.key_a and row.key_b and row.key_b.num_tokens == row.key_a.num_tokens
    }
    assert shared <= both
    assert len(rows) == len({(row.key_a, row.key_b) for row in rows})
