"""Host cost of a dispatched call: look-up and plan against a bare dict get and, on a GPU, calls against bare launches.

    python scripts/bench_dispatch.py [--json FILE] [--model deepseek-v3] [--ep 16] [--tokens 1,64,1024]

A sample is the mean of a batch of calls, timed on the host without waiting for the GPU (which is drained between
batches); medians and 99th percentiles are over batches. All rows of one part take turns in one process.
"""

from __future__ import annotations

import argparse
import itertools
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from fitune.cache import Table
from fitune.cache.table import table_of
from fitune.dispatch import Dispatcher
from fitune.dispatch.device import resolve_device, target_of
from fitune.kernels.layer import LayerArgs, Workspace
from fitune.models import preset
from fitune.problem import DEFAULT_TOKENS, LayerShape, Problem, key_of, local_experts_of_ep
from fitune.record import Decision, Measurement, Member, Regime
from fitune.space import default_tactic
from fitune.target import Environment, Target, kernel_source_hash, version_of


@dataclass(frozen=True, slots=True)
class Row:
    """One timed piece of a call, in ns per call."""

    name: str
    median_ns: float
    p99_ns: float


def table_for(shape: LayerShape, local_experts: int, target: Target) -> Table:
    """A table of default tactics at the usual token counts: timing needs entries, not good ones."""
    here = Environment(target.device, target.arch, target.num_sms, version_of("fitune"), kernel_source_hash())
    measurement = Measurement(1.0, 1.0, 1.0, 1, Regime())
    decisions = []
    for count in DEFAULT_TOKENS:
        problem = Problem(shape, local_experts, count)
        tactic = default_tactic(problem, target)
        members = (Member(tactic, measurement, True),)
        key = key_of(problem, target.device)
        decisions.append(Decision(key, tactic, members, tactic, 1.0, 0.0, "bench", here.id, "bench", 0.0))
    return table_of(decisions, {here.id: here})


def take_turns(
    pieces: dict[str, Callable[[int], object]],
    counts: Sequence[int],
    batches: int,
    between: Callable[[], None] = lambda: None,
) -> list[Row]:
    """Time each piece on the same batches of token counts, one batch each in turn; the loop's own cost taken off."""
    pieces = {"": lambda count: None, **pieces}
    samples: dict[str, list[float]] = {name: [] for name in pieces}
    for piece in pieces.values():
        for count in counts:
            piece(count)
    for _ in range(batches):
        for name, piece in pieces.items():
            between()
            start = time.perf_counter_ns()
            for count in counts:
                piece(count)
            samples[name].append((time.perf_counter_ns() - start) / len(counts))
    empty = statistics.median(samples.pop(""))
    return [Row(name, *(value - empty for value in spread(times))) for name, times in samples.items()]


def spread(times: list[float]) -> tuple[float, float]:
    """Median and 99th percentile."""
    return statistics.median(times), sorted(times)[int(0.99 * (len(times) - 1))]


def bench_lookup(dispatcher: Dispatcher, batches: int) -> list[Row]:
    """Look-up and plan, no tensors."""
    plans = {count: dispatcher.plan(count) for count in range(1, 16385)}
    get, plan = plans.get, dispatcher.plan

    def bare(count: int) -> object:
        return get(count)

    def look_up(count: int) -> object:
        return plan(count)

    counts = [1 + (7919 * index) % 16384 for index in range(256)]
    return take_turns({"dict get": bare, "look-up and plan": look_up}, counts, batches)


def bench_overhead(dispatcher: Dispatcher, shape: LayerShape, local_experts: int, batches: int) -> list[Row]:
    """Everything of a call but its launches: checks, look-up, result tensor, workspace."""
    x, w13, w2, weights, ids = tensors_for(shape, local_experts, 64, torch.device("cpu"), real=False)
    check = dispatcher._binding.check
    for plan in dispatcher._plans:
        if plan is not None:
            plan.launch = lambda args, workspace, out: None
    out = torch.empty_like(x)
    dispatcher._can_run = True
    pieces: dict[str, Callable[[int], object]] = {
        "checks of the tensors": lambda count: check(x, w13, w2, weights, ids),
        "call without launches, out given": lambda count: dispatcher(x, w13, w2, weights, ids, out),
        "call without launches": lambda count: dispatcher(x, w13, w2, weights, ids),
    }
    return take_turns(pieces, range(64), batches)


def bench_calls(
    dispatcher: Dispatcher, shape: LayerShape, local_experts: int, num_tokens: int, batches: int
) -> list[Row]:
    """Whole calls on the GPU against the same launches with everything prepared."""
    device = resolve_device(None)
    x, w13, w2, weights, ids = tensors_for(shape, local_experts, num_tokens, device, real=True)
    out = torch.empty_like(x)
    args = LayerArgs(x, w13, w2, weights, ids)
    workspace = Workspace.allocate(shape, local_experts, num_tokens, device)
    launch = dispatcher.plan(num_tokens).launch
    pieces: dict[str, Callable[[int], object]] = {
        "bare launches": lambda count: launch(args, workspace, out),
        "call, out given": lambda count: dispatcher(x, w13, w2, weights, ids, out),
        "call": lambda count: dispatcher(x, w13, w2, weights, ids),
    }
    rows = take_turns(pieces, range(10), batches, torch.cuda.synchronize)
    return [Row(f"N={num_tokens}: {row.name}", row.median_ns, row.p99_ns) for row in rows]


def tensors_for(
    shape: LayerShape, local_experts: int, num_tokens: int, device: torch.device, *, real: bool
) -> tuple[torch.Tensor, ...]:
    """Tensors of a call; weights that are not real take no memory."""
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}[shape.dtype]
    h, i = shape.hidden_size, shape.intermediate_size
    pair = ((local_experts, 2 * i, h), (local_experts, h, i))
    x = torch.randn(num_tokens, h, dtype=dtype, device=device)
    if real:
        w13, w2 = (torch.randn(size, dtype=dtype, device=device) * 0.02 for size in pair)
    else:
        w13, w2 = (torch.zeros(1, dtype=dtype, device=device).expand(size) for size in pair)
    ids = torch.rand(num_tokens, shape.num_experts, device=device).argsort(1)[:, : shape.top_k].int().contiguous()
    weights = torch.full((num_tokens, shape.top_k), 1.0 / shape.top_k, device=device)
    return x, w13, w2, weights, ids


def show(title: str, rows: Sequence[Row]) -> None:
    print(f"{title:<44}{'median':>12}{'p99':>12}")
    for row in rows:
        print(f"  {row.name:<42}{row.median_ns:>9,.0f} ns{row.p99_ns:>9,.0f} ns")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="also write the rows to this file")
    parser.add_argument("--model", default="deepseek-v3")
    parser.add_argument("--ep", type=int, default=16)
    parser.add_argument("--tokens", default="1,64,1024", help="token counts of the whole calls (GPU only)")
    parser.add_argument("--batches", type=int, default=2000)
    given = parser.parse_args()
    shape = preset(given.model).shape
    local_experts = local_experts_of_ep(shape.num_experts, given.ep)[0]
    cpu = torch.device("cpu")
    parts = {}
    offline = Dispatcher(table_for(shape, local_experts, target_of(cpu)), shape, local_experts, device=cpu)
    parts["look-up"] = bench_lookup(offline, given.batches)
    parts["host work of a call (CPU tensors)"] = bench_overhead(offline, shape, local_experts, given.batches)
    chip = platform.processor() or platform.machine()
    if torch.cuda.is_available():
        device = resolve_device(None)
        chip = torch.cuda.get_device_name(device)
        table = table_for(shape, local_experts, target_of(device))
        online = Dispatcher(table, shape, local_experts, device=device)
        counts = [int(text) for text in given.tokens.split(",")]
        groups = (bench_calls(online, shape, local_experts, count, max(50, given.batches // 10)) for count in counts)
        parts["host time of a call (GPU)"] = list(itertools.chain.from_iterable(groups))
    print(f"{given.model}, EP {given.ep}, {chip}, Python {platform.python_version()}, torch {torch.__version__}")
    for title, rows in parts.items():
        show(title, rows)
    if given.json:
        report = {"python": sys.version, "torch": torch.__version__, "chip": chip, "model": given.model, "ep": given.ep}
        rows_by_part = {title: [asdict(row) for row in rows] for title, rows in parts.items()}
        given.json.write_text(json.dumps(report | {"parts": rows_by_part}, indent=1))


if __name__ == "__main__":
    main()
