"""Compiling what a stage or layer would launch, and telling binaries apart."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping
from typing import Any, Final

from fitune.families import family_named
from fitune.kernels.layer import LayerArgs, Workspace, run_layer, run_sort, run_stage
from fitune.record import Status
from fitune.tactic import Stage, Tactic

ERROR_CHARACTERS: Final = 300
_NOT_CODE: Final = (".loc", ".file", "//", "$L__tmp", "$L__func_begin", "$L__func_end")


class Collector:
    """A launcher that compiles instead of launching and keeps what came out.

    `versions` names code that is no compiled kernel, such as a library's: part of what tells binaries apart.
    """

    compiles_only: Final = True

    def __init__(self) -> None:
        self.functions: list[Any] = []
        self.compiled: list[Any] = []
        self.versions: list[str] = []

    def __call__(self, kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: Mapping[str, Any]) -> None:
        compiled = kernel.warmup(*args, grid=grid, **meta)
        self.functions.append(kernel)
        if compiled is not None:
            self.compiled.append(compiled)

    def binary(self) -> str:
        """Hash over all kernels compiled, in order, and versions; empty when there is nothing (interpreter)."""
        if not self.compiled and not self.versions:
            return ""
        parts = [*(code_hash(kernel) for kernel in self.compiled), *self.versions]
        return hashlib.sha256("".join(parts).encode()).hexdigest()[:16]

    def shared_bytes(self) -> int:
        """The most shared memory a program of any of the kernels uses."""
        return max((int(kernel.metadata.shared) for kernel in self.compiled), default=0)


def compile_stage_launches(stage: Stage, args: LayerArgs, ws: Workspace, out: Any) -> Collector:
    """Compile everything that `stage` launches on these tensors (which may be on the meta device), sort apart."""
    collector = Collector()
    run_stage(stage, args, ws, out, launch=collector)
    collector.versions += _versions(stage.family)
    return collector


def compile_layer_launches(tactic: Tactic, args: LayerArgs, ws: Workspace, out: Any) -> Collector:
    """Compile everything that the whole layer launches, the sort included."""
    collector = Collector()
    run_layer(tactic, args, ws, out, launch=collector)
    collector.versions += _versions(tactic.family)
    return collector


def _versions(family: str) -> list[str]:
    text = family_named(family).code_version()
    return [text] if text else []


def compile_sort_launches(family: str, tile_size: int, args: LayerArgs, ws: Workspace) -> Collector:
    """Compile what the sort in front of a stage launches."""
    collector = Collector()
    run_sort(family, tile_size, args, ws, launch=collector)
    return collector


def normalized_code(text: str, comment: str) -> str:
    """PTX or AMD assembly without source lines, file names and comments: the same code, the same text, anywhere.

    Debug sections, which stand at the end, hold paths and line numbers only.
    """
    code = text.partition("\t.section\t.debug")[0]
    lines = (line.partition(comment)[0].strip() for line in code.splitlines())
    return "\n".join(line for line in lines if line and not line.startswith(_NOT_CODE))


def code_hash(kernel: Any) -> str:
    """Hash of one compiled kernel: of its normalised PTX or AMD assembly, else of its binary. Kept on the kernel."""
    known: str | None = getattr(kernel, "fitune_hash", None)
    if known is not None:
        return known
    for name, comment in (("ptx", "//"), ("amdgcn", ";")):
        if name in kernel.asm:
            content = normalized_code(kernel.asm[name], comment).encode()
            break
    else:
        content = bytes(kernel.kernel)
    digest = hashlib.sha256(content).hexdigest()[:16]
    kernel.fitune_hash = digest
    return digest


def slim(collector: Collector) -> None:
    """Drop intermediate texts of the kernels (a megabyte each) once they are hashed; the binary stays."""
    for kernel in collector.compiled:
        kernel.asm.clear()


def classify(error: BaseException, compiling: bool) -> Status:
    """The status of a candidate that raised `error` while compiling or while running."""
    if type(error).__name__ in ("OutOfResources", "OutOfMemoryError"):
        return Status.OUT_OF_RESOURCES
    return Status.COMPILE_ERROR if compiling else Status.LAUNCH_ERROR


def error_text(error: BaseException) -> str:
    """One line for a record: the kind of error and the most telling line of its text."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip(" ^~")]
    telling = [line for line in lines if re.search(r"error|fail|assert|illegal|invalid|out of", line, re.IGNORECASE)]
    line = telling[0] if telling else (lines or [""])[-1]
    text = f"{type(error).__name__}: {line}" if line else type(error).__name__
    return text[:ERROR_CHARACTERS]
