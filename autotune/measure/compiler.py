"""The compiling child: turns stages into binaries for a named chip, with no GPU and no CUDA context.

Tensors are on the meta device and the active Triton driver is a stub that names the target, so what is compiled, and
the key under which Triton's disk cache keeps it, are those of a launch on that chip.
"""

from __future__ import annotations

import contextlib
import io
import re
import subprocess
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

import torch
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from fitune.errors import InputError
from fitune.kernels.layer import IO_DTYPES, LayerArgs, Workspace, fp8_of, weight_dtype
from fitune.measure.build import Collector, classify, code_hash, compile_stage_launches, error_text
from fitune.measure.inputs import given_scales
from fitune.measure.wire import ChildPort, problem_from_wire, target_from_wire
from fitune.problem import Problem, weight_scale_shapes
from fitune.record import Status
from fitune.tactic import Stage, parse_stage
from fitune.target import Target

PTXAS_LIMIT_S: Final = 120.0
SERIALIZED: Final = "tensor core: ptxas makes every wgmma wait for the one before, which takes twice the time"
_REGISTERS: Final = re.compile(r"Used (\d+) registers")
_STACK: Final = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_SERIALIZED: Final = re.compile(r"C751[45]|wgmma\S* instructions are serialized", re.IGNORECASE)
_AMD_FIELDS: Final[dict[str, str]] = {
    "registers": r"\.vgpr_count:\s+(\d+)",
    "spill_bytes": r"\.vgpr_spill_count:\s+(\d+)",
    "stack_bytes": r"\.private_segment_fixed_size:\s+(\d+)",
}


class StubDriver:
    """Enough of a Triton driver to compile for `target` without one."""

    def __init__(self, target: Target) -> None:
        self._target = gpu_target(target)

    def get_current_target(self) -> GPUTarget:
        return self._target

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def gpu_target(target: Target) -> GPUTarget:
    """Triton's name for a target. Raises InputError."""
    if target.is_cuda:
        return GPUTarget("cuda", target.capability, target.warp_size)
    if target.arch.startswith("gfx"):
        return GPUTarget("hip", target.arch, target.warp_size)
    raise InputError(f"target {target.arch!r} cannot be compiled for; use an sm_ or gfx name")


class Compiler:
    """Compiles stages of problems, one at a time; buffers of the last problem are kept (they hold no memory)."""

    def __init__(self) -> None:
        self._problem: Problem | None = None
        self._target: Target | None = None
        self._tensors: tuple[LayerArgs, Workspace, torch.Tensor] | None = None

    def answer(self, request: Mapping[str, Any]) -> dict[str, Any]:
        """Compile `tactic` for `problem` and `target`; with `report`, also say what ptxas says."""
        started_s = time.perf_counter()
        target = target_from_wire(request["target"])
        stage = parse_stage(request["tactic"])
        try:
            collector = self._compile(stage, problem_from_wire(request["problem"]), target)
            answer = {"status": Status.OK.value, "error": "", **facts(collector, target, report=request["report"])}
            if not request["report"] and serializes_wgmma(collector, target, self._ptxas_log):
                answer |= {"status": Status.REJECTED.value, "error": SERIALIZED}
        except Exception as error:  # noqa: BLE001 - the measuring border
            answer = {"status": classify(error, compiling=True).value, "error": error_text(error)}
        self._forget()
        return {"kind": "done", **answer, "seconds": time.perf_counter() - started_s}

    def _compile(self, stage: Stage, problem: Problem, target: Target) -> Collector:
        if target != self._target:
            driver.set_active(StubDriver(target))
            self._target, self._problem = target, None
        if problem != self._problem or self._tensors is None:
            self._tensors = meta_tensors(problem, target)
            self._problem = problem
        args, workspace, out = self._tensors
        log = io.StringIO()
        with contextlib.redirect_stdout(log), knobs.nvidia.scope():
            knobs.nvidia.dump_ptxas_log = True
            collector = compile_stage_launches(stage, args, workspace, out)
        self._functions = collector.functions
        self._ptxas_log = log.getvalue()
        return collector

    def _forget(self) -> None:
        """Keep nothing compiled: the disk has it, and another target may come."""
        for function in getattr(self, "_functions", []):
            function.device_caches.clear()
        self._functions = []


def meta_tensors(problem: Problem, target: Target) -> tuple[LayerArgs, Workspace, torch.Tensor]:
    """The tensors of a call without memory behind them, shaped, strided and aligned like those that are measured."""
    shape, tokens, local = problem.shape, max(1, problem.num_tokens), problem.local_experts
    hidden, intermediate, fp8 = shape.hidden_size, shape.intermediate_size, fp8_of(target.arch)

    def empty(*size: int, of: torch.dtype = IO_DTYPES[shape.dtype]) -> torch.Tensor:
        return torch.empty(size, dtype=of, device="meta")

    weights = weight_dtype(shape.dtype, fp8)
    args = LayerArgs(
        x=empty(tokens, hidden),
        w13=empty(local, 2 * intermediate, hidden, of=weights),
        w2=empty(local, hidden, intermediate, of=weights),
        topk_weights=empty(tokens, shape.top_k, of=torch.float32),
        topk_ids=empty(tokens, shape.top_k, of=torch.int32),
        local_expert_offset=problem.local_expert_offset,
        scales=shape.scales,
        **given_scales(shape, "meta"),
    )
    if shape.scales:
        sizes = weight_scale_shapes(shape.scales, hidden, intermediate)
        args.w13_scale, args.w2_scale = (empty(local, *size, of=torch.float32) for size in sizes)
    workspace = Workspace.allocate(shape, local, tokens, "meta", num_sms=target.num_sms, fp8=fp8)
    return args, workspace, torch.empty_like(args.x)


def facts(collector: Collector, target: Target, *, report: bool) -> dict[str, Any]:
    """What compiling says: shared memory and hash over all kernels; with `report`, details of our GEMM kernel."""
    found: dict[str, Any] = {"shared_bytes": collector.shared_bytes(), "binary": collector.binary()}
    if not report:
        return found
    gemms = [
        compiled
        for function, compiled in zip(collector.functions, collector.compiled, strict=True)
        if function.__module__.rpartition(".")[2] in ("gemm", "gemv")
    ]
    if not gemms:
        return found  # a library's GEMM
    assert len(gemms) == 1, "a stage launches one GEMM kernel"
    found["ptx_hash"] = code_hash(gemms[0])
    found["gemm_shared_bytes"] = int(gemms[0].metadata.shared)
    if "ptx" in gemms[0].asm:
        found |= ptxas_facts(gemms[0].asm["ptx"], target)
    elif "amdgcn" in gemms[0].asm:
        text = gemms[0].asm["amdgcn"]
        for name, pattern in _AMD_FIELDS.items():
            match = re.search(pattern, text)
            found[name] = int(match[1]) if match else None
        if found["spill_bytes"]:
            found["spill_bytes"] *= 4
    return found


def serializes_wgmma(collector: Collector, target: Target, log: str) -> bool:
    """Whether ptxas serialised tensor-core instructions of any kernel, by what it said while compiling.

    It says nothing for kernels that come from Triton's disk cache; these are assembled once more.
    """
    if _SERIALIZED.search(log):
        return True
    unheard = [
        kernel.asm["ptx"]
        for kernel in collector.compiled
        if "wgmma.mma_async" in kernel.asm.get("ptx", "") and f"'{kernel.metadata.name}'" not in log
    ]
    return any(ptxas_facts(text, target)["serialized_wgmma"] for text in unheard)


def ptxas_facts(ptx: str, target: Target) -> dict[str, Any]:
    """Registers, stack, spills and serialised tensor-core instructions, as Triton's own ptxas reports them."""
    from triton.backends.nvidia import compiler as nvidia

    arch = nvidia.sm_arch_from_capability(target.capability)
    with tempfile.TemporaryDirectory(prefix="fitune-") as folder:
        source = Path(folder) / "kernel.ptx"
        source.write_text(ptx)
        command = [nvidia.get_ptxas(target.capability).path, "-v", f"--gpu-name={arch}", str(source), "-o", "/dev/null"]
        done = subprocess.run(command, capture_output=True, text=True, timeout=PTXAS_LIMIT_S, check=False)
    log = done.stdout + done.stderr
    registers, stack = _REGISTERS.search(log), _STACK.search(log)
    return {
        "registers": int(registers[1]) if registers else None,
        "stack_bytes": int(stack[1]) if stack else None,
        "spill_bytes": int(stack[2]) + int(stack[3]) if stack else None,
        "serialized_wgmma": bool(_SERIALIZED.search(log)),
    }


def main() -> None:
    """Entry of `python -m fitune.measure.compiler`."""
    port, compiler = ChildPort(), Compiler()
    while (request := port.receive()) is not None:
        port.send(compiler.answer(request))


if __name__ == "__main__":
    main()
