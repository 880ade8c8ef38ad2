"""The chip a tactic must fit, and the software and clocks a measurement was taken under."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field, fields, replace
from importlib import metadata, resources
from typing import Final

from fitune.errors import InputError


@dataclass(frozen=True, slots=True)
class Target:
    """What legality and cost need to know about a GPU.

    `arch` is Triton's name for it (`sm_90`, `gfx942`); `shared_bytes` the shared memory one program may use.
    """

    arch: str
    device: str
    num_sms: int
    shared_bytes: int
    l2_bytes: int
    registers_per_sm: int = 65536
    warp_size: int = 32

    @property
    def is_cuda(self) -> bool:
        return self.arch.startswith("sm_")

    @property
    def capability(self) -> int:
        """90 for sm_90; 0 on a chip that is not CUDA's."""
        return int(self.arch[3:]) if self.is_cuda else 0

    @property
    def has_tma(self) -> bool:
        return self.capability >= 90

    @property
    def has_pdl(self) -> bool:
        """Programmatic dependent launch."""
        return self.capability >= 90

    @property
    def has_fp8(self) -> bool:
        """e4m3 operands on the tensor core; on `cpu`, kernels are interpreted and compute what any chip would."""
        return self.capability >= 89 or self.arch.startswith(("gfx94", "gfx95", "cpu"))

    @property
    def has_wgmma(self) -> bool:
        """Hopper's warpgroup MMA, whose M side is 64 rows per four warps."""
        return self.capability == 90


KNOWN_TARGETS: Final[dict[str, Target]] = {
    "sm_80": Target("sm_80", "NVIDIA A100-SXM4-80GB", 108, 166_912, 40 << 20),
    "sm_89": Target("sm_89", "NVIDIA L40S", 142, 101_376, 96 << 20),
    "sm_90": Target("sm_90", "NVIDIA H200", 132, 232_448, 60 << 20),
    "sm_100": Target("sm_100", "NVIDIA B200", 148, 232_448, 126 << 20),
    "gfx942": Target("gfx942", "AMD Instinct MI300X", 304, 65_536, 4 << 20, 131_072, 64),
}


def target_named(name: str) -> Target:
    """A known target by arch name. Raises InputError."""
    if name not in KNOWN_TARGETS:
        raise InputError(f"target {name!r} is not known; use one of {', '.join(KNOWN_TARGETS)}")
    return KNOWN_TARGETS[name]


@dataclass(frozen=True, slots=True)
class Environment:
    """Versions and chip at the time of measuring. Unknown values are empty strings, never guesses."""

    device: str
    arch: str
    num_sms: int
    fitune: str
    kernels: str
    triton: str = ""
    torch: str = ""
    driver: str = ""
    cuda: str = ""
    python: str = ""
    optuna: str = ""
    power_cap_w: float = 0.0
    id: str = field(init=False, compare=False)

    def __post_init__(self) -> None:
        parts = [f"{f.name}={getattr(self, f.name)}" for f in fields(self) if f.init]
        object.__setattr__(self, "id", hashlib.sha256("\n".join(parts).encode()).hexdigest()[:16])


def chip_of(environment: Environment) -> Target:
    """The chip of an environment. Raises InputError where its arch is not known."""
    return replace(target_named(environment.arch), device=environment.device, num_sms=environment.num_sms)


def version_of(package: str) -> str:
    """Installed version of a package without importing it; empty when absent."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def kernel_source_hash() -> str:
    """Hash of the device code's sources: two equal hashes mean the same tactic compiles from the same text."""
    digest = hashlib.sha256()
    folder = resources.files("fitune.kernels")
    for entry in sorted(folder.iterdir(), key=lambda item: item.name):
        if entry.name.endswith(".py") and entry.name != "reference.py":
            digest.update(entry.name.encode())
            digest.update(entry.read_bytes())
    return digest.hexdigest()[:16]
