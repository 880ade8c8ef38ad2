"""Inputs are what they say: slices that share nothing, loads that stand for the problem, references that are right."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fitune.kernels import reference
from fitune.measure.inputs import ProblemInputs, WeightBank, disjoint_offsets
from fitune.problem import LayerShape, Problem
from fitune.routing import draw_topk_ids, local_rows, representative_ids
from fitune.target import KNOWN_TARGETS

SHAPE = LayerShape(32, 16, 8, 2, "fp32")
TARGET = KNOWN_TARGETS["sm_90"]


@given(st.sets(st.integers(0, 15), min_size=1), st.integers(1, 20), st.integers(16, 200))
def test_slices_fit_and_their_active_experts_are_all_different(active: set[int], wanted: int, bank: int) -> None:
    offsets = disjoint_offsets(sorted(active), 16, wanted, bank)
    assert offsets[0] == 0 and len(offsets) <= wanted and max(offsets) + 16 <= bank
    read = [expert + offset for offset in offsets for expert in active]
    assert len(read) == len(set(read))


def test_enough_slices_are_found_where_they_fit() -> None:
    assert disjoint_offsets(range(16), 16, 4, 64) == [0, 16, 32, 48]
    assert disjoint_offsets([3], 16, 4, 19) == [0, 1, 2, 3]


@pytest.mark.parametrize("tokens", [1, 2, 4, 8, 64])
@pytest.mark.parametrize("seed", range(5))
def test_small_problems_get_a_load_like_the_expected_one(tokens: int, seed: int) -> None:
    problem = Problem(LayerShape(64, 64, 256, 8), 16, tokens)
    ids = representative_ids(problem, seed, None)
    rows = int(local_rows(ids, 0, 16).sum())
    assert rows >= 1
    assert abs(rows - problem.expected_routed_rows) <= max(1.0, 0.2 * problem.expected_routed_rows)
    assert np.array_equal(ids, representative_ids(problem, seed, None))


def test_large_problems_are_the_plain_draw() -> None:
    problem = Problem(SHAPE, 4, 300)
    assert np.array_equal(representative_ids(problem, 3, None), draw_topk_ids(problem, 3))


@pytest.fixture
def inputs() -> ProblemInputs:
    problem = Problem(SHAPE, 3, 9, local_expert_offset=2)
    return ProblemInputs(problem, TARGET, WeightBank("cpu", 0), "cpu", 7, round_hidden=False, drop_slots=True)


def test_every_slice_has_the_same_shape_and_other_weights(inputs: ProblemInputs) -> None:
    first = inputs.args[0]
    assert len(inputs.args) > 1
    for other in inputs.args[1:]:
        assert other.x is first.x and other.topk_ids is first.topk_ids
        assert other.w13.shape == first.w13.shape and other.w13.stride() == first.w13.stride()
        for expert in inputs.load.active:
            assert not torch.equal(other.w13[expert], first.w13[expert])
            assert not torch.equal(other.w2[expert], first.w2[expert])


def test_references_agree_with_the_whole_layer(inputs: ProblemInputs) -> None:
    first = inputs.args[0]
    whole = reference.layer(first.x, first.w13, first.w2, first.topk_weights, first.topk_ids, 2)
    assert torch.allclose(inputs.out_reference, whole, atol=1e-6)
    assert (first.topk_ids == -1).any()
    assert inputs.load.rows == inputs.slots.numel()


def test_poison_is_found_and_right_results_pass(inputs: ProblemInputs) -> None:
    inputs.poison("gemm1", "gemm2")
    accuracy, _ = inputs.out_accuracy()
    assert np.isnan(accuracy.rms_relative)
    inputs.out.copy_(inputs.out_reference)
    assert inputs.out_accuracy()[0].max_abs == 0.0
    inputs.out[4, 1] = float("nan")
    accuracy, largest = inputs.out_accuracy()
    assert np.isnan(accuracy.rms_relative) and not largest <= 1.0
    inputs.out[4, 1] = inputs.out_reference[4, 1] + 5.0
    accuracy, largest = inputs.out_accuracy()
    assert accuracy.max_abs == pytest.approx(5.0) and largest > 1.0


def test_hidden_is_restored_in_the_row_order_of_gemv(inputs: ProblemInputs) -> None:
    inputs.poison("gemm1")
    inputs.restore_hidden("gemv")
    accuracy, _ = inputs.hidden_accuracy("gemv")
    assert accuracy.max_abs == 0.0
    assert torch.isnan(inputs.ws.hidden).any()


def test_a_bank_is_drawn_once_and_grows_when_it_must() -> None:
    bank = WeightBank("cpu", 0)
    assert bank.provide(SHAPE, 4)
    held = bank.w13
    assert not bank.provide(SHAPE, 3)
    assert bank.w13 is held
    assert bank.provide(SHAPE, 6)
    assert bank.w13.shape == (6, 32, 32) and bank.w2.shape == (6, 32, 16)
    assert float(bank.w13.std()) == pytest.approx(32**-0.5, rel=0.1)
