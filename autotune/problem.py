"""What is tuned: the layer's shape, the problem one rank meets, and the key a decision is filed under."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, Literal

from fitune.errors import ShapeError

DType = Literal["bf16", "fp16", "fp32", "fp8_block128", "fp8_channel", "fp8_tensor"]
"""Operands of the GEMMs. The three fp8 schemes are e4m3 with float32 scales; x and the result are bf16 there.

`fp8_block128`: weights in blocks of 128x128, activations in groups of 128 columns of a row. `fp8_channel`: one scale
for each weight row and each activation row. `fp8_tensor`: one for gate, up and down weights of an expert, and one given
for all activations. The others take activation scales from the rows at run time.
"""
Scales = Literal["", "block", "channel", "tensor"]
Activation = Literal["swiglu"]
Dispatch = Literal["all_gather", "all_to_all"]

DTYPES: Final[tuple[DType, ...]] = ("bf16", "fp16", "fp32", "fp8_block128", "fp8_channel", "fp8_tensor")
ACTIVATIONS: Final[tuple[Activation, ...]] = ("swiglu",)
DISPATCHES: Final[tuple[Dispatch, ...]] = ("all_gather", "all_to_all")
ITEM_BYTES: Final[dict[str, int]] = {
    "bf16": 2, "fp16": 2, "fp32": 4, "fp8_block128": 1, "fp8_channel": 1, "fp8_tensor": 1,
}  # fmt: skip
SCALES: Final[dict[str, Scales]] = {"fp8_block128": "block", "fp8_channel": "channel", "fp8_tensor": "tensor"}
SCALE_GROUP: Final = 128
"""Columns of a row that share a scale under `fp8_block128`, and the side of a block of weights that does."""
DEFAULT_TOKENS: Final[tuple[int, ...]] = tuple(2**i for i in range(15))
DEFAULT_ROUTING: Final = "random"


def weight_scale_shapes(scales: Scales, hidden_size: int, intermediate_size: int) -> tuple[tuple[int, ...], ...]:
    """Shapes of one expert's scales of w13 and w2; gate blocks before up blocks. Empty where nothing is scaled."""
    inner, outer = -(-intermediate_size // SCALE_GROUP), -(-hidden_size // SCALE_GROUP)
    if scales == "block":
        return (2 * inner, outer), (outer, inner)
    if scales == "channel":
        return (2 * intermediate_size,), (hidden_size,)
    return ((2,), (1,)) if scales == "tensor" else ()


def _positive(owner: str, **values: int) -> None:
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ShapeError(f"{owner}: {name} is {value!r}; it must be a whole number of 1 or more")


def _one_of(owner: str, name: str, value: object, allowed: tuple[str, ...]) -> None:
    if value not in allowed:
        raise ShapeError(f"{owner}: {name} {value!r} is not known; use one of {', '.join(allowed)}")


@dataclass(frozen=True, slots=True)
class LayerShape:
    """One MoE layer, as every rank sees it.

    `num_experts` counts the experts that router ids point at: redundant (replicated) experts are experts of their
    own. `intermediate_size` is one expert's width after the activation, so `w13` has `2 * intermediate_size` rows.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    dtype: DType = "bf16"
    activation: Activation = "swiglu"

    def __post_init__(self) -> None:
        _positive(
            "layer shape",
            hidden_size=self.hidden_size,
            intermediate_size=self.intermediate_size,
            num_experts=self.num_experts,
            top_k=self.top_k,
        )
        _one_of("layer shape", "dtype", self.dtype, DTYPES)
        _one_of("layer shape", "activation", self.activation, ACTIVATIONS)
        if self.top_k > self.num_experts:
            raise ShapeError(
                f"layer shape: top_k {self.top_k} is larger than num_experts {self.num_experts}; "
                "a token cannot choose more experts than there are"
            )

    @property
    def item_bytes(self) -> int:
        """Bytes of one element of a GEMM's operands."""
        return ITEM_BYTES[self.dtype]

    @property
    def io_bytes(self) -> int:
        """Bytes of one element of x, of the result, and of what passes between kernels unquantised."""
        return max(2, self.item_bytes)

    @property
    def scales(self) -> Scales:
        """How operands are scaled; empty where they are not quantised."""
        return SCALES.get(self.dtype, "")

    @property
    def expert_bytes(self) -> int:
        """Bytes of one expert's weights, both GEMMs."""
        return 3 * self.hidden_size * self.intermediate_size * self.item_bytes

    def with_redundant_experts(self, count: int) -> LayerShape:
        """The same layer with `count` replicated experts beside its own."""
        if count < 0:
            raise ShapeError(f"redundant experts is {count}; it must be 0 or more")
        return replace(self, num_experts=self.num_experts + count)


@dataclass(frozen=True, slots=True)
class Problem:
    """One call of the layer on one rank: what a tactic is chosen for.

    The rank holds experts `[local_expert_offset, local_expert_offset + local_experts)`. `num_tokens` are the rows
    that enter the call: all tokens of the expert-parallel group under `all_gather`, the received ones under
    `all_to_all` (each of which has at least one slot here).
    """

    shape: LayerShape
    local_experts: int
    num_tokens: int
    routing: str = DEFAULT_ROUTING
    dispatch: Dispatch = "all_gather"
    local_expert_offset: int = 0

    def __post_init__(self) -> None:
        _positive("problem", local_experts=self.local_experts)
        _one_of("problem", "dispatch", self.dispatch, DISPATCHES)
        if self.num_tokens < 0:
            raise ShapeError(f"problem: num_tokens is {self.num_tokens}; it must be 0 or more")
        if self.local_expert_offset < 0 or self.local_expert_offset + self.local_experts > self.shape.num_experts:
            raise ShapeError(
                f"problem: experts [{self.local_expert_offset}, {self.local_expert_offset + self.local_experts}) "
                f"do not fit in the layer's {self.shape.num_experts}; lower local_experts or the offset"
            )

    @property
    def num_slots(self) -> int:
        """(token, expert) pairs chosen by the router, local or not."""
        return self.num_tokens * self.shape.top_k

    @property
    def max_routed_rows(self) -> int:
        """The most rows that can fall on local experts: what buffers are sized for."""
        return self.num_tokens * min(self.shape.top_k, self.local_experts)

    @property
    def expected_routed_rows(self) -> float:
        """Expected rows on local experts under uniform routing over *all* experts."""
        shape = self.shape
        per_token = shape.top_k * self.local_experts / shape.num_experts
        if self.dispatch == "all_to_all":
            per_token /= 1.0 - self._probability_no_local_slot()
        return self.num_tokens * per_token

    @property
    def expected_rows_per_expert(self) -> float:
        """Expected rows of one local expert. Under all-gather EP does not change it: tokens * top_k / experts."""
        return self.expected_routed_rows / self.local_experts

    @property
    def expected_active_experts(self) -> float:
        """Expected number of local experts with at least one row, uniform routing."""
        rows = self.expected_rows_per_expert
        if self.num_tokens == 0:
            return 0.0
        chance = min(1.0, rows / self.num_tokens)
        idle = (1.0 - chance) ** self.num_tokens
        return self.local_experts * (1.0 - idle)

    def _probability_no_local_slot(self) -> float:
        foreign = self.shape.num_experts - self.local_experts
        if foreign < self.shape.top_k:
            return 0.0
        return math.comb(foreign, self.shape.top_k) / math.comb(self.shape.num_experts, self.shape.top_k)

    @property
    def ep_label(self) -> str:
        """`EP 8` where the experts split evenly, `L=36` where they do not."""
        return ep_label(self.shape.num_experts, self.local_experts)


def ep_label(num_experts: int, local_experts: int) -> str:
    """How reports name an expert-parallel size."""
    if num_experts % local_experts == 0:
        return f"EP {num_experts // local_experts}"
    return f"L={local_experts}"


@dataclass(frozen=True, slots=True, order=True)
class LayerKey:
    """Everything a look-up must match apart from the token count.

    Versions, clocks and hashes are evidence beside an entry, not part of it.
    """

    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int
    dtype: DType
    activation: Activation
    local_experts: int
    dispatch: Dispatch
    routing: str
    device: str

    @property
    def shape(self) -> LayerShape:
        return LayerShape(
            self.hidden_size, self.intermediate_size, self.num_experts, self.top_k, self.dtype, self.activation
        )

    @property
    def ep_label(self) -> str:
        return ep_label(self.num_experts, self.local_experts)


@dataclass(frozen=True, slots=True, order=True)
class Key:
    """What one decision is filed under."""

    layer: LayerKey
    num_tokens: int

    def problem(self) -> Problem:
        """The problem this key stands for, on the rank that holds the first experts."""
        layer = self.layer
        return Problem(layer.shape, layer.local_experts, self.num_tokens, layer.routing, layer.dispatch)


def layer_key(problem: Problem, device: str) -> LayerKey:
    """The one place where a layer key is built: tuner, store, dispatch and reports all call it."""
    shape = problem.shape
    return LayerKey(
        shape.hidden_size,
        shape.intermediate_size,
        shape.num_experts,
        shape.top_k,
        shape.dtype,
        shape.activation,
        problem.local_experts,
        problem.dispatch,
        problem.routing,
        device,
    )


def key_of(problem: Problem, device: str) -> Key:
    """The key under which a decision for `problem` on `device` is filed."""
    return Key(layer_key(problem, device), problem.num_tokens)


def local_experts_of_ep(num_experts: int, ep_size: int) -> tuple[int, ...]:
    """Local expert counts that ranks of an EP group of `ep_size` hold: one value, or two where it splits unevenly."""
    if ep_size < 1 or ep_size > num_experts:
        raise ShapeError(f"EP size {ep_size} is impossible with {num_experts} experts; use 1 to {num_experts}")
    low = num_experts // ep_size
    return (low,) if num_experts % ep_size == 0 else (low + 1, low)
