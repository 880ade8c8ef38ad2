"""The grid chosen by dynamic programming against brute force, and what its costs are made of."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations

import numpy as np
import pytest

from fitune.bucket import buckets, find_bucket
from fitune.cache import Recording
from fitune.errors import InputError
from fitune.measure.recording import RecordingMeasurer
from fitune.problem import LayerShape, Problem, key_of
from fitune.record import Measurement, Record, Regime, Status
from fitune.search.grid import (
    TokenGrid,
    Transfer,
    candidate_points,
    choose_grid,
    grid_of_points,
    log_uniform,
    recorded_points,
    transfer_of,
)
from fitune.space import default_tactic, pool
from fitune.tactic import Stage, Tactic
from fitune.target import KNOWN_TARGETS, Environment

TARGET = KNOWN_TARGETS["sm_90"]
LAYER = Problem(LayerShape(7168, 2048, 256, 8), 32, 1)
ENVIRONMENT = Environment(TARGET.device, TARGET.arch, TARGET.num_sms, "0.1.0", "kernelhash")


def invented(
    points: tuple[int, ...], counts: tuple[int, ...], seed: int = 0, layers: int = 1, steps: int = 0
) -> Transfer:
    """Random regrets, zero where a point is the count; few different ones with `steps`, so that grids tie."""
    rng = np.random.default_rng(seed)
    regret, missed = rng.random((layers, len(points), len(counts))), 2.0 * rng.random((layers, len(counts)))
    if steps:
        regret = np.floor(regret * steps) / steps
    for row, point in enumerate(points):
        if point in counts:
            regret[:, row, counts.index(point)] = 0.0
    measured = rng.random(regret.shape) < 0.5
    return Transfer(points, counts, log_uniform(counts), regret, measured, missed, missed > 1.0)


def by_hand(transfer: Transfer, points: tuple[int, ...]) -> tuple[float, float, float]:
    """Unserved share, mean and worst of a grid, count by count."""
    table = buckets(points)
    unserved = mean = worst = 0.0
    for column, (count, weight) in enumerate(zip(transfer.counts, transfer.weights, strict=True)):
        owner = find_bucket(table, count)
        if owner is None:
            unserved += weight
            values = transfer.missed[:, column]
        else:
            values = transfer.regret[:, transfer.points.index(table[owner].point), column]
        mean += weight * values.mean()
        worst = max(worst, values.max())
    return unserved, mean, worst


def numbers(grid: TokenGrid) -> tuple[float, float, float]:
    return grid.unserved.share, grid.expected.mean, grid.expected.worst


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("num_buckets", [1, 2, 3, 5, 7])
def test_no_grid_is_better(seed: int, num_buckets: int) -> None:
    points = (1, 2, 3, 7, 8, 20, 64)
    transfer = invented(points, (1, 2, 3, 4, 5, 6, 8, 11, 17, 20, 31, 40, 64, 80), seed, 1 + seed % 3, 3 * (seed % 2))
    best = min(by_hand(transfer, chosen) for chosen in combinations(points, num_buckets))
    grid = choose_grid(transfer, num_buckets)
    assert len(grid.points) == num_buckets
    assert numbers(grid) == pytest.approx(best, abs=1e-10)
    assert numbers(grid) == pytest.approx(by_hand(transfer, grid.points), abs=1e-10)
    assert choose_grid(transfer, num_buckets) == grid


def test_the_worst_breaks_ties_of_the_mean() -> None:
    """2 and 4 lose 0.4 at one count, 3 and 4 lose 0.2 at two."""
    transfer = replace(invented((1, 2, 3, 4), (1, 2, 3, 4)), weights=np.full(4, 0.25))
    regret = np.zeros((1, 4, 4))
    regret[0, 3, 2] = 0.4
    regret[0, 2, [1, 2]] = 0.2
    grid = choose_grid(replace(transfer, regret=regret), 3)
    assert grid.points == (1, 3, 4)
    assert (grid.expected.mean, grid.expected.worst) == (pytest.approx(0.1), 0.2)


def test_the_whole_range_is_served_first() -> None:
    """A default that costs nothing is no reason to leave a gap."""
    points = candidate_points(1, 64)
    transfer = invented(points, tuple(range(1, 65)))
    grid = choose_grid(replace(transfer, missed=0.0 * transfer.missed), 4)
    assert grid.unserved.share == 0.0
    assert grid.points == (1, 4, 16, 64)
    assert [(each.bucket.low, each.bucket.high) for each in grid.served] == [(1, 2), (3, 8), (9, 32), (33, 64)]


def test_one_bucket_serves_its_point_alone() -> None:
    transfer = invented((4, 8), (4, 6, 8))
    grid = choose_grid(transfer, 1)
    assert [(each.bucket.low, each.bucket.high) for each in grid.served] == [(grid.points[0],) * 2]
    assert grid.served[0].expected.num == 1
    assert grid.unserved.num == 2


def test_every_point_chosen_leaves_no_regret_at_the_points() -> None:
    points = candidate_points(1, 512)
    grid = choose_grid(invented(points, points), len(points))
    assert grid.points == points
    assert (grid.expected.mean, grid.expected.worst, grid.unserved.num) == (0.0, 0.0, 0)


def test_a_flip_gets_a_boundary_there() -> None:
    """One tactic up to 96, another above: sqrt(48 * 192) is 96, and no other pair of three points ends there."""
    points, counts = (24, 48, 64, 128, 192, 256, 384), tuple(range(24, 385))
    small = np.array(points)[:, None] <= 96
    regret = np.where(small == (np.array(counts)[None, :] <= 96), 0.0, 0.1)[None]
    flip = replace(invented(points, counts), regret=regret)
    grid = choose_grid(flip, 4)
    assert grid.points == (24, 48, 192, 384)
    assert [each.bucket.high for each in grid.served if each.bucket.low <= 96 <= each.bucket.high] == [96]
    assert (grid.expected.mean, grid.expected.worst) == (0.0, 0.0)


@pytest.mark.parametrize(("number", "words"), [(0, "0 buckets"), (-1, "-1 buckets"), (4, "4 buckets are more than")])
def test_impossible_numbers_of_buckets(number: int, words: str) -> None:
    with pytest.raises(InputError, match=words):
        choose_grid(invented((1, 2, 4), (1, 2, 4)), number)


def test_parts_add_up() -> None:
    transfer = invented((1, 3, 16, 20), tuple(range(1, 25)), layers=2)
    grid = grid_of_points(transfer, (3, 20))
    for parts in ((grid.measured, grid.predicted), (*(each.expected for each in grid.served), grid.unserved)):
        assert sum(part.share for part in parts) == pytest.approx(1.0)
        assert sum(part.share * part.mean for part in parts) == pytest.approx(grid.expected.mean)
        assert max(part.worst for part in parts) == grid.expected.worst
        assert sum(part.num for part in parts) == grid.expected.num == 48


def test_weights_are_log_uniform() -> None:
    weights = log_uniform(tuple(range(1, 1025)))
    assert weights.sum() == pytest.approx(1.0)
    assert weights[15:31].sum() == pytest.approx(weights[511:1023].sum(), rel=0.05)  # an octave is an octave


def test_candidate_points() -> None:
    assert candidate_points(1, 16) == (1, 2, 3, 4, 6, 8, 12, 16)
    assert candidate_points(5, 20) == (5, 6, 8, 12, 16, 20)
    assert candidate_points(7, 7) == (7,)


# ---- evidence


def tactics_at(count: int) -> tuple[Tactic, Tactic]:
    """The default and another legal tactic of one head."""
    problem = replace(LAYER, num_tokens=count)
    default = default_tactic(problem, TARGET)
    first = default.stage("gemm1")
    other = next(
        stage
        for stage in pool(problem, TARGET, "gemm1")
        if (stage.family, stage.tile_size) == (first.family, first.tile_size) and stage != first
    )
    return default, Tactic.of(other, default.stage("gemm2"))


def played(
    times_us: dict[int, dict[Tactic, float]], parts: dict[int, dict[Stage, float]] | None = None
) -> RecordingMeasurer:
    """A recording of whole layers, and of stages; every count has some stage, or it would not count as recorded."""
    records = []
    for count, layers in times_us.items():
        key = key_of(replace(LAYER, num_tokens=count), TARGET.device)
        some = next(iter(layers)).stage("gemm2")
        stages = (parts or {}).get(count) or {some: 10.0}
        for tactic, time_us in [*layers.items(), *stages.items()]:
            part = tactic.stage if isinstance(tactic, Stage) else "layer"
            found = Measurement(time_us, 0.99 * time_us, 1.01 * time_us, 9, Regime())
            records.append(Record(key, part, tactic, Status.OK, ENVIRONMENT.id, "run", 1.0, "sampler", "final", found))
    return RecordingMeasurer(Recording(TARGET, "planted", "", {ENVIRONMENT.id: ENVIRONMENT}, tuple(records)))


def test_measured_evidence_overrides_prediction() -> None:
    default, other = tactics_at(64)
    player = played({64: {default: 100.0, other: 120.0}, 128: {default: 250.0, other: 200.0}})
    transfer = transfer_of([LAYER], (64, 128), 64, 128, TARGET, player)
    assert transfer.counts == (64, 80, 96, 112, 128)
    regret, measured = transfer.regret[0], transfer.measured[0]
    assert regret[0, 0] == regret[1, 4] == 0.0
    assert regret[0, 4] == pytest.approx(0.25)
    assert regret[1, 0] == pytest.approx(0.2)
    assert measured[:, [0, 4]].all() and not measured[:, 1:4].any()
    alone = transfer_of([LAYER], (64, 128), 64, 128, TARGET)
    assert not alone.measured.any()
    assert alone.regret[0, 0, 4] != pytest.approx(0.25)


def test_a_point_that_was_not_recorded_is_never_measured() -> None:
    default, other = tactics_at(64)
    player = played({64: {default: 100.0, other: 120.0}, 128: {default: 250.0, other: 200.0}})
    transfer = transfer_of([LAYER], (64, 96, 128), 64, 128, TARGET, player)
    assert not transfer.measured[0, 1].any()
    assert transfer.regret[0, 1].min() == 0.0
    assert recorded_points(player, [LAYER], 1, 100) == (64,)
    assert recorded_points(player, [LAYER, replace(LAYER, local_experts=16)], 1, 100) == ()


def test_predictions_are_set_right_by_what_was_recorded() -> None:
    """Between two counts where a tactic was 30 % slower than another, the cost model may not call it the faster one."""
    default, other = tactics_at(64)
    second = default.stage("gemm2")
    parts = {
        64: {default.stage("gemm1"): 100.0, other.stage("gemm1"): 130.0, second: 10.0},
        256: {default.stage("gemm1"): 130.0, other.stage("gemm1"): 100.0, second: 10.0},
    }
    layers = {count: {Tactic.of(a, second): a_us + 10.0 for a, a_us in stages.items() if a.stage == "gemm1"}
              for count, stages in parts.items()}  # fmt: skip
    transfer = transfer_of([LAYER], (64, 256), 64, 256, TARGET, played(layers, parts))
    near = transfer.counts.index(80), transfer.counts.index(224)
    assert transfer.regret[0, 0, near[0]] == 0.0 < transfer.regret[0, 1, near[0]]
    assert transfer.regret[0, 1, near[1]] == 0.0 < transfer.regret[0, 0, near[1]]


def test_another_device_knows_nothing() -> None:
    default, other = tactics_at(64)
    player = played({64: {default: 100.0, other: 120.0}})
    chip = replace(TARGET, device="NVIDIA Other")
    assert not transfer_of([LAYER], (64,), 64, 80, chip, player).measured.any()


def test_several_layers_share_a_grid_with_the_least_sum() -> None:
    transfer = invented((1, 2, 4, 8), tuple(range(1, 9)), layers=2)
    grid = choose_grid(transfer, 3)
    sums = {
        chosen: sum(by_hand(_one_layer(transfer, row), chosen)[1] for row in range(2))
        for chosen in combinations(transfer.points, 3)
        if by_hand(transfer, chosen)[0] == 0.0
    }
    assert grid.points == min(sums, key=lambda chosen: sums[chosen])


def _one_layer(transfer: Transfer, row: int) -> Transfer:
    rows = slice(row, row + 1)
    return replace(
        transfer,
        regret=transfer.regret[rows],
        measured=transfer.measured[rows],
        missed=transfer.missed[rows],
        missed_measured=transfer.missed_measured[rows],
    )
