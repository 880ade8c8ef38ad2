"""The options that several commands share, each worded once."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer


def whole_number(least: int) -> Callable[[object], int]:
    """A reader of one whole number; its refusal names the value."""

    def read(text: object) -> int:
        if not re.fullmatch(r"[0-9]{1,18}", str(text)) or int(str(text)) < least:
            raise typer.BadParameter(f"{text!r} is not a whole number of {least} or more")
        return int(str(text))

    return read


def some_path(text: object) -> Path:
    """A path to write to; an empty one, such as a variable that was never set makes, would be the current folder."""
    if not str(text).strip():
        raise typer.BadParameter("it is empty; name a path")
    return Path(str(text))


Model = Annotated[str | None, typer.Option("--model", metavar="NAME", help="A known model, such as deepseek-v3.")]
ModelConfig = Annotated[
    Path | None, typer.Option("--model-config", metavar="PATH", help="A local Hugging Face config.json.")
]
Shape = Annotated[str | None, typer.Option("--shape", metavar="TEXT", help="Raw numbers: H=7168,I=2048,E=256,K=8.")]
DTypeName = Annotated[
    str,
    typer.Option(
        "--dtype",
        metavar="TYPE",
        help="Of weights and activations: bf16, fp16, fp32, fp8_block128 (or fp8: one scale for 128x128 weights and "
        "for 128 values of a row), fp8_channel (for a row of either) or fp8_tensor (for all of either).",
    ),
]
Ep = Annotated[
    str | None, typer.Option("--ep", metavar="LIST", help="Expert-parallel sizes, such as 1,8,16.  [default: 1]")
]
LocalExperts = Annotated[
    str | None, typer.Option("--local-experts", metavar="LIST", help="Experts a rank holds, instead of --ep.")
]
Redundant = Annotated[
    int,
    typer.Option("--redundant", metavar="R", parser=whole_number(0), help="Replicated experts beside the model's own."),
]
Tokens = Annotated[
    str | None,
    typer.Option("--tokens", metavar="LIST", help="Token counts: 1,2,4 or 64:1024 (doubling).  [default: 1:16384]"),
]
TokensOrAuto = Annotated[
    str | None,
    typer.Option(
        "--tokens",
        metavar="LIST|auto:B",
        help="Token counts: 1,2,4 or 64:1024 (doubling); or auto:B, auto:B:LOW-HIGH: the B of the range (1-16384) that "
        "are expected to serve it best.  [default: 1:16384]",
    ),
]
EpFilter = Annotated[str | None, typer.Option("--ep", metavar="LIST", help="Only these expert-parallel sizes.")]
TokensFilter = Annotated[
    str | None, typer.Option("--tokens", metavar="LIST", help="Only these token counts: 1,2,4 or 64:1024.")
]
Routing = Annotated[
    str,
    typer.Option("--routing", metavar="TEXT", help="balanced, random, zipf:S, or file:PATH with a histogram."),
]
DispatchKind = Annotated[
    str, typer.Option("--dispatch", metavar="KIND", help="How tokens reach a rank: all_gather or all_to_all.")
]
StoreDir = Annotated[
    Path | None,
    typer.Option("--store", metavar="DIR", help="Where records live.  [default: see `fitune cache dir`]"),
]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout instead of a table.")]
MeasurerName = Annotated[
    str,
    typer.Option(
        "--measurer",
        metavar="auto|gpu|recording[:FILE]",
        help="Who measures. auto: this machine's GPU, else the shipped recording.",
    ),
]
Seed = Annotated[
    int, typer.Option("--seed", metavar="S", parser=whole_number(0), help="Seed of sampler, routing and data.")
]


def store_path(given: Path | None) -> Path:
    """The store directory a command works on."""
    from fitune.settings import data_directory

    return given if given is not None else data_directory()
