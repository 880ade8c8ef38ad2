"""The counts that `warm` runs meet every binary that any count of the bucket needs.

Triton's own launcher is asked what it would compile for; nothing is compiled and nothing is launched. This needs the
kernels without the interpreter, hence a process of its own.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

import pytest

PROBE = """
import json, sys
import torch
from fitune.dispatch.plan import warm_counts
from fitune.dispatch.scales import wanted_scales
from fitune.dispatch.workspaces import SharedWorkspace
from fitune.kernels.layer import LayerArgs, run_sort, run_stage, weight_dtype
from fitune.problem import LayerShape
from fitune.tactic import parse_tactic

shape = LayerShape(64, 32, 16, 3, sys.argv[2])
tactic = parse_tactic(sys.argv[1])
w13 = torch.empty(4, 64, 64, dtype=weight_dtype(shape.dtype))
w2 = torch.empty(4, 64, 32, dtype=weight_dtype(shape.dtype))
scales = {name: torch.ones(size) for name, (size, _) in wanted_scales(shape.scales, 4, 32, 64).items()}
workspaces = SharedWorkspace(shape, 4, torch.device("cpu"), 4, torch.float8_e4m3fn)
large = workspaces.own(512)

def what_triton_sees(parameter, value):
    if parameter.is_constexpr:
        return ("constant", value)
    if value is None:
        return ("none",)
    if isinstance(value, torch.Tensor):
        return (str(value.dtype), parameter.do_not_specialize_on_alignment or value.data_ptr() % 16 == 0)
    if not isinstance(value, int):
        return (str(value.block_shape), str(value.base.dtype))
    kind = "i32" if -2**31 <= value < 2**31 else "i64"
    if parameter.do_not_specialize:
        return (kind,)
    return (kind, value == 1, parameter.do_not_specialize_on_alignment or value % 16 == 0)

def binaries(num_tokens, workspace):
    found = set()
    def launch(kernel, grid, args, meta):
        names = {parameter.name: parameter for parameter in kernel.params}
        values = dict(zip(names, args)) | {name: value for name, value in meta.items() if name in names}
        options = tuple(sorted((name, value) for name, value in meta.items() if name not in names))
        seen = tuple(what_triton_sees(names[name], value) for name, value in sorted(values.items()))
        found.add((kernel.fn.__name__, seen, options))
    ids = torch.empty(num_tokens, 3, dtype=torch.int32)
    x = torch.empty(num_tokens, 34, dtype=torch.bfloat16)
    args = LayerArgs(x, w13, w2, torch.empty(num_tokens, 3), ids, 4, shape.scales, **scales)
    run_sort(tactic.family, tactic.tile_size, args, workspace, launch)
    for name in ("gemm1", "gemm2"):
        run_stage(tactic.stage(name), args, workspace, torch.empty_like(x), launch)
    return found

report = []
for low, high in ((1, 1), (2, 2), (3, 5), (6, 11), (12, 22), (23, 45), (46, 90), (91, 181), (150, 400)):
    counts = warm_counts(low, high, 3)
    warm = set().union(*(binaries(count, large) for count in counts))
    sizes = range(low, high + 1)
    every = {count: (binaries(count, large) | binaries(count, workspaces.own(count))) - warm for count in sizes}
    cold = {count: sorted(name for name, *_ in missing) for count, missing in every.items() if missing}
    report.append({"low": low, "high": high, "warm": len(warm), "runs": len(counts), "cold": cold})
print(json.dumps(report))
"""

TILES = "g1:256x64/g8/w4/s2/p1f/tma g2:64x64/g8/w4/s2/p2/tma/tail2 fin:reduce"
CASES = {
    "grid": "t16 gather:fused act:fused g1:32x32/g8/w4/s2/grid/ptr g2:32x32/g8/w4/s2/grid/ptr fin:reduce",
    "persistent": "t64 gather:permute act:separate g1:64x32/g8/w4/s3/p2/tma g2:64x32/g8/w4/s3/p1f/tma fin:fused",
    "gemv": "gemv t1 gather:fused act:fused g1:4x64/g1/w4/s2/grid/ptr g2:4x32/g1/w4/s2/p16/ptr/pdl fin:fused",
    "fp8_block128": f"t64 gather:fused act:fused {TILES}",
    "fp8_block128 permute": f"t64 gather:permute act:separate {TILES}",
    "fp8_channel": f"t64 gather:permute act:fused quant:separate {TILES}",
    "fp8_tensor": f"t64 gather:fused act:fused {TILES}",
    "fp8_channel gemv": "gemv t1 gather:fused act:fused g1:4x64/g1/w4/s2/grid/ptr g2:4x32/g1/w4/s2/p16/ptr fin:fused",
}


@pytest.mark.parametrize("name", CASES)
def test_warm_leaves_no_binary_cold(name: str) -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "0"}
    dtype = name.split()[0] if name.startswith("fp8") else "bf16"
    run = subprocess.run(
        [sys.executable, "-c", PROBE, CASES[name], dtype], capture_output=True, text=True, env=environment, check=False
    )
    assert run.returncode == 0, run.stderr
    report: list[dict[str, Any]] = json.loads(run.stdout)
    assert [entry for entry in report if entry["cold"]] == []
    assert all(entry["warm"] >= 2 for entry in report)
    assert all(entry["runs"] < 30 for entry in report)
