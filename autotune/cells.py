"""One decision as reports show it: a cell of the grid tokens x EP, with its time, its default and its state."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Literal

from fitune.models import PRESETS
from fitune.problem import Key, LayerKey
from fitune.record import Decision, Measurement
from fitune.target import Environment

State = Literal["tuned", "tie", "default", "stale"]


@dataclass(frozen=True, slots=True)
class Cell:
    """A decision with what reports say about it.

    `state` is the decision's own, or `stale` when `stale_because` says why its evidence no longer counts here.
    """

    decision: Decision
    environment: Environment | None
    stale_because: str = ""

    @property
    def key(self) -> Key:
        return self.decision.key

    @property
    def tokens(self) -> int:
        return self.key.num_tokens

    @property
    def state(self) -> State:
        return "stale" if self.stale_because else self.decision.state

    @property
    def measurement(self) -> Measurement | None:
        """The chosen tactic's interleaved time; None where the store does not hold it."""
        member = self.decision.member(self.decision.chosen)
        return member.measurement if member is not None else None

    @property
    def against_default(self) -> float | None:
        """time(chosen) / time(default) - 1 of the same interleaved run: negative where the choice is faster."""
        measurement = self.measurement
        if measurement is None or self.decision.default_us <= 0.0:
            return None
        return measurement.median_us / self.decision.default_us - 1.0


def cells_of(decisions: Iterable[Decision], environments: Mapping[str, Environment], kernels: str) -> list[Cell]:
    """Decisions as cells, sorted by layer, EP and tokens. `kernels` is the hash of this installation's kernels."""
    cells = [
        Cell(decision, environments.get(decision.environment_id), _staleness(decision, environments, kernels))
        for decision in decisions
    ]
    return sorted(cells, key=lambda cell: (grid_of(cell.key.layer), -cell.key.layer.local_experts, cell.tokens))


def _staleness(decision: Decision, environments: Mapping[str, Environment], kernels: str) -> str:
    environment = environments.get(decision.environment_id)
    if environment is None:
        return "the store does not say what it was measured under"
    if environment.kernels != kernels:
        return f"measured with kernels {environment.kernels or 'unknown'}, this fitune has {kernels}"
    return ""


def grid_of(layer: LayerKey) -> tuple[str, ...]:
    """What one grid of cells has in common: everything of the layer key but the local experts, as text."""
    return (layer_name(layer), *layer_facts(layer))


def layer_facts(layer: LayerKey) -> tuple[str, ...]:
    """The layer in words, for a heading."""
    return (
        f"hidden {layer.hidden_size}",
        f"intermediate {layer.intermediate_size}",
        f"{layer.num_experts} experts, top-{layer.top_k}",
        layer.dtype,
        layer.routing,
        layer.dispatch,
        layer.device,
    )


def layer_name(layer: LayerKey) -> str:
    """A known model's name for the layer's sizes; `layer` where none has them."""
    sizes = (layer.hidden_size, layer.intermediate_size, layer.num_experts, layer.top_k)
    for name, preset in PRESETS.items():
        shape = preset.shape
        if sizes == (shape.hidden_size, shape.intermediate_size, shape.num_experts, shape.top_k):
            return name
    return "layer"


def cell_json(cell: Cell) -> dict[str, object]:
    """A cell as plain JSON values; times in µs, null where unknown."""
    decision, measurement = cell.decision, cell.measurement
    return {
        "tokens": cell.tokens,
        "ep": cell.key.layer.ep_label,
        "local_experts": cell.key.layer.local_experts,
        "tactic": str(decision.chosen),
        "median_us": measurement.median_us if measurement else None,
        "ci_low_us": measurement.ci_low_us if measurement else None,
        "ci_high_us": measurement.ci_high_us if measurement else None,
        "default": str(decision.default),
        "default_us": decision.default_us,
        "against_default": cell.against_default,
        "state": cell.state,
        "stale_because": cell.stale_because,
        "noise": decision.noise,
        "tied": [str(member.tactic) for member in decision.members if member.tied],
        "reason": decision.reason,
        "origin": decision.origin,
        "environment": decision.environment_id,
        "layer": asdict(cell.key.layer),
    }
