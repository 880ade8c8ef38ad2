"""What is known of a model's MoE layer beyond its sizes: the router, and how people deploy it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final, Literal

from fitune.errors import ShapeError
from fitune.problem import LayerShape

RouterKind = Literal["softmax", "softmax_topk", "sigmoid", "sqrt_softplus"]

ROUTER_KINDS: Final[tuple[RouterKind, ...]] = ("softmax", "softmax_topk", "sigmoid", "sqrt_softplus")
MAX_SIZE: Final = 2**31 - 1


@dataclass(frozen=True, slots=True)
class RouterSpec:
    """How a model turns router logits into experts and weights.

    `softmax` scores all experts before the top-k, `softmax_topk` only those chosen; `sigmoid` and `sqrt_softplus`
    score each expert alone. `bias` says that a learned correction is added to the scores for choosing (never for
    weighting). With `num_groups > 1` only experts of the best `topk_groups` groups can be chosen. `renormalize` makes
    a token's weights sum to 1 before they are multiplied by `scale`.
    """

    kind: RouterKind = "softmax"
    renormalize: bool = True
    bias: bool = False
    num_groups: int = 1
    topk_groups: int = 1
    scale: float = 1.0

    def check(self, num_experts: int, top_k: int) -> None:
        """Raise ShapeError where this router cannot serve a layer of `num_experts` and `top_k`."""
        groups, chosen = self.num_groups, self.topk_groups
        if groups < 1 or num_experts % groups:
            raise ShapeError(f"router: {num_experts} experts do not split into {groups} groups; use a divisor")
        if not 1 <= chosen <= groups:
            raise ShapeError(f"router: topk_groups {chosen} is impossible with {groups} groups; use 1 to {groups}")
        if top_k > chosen * (num_experts // groups):
            raise ShapeError(
                f"router: top_k {top_k} is larger than the {chosen * (num_experts // groups)} experts of "
                f"{chosen} groups; raise topk_groups"
            )
        if not (math.isfinite(self.scale) and self.scale > 0.0):
            raise ShapeError(f"router: scale is {self.scale}; it must be a finite number above 0")


@dataclass(frozen=True, slots=True)
class ModelPreset:
    """One model's MoE layer. `usual_ep` lists expert-parallel sizes people deploy it with; `note` is for people."""

    name: str
    shape: LayerShape
    router: RouterSpec
    usual_ep: tuple[int, ...] = (1,)
    note: str = ""
