"""Shapes and problems that can be, those that cannot, and the numbers derived from them."""

from dataclasses import fields, replace
from itertools import combinations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fitune.errors import FituneError, ShapeError
from fitune.problem import DEFAULT_TOKENS, LayerShape, Problem, key_of, layer_key, local_experts_of_ep

DEEPSEEK = LayerShape(7168, 2048, 256, 8)


def problems() -> st.SearchStrategy[Problem]:
    @st.composite
    def build(draw: st.DrawFn) -> Problem:
        experts = draw(st.integers(1, 300))
        shape = LayerShape(
            draw(st.integers(1, 9000)), draw(st.integers(1, 9000)), experts, draw(st.integers(1, experts))
        )
        local = draw(st.integers(1, experts))
        offset = draw(st.integers(0, experts - local))
        dispatch = draw(st.sampled_from(["all_gather", "all_to_all"]))
        return Problem(shape, local, draw(st.integers(0, 100_000)), "random", dispatch, offset)  # type: ignore[arg-type]

    return build()


@pytest.mark.parametrize("field", ["hidden_size", "intermediate_size", "num_experts", "top_k"])
@pytest.mark.parametrize("value", [0, -1, 2.5, "8", True, None])
def test_layer_sizes_are_positive_whole_numbers(field: str, value: object) -> None:
    with pytest.raises(ShapeError, match=field) as caught:
        replace(DEEPSEEK, **{field: value})
    assert repr(value) in str(caught.value)
    assert "\n" not in str(caught.value)


def test_top_k_beyond_the_experts_is_refused_with_both_numbers() -> None:
    with pytest.raises(ShapeError, match="top_k 9 is larger than num_experts 8"):
        LayerShape(64, 64, 8, 9)


def test_unknown_dtype_activation_and_dispatch_name_the_known_ones() -> None:
    with pytest.raises(ShapeError, match=r"'int3'.*bf16"):
        LayerShape(64, 64, 8, 2, "int3")  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"'gelu'.*swiglu"):
        LayerShape(64, 64, 8, 2, "bf16", "gelu")  # type: ignore[arg-type]
    with pytest.raises(ShapeError, match=r"'scatter'.*all_to_all"):
        Problem(DEEPSEEK, 8, 8, dispatch="scatter")  # type: ignore[arg-type]


@pytest.mark.parametrize(("local", "offset"), [(0, 0), (257, 0), (1, 256), (8, -1), (128, 129)])
def test_local_experts_must_lie_within_the_layer(local: int, offset: int) -> None:
    with pytest.raises(ShapeError):
        Problem(DEEPSEEK, local, 8, local_expert_offset=offset)


def test_negative_tokens_are_refused_and_none_is_fine() -> None:
    with pytest.raises(ShapeError, match="num_tokens is -1"):
        Problem(DEEPSEEK, 8, -1)
    empty = Problem(DEEPSEEK, 8, 0)
    assert empty.expected_routed_rows == empty.expected_active_experts == empty.num_slots == 0


def test_every_error_is_a_users_error_with_exit_code_2() -> None:
    assert issubclass(ShapeError, FituneError)
    assert ShapeError.exit_code == 2


def test_expert_parallelism_changes_the_experts_not_the_rows_of_one() -> None:
    for local in (256, 32, 16, 9):
        problem = Problem(DEEPSEEK, local, 4096)
        assert problem.expected_rows_per_expert == pytest.approx(4096 * 8 / 256)
        assert problem.expected_routed_rows == pytest.approx(4096 * 8 * local / 256)


def test_all_to_all_rows_agree_with_counting_every_choice() -> None:
    shape = LayerShape(64, 64, 7, 3)
    local = {2, 3}
    hits = [len(local & set(choice)) for choice in combinations(range(7), 3)]
    received = [count for count in hits if count]
    problem = Problem(shape, 2, 1000, dispatch="all_to_all", local_expert_offset=2)
    assert problem.expected_routed_rows == pytest.approx(1000 * sum(received) / len(received))


@given(problems())
def test_derived_numbers_are_consistent(problem: Problem) -> None:
    shape = problem.shape
    assert problem.num_slots == problem.num_tokens * shape.top_k
    assert problem.expected_routed_rows <= problem.max_routed_rows + 1e-6
    assert problem.max_routed_rows <= problem.num_slots
    assert 0 <= problem.expected_active_experts <= min(problem.local_experts, problem.max_routed_rows) + 1e-6
    if problem.dispatch == "all_to_all":
        assert problem.expected_routed_rows >= problem.num_tokens * (1 - 1e-9)
    elif problem.local_experts == shape.num_experts:
        assert problem.expected_routed_rows == pytest.approx(problem.num_slots)


@given(
    problems(),
    st.sampled_from([field.name for field in fields(LayerShape)] + ["local_experts", "routing", "num_tokens"]),
)
def test_whatever_changes_the_problem_changes_the_key(problem: Problem, field: str) -> None:
    shape = problem.shape
    other = {
        "hidden_size": replace(problem, shape=replace(shape, hidden_size=shape.hidden_size + 1)),
        "intermediate_size": replace(problem, shape=replace(shape, intermediate_size=shape.intermediate_size + 1)),
        "num_experts": replace(problem, shape=replace(shape, num_experts=shape.num_experts + 1)),
        "top_k": replace(problem, shape=replace(shape, num_experts=400, top_k=shape.top_k + 1)),
        "dtype": replace(problem, shape=replace(shape, dtype="fp16")),
        "activation": problem,
        "local_experts": replace(
            problem, shape=replace(shape, num_experts=shape.num_experts + 1), local_experts=problem.local_experts + 1
        ),
        "routing": replace(problem, routing="zipf:1"),
        "num_tokens": replace(problem, num_tokens=problem.num_tokens + 1),
    }[field]
    same = other == problem
    assert (key_of(other, "H200") == key_of(problem, "H200")) is same
    assert key_of(problem, "H200") != key_of(problem, "H20")


@given(problems())
def test_the_key_gives_the_problem_back_apart_from_the_rank(problem: Problem) -> None:
    key = key_of(problem, "H200")
    assert key.problem() == replace(problem, local_expert_offset=0)
    assert layer_key(key.problem(), "H200") == key.layer
    assert key.layer.shape == problem.shape


@given(st.integers(1, 600), st.integers(1, 600))
def test_ep_splits_hold_all_experts(num_experts: int, ep_size: int) -> None:
    if ep_size > num_experts:
        with pytest.raises(ShapeError, match=f"EP size {ep_size}"):
            local_experts_of_ep(num_experts, ep_size)
        return
    held = local_experts_of_ep(num_experts, ep_size)
    larger = num_experts % ep_size
    assert all(count > 0 for count in held)
    assert (held[0] * larger + held[-1] * (ep_size - larger)) == num_experts
    assert len(held) == (2 if larger else 1)


def test_labels_and_redundant_experts() -> None:
    assert Problem(DEEPSEEK, 32, 1).ep_label == "EP 8"
    assert Problem(DEEPSEEK, 36, 1).ep_label == "L=36"
    assert DEEPSEEK.with_redundant_experts(32).num_experts == 288
    with pytest.raises(ShapeError):
        DEEPSEEK.with_redundant_experts(-1)
    assert DEFAULT_TOKENS == (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


def test_bytes_of_an_expert() -> None:
    assert DEEPSEEK.expert_bytes == 3 * 7168 * 2048 * 2
    assert replace(DEEPSEEK, dtype="fp32").expert_bytes == 2 * DEEPSEEK.expert_bytes
