"""What a user types, read into the types the rest works with. Every mistake is an InputError of one line."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from fitune.errors import InputError, ShapeError
from fitune.problem import (
    DEFAULT_TOKENS,
    DISPATCHES,
    Dispatch,
    LayerKey,
    LayerShape,
    Problem,
    local_experts_of_ep,
)
from fitune.target import Target

MAX_TOKENS: Final = 1 << 24
_DURATION: Final = re.compile(r"(?:(\d+(?:\.\d+)?)h)?(?:(\d+(?:\.\d+)?)m)?(?:(\d+(?:\.\d+)?)s?)?")


def whole_numbers(text: str, option: str, largest: int = MAX_TOKENS) -> tuple[int, ...]:
    """Read `1,2,4`, `64:1024` (doubling from 64, ending with 1024) or a mix; sorted, each once."""
    numbers: set[int] = set()
    for item in text.split(","):
        low, colon, high = item.strip().partition(":")
        first = _whole_number(low, text, option, largest)
        last = _whole_number(high, text, option, largest) if colon else first
        if last < first:
            raise InputError(f"{option} {text!r}: the range {item.strip()!r} runs backwards; write LOW:HIGH")
        while first < last:
            numbers.add(first)
            first *= 2
        numbers.add(last)
    return tuple(sorted(numbers))


def _whole_number(item: str, text: str, option: str, largest: int) -> int:
    if not re.fullmatch(r"[0-9]{1,12}", item) or not 1 <= int(item) <= largest:
        raise InputError(
            f"{option} {text!r}: {item!r} is not a whole number from 1 to {largest}; "
            "write a list like 1,2,4 or a range like 64:1024"
        )
    return int(item)


def seconds_of(text: str, option: str = "--budget") -> float:
    """Read `90s`, `10m`, `1h30m` or plain seconds."""
    match = _DURATION.fullmatch(text.strip().lower())
    amounts = [float(part or 0) for part in match.groups()] if match else []
    total = sum(amount * unit for amount, unit in zip(amounts, (3600, 60, 1), strict=False))
    if total <= 0:
        raise InputError(f"{option} {text!r} is not a time above zero; write it like 90s, 10m or 1h30m")
    return total


@dataclass(frozen=True, slots=True)
class Layer:
    """The layer a command works on: its shape and what to call it."""

    name: str
    shape: LayerShape


def read_layer(model: str | None, model_config: Path | None, shape: str | None, dtype: str, redundant: int) -> Layer:
    """The one layer that `--model`, `--model-config` or `--shape` names."""
    from fitune.models import parse_dtype, parse_shape, preset, read_model_config
    from fitune.modelspec import MAX_SIZE

    try:
        known = parse_dtype(dtype)
    except ShapeError as error:
        raise ShapeError(f"--{error}") from error
    given = [
        name for name, value in (("--model", model), ("--model-config", model_config), ("--shape", shape)) if value
    ]
    if len(given) != 1:
        what = f"{' and '.join(given)} are given together" if given else "no layer is given"
        raise InputError(f"{what}; use one of --model NAME, --model-config PATH or --shape H=7168,I=2048,E=256,K=8")
    if shape:
        layer = Layer("layer", parse_shape(shape, known))
    elif model_config:
        found = read_model_config(model_config, known)
        layer = Layer(found.name, found.shape)
    else:
        assert model is not None
        layer = Layer(model, preset(model, known).shape)
    if redundant > MAX_SIZE - layer.shape.num_experts:
        raise ShapeError(f"--redundant {redundant} is too many; a layer has at most {MAX_SIZE} experts with them")
    return Layer(layer.name, layer.shape.with_redundant_experts(redundant)) if redundant else layer


def local_expert_counts(shape: LayerShape, ep: str | None, local_experts: str | None) -> tuple[int, ...]:
    """Local expert counts that `--ep` or `--local-experts` names, most first; EP 1 when neither is given."""
    if ep is not None and local_experts is not None:
        raise InputError(f"--ep {ep} and --local-experts {local_experts} are given together; use one of them")
    if local_experts is not None:
        counts = set(whole_numbers(local_experts, "--local-experts"))
        for count in counts:
            if count > shape.num_experts:
                raise ShapeError(f"--local-experts {count} is more than the layer's {shape.num_experts} experts")
    else:
        sizes = whole_numbers("1" if ep is None else ep, "--ep")
        counts = {count for size in sizes for count in local_experts_of_ep(shape.num_experts, size)}
    return tuple(sorted(counts, reverse=True))


def token_counts(text: str | None) -> tuple[int, ...]:
    """Token counts that `--tokens` names; 1, 2, 4 ... 16384 when it is not given."""
    return DEFAULT_TOKENS if text is None else whole_numbers(text, "--tokens")


def check_chip(problems: Iterable[Problem], target: Target) -> None:
    """Raise ShapeError where the chip does not multiply what a layer is made of."""
    for problem in problems:
        if problem.shape.scales and not target.has_fp8:
            raise ShapeError(
                f"--dtype {problem.shape.dtype}: {target.device} ({target.arch}) does not multiply fp8; "
                "use bf16 there, or a chip that does"
            )


def ep_labels(layers: Iterable[LayerKey]) -> str:
    """The EP sizes of some layers in words, smallest first; empty where there are none."""
    ordered = sorted(set(layers), key=lambda layer: -layer.local_experts)
    return ", ".join(dict.fromkeys(layer.ep_label for layer in ordered))


def read_dispatch(text: str) -> Dispatch:
    """`all_gather` or `all_to_all`, dashes allowed."""
    canonical = text.replace("-", "_")
    for known in DISPATCHES:
        if canonical == known:
            return known
    raise InputError(f"--dispatch {text!r} is not known; use one of {', '.join(DISPATCHES)}")


def grid(
    shape: LayerShape, counts: tuple[int, ...], tokens: tuple[int, ...], routing: str, dispatch: Dispatch
) -> tuple[Problem, ...]:
    """Every problem of the sweep, EP by EP, tokens ascending."""
    return tuple(Problem(shape, count, num_tokens, routing, dispatch) for count in counts for num_tokens in tokens)
