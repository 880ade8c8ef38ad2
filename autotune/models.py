"""Which layer is tuned: presets of well-known models, a reader of Hugging Face config.json files, and raw numbers."""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from fitune.errors import InputError, ShapeError
from fitune.model_config import read_model_config
from fitune.modelspec import MAX_SIZE, ROUTER_KINDS, ModelPreset, RouterKind, RouterSpec
from fitune.problem import DTYPES, DType, LayerShape

__all__ = [
    "PRESETS",
    "ROUTER_KINDS",
    "ModelPreset",
    "RouterKind",
    "RouterSpec",
    "parse_dtype",
    "parse_shape",
    "preset",
    "read_model_config",
]

_UNGATED: Final = "its experts use a squared ReLU without a gate; tuned here as SwiGLU, whose gemm1 is twice as wide"
_GROUPED: Final = RouterSpec("sigmoid", bias=True, num_groups=8, topk_groups=4, scale=2.5)


def _row(
    name: str,
    sizes: tuple[int, int, int, int],
    router: RouterSpec,
    usual_ep: tuple[int, ...],
    note: str,
) -> ModelPreset:
    router.check(sizes[2], sizes[3])
    return ModelPreset(name, LayerShape(*sizes), router, usual_ep, note)


# name, (hidden, intermediate, experts, top-k), router, usual EP sizes, note
_ROWS: Final = (
    _row("deepseek-v3", (7168, 2048, 256, 8), _GROUPED, (8, 16, 32), "published in fp8 128x128; 1 shared expert"),
    _row("deepseek-r1", (7168, 2048, 256, 8), _GROUPED, (8, 16, 32), "published in fp8 128x128; 1 shared expert"),
    _row("deepseek-v3.2", (7168, 2048, 256, 8), _GROUPED, (8, 16, 32), "published in fp8 128x128; 1 shared expert"),
    _row(
        "kimi-k2",
        (7168, 2048, 384, 8),
        RouterSpec("sigmoid", bias=True, scale=2.827),
        (16,),
        "published in fp8 128x128; 1 shared expert",
    ),
    _row(
        "deepseek-v4-flash",
        (4096, 2048, 256, 6),
        RouterSpec("sqrt_softplus", bias=True, scale=1.5),
        (4, 8),
        "published in fp8 128x128 with fp4 experts; 1 shared expert",
    ),
    _row("qwen3-30b-a3b", (2048, 768, 128, 8), RouterSpec(), (1, 4), "published in bf16 and fp8"),
    _row("qwen3-235b-a22b", (4096, 1536, 128, 8), RouterSpec(), (8,), "published in bf16 and fp8"),
    _row("qwen3-next-80b", (2048, 512, 512, 10), RouterSpec(), (2, 4), "published in bf16 and fp8; 1 shared expert"),
    _row("qwen3-coder-480b", (6144, 2560, 160, 8), RouterSpec(), (8,), "published in bf16 and fp8"),
    _row(
        "glm-5",
        (6144, 2048, 256, 8),
        RouterSpec("sigmoid", bias=True, scale=2.5),
        (8,),
        "published in bf16 and fp8; 1 shared expert",
    ),
    _row("minimax-m2.5", (3072, 1536, 256, 8), RouterSpec("sigmoid", bias=True), (4, 8), "published in fp8"),
    _row("mixtral-8x7b", (4096, 14336, 8, 2), RouterSpec(), (1, 2), "published in bf16"),
    _row("mixtral-8x22b", (6144, 16384, 8, 2), RouterSpec(), (1, 2), "published in bf16"),
    _row(
        "llama4-maverick",
        (5120, 8192, 128, 1),
        RouterSpec("sigmoid", renormalize=False),
        (1, 8),
        "published in bf16 and fp8; 1 shared expert; the sigmoid of the chosen logit scales the expert's input",
    ),
    _row(
        "llama4-scout",
        (5120, 8192, 16, 1),
        RouterSpec("sigmoid", renormalize=False),
        (1, 8),
        "published in bf16 and fp8; 1 shared expert; the sigmoid of the chosen logit scales the expert's input",
    ),
    _row(
        "gpt-oss-120b",
        (2880, 2880, 128, 4),
        RouterSpec("softmax_topk"),
        (1, 2, 4, 8),
        "published in mxfp4; its SwiGLU is clamped and its experts have biases, which is not modelled",
    ),
    _row(
        "nemotron-3-nano",
        (2688, 1856, 128, 6),
        RouterSpec("sigmoid", bias=True, scale=2.5),
        (2, 4, 8),
        f"published in bf16 and fp8; 1 shared expert; {_UNGATED}",
    ),
    _row(
        "nemotron-3-super",
        (4096, 2688, 512, 22),
        RouterSpec("sigmoid", bias=True, scale=5.0),
        (2, 4, 8),
        f"published in bf16 and fp8; 1 shared expert; {_UNGATED}",
    ),
    _row(
        "gemma-4-26b-a4b",
        (2816, 704, 128, 8),
        RouterSpec(),
        (1,),
        "published in bf16 and fp8; its gate uses GELU, tuned here as SwiGLU of the same sizes",
    ),
)

PRESETS: Final[Mapping[str, ModelPreset]] = MappingProxyType({row.name: row for row in _ROWS})


def preset(name: str, dtype: DType = "bf16") -> ModelPreset:
    """A well-known model by name (case and `_` for `-` do not matter). Raises InputError with close names."""
    known = PRESETS.get(name.strip().lower().replace("_", "-"))
    if known is None:
        close = difflib.get_close_matches(name.lower(), PRESETS, n=3, cutoff=0.5)
        hint = f"did you mean {' or '.join(close)}?" if close else f"known: {', '.join(PRESETS)}"
        raise InputError(f"model {name!r} is not known; {hint} (or give --model-config or --shape)")
    return replace(known, shape=replace(known.shape, dtype=dtype))


_DTYPE_NICKNAMES: Final[Mapping[str, DType]] = MappingProxyType({"fp8": "fp8_block128"})


def parse_dtype(text: str) -> DType:
    """A layer's dtype as people write it: its name, or `fp8` for `fp8_block128`. Raises ShapeError."""
    for name in DTYPES:
        if text == name:
            return name
    if text not in _DTYPE_NICKNAMES:
        raise ShapeError(f"dtype {text!r} is not known; use one of {', '.join(DTYPES)} (fp8 is short for fp8_block128)")
    return _DTYPE_NICKNAMES[text]


_SHAPE_LETTERS: Final[dict[str, str]] = {
    "H": "hidden_size",
    "I": "intermediate_size",
    "E": "num_experts",
    "K": "top_k",
}


def parse_shape(text: str, dtype: DType = "bf16") -> LayerShape:
    """Read `H=7168,I=2048,E=256,K=8`: hidden and intermediate size, experts, top-k, in any order.

    Raises InputError where the text does not parse, ShapeError where no such layer can exist.
    """
    usage = "write it like H=7168,I=2048,E=256,K=8"
    sizes: dict[str, int] = {}
    for item in text.split(","):
        letter, equals, digits = (part.strip() for part in item.partition("="))
        field = _SHAPE_LETTERS.get(letter.upper())
        if not equals or field is None:
            raise InputError(f"shape {text!r}: {item.strip()!r} is not one of H=, I=, E=, K=; {usage}")
        if field in sizes:
            raise InputError(f"shape {text!r}: {letter.upper()} stands there twice; {usage}")
        if re.fullmatch(r"[0-9]{1,10}", digits) is None or int(digits) > MAX_SIZE:
            raise InputError(f"shape {text!r}: {digits!r} is not a whole number from 1 to {MAX_SIZE}; {usage}")
        sizes[field] = int(digits)
    missing = [letter for letter, field in _SHAPE_LETTERS.items() if field not in sizes]
    if missing:
        raise InputError(f"shape {text!r}: {', '.join(missing)} is missing; {usage}")
    hidden, intermediate, num_experts, top_k = (sizes[field] for field in _SHAPE_LETTERS.values())
    return LayerShape(hidden, intermediate, num_experts, top_k, dtype)
