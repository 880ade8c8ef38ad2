"""What the results page is made of: the cells of one search run, each beside its peers and the physical floor."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fitune.cache import Recording
from fitune.diff import Side
from fitune.problem import LayerShape, Problem
from fitune.record import Decision, Measurement
from fitune.routing import local_rows, representative_ids

TENSOR_FLOPS_PER_US: Final = 790e6
DRAM_BYTES_PER_US: Final = 4.70e6
PEER_COLUMNS_AFTER: Final = "dense_cublas_us"
SAME_LOAD: Final = 0.01
"""Floors closer than this count as the same load."""


@dataclass(frozen=True, slots=True)
class Load:
    """What one draw of the router puts on the rank; `touched` are tokens with at least one local slot."""

    rows: int
    active: int
    touched: float


@dataclass(frozen=True, slots=True)
class PeerCell:
    """One line of the peers' table: the fastest peer of a cell and all of them, in µs."""

    load: Load
    floor_us: float
    best: str
    best_us: float
    times_us: Mapping[str, float]


@dataclass(frozen=True, slots=True)
class ResultCell:
    """One (tokens, EP) cell: the decision of the run and the best peer, each with the floor of its own load."""

    ep: int
    tokens: int
    decision: Decision
    measurement: Measurement
    load: Load
    floor_us: float
    peer: PeerCell
    peer_at_our_load_us: float

    @property
    def us(self) -> float:
        return self.measurement.median_us

    @property
    def ratio(self) -> float:
        """Our time over the best peer's."""
        return self.us / self.peer.best_us

    @property
    def over_floor(self) -> float:
        return self.us / self.floor_us

    @property
    def peer_over_floor(self) -> float:
        return self.peer.best_us / self.peer.floor_us

    @property
    def ratio_over_floor(self) -> float:
        """The same with each time first divided by the floor of its own load."""
        return self.over_floor / self.peer_over_floor

    @property
    def ratio_at_our_load(self) -> float:
        return self.us / self.peer_at_our_load_us

    @property
    def same_load(self) -> bool:
        return abs(self.floor_us / self.peer.floor_us - 1.0) <= SAME_LOAD

    @property
    def gain(self) -> float:
        """How much longer the default takes: 0.1 is 10 %."""
        return self.decision.default_us / self.us - 1.0

    @property
    def gemms_us(self) -> float:
        """Sum of both GEMM parts: gather or permute, activation and combine included, the sort not."""
        parts = dict(self.measurement.parts_us)
        return parts["gemm1"] + parts["gemm2"]


def floor_us(shape: LayerShape, tokens: int, load: Load) -> float:
    """The least time at 790 TFLOP/s and 4.70 TB/s, whichever takes longer.

    Bytes: the weights of every active expert, the tokens that have a local slot, the hidden rows written and read, and
    the output of all tokens, each once.
    """
    flops = 6.0 * load.rows * shape.hidden_size * shape.intermediate_size
    ends = (load.touched + tokens) * shape.hidden_size
    hidden = 2 * load.rows * shape.intermediate_size
    moved = load.active * shape.expert_bytes + (ends + hidden) * shape.item_bytes
    return max(flops / TENSOR_FLOPS_PER_US, moved / DRAM_BYTES_PER_US)


def drawn_load(problem: Problem, seed: int) -> Load:
    """The load that fitune measures a problem with."""
    ids = representative_ids(problem, seed)
    rows = local_rows(ids, problem.local_expert_offset, problem.local_experts)
    local = (ids >= problem.local_expert_offset) & (ids < problem.local_expert_offset + problem.local_experts)
    return Load(int(rows.sum()), int((rows > 0).sum()), float(local.any(axis=1).sum()))


def read_peers(path: Path) -> dict[tuple[int, int], PeerCell]:
    """The peers' table by (EP, tokens). Of their draw only totals are known: `touched` is its expected value."""
    found = {}
    with path.open(newline="") as file:
        for line in csv.DictReader(file):
            ep, tokens = int(line["ep"]), int(line["tokens"])
            names = list(line)
            peers = [name for name in names[names.index(PEER_COLUMNS_AFTER) + 1 :] if line[name]]
            touched = tokens * (1.0 - (1.0 - 1.0 / ep) ** 8)
            found[ep, tokens] = PeerCell(
                Load(int(line["routed_rows"]), int(line["active_experts"]), touched),
                float(line["floor_us"]),
                line["best_peer"],
                float(line["best_us"]),
                {name.removesuffix("_us"): float(line[name]) for name in peers},
            )
    return found


def read_cells(recording: Recording, peers: Mapping[tuple[int, int], PeerCell]) -> list[ResultCell]:
    """The run's cells, EP 1 first, tokens rising."""
    cells = []
    for decision in recording.decisions:
        problem = decision.key.problem()
        member = decision.member(decision.chosen)
        assert member is not None, "a decision holds its choice's time"
        load = drawn_load(problem, member.measurement.regime.seed)
        ep, tokens = problem.shape.num_experts // problem.local_experts, problem.num_tokens
        ours = floor_us(problem.shape, tokens, load)
        of_ep = [(each.floor_us, each.best_us) for (size, _), each in peers.items() if size == ep]
        at_ours = interpolated(ours, of_ep)
        cells.append(ResultCell(ep, tokens, decision, member.measurement, load, ours, peers[ep, tokens], at_ours))
    return sorted(cells, key=lambda cell: (cell.ep, cell.tokens))


def interpolated(at: float, points: Iterable[tuple[float, float]]) -> float:
    """The value at `at` on the straight lines between points, beyond their ends that of the last point, scaled."""
    known = sorted(points)
    if at <= known[0][0] or at >= known[-1][0]:
        x, y = known[0] if at <= known[0][0] else known[-1]
        return y * at / x
    above = next(index for index, (x, _) in enumerate(known) if x >= at)
    (x0, y0), (x1, y1) = known[above - 1], known[above]
    return y1 if x1 == x0 else y0 + (y1 - y0) * (at - x0) / (x1 - x0)


def geometric_mean(values: Iterable[float]) -> float:
    logs = [math.log(value) for value in values]
    return math.exp(sum(logs) / len(logs))


def side_of_ep(recording: Recording, ep: int) -> Side:
    """What the run holds for one EP size, as a side of a diff."""
    local = next(iter(recording.decisions)).key.layer.num_experts // ep
    decisions = {item.key: item for item in recording.decisions if item.key.layer.local_experts == local}
    records = [item for item in recording.records if item.key.layer.local_experts == local]
    return Side(f"EP {ep}", decisions, records, recording.environments)
