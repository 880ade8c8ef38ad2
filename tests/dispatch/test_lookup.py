"""The dense look-up against the bucket rule, and what it says where nothing matches."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fitune.bucket import buckets, find_bucket
from fitune.dispatch.lookup import DENSE_LIMIT, build_lookup, explain_mismatch
from fitune.problem import LayerKey, Problem, layer_key

ASKED = LayerKey(7168, 2048, 256, 8, "bf16", "swiglu", 16, "all_gather", "random", "NVIDIA H200")


def small_lookup(small: Any, counts: set[int], **maker: Any) -> Any:
    asked = layer_key(Problem(small.shape, 4, 0), "cpu")
    return build_lookup(small.table(**maker)(counts), asked, any_routing=True)


@given(
    points=st.sets(st.integers(1, 3000), min_size=1, max_size=20), probes=st.lists(st.integers(0, 9000), max_size=20)
)
def test_dense_agrees_with_the_bucket_rule(small: Any, points: set[int], probes: list[int]) -> None:
    lookup = small_lookup(small, points)
    rule = buckets(tuple(points))
    edges = [edge + step for bucket in rule for edge in (bucket.low, bucket.high) for step in (-1, 0, 1)]
    for count in (*probes, *edges):
        index = find_bucket(rule, count)
        entry = lookup.entry(count)
        if index is None:
            assert entry is None
        else:
            assert entry is not None and entry.bucket == rule[index]


def test_more_entries_than_a_byte_can_name(small: Any) -> None:
    points = set(range(1, 400))
    lookup = small_lookup(small, points)
    assert not isinstance(lookup.dense, bytes)
    assert [lookup.entry(count).bucket.point for count in sorted(points)] == sorted(points)
    assert lookup.entry(0) is None and lookup.entry(400) is None


def test_counts_beyond_the_dense_map(small: Any) -> None:
    points = {DENSE_LIMIT // 2, DENSE_LIMIT, 2 * DENSE_LIMIT}
    lookup = small_lookup(small, points)
    assert len(lookup.dense) == DENSE_LIMIT
    rule = buckets(tuple(points))
    for count in (DENSE_LIMIT // 2, DENSE_LIMIT - 1, DENSE_LIMIT, DENSE_LIMIT + 1, 2 * DENSE_LIMIT):
        index = find_bucket(rule, count)
        assert index is not None and lookup.entry(count).bucket == rule[index]
    assert lookup.entry(2 * DENSE_LIMIT + 1) is None
    assert lookup.entry(DENSE_LIMIT // 2 - 1) is None


def test_no_count_is_clamped(small: Any) -> None:
    lookup = small_lookup(small, {16, 512})
    assert [count for count in range(2000) if lookup.entry(count)] == [*range(16, 33), *range(256, 513)]
    assert lookup.miss_reason(600) == "num_tokens: table has 16..32, 256..512; asked 600"
    assert lookup.miss_reason(64).endswith("asked 64")
    assert lookup.entry(-1) is None


def test_one_differing_field_is_named_with_both_values() -> None:
    table = [replace(ASKED, local_experts=count) for count in (256, 32)]
    assert explain_mismatch(ASKED, table) == "local_experts: table has 32, 256; asked 16"


def test_the_nearest_layers_are_compared() -> None:
    far = [replace(ASKED, hidden_size=64, top_k=2, local_experts=count) for count in (1, 2, 4)]
    near = replace(ASKED, device="NVIDIA H100")
    assert explain_mismatch(ASKED, [*far, near]) == "device: table has NVIDIA H100; asked NVIDIA H200"
    assert explain_mismatch(ASKED, far[:1]) == (
        "hidden_size: table has 64; asked 7168, top_k: table has 2; asked 8, local_experts: table has 1; asked 16"
    )


@pytest.mark.parametrize("field", ["hidden_size", "intermediate_size", "num_experts", "top_k", "local_experts"])
def test_every_number_of_the_key_must_match(small: Any, field: str) -> None:
    table = small.table()({4, 8})
    asked = layer_key(Problem(small.shape, 4, 0), "cpu")
    asked = replace(asked, **{field: getattr(asked, field) + 1})
    lookup = build_lookup(table, asked, any_routing=True)
    assert lookup.entries == ()
    assert lookup.miss_reason(4).startswith(f"{field}: table has ")


@pytest.mark.parametrize("change", [{"dtype": "bf16"}, {"dispatch": "all_to_all"}, {"device": "NVIDIA H200"}])
def test_every_text_of_the_key_must_match(small: Any, change: dict[str, Any]) -> None:
    asked = replace(layer_key(Problem(small.shape, 4, 0), "cpu"), **change)
    lookup = build_lookup(small.table()({4, 8}), asked, any_routing=True)
    assert lookup.miss_reason(4).startswith(f"{next(iter(change))}: table has ")


def test_many_values_are_not_all_named() -> None:
    text = explain_mismatch(ASKED, [replace(ASKED, local_experts=count) for count in range(20, 60)])
    assert text == "local_experts: table has 20, 21, 22, 23, 24, 25, 26, 27 and 32 more; asked 16"


def test_routing_is_matched_where_it_is_stated(small: Any) -> None:
    asked = layer_key(Problem(small.shape, 4, 0), "cpu")
    table = small.table(routing="zipf:1.2")({4})
    assert build_lookup(table, asked, any_routing=True).asked.routing == "zipf:1.2"
    stated = build_lookup(table, asked, any_routing=False)
    assert stated.miss_reason(4) == "routing: table has zipf:1.2; asked random"


def test_no_table_and_an_empty_table_say_so(small: Any) -> None:
    assert build_lookup(None, ASKED, any_routing=True).miss_reason(1).startswith("table: none was given; asked hidden")
    assert build_lookup(small.table()(()), ASKED, any_routing=True).miss_reason(1).startswith("table: it is empty")
