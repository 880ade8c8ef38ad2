"""`fitune verify`: are the chosen tactics right? Checked on this machine's GPU against a float32 reference."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from fitune.cli import options
from fitune.cli.output import say
from fitune.errors import InputError, NoGpuError

if TYPE_CHECKING:
    from fitune.cli.search import Grid
    from fitune.measure.protocol import Outcome
    from fitune.problem import Problem
    from fitune.tactic import Tactic

EXAMPLES = """\b
Examples:
  fitune verify --store tuned
  fitune verify --store tuned --ep 16 --tokens 1,8192 --seed 7 --json
  fitune verify --model qwen3-30b-a3b --ep 1,4"""
MAX_ABS: Final = 0.0625
MAX_ABS_FP8: Final = 0.25
"""A value beside the middle of two e4m3 steps may fall to either, so the largest of 10^8 errors is a multiple."""


def register(app: typer.Typer) -> None:
    app.command("verify", short_help="Check tactics against a float32 reference (GPU).", epilog=EXAMPLES)(verify)


def bound_of(text: object) -> float:
    """A finite number of 0 or more; its refusal names the value."""
    try:
        value = float(str(text))
    except ValueError:
        value = math.nan
    if not 0.0 <= value < math.inf:
        raise typer.BadParameter(f"{text!r} is not a finite number of 0 or more")
    return value


@dataclass(frozen=True, slots=True)
class Job:
    """One tactic to be checked on one problem."""

    problem: Problem
    tactic: Tactic


def verify(
    store: options.StoreDir = None,
    model: options.Model = None,
    model_config: options.ModelConfig = None,
    shape: options.Shape = None,
    dtype: options.DTypeName = "bf16",
    ep: options.Ep = None,
    local_experts: options.LocalExperts = None,
    redundant: options.Redundant = 0,
    tokens: options.Tokens = None,
    routing: Annotated[
        str | None, typer.Option("--routing", metavar="TEXT", help="Another profile than the tuned one.")
    ] = None,
    dispatch: options.DispatchKind = "all_gather",
    seed: Annotated[
        int | None,
        typer.Option(
            "--seed",
            metavar="S",
            parser=options.whole_number(0),
            help="Seed of the fresh input.  [default: from the clock]",
        ),
    ] = None,
    bound: Annotated[
        float | None,
        typer.Option(
            "--bound",
            metavar="X",
            parser=bound_of,
            help=f"Largest absolute error allowed.  [default: {MAX_ABS:g}, in fp8 {MAX_ABS_FP8:g}]",
        ),
    ] = None,
    json: options.Json = False,
) -> None:
    """Run tactics on fresh random input and compare with a float32 reference; exit 1 when one is wrong.

    With --model, --model-config or --shape the default tactics of that layer are checked, else the chosen tactics of
    a store. Needs a GPU (exit 3 without one).
    """
    from fitune.cli.search import Grid, read_grid

    drawn = time.time_ns() % (1 << 31) if seed is None else seed
    tuned: dict[Problem, Tactic] = {}
    if model or model_config or shape:
        profile = "random" if routing is None else routing
        grid = read_grid(model, model_config, shape, dtype, redundant, ep, local_experts, tokens, profile, dispatch)
    else:
        tuned, histograms = _of_store(options.store_path(store), ep, tokens, routing)
        grid = Grid(tuple(tuned), histograms)
    rows = [_row(job, outcome, bound) for job, outcome in _check(grid, tuned, drawn)]
    _report(rows, drawn, json)
    if not all(row["right"] for row in rows):
        raise typer.Exit(1)


def _check(grid: Grid, tuned: Mapping[Problem, Tactic], seed: int) -> list[tuple[Job, Outcome]]:
    """Run every problem's tuned tactic, or its default where there is none. Raises NoGpuError."""
    from fitune.cli.inputs import check_chip
    from fitune.measure.choose import choose_measurer, why_no_gpu
    from fitune.measure.gpu import GpuMeasurer
    from fitune.space import default_tactic

    reason = why_no_gpu()
    if reason:
        raise NoGpuError(f"no usable GPU: {reason}; verify runs the kernels, so run it on a machine with one")
    problems = grid.problems
    measurer, _ = choose_measurer("gpu", problems, seed=seed, histograms=grid.histograms, compile_workers=0)
    assert isinstance(measurer, GpuMeasurer)
    try:
        check_chip(problems, measurer.target)
        jobs = [Job(problem, tuned.get(problem) or default_tactic(problem, measurer.target)) for problem in problems]
        say(f"checking {len(jobs)} cells on {measurer.target.device} with seed {seed}")
        return [(job, measurer.check_cells(job.problem, [job.tactic], seed)[0]) for job in jobs]
    finally:
        measurer.close()


def _of_store(
    path: Path, ep: str | None, tokens: str | None, routing: str | None
) -> tuple[dict[Problem, Tactic], dict[str, list[float]]]:
    """Chosen tactics of a store's cells, and the histogram that `routing` names. Raises InputError without cells."""
    from dataclasses import replace

    from fitune.cache import open_store
    from fitune.cli.show import read_cells, select
    from fitune.routing import check_histogram, read_routing

    profile, weights = (None, None) if routing is None else read_routing(routing)
    cells = select(read_cells(open_store(path)), ep, tokens)
    if not cells:
        raise InputError(f"{path} holds no tuned cells; fill it with `fitune search`, or give --model")
    found = {}
    for cell in cells:
        problem = cell.key.problem()
        if profile is not None:
            problem = replace(problem, routing=profile)
        if weights is not None:
            check_histogram(problem, weights)
        found[problem] = cell.decision.chosen
    return found, {} if profile is None or weights is None else {profile: weights.tolist()}


def _row(job: Job, outcome: Outcome, given: float | None) -> dict[str, Any]:
    accuracy = outcome.accuracy
    bound = given if given is not None else MAX_ABS_FP8 if job.problem.shape.scales else MAX_ABS
    return {
        "tokens": job.problem.num_tokens,
        "ep": job.problem.ep_label,
        "tactic": str(job.tactic),
        "status": str(outcome.status),
        "max_abs": accuracy.max_abs if accuracy else None,
        "bound": bound,
        "rms_relative": accuracy.rms_relative if accuracy else None,
        "right": outcome.status == "ok" and accuracy is not None and accuracy.max_abs <= bound,
        "error": outcome.error,
    }


def _report(rows: list[dict[str, Any]], seed: int, json: bool) -> None:
    right = sum(row["right"] for row in rows)
    if json:
        from fitune.cli.output import emit_json

        emit_json({"seed": seed, "right": right, "cells": rows})
        return
    from fitune.cli.output import console
    from fitune.render import cut, plain_table, print_table

    table = plain_table(
        ("tokens", "right"), ("EP", "left"), ("max abs", "right"), ("rms", "right"), ("result", "left"),
        ("tactic", "left"), shrinking=("tactic",),
    )  # fmt: skip
    for row in rows:
        errors = [f"{row[name]:.2e}" if row[name] is not None else "-" for name in ("max_abs", "rms_relative")]
        failure = "" if row["status"] == "ok" else f" {row['status']} {row['error']}".rstrip()
        result = "right" if row["right"] else f"WRONG{failure}"
        table.add_row(str(row["tokens"]), row["ep"], *errors, result, cut(row["tactic"]))
    print_table(table, console())
    bounds = " or ".join(f"{bound:g}" for bound in sorted({row["bound"] for row in rows}))
    say(f"{right} of {len(rows)} cells right (max abs <= {bounds})")
