"""`fitune search`: tune every (tokens, local experts) key of a layer and keep what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fitune.cli import options
from fitune.cli.output import say
from fitune.errors import FituneError

if TYPE_CHECKING:
    from fitune.measure.protocol import Measurer
    from fitune.misses import Miss
    from fitune.problem import Problem
    from fitune.search import SearchPlan, SearchSummary

EXAMPLES = """\b
Examples:
  fitune search --model deepseek-v3 --ep 1,8,16 --store tuned
  fitune search --model-config ./config.json --ep 8 --tokens 1:4096 --budget 10m
  fitune search --model deepseek-v3 --ep 8,16 --tokens auto:12:1-4096 --store tuned
  fitune search --shape H=2048,I=768,E=128,K=8 --dtype fp16 --ep 1,4 --trials 60
  fitune search --store tuned --misses tuned/misses.jsonl

\b
A search that was stopped goes on where it was when the same command is given again.
Without a GPU it runs on the shipped recording; its tactics are true for the GPU that was recorded."""


def register(app: typer.Typer) -> None:
    app.command("search", short_help="Tune every (tokens, local experts) key of a layer.", epilog=EXAMPLES)(search)


def search(
    model: options.Model = None,
    model_config: options.ModelConfig = None,
    shape: options.Shape = None,
    dtype: options.DTypeName = "bf16",
    ep: options.Ep = None,
    local_experts: options.LocalExperts = None,
    redundant: options.Redundant = 0,
    tokens: options.TokensOrAuto = None,
    routing: options.Routing = "random",
    dispatch: options.DispatchKind = "all_gather",
    store: options.StoreDir = None,
    budget: Annotated[
        str | None, typer.Option("--budget", metavar="TIME", help="Stop after this long: 90s, 10m, 1h30m.")
    ] = None,
    trials: Annotated[
        int | None,
        typer.Option(
            "--trials",
            metavar="N",
            parser=options.whole_number(1),
            help="Measure at most N candidates per key and GEMM.",
        ),
    ] = None,
    seed: options.Seed = 0,
    sampler: Annotated[
        str, typer.Option("--sampler", metavar="NAME", help="pool, random, tpe, gp or exhaustive.")
    ] = "pool",
    measurer: options.MeasurerName = "auto",
    misses: Annotated[
        Path | None,
        typer.Option("--misses", metavar="FILE", help="Tune what a server's miss log asks for, too."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Decide again what already has a decision.")] = False,
    json: options.Json = False,
) -> None:
    """Tune: find the fastest tactic of every (tokens, local experts) key and keep every measurement.

    Measures on this machine's GPU, or on a recording where there is none. Every result is checked against a
    reference before it may win, finalists race the default in interleaved rounds, and what is measured is stored at
    once.
    """
    from fitune.cli.grid import choose_problems, read_auto
    from fitune.cli.inputs import seconds_of
    from fitune.search import SearchPlan

    grid = Grid((), {})
    auto = read_auto(tokens)
    tokens = tokens if auto is None else auto.candidates
    if model or model_config or shape or misses is None:
        grid = read_grid(model, model_config, shape, dtype, redundant, ep, local_experts, tokens, routing, dispatch)
    missed = read_misses(misses) if misses is not None else []
    problems = tuple(dict.fromkeys([*grid.problems, *(miss.problem for miss in missed)]))
    plan = SearchPlan(
        problems,
        trials=trials,
        budget_s=None if budget is None else seconds_of(budget),
        seed=seed,
        sampler=sampler,
        force=force,
    )
    path = options.store_path(store)
    required = () if auto else grid.problems
    with measuring(measurer, problems, grid.histograms, seed, required=required, path=path) as found:
        chosen = choose_problems(auto, grid.problems, found) if auto and grid.problems else grid.problems
        plan = replace(plan, problems=(*chosen, *searchable(missed, found, chosen)))
        summary = run(plan, found, path)
        report(plan, found, summary, path, json)


@dataclass(frozen=True, slots=True)
class Grid:
    """The problems a command line names, and the histograms their routing profiles need, by profile."""

    problems: tuple[Problem, ...]
    histograms: Mapping[str, Sequence[float]]


def read_grid(
    model: str | None,
    model_config: Path | None,
    shape: str | None,
    dtype: str,
    redundant: int,
    ep: str | None,
    local_experts: str | None,
    tokens: str | None,
    routing: str,
    dispatch: str,
) -> Grid:
    """The options that name a layer and its sweep, read and checked. Raises InputError."""
    from fitune.cli import inputs
    from fitune.routing import check_histogram, read_routing

    layer = inputs.read_layer(model, model_config, shape, dtype, redundant)
    counts = inputs.local_expert_counts(layer.shape, ep, local_experts)
    profile, weights = read_routing(routing)
    problems = inputs.grid(layer.shape, counts, inputs.token_counts(tokens), profile, inputs.read_dispatch(dispatch))
    if weights is None:
        return Grid(problems, {})
    for problem in problems:
        check_histogram(problem, weights)
    return Grid(problems, {profile: weights.tolist()})


def read_misses(path: Path) -> list[Miss]:
    """What a miss log asks for. Broken lines are told and passed over. Raises StoreError."""
    from fitune.misses import scan_misses

    scan = scan_misses(path)
    for line in scan.broken:
        say(f"{path}: line {line.number} is passed over: {line.what}")
    return list(scan.misses)


def searchable(misses: Sequence[Miss], measurer: Measurer, besides: Sequence[Problem]) -> list[Problem]:
    """The problems of a miss log that this measurer can answer; what it cannot is told and left out."""
    from fitune.measure.recording import RecordingMeasurer

    known = set(measurer.problems()) if isinstance(measurer, RecordingMeasurer) else None
    found: list[Problem] = []
    for miss in misses:
        problem = miss.problem
        name = f"miss of {problem.num_tokens} tokens, {problem.ep_label}"
        if problem in found or problem in besides:
            continue
        if miss.layer.device != measurer.target.device:
            say(f"{name}: left out, it was missed on {miss.layer.device}, this is {measurer.target.device}")
        elif problem.shape.scales and not measurer.target.has_fp8:
            say(f"{name}: left out, {measurer.target.device} does not multiply fp8")
        elif known is not None and problem not in known:
            say(f"{name}: left out, it was not recorded; search on a GPU")
        else:
            found.append(problem)
    return found


@contextmanager
def measuring(
    text: str,
    problems: Sequence[Problem],
    histograms: Mapping[str, Sequence[float]],
    seed: int,
    *,
    required: Sequence[Problem],
    path: Path,
) -> Iterator[Measurer]:
    """The measurer that `--measurer` names, announced on stderr and closed at the end.

    Before anything is said, a recording must hold the `required` problems, and the store at `path` is opened or made.
    """
    from fitune.cache import Store
    from fitune.cli.inputs import check_chip
    from fitune.measure.choose import choose_measurer
    from fitune.measure.recording import RecordingMeasurer

    measurer, note = choose_measurer(text, problems, seed=seed, histograms=histograms)
    try:
        check_chip(required, measurer.target)
        if isinstance(measurer, RecordingMeasurer):
            for problem in required:
                measurer.require(problem)
        Store.open(path, create=True)
        if note:
            say(note)
        if isinstance(measurer, RecordingMeasurer):
            name, device = measurer.recording.name, measurer.target.device
            say(f"recording {name!r}: nothing is measured on this machine; the tactics found are true for {device}")
        yield measurer
    finally:
        measurer.close()


def run(plan: SearchPlan, measurer: Measurer, path: Path) -> SearchSummary:
    """Search into the store at `path` with progress on stderr, and write the table at the end, come what may."""
    from fitune.cache import Store
    from fitune.cli.progress import SearchProgress
    from fitune.search import run_search

    store = Store.open(path, create=True)
    try:
        with SearchProgress(len(plan.problems), plan.budget_s) as progress:
            summary = run_search(plan, measurer, store, progress)
    except BaseException as error:
        with suppress(FituneError):  # what went wrong first is what the user should read
            store.write_table()
        if isinstance(error, KeyboardInterrupt):
            say(f"interrupted; everything measured so far is kept in {path}, resume by the same command")
            raise typer.Exit(130) from None
        raise
    store.write_table()
    return summary


def report(plan: SearchPlan, measurer: Measurer, summary: SearchSummary, path: Path, json: bool) -> None:
    """The cells of the plan on stdout, what happened on stderr."""
    from fitune.cache import open_store
    from fitune.cli.show import read_cells
    from fitune.problem import key_of

    keys = {key_of(problem, measurer.target.device) for problem in plan.problems}
    opened = open_store(path)
    cells = read_cells(opened, [decision for key, decision in opened.decisions().items() if key in keys])
    if json:
        from fitune.cells import cell_json
        from fitune.cli.output import emit_json

        emit_json(
            {
                "store": str(path),
                "measurer": measurer.name,
                "device": measurer.target.device,
                "run_id": summary.run_id,
                "elapsed_s": summary.elapsed_s,
                "measured": summary.measured,
                "reused": summary.reused,
                "kept": len(summary.kept),
                "skipped": [
                    {"tokens": key.num_tokens, "ep": key.layer.ep_label, "reason": reason}
                    for key, reason in summary.skipped
                ],
                "cells": [cell_json(cell) for cell in cells],
            }
        )
    else:
        from fitune.cli.output import console
        from fitune.render import print_cells

        print_cells(cells, console())
    _talk(summary, path)


def _talk(summary: SearchSummary, path: Path) -> None:
    from fitune.cli.progress import clock

    what = f"{len(summary.decided)} of {summary.total} cells decided"
    if summary.kept:
        what += f", {len(summary.kept)} kept from before"
    if summary.skipped:
        what += f", {len(summary.skipped)} left out (give the same command again to go on)"
    reused = f", {summary.reused} taken from the store" if summary.reused else ""
    say(f"{what}: {summary.measured} measurements{reused} in {clock(summary.elapsed_s)}; kept in {path}")
    if summary.missing:
        say(f"{summary.missing} legal candidates are not in the recording and were not considered")
