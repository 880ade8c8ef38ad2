"""What a kernel family answers. Subclass `Family`; only `name`, `launching` and `stages` have no default."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

from fitune.families.plain import library_terms
from fitune.problem import LayerShape, Problem
from fitune.roofline import CostTerms
from fitune.tactic import Stage, StageName
from fitune.target import Target


@dataclass(frozen=True, slots=True)
class Footprint:
    """What one program of a stage takes: shared memory in bytes, and how many fit on one SM at once."""

    shared_bytes: int
    programs_per_sm: int


@runtime_checkable
class Family(Protocol):
    """One way to run both GEMMs of the layer.

    `name` stands in tactic texts (`naive t1 ...`): a lower-case word that does not look like a tile size. `launching`
    is `package.module:function` of the torch half, imported at the first launch:

        function(stage, args: LayerArgs, ws: Workspace, out: Tensor, launch: Launcher) -> None

    gemm1 reads args.x and fills ws.hidden, gemm2 reads ws.hidden and fills out. It must not wait for the GPU, and
    where `fitune.kernels.plugin.compiles_only(launch)` is true it must compute nothing beside calling `launch`.

    An instance must be hashable and must answer alike for its whole life: answers are cached.
    """

    name: str
    launching: str
    binary_depends_on_tokens: bool = False
    """Whether compiled kernels differ between token counts of one layer."""
    sorts: bool = True
    """Whether the slots are sorted before gemm1, with the stages' tile_size.

    With the sort, row r of ws.hidden is the r-th local slot by (expert, slot); without it, row s is slot s.
    """

    def __hash__(self) -> int:
        return object.__hash__(self)

    def stages(self, shape: LayerShape, target: Target, stage: StageName) -> Iterable[Stage]:
        """Every stage to consider, legal or not: distinct, and in the same order each time."""
        ...

    def static_reason(self, stage: Stage, shape: LayerShape, target: Target) -> str:
        """Why a stage of this family cannot run or is not worth it whatever the load; empty when it may.

        A reason reads `rule: detail`. The rules `form`, `library`, `shared memory` and `tma` say that it cannot be
        launched: a stored tactic is then not used. `stage` may be any that a stored text names, not only enumerated
        ones. A stage of another form than the family's (options it does not know, another tile_size) must get a
        reason.
        """
        return ""

    def load_reason(self, stage: Stage, problem: Problem) -> str:
        """As `static_reason`, for reasons that depend on the load; asked only when that gives none."""
        return ""

    def legal_stages(self, shape: LayerShape, target: Target, stage: StageName) -> Iterable[Stage]:
        """The stages without a static reason, in the order of `stages`."""
        return (item for item in self.stages(shape, target, stage) if not self.static_reason(item, shape, target))

    def axes(self, stage: StageName) -> Mapping[str, Sequence[Any]]:
        """Values enumerated on each axis of our own kernels' GEMM, for reports; empty for a family without them."""
        return {}

    def cost(
        self, stage: Stage, problem: Problem, target: Target, expert_rows: Sequence[int] | None = None
    ) -> CostTerms:
        """The estimate of a stage; `expert_rows` [local_experts] replaces the routing profile's expectation."""
        return library_terms(stage, problem, target, expert_rows)

    def footprint(self, stage: Stage, shape: LayerShape, target: Target) -> Footprint | None:
        """What one program takes; None where the family cannot tell."""
        return None

    def bytes_in_flight(self, stage: Stage, shape: LayerShape) -> int:
        """Operand bytes one program keeps in flight: of tied tactics the one with fewer is preferred."""
        return 0

    def code_version(self) -> str:
        """Text that names code outside the compiled kernels (`torch 2.13.0`): part of the recorded binary hash."""
        return ""
