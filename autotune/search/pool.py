"""The enumerated legal stages of one key and GEMM, as Optuna parameters and as numbers for a model."""

from __future__ import annotations

import math
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, Final, NamedTuple

import numpy as np
import optuna
from numpy.typing import NDArray
from optuna.distributions import CategoricalDistribution

from fitune.tactic import GemmTactic, LibraryGemm, Stage

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Value = str | int | bool

FEATURES: Final[tuple[str, ...]] = (
    "tile_size",
    "block_n",
    "block_k",
    "num_stages",
    "num_warps",
    "group_m",
    "persistent",
    "programs",
    "flatten",
    "tma",
    "swap",
    "pdl",
    "tail",
    "permute",
    "separate",
    "fused_finalize",
    "separate_quantize",
    "family",
)


GEMM_COLUMNS: Final = 12
"""Features of our GEMM's own fields, behind tile_size."""


class Head(NamedTuple):
    """What both GEMMs of a tactic must share."""

    family: str
    tile_size: int


def head_of(stage: Stage) -> Head:
    return Head(stage.family, stage.tile_size)


def stage_params(stage: Stage) -> dict[str, Value]:
    """The stage as one Optuna parameter per field; `loop` joins schedule, programs per SM and flatten.

    A library's GEMM has its options as `loop` and nothing in the other fields of a GEMM, so that pools may mix both.
    """
    gemm = stage.gemm
    params: dict[str, Value] = {"family": stage.family, "tile_size": stage.tile_size}
    if isinstance(gemm, LibraryGemm):
        params |= dict.fromkeys(("block_n", "block_k", "group_m", "num_warps", "num_stages"), 0)
        params |= {"loop": str(gemm), "loads": "", "swap_ab": False, "pdl": False, "tail": 0}
    else:
        loop = "grid" if gemm.schedule == "grid" else f"p{gemm.programs_per_sm}{'f' if gemm.flatten else ''}"
        params |= {
            "block_n": gemm.block_n,
            "block_k": gemm.block_k,
            "group_m": gemm.group_m,
            "num_warps": gemm.num_warps,
            "num_stages": gemm.num_stages,
            "loop": loop,
            "loads": gemm.loads,
            "swap_ab": gemm.swap_ab,
            "pdl": gemm.pdl,
            "tail": gemm.tail,
        }
    params["quantize"] = stage.quantize
    for name, value in (("gather", stage.gather), ("activation", stage.activation), ("finalize", stage.finalize)):
        if value is not None:
            params[name] = value
    return params


def stage_features(stage: Stage) -> list[float]:
    """Numbers in units of about one natural step each, in the order of FEATURES; they tell any two stages apart."""
    gemm = stage.gemm
    numbers = _option_features(gemm) if isinstance(gemm, LibraryGemm) else _gemm_features(gemm)
    places = (
        stage.gather == "permute",
        stage.activation == "separate",
        stage.finalize == "fused",
        stage.quantize == "separate",
    )
    return [math.log2(stage.tile_size), *numbers, *map(float, places), _family_feature(stage)]


def _gemm_features(gemm: GemmTactic) -> list[float]:
    persistent = gemm.schedule == "persistent"
    return [
        math.log2(gemm.block_n),
        math.log2(gemm.block_k),
        float(gemm.num_stages),
        math.log2(gemm.num_warps),
        math.log2(gemm.group_m) / 3.0,
        float(persistent),
        math.log2(gemm.programs_per_sm) if persistent else 0.0,
        float(gemm.flatten),
        float(gemm.loads == "tma"),
        float(gemm.swap_ab),
        float(gemm.pdl),
        math.log2(gemm.tail),
    ]


def _option_features(gemm: LibraryGemm) -> list[float]:
    """A library's options in the columns of our GEMM's fields, which mean nothing for it; the last ones add up."""
    columns = [0.0] * GEMM_COLUMNS
    for place, (_, value) in enumerate(gemm.options):
        step = _spread(value) if isinstance(value, str) else math.copysign(math.log2(1 + abs(value)), value)
        columns[min(place, GEMM_COLUMNS - 1)] += step
    return columns


def _family_feature(stage: Stage) -> float:
    """Tile 0, gemv 3, others beyond: near one another, and apart by name and by which options they have."""
    known = {"tile": 0.0, "gemv": 3.0}
    if stage.family in known:
        return known[stage.family]
    names = [name for name, _ in stage.gemm.options] if isinstance(stage.gemm, LibraryGemm) else []
    return 6.0 + _spread(" ".join([stage.family, *names]))


def _spread(text: str) -> float:
    """A number from 0 to 2 for a text, the same in every process."""
    return zlib.crc32(text.encode()) / 2.0**31


class StagePool:
    """Distinct stages of one GEMM, in a fixed order. `head_index` [len(pool)] says which of `heads` a stage has."""

    def __init__(self, stages: Sequence[Stage]) -> None:
        self.stages: tuple[Stage, ...] = tuple(dict.fromkeys(stages))
        self.features: Floats = np.array([stage_features(stage) for stage in self.stages], dtype=np.float64).reshape(
            len(self.stages), len(FEATURES)
        )
        self.params: tuple[dict[str, Value], ...] = tuple(stage_params(stage) for stage in self.stages)
        names = list(self.params[0]) if self.params else []
        self.distributions: dict[str, CategoricalDistribution] = {
            name: CategoricalDistribution(sorted({params[name] for params in self.params})) for name in names
        }
        members = [head_of(stage) for stage in self.stages]
        self.heads: tuple[Head, ...] = tuple(dict.fromkeys(members))
        numbers = {head: number for number, head in enumerate(self.heads)}
        self.head_index: Ints = np.array([numbers[head] for head in members], dtype=np.int64)
        self._by_stage = {stage: index for index, stage in enumerate(self.stages)}
        self._by_params = {tuple(params.values()): index for index, params in enumerate(self.params)}
        assert len(self._by_params) == len(self.stages), "two stages have the same parameters"

    def __len__(self) -> int:
        return len(self.stages)

    def __contains__(self, stage: object) -> bool:
        return stage in self._by_stage

    def index(self, stage: Stage) -> int | None:
        """Position of a stage, or None where it is no member."""
        return self._by_stage.get(stage)

    def index_of_params(self, params: Mapping[str, Value]) -> int | None:
        """Position of the stage with exactly these parameters, or None: an illegal combination, or incomplete."""
        return self._by_params.get(tuple(params[name] for name in self.distributions if name in params))

    def matching(self, params: Mapping[str, Value]) -> list[int]:
        """Positions whose parameters agree with the given ones, which may be only some."""
        wanted = {name: value for name, value in params.items() if name in self.distributions}
        if not wanted:
            return list(range(len(self)))
        return [
            index for index, own in enumerate(self.params) if all(own[name] == value for name, value in wanted.items())
        ]


def suggest_stage(trial: optuna.Trial, pool: StagePool) -> Stage:
    """The stage a trial stands for: suggests every field; for use in an objective with one of our samplers."""
    params: dict[str, Any] = {
        name: trial.suggest_categorical(name, dist.choices) for name, dist in pool.distributions.items()
    }
    index = pool.index_of_params(params)
    assert index is not None, f"the study's sampler left the pool: {params}"
    return pool.stages[index]
