"""`fitune record`: measure whole tactic spaces and pack them into one file that can be searched without a GPU."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from fitune.cli import options
from fitune.cli.output import say
from fitune.errors import InputError

if TYPE_CHECKING:
    from fitune.cache import Recording, Store
    from fitune.problem import Key
    from fitune.record import Record
    from fitune.target import Target

EXAMPLES = """\b
Examples:
  fitune record --model deepseek-v3 --ep 1,8,16 --store sweep --out h200.fitrec
  fitune record --from-store sweep --out h200.fitrec --name deepseek-v3-h200
  fitune search --model deepseek-v3 --ep 8 --measurer recording:h200.fitrec --store tuned"""


def register(app: typer.Typer) -> None:
    app.command("record", short_help="Sweep a tactic space and pack it as a recording.", epilog=EXAMPLES)(record)


@dataclass(frozen=True, slots=True)
class Coverage:
    """How exhaustive a recording is: legal candidates of its cells, and how many of them were tried."""

    cells: int
    legal: int
    tried: int
    least: float

    def __str__(self) -> str:
        share = self.tried / self.legal if self.legal else 1.0
        return (
            f"{self.tried} of {self.legal} legal candidates tried ({share:.1%}) in {self.cells} cells, "
            f"{self.least:.1%} in the least covered one"
        )


def record(
    out: Annotated[Path, typer.Option("--out", metavar="FILE", help="The recording to write.")],
    model: options.Model = None,
    model_config: options.ModelConfig = None,
    shape: options.Shape = None,
    dtype: options.DTypeName = "bf16",
    ep: options.Ep = None,
    local_experts: options.LocalExperts = None,
    redundant: options.Redundant = 0,
    tokens: options.Tokens = None,
    routing: options.Routing = "random",
    dispatch: options.DispatchKind = "all_gather",
    store: options.StoreDir = None,
    from_store: Annotated[
        Path | None, typer.Option("--from-store", metavar="DIR", help="Measure nothing, pack what a store holds.")
    ] = None,
    budget: Annotated[
        str | None, typer.Option("--budget", metavar="TIME", help="Stop measuring after this long: 90s, 10m, 1h30m.")
    ] = None,
    name: Annotated[str | None, typer.Option("--name", metavar="TEXT", help="Its name.  [default: FILE's]")] = None,
    seed: options.Seed = 0,
    measurer: options.MeasurerName = "gpu",
    json: options.Json = False,
) -> None:
    """Sweep the whole tactic space of a layer into a store and pack it as a recording.

    Says how exhaustive the recording is. A sweep that was stopped goes on by the same command.
    """
    from fitune.cache import open_store, save_recording
    from fitune.cli.inputs import seconds_of

    check_out(out)
    title = check_name(out.stem if name is None else name)
    layer_given = bool(model or model_config or shape)
    if from_store is not None:
        if layer_given or store is not None:
            raise InputError("--from-store packs everything that store holds; leave out the layer and --store")
        source = open_store(from_store)
        packed = pack(source, title, None, None, latest_kernels(source))
    else:
        from fitune.cli.search import measuring, read_grid, run
        from fitune.problem import key_of
        from fitune.search import SearchPlan

        grid = read_grid(model, model_config, shape, dtype, redundant, ep, local_experts, tokens, routing, dispatch)
        limit_s = None if budget is None else seconds_of(budget)
        plan = SearchPlan(
            grid.problems, budget_s=limit_s, seed=seed, sampler="exhaustive", batch=SWEEP_BATCH, force=True
        )
        path = options.store_path(store)
        with measuring(measurer, grid.problems, grid.histograms, seed, required=grid.problems, path=path) as found:
            run(plan, found, path)
            keys = {key_of(problem, found.target.device) for problem in grid.problems}
            packed = pack(open_store(path), title, keys, found.target, found.environment.kernels)
    recording, coverage = packed
    save_recording(out, recording)
    _report(out, recording, coverage, json)


def latest_kernels(store: Store) -> str:
    """The kernel hash of a store's latest record; told where it is not this fitune's. Raises InputError."""
    from fitune.target import kernel_source_hash

    records, environments, own = store.records(), store.environments(), kernel_source_hash()
    if not records:
        raise InputError(f"{store.path} holds no measurements; make some with `fitune search` or `fitune record`")
    kernels = environments[records[-1].environment_id].kernels
    if kernels != own:
        say(f"these times are of kernels {kernels}, this fitune has {own}: searches on them give stale cells")
    return kernels


MAX_NAME: Final = 200
SWEEP_BATCH: Final = 32
"""Stages handed over at once: enough that every compile worker has one while another is measured."""


def check_out(out: Path) -> None:
    """Raises InputError before hours are spent on what could not be written."""
    if out.is_dir():
        raise InputError(f"--out {out} is a folder; name a file in it")
    if not out.parent.is_dir():
        raise InputError(f"--out {out}: there is no folder {out.parent}; make it first")


def check_name(name: str) -> str:
    """A recording's name. Raises InputError where it cannot be stored."""
    if not 1 <= len(name) <= MAX_NAME or not name.isprintable():
        raise InputError(f"--name {name!r:.80}: a recording's name is 1 to {MAX_NAME} printable characters")
    return name


def pack(
    store: Store, name: str, keys: set[Key] | None, target: Target | None, kernels: str
) -> tuple[Recording, Coverage]:
    """A store's records of `keys` (all when None) of the kernel hash `kernels`, each measured thing once, the latest.

    Raises InputError where nothing fits, or where keys of several devices are there.
    """
    from fitune.cache import Recording
    from fitune.target import chip_of

    environments = store.environments()
    fitting = {identity for identity, environment in environments.items() if environment.kernels == kernels}
    wanted = keys.__contains__ if keys is not None else None
    records = latest(record for record in store.records(wanted) if record.environment_id in fitting)
    decisions = [item for item in store.decisions(wanted).values() if item.environment_id in fitting]
    devices = sorted({record.key.layer.device for record in records})
    if len(devices) != 1:
        what = f"records of {', '.join(devices)}" if devices else f"no records of kernels {kernels}"
        raise InputError(f"{store.path} holds {what}; a recording is made of one device's")
    chip = target or chip_of(environments[records[-1].environment_id])
    found = coverage(records, chip)
    used = {item.environment_id for item in records} | {item.environment_id for item in decisions}
    kept = {identity: environments[identity] for identity in sorted(used)}
    return Recording(chip, name, f"{found}", kept, tuple(records), tuple(decisions)), found


def latest(records: Iterable[Record]) -> list[Record]:
    """Of records of the same key, tactic and phase the last one, in the order of their first."""
    kept: dict[tuple[object, ...], Record] = {}
    for item in records:
        kept[item.key, item.tactic, item.phase] = item
    return list(kept.values())


def coverage(records: Iterable[Record], target: Target) -> Coverage:
    """How much of the legal space of every recorded key was tried."""
    from fitune.space import pool
    from fitune.tactic import STAGES, Stage

    tried: dict[Key, set[Stage]] = {}
    for item in records:
        stages = tried.setdefault(item.key, set())
        if isinstance(item.tactic, Stage):
            stages.add(item.tactic)
    legal_total, tried_total, least = 0, 0, 1.0
    for key, stages in tried.items():
        legal = {stage for part in STAGES for stage in pool(key.problem(), target, part)}
        done = len(legal & stages)
        legal_total, tried_total = legal_total + len(legal), tried_total + done
        least = min(least, done / len(legal)) if legal else least
    return Coverage(len(tried), legal_total, tried_total, least)


def _report(out: Path, recording: Recording, coverage: Coverage, json: bool) -> None:
    size_bytes = out.stat().st_size
    if json:
        from fitune.cli.output import emit_json

        emit_json(
            {
                "file": str(out),
                "bytes": size_bytes,
                "name": recording.name,
                "device": recording.target.device,
                "records": len(recording.records),
                "decisions": len(recording.decisions),
                "cells": coverage.cells,
                "legal": coverage.legal,
                "tried": coverage.tried,
                "least": coverage.least,
            }
        )
        return
    print(f"{out}: {len(recording.records)} measurements on {recording.target.device}, {size_bytes:,} bytes")
    say(str(coverage))
