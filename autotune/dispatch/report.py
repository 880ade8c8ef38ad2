"""What a look-up says about itself."""

from __future__ import annotations

from dataclasses import fields

from fitune.cache import Entry
from fitune.dispatch.lookup import describe
from fitune.dispatch.plan import Lookup
from fitune.problem import LayerKey
from fitune.target import Environment, version_of


def explain(lookup: Lookup, num_tokens: int, key: LayerKey, table_hash: str, kernels: str) -> str:
    """One `name  value` line for each thing known about the look-up of `num_tokens` under `key`."""
    rows = [("num_tokens", _where(lookup, num_tokens)), ("tactic", str(lookup.tactic))]
    if lookup.entry is None:
        rows.append(("state", f"miss, default tactic: {lookup.reason}"))
    else:
        rows += _evidence(lookup.entry, kernels)
    rows += [("layer", describe(key)), ("table", table_hash or "none")]
    return "\n".join(f"{name:<12}{value}" for name, value in rows)


def _where(lookup: Lookup, num_tokens: int) -> str:
    if lookup.entry is None:
        return f"{num_tokens}, in no tuned bucket"
    bucket = lookup.entry.bucket
    return f"{num_tokens}, tuned at {bucket.point} for {bucket.low}..{bucket.high}"


def _evidence(entry: Entry, kernels: str) -> list[tuple[str, str]]:
    environment = entry.environment
    times = (
        f"{entry.median_us:.1f} µs [{entry.ci_low_us:.1f}, {entry.ci_high_us:.1f}], default {entry.default_us:.1f} µs"
    )
    rows = [("state", f"hit, {entry.state}: {times}"), ("measured on", _software(environment))]
    if environment.kernels != kernels:
        text = f"tuned with kernels {environment.kernels or 'unknown'}, these are {kernels}: tune again"
        rows.append(("stale", text))
    now = {name: version_of(name) for name in ("triton", "torch")}
    changed = [
        f"{name} {then} when tuned, {now[name]} now"
        for name in now
        if (then := getattr(environment, name)) and then.partition("+")[0] != now[name].partition("+")[0]
    ]
    if changed:
        rows.append(("changed", ", ".join(changed)))
    return rows


def _software(environment: Environment) -> str:
    shown = ("driver", "cuda", "torch", "triton", "fitune")
    known = [f"{f.name} {getattr(environment, f.name)}" for f in fields(environment) if f.name in shown]
    return ", ".join([environment.device, *(text for text in known if not text.endswith(" "))])
