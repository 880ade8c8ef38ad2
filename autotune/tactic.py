"""What is chosen: every decision of one MoE call, by value, with a short text form that parses back.

    t64 gather:permute act:separate g1:256x64/g8/w4/s5/p1f/tma g2:256x64/g8/w4/s5/p1f/tma fin:reduce

`t64` is the tile_size. `256x64` is block_n x block_k, `g8` group_m, `w4` warps, `s5` pipeline stages, then the
schedule: `grid`, or `p1` for a persistent loop with one program per SM (`p1f`: flattened into one loop). `tma` or
`ptr` says how operands are loaded and a trailing `swap` that weights take the M side of the tensor core; `pdl`
launches the kernel before its forerunner has ended, `tail4` cuts the tiles of a thin last round in four. fp8 layers
add `quant:separate` where a kernel of its own quantises the hidden rows. A text with `g1:` or `g2:` alone is one stage
of a tactic. A family other than `tile` is named first: `gemv t1 ...`. Where a library chooses inside its GEMM, that is
written `g1:auto`, or with the options it was given `g1:align=128,mode=fast`.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache, total_ordering
from typing import Final, Literal

from fitune.errors import TacticSyntaxError

StageName = Literal["gemm1", "gemm2"]
Schedule = Literal["grid", "persistent"]
Loads = Literal["pointer", "tma"]
Gather = Literal["fused", "permute"]
ActivationPlace = Literal["fused", "separate"]
Finalize = Literal["fused", "reduce"]
Quantize = Literal["fused", "separate"]

STAGES: Final[tuple[StageName, ...]] = ("gemm1", "gemm2")
TILE_SIZES: Final[tuple[int, ...]] = (16, 32, 64, 128, 256)
LIBRARY_CHOOSES: Final = "auto"


@dataclass(frozen=True, slots=True, order=True)
class GemmTactic:
    """How one grouped GEMM runs.

    `block_n` counts output columns of the GEMM, gate and up columns together in gemm1. `group_m` is how many tiles
    of one expert are walked before the next block of columns. `programs_per_sm` and `flatten` belong to the
    persistent loop; under `grid` they stay at 1 and False. `pdl` is programmatic dependent launch: the kernel starts
    while the one before it ends, and waits inside for its results. `tail` is into how many blocks of columns a
    persistent loop cuts the tiles of its last round where that round would leave most programs idle.
    """

    block_n: int
    block_k: int
    group_m: int = 8
    num_warps: int = 4
    num_stages: int = 3
    schedule: Schedule = "grid"
    programs_per_sm: int = 1
    flatten: bool = False
    loads: Loads = "pointer"
    swap_ab: bool = False
    pdl: bool = False
    tail: int = 1

    @property
    def reads_gate_and_up_apart(self) -> bool:
        """Whether gemm1 with fused SwiGLU reads gate and up rows as two operands, if TMA can read them at all.

        On the M side, an operand put together from a box of four dimensions would go through registers; one that is
        loaded as it is stays in shared memory. Each needs the 64 rows that wgmma takes.
        """
        return self.swap_ab and self.loads == "tma" and self.block_n >= 128

    def __str__(self) -> str:
        loop = "grid" if self.schedule == "grid" else f"p{self.programs_per_sm}{'f' if self.flatten else ''}"
        loads = "tma" if self.loads == "tma" else "ptr"
        tail = ("/swap" if self.swap_ab else "") + ("/pdl" if self.pdl else "")
        tail += f"/tail{self.tail}" if self.tail > 1 else ""
        return (
            f"{self.block_n}x{self.block_k}/g{self.group_m}/w{self.num_warps}/s{self.num_stages}/{loop}/{loads}{tail}"
        )


@total_ordering
@dataclass(frozen=True, slots=True)
class LibraryGemm:
    """A GEMM that a library runs, with the options it is given: (name, value) pairs, kept sorted by name.

    Names look like `align`; values are whole numbers of up to 18 digits, or words that begin with a letter (letters,
    digits, `_`, `.`, `-`). Raises TacticSyntaxError on others.
    """

    options: tuple[tuple[str, str | int], ...] = ()

    def __post_init__(self) -> None:
        names = [name for name, _ in self.options]
        if len(set(names)) < len(names):
            raise TacticSyntaxError(f"library GEMM: option {', '.join(names)}: a name stands there twice")
        for name, value in self.options:
            if not _is_option(name, value):
                raise TacticSyntaxError(
                    f"library GEMM: {name}={value!r} is no option; write it like align=128 or mode=fast"
                )
        object.__setattr__(self, "options", tuple(sorted(self.options, key=lambda option: option[0])))

    def __lt__(self, other: object) -> bool:
        if not isinstance(other, LibraryGemm):
            return NotImplemented
        return self._rank() < other._rank()

    def _rank(self) -> tuple[tuple[str, bool, str | int], ...]:
        """Options with numbers before words, so that the two are never compared."""
        return tuple((name, isinstance(value, str), value) for name, value in self.options)

    def __str__(self) -> str:
        return ",".join(f"{name}={value}" for name, value in self.options) or LIBRARY_CHOOSES


Gemm = GemmTactic | LibraryGemm


@dataclass(frozen=True, slots=True)
class Stage:
    """One GEMM's half of a tactic with the choices that belong to it: what is searched, compiled and timed alone.

    `gather` and `activation` are set for gemm1 and None for gemm2; `finalize` the other way round. `quantize` says
    where gemm1 of an fp8 layer quantises its result for gemm2; elsewhere it stays at `fused`.
    """

    stage: StageName
    family: str
    tile_size: int
    gemm: Gemm
    gather: Gather | None = None
    activation: ActivationPlace | None = None
    finalize: Finalize | None = None
    quantize: Quantize = "fused"

    def __post_init__(self) -> None:
        if self.stage == "gemm1":
            assert self.gather is not None and self.activation is not None and self.finalize is None
        else:
            assert self.gather is None and self.activation is None and self.finalize is not None

    @property
    def own_gemm(self) -> GemmTactic:
        """The GEMM of a family that runs fitune's kernels; an assertion for a library's."""
        assert isinstance(self.gemm, GemmTactic), f"{self.family} has no GEMM of our kernels"
        return self.gemm

    def __str__(self) -> str:
        if self.stage == "gemm1":
            return f"{_head(self)} gather:{self.gather} act:{self.activation}{_quantize(self)} g1:{self.gemm}"
        return f"{_head(self)} g2:{self.gemm} fin:{self.finalize}"


@dataclass(frozen=True, slots=True)
class Tactic:
    """All choices of one MoE call."""

    family: str
    tile_size: int
    gemm1: Gemm
    gemm2: Gemm
    gather: Gather = "fused"
    activation: ActivationPlace = "fused"
    finalize: Finalize = "reduce"
    quantize: Quantize = "fused"

    @classmethod
    def of(cls, first: Stage, second: Stage) -> Tactic:
        """Join a gemm1 and a gemm2 stage; they must share family and tile_size."""
        assert first.stage == "gemm1" and second.stage == "gemm2"
        assert (first.family, first.tile_size) == (second.family, second.tile_size)
        assert first.gather and first.activation and second.finalize
        return cls(
            first.family,
            first.tile_size,
            first.gemm,
            second.gemm,
            first.gather,
            first.activation,
            second.finalize,
            first.quantize,
        )

    def stage(self, name: StageName) -> Stage:
        """One half of the tactic."""
        if name == "gemm1":
            return Stage(
                "gemm1", self.family, self.tile_size, self.gemm1, self.gather, self.activation, quantize=self.quantize
            )
        return Stage("gemm2", self.family, self.tile_size, self.gemm2, finalize=self.finalize)

    def __str__(self) -> str:
        return (
            f"{_head(self)} gather:{self.gather} act:{self.activation}{_quantize(self)} "
            f"g1:{self.gemm1} g2:{self.gemm2} fin:{self.finalize}"
        )


def _head(tactic: Tactic | Stage) -> str:
    return f"t{tactic.tile_size}" if tactic.family == "tile" else f"{tactic.family} t{tactic.tile_size}"


def _quantize(tactic: Tactic | Stage) -> str:
    return "" if tactic.quantize == "fused" else f" quant:{tactic.quantize}"


_GEMM: Final = re.compile(
    r"(?P<n>\d+)x(?P<k>\d+)/g(?P<g>\d+)/w(?P<w>\d+)/s(?P<s>\d+)/(?:grid|p(?P<p>\d+)(?P<f>f?))/(?P<l>tma|ptr)"
    r"(?P<swap>/swap)?(?P<pdl>/pdl)?(?:/tail(?P<tail>[2-9]))?"
)
_NUMBER: Final = re.compile(r"-?\d{1,18}")
_WORD: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.-]*")
_NAME: Final = re.compile(r"[a-z][a-z0-9_]*")
_CHOICES: Final[dict[str, tuple[str, ...]]] = {
    "gather": ("fused", "permute"),
    "act": ("fused", "separate"),
    "fin": ("fused", "reduce"),
    "quant": ("separate",),
}


def _is_option(name: str, value: str | int) -> bool:
    if isinstance(value, bool) or not _NAME.fullmatch(name):
        return False
    return bool((_NUMBER if isinstance(value, int) else _WORD).fullmatch(str(value)))


def _parse_options(text: str) -> LibraryGemm | None:
    """A library's GEMM, or None where the text is none."""
    if text == LIBRARY_CHOOSES:
        return LibraryGemm()
    options: list[tuple[str, str | int]] = []
    for word in text.split(","):
        name, _, value = word.partition("=")
        options.append((name, int(value) if _NUMBER.fullmatch(value) else value))
    try:
        return LibraryGemm(tuple(options))
    except TacticSyntaxError:
        return None


def _parse_gemm(text: str, whole: str) -> Gemm:
    match = _GEMM.fullmatch(text)
    if match is None:
        library = _parse_options(text)
        if library is not None:
            return library
        raise TacticSyntaxError(
            f"tactic {whole!r}: {text!r} is no GEMM; write it like 128x64/g8/w4/s3/p1f/tma or 128x64/g8/w4/s3/grid/ptr"
        )
    persistent = match["p"] is not None
    return GemmTactic(
        block_n=int(match["n"]),
        block_k=int(match["k"]),
        group_m=int(match["g"]),
        num_warps=int(match["w"]),
        num_stages=int(match["s"]),
        schedule="persistent" if persistent else "grid",
        programs_per_sm=int(match["p"]) if persistent else 1,
        flatten=match["f"] == "f",
        loads="tma" if match["l"] == "tma" else "pointer",
        swap_ab=match["swap"] is not None,
        pdl=match["pdl"] is not None,
        tail=int(match["tail"] or 1),
    )


def _parse_fields(text: str) -> tuple[str, int, dict[str, str]]:
    words = text.split()
    family = "tile"
    if words and not re.fullmatch(r"t\d+", words[0]):
        family, words = words[0], words[1:]
    if not words or not re.fullmatch(r"t\d+", words[0]) or not re.fullmatch(r"[a-z][a-z0-9_]*", family):
        raise TacticSyntaxError(f"tactic {text!r}: it must begin with a tile size like t64")
    fields: dict[str, str] = {}
    for word in words[1:]:
        name, colon, value = word.partition(":")
        if not colon or name not in ("g1", "g2", *_CHOICES) or name in fields:
            raise TacticSyntaxError(f"tactic {text!r}: {word!r} is not a field, or stands there twice")
        if name in _CHOICES and value not in _CHOICES[name]:
            raise TacticSyntaxError(f"tactic {text!r}: {name} {value!r} is not one of {', '.join(_CHOICES[name])}")
        fields[name] = value
    return family, int(words[0][1:]), fields


def _require(text: str, fields: dict[str, str], names: set[str]) -> None:
    if set(fields) != names:
        odd = sorted(set(fields) ^ names)
        raise TacticSyntaxError(f"tactic {text!r}: fields {', '.join(odd)} are missing or do not belong there")


@lru_cache(maxsize=65536)
def parse_stage(text: str) -> Stage:
    """Read the text form of one stage. Raises TacticSyntaxError."""
    family, tile_size, fields = _parse_fields(text)
    if "g1" in fields:
        quantize = fields.pop("quant", "fused")
        _require(text, fields, {"g1", "gather", "act"})
        gemm = _parse_gemm(fields["g1"], text)
        return Stage("gemm1", family, tile_size, gemm, fields["gather"], fields["act"], None, quantize)  # type: ignore[arg-type]
    _require(text, fields, {"g2", "fin"})
    gemm = _parse_gemm(fields["g2"], text)
    return Stage("gemm2", family, tile_size, gemm, finalize=fields["fin"])  # type: ignore[arg-type]


@lru_cache(maxsize=65536)
def parse_tactic(text: str) -> Tactic:
    """Read the text form of a whole tactic. Raises TacticSyntaxError."""
    family, tile_size, fields = _parse_fields(text)
    quantize = fields.pop("quant", "fused")
    _require(text, fields, {"g1", "g2", "gather", "act", "fin"})
    return Tactic(
        family,
        tile_size,
        _parse_gemm(fields["g1"], text),
        _parse_gemm(fields["g2"], text),
        fields["gather"],  # type: ignore[arg-type]
        fields["act"],  # type: ignore[arg-type]
        fields["fin"],  # type: ignore[arg-type]
        quantize,  # type: ignore[arg-type]
    )


def num_tiles(rows: int, tile_size: int) -> int:
    """Tiles that one expert's rows need: the padding rule of sort kernel, cost model and reports."""
    return -(-rows // tile_size)


def max_tiles(max_rows: int, local_experts: int, tile_size: int) -> int:
    """The most tiles any routing of `max_rows` rows can need: what tile maps and grids are sized for."""
    if max_rows == 0:
        return 0
    partly_filled = min(local_experts, max_rows)
    return partly_filled + (max_rows - partly_filled) // tile_size
