"""Run layers once, checked, for tools that watch a kernel: ncu, nsys, compute-sanitizer. Needs a GPU.

    ncu --clock-control none --profile-from-start off --kernel-name regex:grouped_gemm \\
        python scripts/run_once.py --dtype bf16 --local-experts 16 --tokens 8192 --tactic "t64 gather:permute ..."
    compute-sanitizer --tool memcheck python scripts/run_once.py --every-class --dtype fp8_block128
    python scripts/run_once.py --every-model --dtype bf16

With `--tactic`, one layer of DeepSeek-V3's sizes (or `--shape`): once to compile and compare, once more between
cudaProfilerStart and cudaProfilerStop. With `--every-class`, a small layer with odd sizes and foreign slots, by one
tactic of every class that the kernels branch on. With `--every-model`, layers of every preset's sizes under random and
zipf routing with foreign slots, by a sample of those tactics. Exit code 1 where a result is wrong.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace

from fitune import space
from fitune.measure.bench import TOLERANCES
from fitune.measure.compile import CompilePool
from fitune.measure.device import device_target
from fitune.measure.inputs import ProblemInputs, WeightBank
from fitune.models import PRESETS
from fitune.problem import DType, LayerShape, Problem
from fitune.tactic import STAGES, Stage, Tactic, parse_tactic
from fitune.target import Target

SMALL = (416, 272, 8, 2)
SMALL_TOKENS = (3, 70, 600)
MODEL_LOADS = ((1, "random"), (40, "zipf:1.2"), (700, "random"))
TACTICS_PER_LOAD = 6


def class_of(stage: Stage) -> tuple[object, ...]:
    """What the kernels branch on, apart from block sizes."""
    places = (stage.family, stage.gather, stage.activation, stage.finalize, stage.quantize)
    if stage.family not in ("tile", "gemv"):
        return places
    gemm = stage.own_gemm
    more = (gemm.schedule, gemm.flatten, gemm.loads, gemm.swap_ab, gemm.pdl, gemm.tail, gemm.num_stages > 1)
    return (*places, *more, stage.tile_size >= 64)


def tactics_of_every_class(problem: Problem, target: Target) -> list[Tactic]:
    """Tactics that between them hold one stage of every class of both GEMMs."""
    heads: dict[tuple[str, int], dict[str, dict[tuple[object, ...], Stage]]] = {}
    seen: dict[str, set[tuple[object, ...]]] = {name: set() for name in STAGES}
    for name in STAGES:
        for stage in space.pool(problem, target, name):
            found = heads.setdefault((stage.family, stage.tile_size), {part: {} for part in STAGES})
            if class_of(stage) not in seen[name] or not found[name]:
                found[name].setdefault(class_of(stage), stage)
                seen[name].add(class_of(stage))
    tactics = []
    for parts in heads.values():
        first, second = (list(parts[name].values()) for name in STAGES)
        if first and second:
            longest = max(len(first), len(second))
            tactics += [Tactic.of(first[i % len(first)], second[i % len(second)]) for i in range(longest)]
    return tactics


def check(problem: Problem, tactics: list[Tactic], target: Target, *, profile: bool) -> int:
    """Run and compare every tactic on one problem; how many are wrong."""
    import torch

    from fitune.kernels.layer import run_layer

    inputs = ProblemInputs(
        problem, target, WeightBank("cuda:0", 0), "cuda:0", 0, round_hidden=False, representative=False, drop_slots=True
    )
    most, rms = TOLERANCES[problem.shape.dtype]
    wrong = 0
    for tactic in tactics:
        inputs.poison(*STAGES)
        run_layer(tactic, inputs.args[0], inputs.ws, inputs.out)
        torch.cuda.synchronize()
        accuracy, largest = inputs.out_accuracy()
        right = largest <= most and accuracy.rms_relative <= rms
        wrong += not right
        print(
            f"{'right' if right else 'WRONG'} {accuracy.rms_relative:.1e} {problem.num_tokens:6d} {tactic}", flush=True
        )
        if profile:
            torch.cuda.cudart().cudaProfilerStart()
            run_layer(tactic, inputs.args[0], inputs.ws, inputs.out)
            torch.cuda.synchronize()
            torch.cuda.cudart().cudaProfilerStop()
    return wrong


def problems_of_every_model(dtype: DType) -> list[Problem]:
    """Loads of every preset's sizes, at the first expert-parallel size that it is usually run at."""
    presets = {each.shape: each for each in PRESETS.values()}
    return [
        Problem(replace(shape, dtype=dtype), max(1, shape.num_experts // each.usual_ep[0]), tokens, routing)
        for shape, each in presets.items()
        for tokens, routing in MODEL_LOADS
    ]


def check_every_model(dtype: DType, target: Target) -> int:
    """Run and compare a sample of tactics on the layers of all models; how many are wrong."""
    pool, tried = CompilePool(target), []
    for problem in problems_of_every_model(dtype):
        tactics = tactics_of_every_class(problem, target)
        tried.append((problem, tactics[:: -(-len(tactics) // TACTICS_PER_LOAD)]))
        pool.submit(problem, [tactic.stage(name) for tactic in tried[-1][1] for name in STAGES])
    wrong = 0
    for problem, tactics in tried:
        print(f"{problem.shape}, {problem.local_experts} local experts, {problem.routing}", flush=True)
        for tactic in tactics:
            for name in STAGES:
                pool.answer(problem, tactic.stage(name))
        wrong += check(problem, tactics, target, profile=False)
    pool.close()
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dtype", default="bf16")
    parser.add_argument("--shape", default="7168,2048,256,8", help="hidden, intermediate, experts, top-k")
    parser.add_argument("--local-experts", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--tactic", action="append", default=[], help="may be given several times")
    parser.add_argument("--every-class", action="store_true")
    parser.add_argument("--every-model", action="store_true")
    given = parser.parse_args()
    target = device_target("cuda:0")
    if given.every_class:
        shape = LayerShape(*SMALL, dtype=given.dtype)
        problems = [Problem(shape, 5, tokens, local_expert_offset=2) for tokens in SMALL_TOKENS]
        return int(
            sum(check(each, tactics_of_every_class(each, target), target, profile=False) for each in problems) > 0
        )
    if given.every_model:
        return int(check_every_model(given.dtype, target) > 0)
    if not given.tactic:
        parser.error("give --tactic, --every-class or --every-model")
    problem = Problem(
        LayerShape(*map(int, given.shape.split(",")), dtype=given.dtype), given.local_experts, given.tokens
    )
    return int(check(problem, [parse_tactic(text) for text in given.tactic], target, profile=True) > 0)


if __name__ == "__main__":
    sys.exit(main())
