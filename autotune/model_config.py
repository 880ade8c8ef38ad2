"""Reads the MoE layer out of a local Hugging Face config.json, whatever its family calls the fields."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from fitune.errors import InputError, ShapeError
from fitune.inputfile import read_input
from fitune.modelspec import MAX_SIZE, ModelPreset, RouterKind, RouterSpec
from fitune.problem import DType, LayerShape

MAX_CONFIG_BYTES: Final = 16 << 20
_NESTED: Final = ("text_config", "llm_config", "language_config", "language_model_config", "thinker_config")
_EXPERTS: Final = ("n_routed_experts", "num_local_experts", "num_experts", "moe_num_experts", "num_moe_experts")
_TOP_K: Final = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "experts_per_token",
    "top_k_experts",
    "moe_topk",
    "moe_top_k",
    "moe_k",
)
_EXPERT_WIDTH: Final = ("moe_intermediate_size", "expert_intermediate_size", "expert_ffn_hidden_size")
# In these families `intermediate_size` is the width of one expert; everywhere else it may be a dense layer's.
_WIDTH_IS_EXPERTS: Final = frozenset({"olmoe", "jamba", "flex_olmo"})
_SCORES: Final[dict[str, RouterKind]] = {
    "softmax": "softmax",
    "sigmoid": "sigmoid",
    "sqrtsoftplus": "sqrt_softplus",
    "sqrt_softplus": "sqrt_softplus",
}
_KIND_OF_TYPE: Final[dict[str, RouterKind]] = {
    "gpt_oss": "softmax_topk",
    "llama4": "sigmoid",
    "llama4_text": "sigmoid",
    "deepseek_v3": "sigmoid",
    "kimi_k2": "sigmoid",
    "glm4_moe": "sigmoid",
    "glm4v_moe_text": "sigmoid",
    "nemotron_h": "sigmoid",
    "minimax_m2": "sigmoid",
    "deepseek_v4": "sqrt_softplus",
}
_CHOOSING_BIAS: Final = frozenset(
    {"deepseek_v3", "kimi_k2", "glm4_moe", "glm4v_moe_text", "nemotron_h", "minimax_m2", "deepseek_v4"}
)
_SILU: Final = frozenset({"silu", "swish", "swiglu", "swigluoai"})
_UNGATED_ACTIVATIONS: Final = frozenset({"relu", "relu2", "relu_squared", "squared_relu"})


def read_model_config(path: str | Path, dtype: DType = "bf16") -> ModelPreset:
    """The MoE layer that a local Hugging Face `config.json` (or the folder that holds it) describes.

    A nested `text_config` is searched too. Raises InputError naming file, field and value where the file cannot be
    read or lacks a field, ShapeError where the layer cannot exist.
    """
    file = Path(path)
    if file.is_dir():
        file = file / "config.json"
    config = _Config(_text_model(_load_object(file), file), file)
    experts_field, num_experts = config.size(_EXPERTS, "number of experts")
    _, top_k = config.size(_TOP_K, "experts per token")
    width = _expert_width(config, experts_field)
    _, hidden = config.size(("hidden_size", "d_model"), "hidden size")
    notes = []
    latent = config.value("moe_latent_size", config.is_size)
    if latent is not None:
        notes.append(f"experts work on a latent of {latent}, not on the model's hidden size {hidden}")
        hidden = latent
    notes.extend(_activation_notes(config))
    try:
        shape = LayerShape(hidden, width, num_experts, top_k, dtype)
        router = _router(config)
        router.check(num_experts, top_k)
    except ShapeError as error:
        raise ShapeError(f"{file}: {error}") from None
    return ModelPreset(config.model_type or file.stem, shape, router, (1,), "; ".join(notes))


def _load_object(file: Path) -> dict[str, Any]:
    raw = read_input(file, MAX_CONFIG_BYTES, str(file), "give a model's config.json")
    try:
        loaded = json.loads(raw.decode("utf-8-sig"))
    except (ValueError, RecursionError) as error:
        raise InputError(f"{file}: not valid JSON ({_json_fault(error)}); give a model's config.json") from None
    if not isinstance(loaded, dict):
        raise InputError(f"{file}: holds {_short(loaded)}, not an object; give a model's config.json")
    return loaded


def _json_fault(error: Exception) -> str:
    match error:
        case json.JSONDecodeError():
            return f"line {error.lineno}: {error.msg}"
        case UnicodeDecodeError():
            return "its bytes are no UTF-8 text"
        case RecursionError():
            return "it is nested too deeply"
        case _:
            return "it holds a number too long to read"


def _text_model(loaded: dict[str, Any], file: Path) -> dict[str, Any]:
    """The part of the config that describes the layer with experts: the file itself, or a text model nested in it."""
    queue = [loaded]
    for _ in range(8):
        if not queue:
            break
        part = queue.pop(0)
        if any(part.get(name) is not None for name in _EXPERTS):
            return part
        queue.extend(part[name] for name in _NESTED if isinstance(part.get(name), dict))
    raise InputError(
        f"{file}: no number of experts ({', '.join(_EXPERTS)}), so this is no mixture-of-experts model; "
        "use --shape H=..,I=..,E=..,K=.. if it is one"
    )


@dataclass(frozen=True, slots=True)
class _Config:
    """Checked access to the fields of one config; every error names the file, the field and the value."""

    fields: dict[str, Any]
    file: Path

    @property
    def model_type(self) -> str:
        return self.value("model_type", lambda value: isinstance(value, str), "a text") or ""

    @staticmethod
    def is_size(value: object) -> bool:
        return isinstance(value, int) and not isinstance(value, bool) and 1 <= value <= MAX_SIZE

    def value(self, name: str, good: Callable[[object], bool], expected: str = "") -> Any:
        """The field's value, or None where it is absent or null. Raises InputError where it is not `good`."""
        value = self.fields.get(name)
        if value is not None and not good(value):
            expected = expected or f"a whole number from 1 to {MAX_SIZE}"
            raise InputError(f"{self.file}: {name} is {_short(value)}; it must be {expected}")
        return value

    def number(self, name: str, default: float) -> float:
        value = self.value(name, lambda item: isinstance(item, int | float) and not isinstance(item, bool), "a number")
        return default if value is None else float(value)

    def flag(self, name: str, default: bool) -> bool:
        value = self.value(name, lambda item: isinstance(item, bool), "true or false")
        return default if value is None else bool(value)

    def count(self, name: str, default: int) -> int:
        value = self.value(name, self.is_size)
        return default if value is None else int(value)

    def size(self, names: tuple[str, ...], what: str) -> tuple[str, int]:
        """The first of several spellings that is there; spellings that contradict one another are an error."""
        found = [(name, value) for name in names if (value := self._scalar(name)) is not None]
        if not found:
            raise InputError(f"{self.file}: no {what} ({', '.join(names)}); add it, or use --shape H=..,I=..,E=..,K=..")
        if len({value for _, value in found}) > 1:
            said = " but ".join(f"{name} is {value}" for name, value in found)
            raise InputError(f"{self.file}: {what} is contradictory: {said}; correct it, or use --shape")
        return found[0]

    def _scalar(self, name: str) -> int | None:
        """A size; a list of equal sizes, one a layer, counts as that size."""
        value: Any = self.fields.get(name)
        if isinstance(value, list) and value:
            if any(item != value[0] for item in value):
                raise InputError(f"{self.file}: {name} differs by layer ({_short(value)}); choose one with --shape")
            value = value[0]
        if value is None:
            return None
        if not self.is_size(value):
            raise InputError(f"{self.file}: {name} is {_short(value)}; it must be a whole number from 1 to {MAX_SIZE}")
        return int(value)


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:57]}..."


def _expert_width(config: _Config, experts_field: str) -> int:
    names: tuple[str, ...] = _EXPERT_WIDTH
    own = any(config.fields.get(name) is not None for name in names)
    if not own and (experts_field == "num_local_experts" or config.model_type in _WIDTH_IS_EXPERTS):
        names = ("intermediate_size",)
    return config.size(names, "width of one expert")[1]


def _activation_notes(config: _Config) -> list[str]:
    for name in ("mlp_hidden_act", "hidden_activation", "hidden_act"):
        activation = config.value(name, lambda item: isinstance(item, str), "a text")
        if activation is None or activation in _SILU:
            continue
        wider = ", whose gemm1 is twice as wide" if activation in _UNGATED_ACTIVATIONS else " of the same sizes"
        return [f"its experts use {_short(activation)}; tuned here as SwiGLU{wider}"]
    return []


def _router(config: _Config) -> RouterSpec:
    model_type = config.model_type
    kind = _KIND_OF_TYPE.get(model_type, "softmax")
    scoring = config.value(
        "scoring_func",
        lambda item: isinstance(item, str) and item in _SCORES,
        f"one of {', '.join(_SCORES)} (or use --shape, which assumes no router)",
    )
    if scoring is not None and kind != "softmax_topk":
        kind = _SCORES[scoring]
    corrected = config.fields.get("topk_method") == "noaux_tc" or model_type in _CHOOSING_BIAS
    return RouterSpec(
        kind,
        renormalize=config.flag("norm_topk_prob", not model_type.startswith("llama4")),
        bias=config.flag("use_routing_bias", corrected),
        num_groups=config.count("n_group", 1),
        topk_groups=config.count("topk_group", 1),
        scale=config.number("routed_scaling_factor", 1.0),
    )
