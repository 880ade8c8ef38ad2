"""Routing is tested against what was asked: exact counts where they are promised, statistics where chance decides."""

import json
import math
from itertools import permutations
from pathlib import Path
from time import perf_counter
from typing import get_args

import msgpack
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fitune.errors import InputError
from fitune.histogram import weights_digest
from fitune.problem import Dispatch, LayerShape, Problem
from fitune.routing import (
    check_routing,
    draw_topk_ids,
    draw_topk_weights,
    load_histogram,
    local_rows,
    read_routing,
)

DEEPSEEK = LayerShape(7168, 2048, 256, 8)
SMALL = LayerShape(64, 64, 6, 3)


def zipf_weights(num_experts: int, exponent: float) -> np.ndarray:
    return np.arange(1, num_experts + 1, dtype=np.float64) ** -exponent


def problem_of(shape: LayerShape, tokens: int, routing: str, local: int | None = None, **more: object) -> Problem:
    return Problem(shape, local or shape.num_experts, tokens, routing, **more)  # type: ignore[arg-type]


def recorded(shape: LayerShape, weights: np.ndarray, tokens: int, local: int | None = None, **more: object) -> Problem:
    return problem_of(shape, tokens, f"file:test:{weights_digest(weights)}", local, **more)


def chi_squared(observed: np.ndarray, expected: np.ndarray) -> float:
    """In standard deviations above its mean."""
    seen = expected > 0
    assert not observed[~seen].any()
    free = int(seen.sum()) - 1
    statistic = float((((observed - expected) ** 2)[seen] / expected[seen]).sum())
    return (statistic - free) / math.sqrt(2 * free)


# ---- what always holds ----


@st.composite
def drawn(draw: st.DrawFn) -> tuple[Problem, int]:
    experts = draw(st.integers(1, 40))
    shape = LayerShape(8, 8, experts, draw(st.integers(1, experts)))
    local = draw(st.integers(1, experts))
    routing = draw(st.sampled_from(["balanced", "random", "zipf:0.5", "zipf:1.2", "zipf:8"]))
    problem = Problem(
        shape,
        local,
        draw(st.integers(0, 70)),
        routing,
        draw(st.sampled_from(get_args(Dispatch))),
        draw(st.integers(0, experts - local)),
    )
    return problem, draw(st.integers(0, 2**40))


@settings(deadline=None, max_examples=200)
@given(drawn())
def test_ids_are_distinct_in_range_reproducible_and_local_where_promised(case: tuple[Problem, int]) -> None:
    problem, seed = case
    shape, first = problem.shape, problem.local_expert_offset
    ids = draw_topk_ids(problem, seed)
    assert ids.dtype == np.int32
    assert ids.shape == (problem.num_tokens, shape.top_k)
    assert ((ids >= 0) & (ids < shape.num_experts)).all()
    assert (np.diff(np.sort(ids, axis=1), axis=1) > 0).all()
    assert (draw_topk_ids(problem, seed) == ids).all()
    hits = ((ids >= first) & (ids < first + problem.local_experts)).sum(axis=1)
    assert local_rows(ids, first, problem.local_experts).sum() == hits.sum()
    if problem.dispatch == "all_to_all":
        assert (hits > 0).all()


@settings(deadline=None, max_examples=100)
@given(drawn())
def test_weights_are_positive_falling_and_sum_to_one(case: tuple[Problem, int]) -> None:
    problem, seed = case
    weights = draw_topk_weights(problem, seed)
    assert weights.dtype == np.float32
    assert weights.shape == (problem.num_tokens, problem.shape.top_k)
    assert (weights > 0).all()
    assert (np.diff(weights, axis=1) <= 0).all()
    assert np.allclose(weights.sum(axis=1), 1.0, atol=1e-5)


def test_seeds_matter_and_the_rank_does_not_change_the_routing_under_all_gather() -> None:
    for routing in ("random", "zipf:1.2"):
        one = draw_topk_ids(problem_of(DEEPSEEK, 64, routing), 0)
        assert (draw_topk_ids(problem_of(DEEPSEEK, 64, routing), 1) != one).any()
        assert (draw_topk_ids(problem_of(DEEPSEEK, 64, routing, 16, local_expert_offset=32), 0) == one).all()
    assert (
        draw_topk_weights(problem_of(DEEPSEEK, 64, "random"), 0)
        != draw_topk_weights(problem_of(DEEPSEEK, 64, "random"), 1)
    ).any()


def test_a_negative_seed_is_refused() -> None:
    with pytest.raises(InputError, match="seed is -1"):
        draw_topk_ids(problem_of(SMALL, 4, "random"), -1)


@pytest.mark.parametrize("dispatch", get_args(Dispatch))
@pytest.mark.parametrize("routing", ["balanced", "random", "zipf:1.2", "file"])
@pytest.mark.parametrize("local", [256, 16, 1])
def test_the_largest_usual_problem_is_drawn_quickly(routing: str, dispatch: Dispatch, local: int) -> None:
    histogram = None
    problem = problem_of(DEEPSEEK, 16384, routing if routing != "file" else "random", local, dispatch=dispatch)
    if routing == "file":
        histogram = zipf_weights(256, 0.6)
        problem = recorded(DEEPSEEK, histogram, 16384, local, dispatch=dispatch)
    start = perf_counter()
    ids = draw_topk_ids(problem, 0, histogram)
    assert len(ids) == 16384
    assert perf_counter() - start < 5.0  # a quarter of a second on an idle core


# ---- balanced ----


@settings(deadline=None)
@given(st.integers(1, 64), st.data())
def test_balanced_counts_differ_by_one_at_most(num_experts: int, data: st.DataObject) -> None:
    shape = LayerShape(8, 8, num_experts, data.draw(st.integers(1, num_experts)))
    tokens = data.draw(st.integers(0, 200))
    rows = local_rows(
        draw_topk_ids(problem_of(shape, tokens, "balanced"), data.draw(st.integers(0, 99))), 0, num_experts
    )
    assert rows.sum() == tokens * shape.top_k
    assert rows.max() - rows.min() <= 1


@pytest.mark.parametrize("ep_size", [2, 8, 16, 32])
@pytest.mark.parametrize("tokens", [1, 2, 3, 7, 64, 1000])
def test_balanced_gives_every_rank_its_share_at_every_size(ep_size: int, tokens: int) -> None:
    local = 256 // ep_size
    for seed in range(4):
        ids = draw_topk_ids(problem_of(DEEPSEEK, tokens, "balanced"), seed)
        shares = local_rows(ids, 0, 256).reshape(ep_size, local).sum(axis=1)
        assert abs(shares - tokens * 8 / ep_size).max() <= 2


@pytest.mark.parametrize("local", [1, 9, 16, 32, 200])
def test_balanced_all_to_all_has_the_expected_rows_dealt_evenly(local: int) -> None:
    problem = problem_of(DEEPSEEK, 500, "balanced", local, dispatch="all_to_all", local_expert_offset=256 - local)
    ids = draw_topk_ids(problem, 3)
    rows = local_rows(ids, 256 - local, local)
    assert rows.sum() == round(problem.expected_routed_rows)
    assert rows.max() - rows.min() <= 1
    foreign = local_rows(ids, 0, 256 - local)
    assert foreign.max() - foreign.min() <= 1


# ---- random and zipf ----


def test_random_routing_is_uniform() -> None:
    rows = local_rows(draw_topk_ids(problem_of(DEEPSEEK, 16384, "random"), 5), 0, 256)
    assert abs(chi_squared(rows, np.full(256, 512.0))) < 5  # without replacement: a little below a true chi-squared


def test_random_rows_follow_the_expected_numbers_of_the_problem() -> None:
    for dispatch in get_args(Dispatch):
        for local in (1, 16, 32, 128):
            problem = problem_of(DEEPSEEK, 8192, "random", local, dispatch=dispatch, local_expert_offset=7)
            rows = local_rows(draw_topk_ids(problem, 1), 7, local)
            expected = problem.expected_routed_rows
            assert abs(rows.sum() - expected) < 6 * math.sqrt(expected)


def first_choice_chances(weights: np.ndarray, top_k: int) -> dict[frozenset[int], float]:
    """Chance of every set of `top_k` experts drawn one by one without replacement, by adding up all orders."""
    chances: dict[frozenset[int], float] = {}
    for order in permutations(range(len(weights)), top_k):
        chance, left = 1.0, float(weights.sum())
        for expert in order:
            chance *= weights[expert] / left
            left -= weights[expert]
        chances[frozenset(order)] = chances.get(frozenset(order), 0.0) + chance
    return chances


def popularity(shape: LayerShape, exponent: float, seed: int) -> np.ndarray:
    """Weights of the experts under `zipf`, ranked as the routing itself shuffled them."""
    ids = draw_topk_ids(problem_of(LayerShape(8, 8, shape.num_experts, 1), 60_000, f"zipf:{exponent}"), seed)
    ranks = np.argsort(np.argsort(-local_rows(ids, 0, shape.num_experts)))
    return zipf_weights(shape.num_experts, exponent)[ranks]


@pytest.mark.parametrize("exponent", [0.7, 1.2, 2.0])
def test_zipf_shares_are_those_of_the_law(exponent: float) -> None:
    shape = LayerShape(8, 8, 64, 1)
    ids = draw_topk_ids(problem_of(shape, 100_000, f"zipf:{exponent}"), 2)
    rows = np.sort(local_rows(ids, 0, 64))[::-1]
    weights = zipf_weights(64, exponent)
    expected = 100_000 * weights / weights.sum()
    heavy = expected > 400  # among the rare ones, sorting by count itself disturbs the counts
    assert (abs(rows - expected)[heavy] < 6 * np.sqrt(expected[heavy])).all()
    assert abs(rows[~heavy].sum() - expected[~heavy].sum()) < 6 * math.sqrt(expected[~heavy].sum() + 1)


@pytest.mark.parametrize("routing", ["random", "zipf:1.2", "zipf:2.5"])
@pytest.mark.parametrize(
    ("dispatch", "local", "offset"),
    [("all_gather", 6, 0), ("all_to_all", 2, 3), ("all_to_all", 1, 5), ("all_to_all", 4, 0)],
)
def test_sets_of_experts_have_their_exact_chances(routing: str, dispatch: Dispatch, local: int, offset: int) -> None:
    seed, tokens = 11, 60_000
    exponent = 0.0 if routing == "random" else float(routing.removeprefix("zipf:"))
    weights = popularity(SMALL, exponent, seed) if exponent else np.ones(6)
    held = set(range(offset, offset + local))
    chances = first_choice_chances(weights, SMALL.top_k)
    if dispatch == "all_to_all":
        chances = {chosen: chance for chosen, chance in chances.items() if chosen & held}
    problem = problem_of(SMALL, tokens, routing, local, dispatch=dispatch, local_expert_offset=offset)
    drawn_sets = [frozenset(row) for row in draw_topk_ids(problem, seed).tolist()]
    names = sorted(chances, key=sorted)
    total = sum(chances.values())
    observed = np.array([drawn_sets.count(name) for name in names])
    expected = np.array([chances[name] / total * tokens for name in names])
    assert observed.sum() == tokens
    assert chi_squared(observed, expected) < 5


# ---- histograms ----


@pytest.mark.parametrize(
    ("shape", "exponent"),
    [(DEEPSEEK, 0.8), (LayerShape(8, 8, 8, 2), 0.9), (LayerShape(8, 8, 16, 1), 1.2), (SMALL, 0.3)],
)
def test_a_recorded_histogram_is_met(shape: LayerShape, exponent: float) -> None:
    tokens = 20_000
    recording = local_rows(
        draw_topk_ids(problem_of(shape, tokens, f"zipf:{exponent}"), 4), 0, shape.num_experts
    ).astype(float)
    rows = local_rows(draw_topk_ids(recorded(shape, recording, tokens), 9, recording), 0, shape.num_experts)
    deviation = np.sqrt(recording * (1 - recording / tokens) + 1)
    assert (abs(rows - recording) < 6 * deviation).all()
    squares = (((rows - recording) / deviation) ** 2).mean()
    assert squares < 1 + 5 * math.sqrt(2 / shape.num_experts)


def test_experts_never_recorded_are_never_drawn_and_those_in_every_token_always() -> None:
    histogram = np.array([0.0, 100.0, 50.0, 0.0, 100.0, 50.0])
    ids = draw_topk_ids(recorded(SMALL, histogram, 5000), 0, histogram)
    rows = local_rows(ids, 0, 6)
    assert rows.tolist()[:2] == [0, 5000]
    assert rows[3] == 0
    assert rows[4] == 5000
    assert rows[2] + rows[5] == 5000
    assert abs(rows[2] - 2500) < 200


def test_a_histogram_under_all_to_all_is_that_of_the_tokens_that_come() -> None:
    histogram, local, offset = zipf_weights(6, 0.4)[::-1].copy(), 2, 1
    everything = draw_topk_ids(recorded(SMALL, histogram, 120_000), 1, histogram)
    comes = ((everything >= offset) & (everything < offset + local)).any(axis=1)
    expected = local_rows(everything[comes], 0, 6) / comes.sum()
    problem = recorded(SMALL, histogram, 60_000, local, dispatch="all_to_all", local_expert_offset=offset)
    share = local_rows(draw_topk_ids(problem, 2, histogram), 0, 6) / 60_000
    assert abs(share - expected).max() < 6 * math.sqrt(0.25 / 60_000)


def test_histograms_that_cannot_be_drawn_from() -> None:
    weights = zipf_weights(6, 0.4)
    problem = recorded(SMALL, weights, 10)
    with pytest.raises(InputError, match="the histogram itself is needed"):
        draw_topk_ids(problem, 0)
    with pytest.raises(InputError, match="another one"):
        draw_topk_ids(problem, 0, weights + 1)
    short = zipf_weights(5, 0.4)
    with pytest.raises(InputError, match="5 numbers for 6 experts"):
        draw_topk_ids(recorded(SMALL, short, 10), 0, short)
    hot = np.array([10.0, 1, 1, 1, 1, 1])
    with pytest.raises(InputError, match=r"expert 0 has 66\.7% of the slots.*33\.3%"):
        draw_topk_ids(recorded(SMALL, hot, 10), 0, hot)
    cold = np.array([0.0, 1, 1, 1, 1, 0])
    with pytest.raises(InputError, match="no token chose experts 5 to 5"):
        draw_topk_ids(recorded(SMALL, cold, 10, 1, dispatch="all_to_all", local_expert_offset=5), 0, cold)


def test_a_histogram_reads_the_same_from_every_form(tmp_path: Path) -> None:
    numbers = [3, 0, 2.5, 7]
    (tmp_path / "h.json").write_text(json.dumps(numbers))
    (tmp_path / "h.msgpack").write_bytes(msgpack.packb(numbers))
    (tmp_path / "h.txt").write_text("3\n0\n2.5\n7\n")
    names = set()
    for suffix in ("json", "msgpack", "txt"):
        name, weights = load_histogram(tmp_path / f"h.{suffix}")
        names.add(name)
        assert weights.tolist() == [3.0, 0.0, 2.5, 7.0]
        assert check_routing(name) == name
        text, again = read_routing(f"file:{tmp_path / f'h.{suffix}'}")
        assert text == name
        assert again is not None
    assert len(names) == 1


def test_a_histograms_name_is_made_safe_and_its_digits_follow_its_numbers(tmp_path: Path) -> None:
    (tmp_path / "my run: é.json").write_text("[1, 2]")
    (tmp_path / "other.json").write_text("[1, 3]")
    name, _ = load_histogram(tmp_path / "my run: é.json")
    assert check_routing(name) == name
    assert name.split(":")[2] != load_histogram(tmp_path / "other.json")[0].split(":")[2]


@pytest.mark.parametrize(
    "content",
    [b"", b"[]", b"{}", b"[1, ", b"[1, -1]", b"[1, null]", b"[1, true]", b"[0, 0]", b'["1"]', b"1\nnan\n", b"1\ninf\n"]
    + [b"one\ntwo\n", b"\xc1", b"\xff\x00", b"[" * 50_000, b"[1e400]", b"[1, [2]]", b"\x93\x01\x02"],
)
def test_broken_histograms_are_one_line_errors(tmp_path: Path, content: bytes) -> None:
    file = tmp_path / "h.bin"
    file.write_bytes(content)
    with pytest.raises(InputError) as caught:
        load_histogram(file)
    assert str(file) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_histograms_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "absent", tmp_path, "a\0b"):
        with pytest.raises(InputError):
            load_histogram(path)
    with pytest.raises(InputError, match="absent"):
        read_routing("file:absent")


# ---- texts ----


@pytest.mark.parametrize(
    ("text", "canonical"),
    [
        ("balanced", "balanced"),
        (" random ", "random"),
        ("zipf:1.20", "zipf:1.2"),
        ("zipf:01", "zipf:1"),
        ("zipf:8", "zipf:8"),
    ]
    + [("file:run-1:0123abcd", "file:run-1:0123abcd")],
)
def test_canonical_texts(text: str, canonical: str) -> None:
    assert check_routing(text) == canonical
    assert check_routing(canonical) == canonical
    assert read_routing(text) == (canonical, None)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Balanced",
        "uniform",
        "zipf",
        "zipf:",
        "zipf:0",
        "zipf:-1",
        "zipf:nan",
        "zipf:inf",
        "zipf:9",
        "zipf:1e0",
        "zipf:0.0000001",
    ]
    + ["zipf:1.2:3", "file:", "file:x", "file:x:123", "file:a b:0123abcd"],
)
def test_texts_that_name_no_routing(text: str) -> None:
    with pytest.raises(InputError, match="routing") as caught:
        check_routing(text)
    assert "use" in str(caught.value)


# ---- rows ----


def test_local_rows_ignore_other_ranks_and_minus_one() -> None:
    ids = np.array([[0, 5, -1], [6, 7, 9], [5, -1, -1]], dtype=np.int32)
    rows = local_rows(ids, 5, 3)
    assert rows.dtype == np.int64
    assert rows.tolist() == [2, 1, 1]
    assert local_rows(np.empty((0, 8), dtype=np.int64), 0, 4).tolist() == [0, 0, 0, 0]
