"""Run as a script, without Triton's interpreter: compiles the small kernels for sm_90 and prints facts as JSON lines.

No GPU is needed: tensors are on the meta device and a stub driver names the target.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver

from fitune.kernels import router, rows, sort


class StubDriver:
    """What compiling asks of a driver."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_only(kernel: Any, grid: tuple[int, ...], args: tuple[Any, ...], meta: Mapping[str, Any]) -> None:
    compiled = kernel.warmup(*args, grid=grid, **meta)
    ptx = compiled.asm["ptx"]
    facts = {
        "kernel": kernel.fn.__name__,
        "shared_bytes": compiled.metadata.shared,
        "wide_loads": len(re.findall(r"ld\.global\S*\.v4", ptx)),
        "wide_stores": len(re.findall(r"st\.global\S*\.v4", ptx)),
        "loops_in_64_bits": len(re.findall(r"scf\.for .*: i64", compiled.asm["ttir"])),
    }
    print(json.dumps(facts), flush=True)


def empty(*size: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(size, dtype=dtype, device="meta")


def ints(*size: int) -> torch.Tensor:
    return empty(*size, dtype=torch.int32)


def main() -> None:
    driver.set_active(StubDriver())
    for num_tokens, local_experts in ((8, 36), (128, 256), (4096, 256)):
        sort.sort_slots(
            ints(num_tokens, 8),
            0,
            local_experts,
            64,
            row_of_slot=ints(num_tokens * 8),
            slot_of_row=ints(num_tokens * 8),
            expert_rows=ints(local_experts + 1),
            expert_tiles=ints(local_experts + 1),
            tile_expert=ints(num_tokens * 8),
            block_counts=ints(1024),
            launch=compile_only,
        )
    weights = empty(64, 8, dtype=torch.float32)
    for columns in (7168, 2880):
        x, sorted_rows = empty(64, columns), empty(512, columns)
        rows.permute_rows(x, ints(512), ints(17), 8, sorted_rows, 1024, launch=compile_only)
        rows.swiglu(empty(512, 2 * columns), ints(17), sorted_rows, 1024, launch=compile_only)
        rows.combine(sorted_rows, ints(512), weights, x, launch=compile_only)
        rows.cast_rows(x.float(), x, launch=compile_only)
        rows.zero_fill(x, launch=compile_only)
    router.softmax_topk(empty(64, 160), 8, True, launch=compile_only)
    router.sigmoid_grouped_topk(
        empty(64, 256), empty(256, dtype=torch.float32), 8, 4, 8, 2.5, True, launch=compile_only
    )


if __name__ == "__main__":
    main()
