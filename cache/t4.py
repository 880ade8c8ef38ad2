"""T4 files: records as the open JSON format of autotuning results, and back.

T4 is what Kernel Tuner, KTT and BAT exchange (FAIR Sharing of Data in Autotuning Research,
https://doi.org/10.1145/3629527.3651429). Written is its schema version 1.0.0 as Kernel Tuner ships it, results and
metadata in one file: one file for each key and GEMM, and one for the key's whole layers.

    configuration   the tactic's text as `tactic`, and every axis of it by name
    invalidity      the status, see INVALIDITY; correctness is 0 for a wrong result, else 1
    times           `runtimes` holds the median alone, in ms as Kernel Tuner does: single samples are not kept
    measurements    `time` (the objective) and what else was measured, each with its unit; times in us are exact

What T4 has no field for stands under the name `fitune`: in each result what else the record says, in the metadata the
key, environments, regimes and decisions. The schema allows fields of one's own.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from datetime import UTC, datetime, timedelta
from typing import Any, Final, get_args

from fitune.cache.codec import (
    Named,
    encode_decision,
    encode_environment,
    encode_key,
    encode_record,
    encode_regime,
)
from fitune.cells import layer_name
from fitune.errors import StoreError
from fitune.problem import DEFAULT_ROUTING, Key, LayerKey
from fitune.record import Decision, Part, Record, Regime, Status
from fitune.tactic import Gemm, GemmTactic, Stage, Tactic
from fitune.target import Environment

SCHEMA_VERSION: Final = "1.0.0"
FORMAT: Final = 1
"""Of the fields under `fitune`."""
SUFFIX: Final = ".t4.json"
MAX_T4_BYTES: Final = 1 << 25
"""Some 20,000 results; hostile JSON takes up to twenty times its size in memory."""
LEAST_US: Final = 1e-3
MOST_US: Final = 1e10
"""What a time of a kernel that is read back may be: from a nanosecond to hours."""
ORIGIN: Final = "import:t4"
"""Of records whose file does not say where their tactic came from."""

INVALIDITY: Final[dict[Status, str]] = {
    Status.OK: "correct",
    Status.REJECTED: "constraints",
    Status.COMPILE_ERROR: "compile",
    Status.OUT_OF_RESOURCES: "runtime",
    Status.LAUNCH_ERROR: "runtime",
    Status.WRONG_RESULT: "correctness",
    Status.TIMEOUT: "timeout",
    Status.CRASHED: "runtime",
}
"""T4's word for each status; the status itself stands beside it."""

PARTS: Final[tuple[str, ...]] = get_args(Part)
KEY_FIELDS: Final = (*(part.name for part in fields(LayerKey)), "num_tokens")
REGIME_FIELDS: Final = tuple(part.name for part in fields(Regime))
TIMED: Final = (
    ("time", "us"),
    ("time_ci_low", "us"),
    ("time_ci_high", "us"),
    ("samples", ""),
    ("sm_frequency", "MHz"),
    ("power_usage", "W"),
)
ERRORS: Final = (("max_abs_error", ""), ("rms_relative_error", ""))
UNITS: Final = dict((*TIMED, *ERRORS))
OF_KERNEL: Final = "time."
"""Begins the name of one kernel's share of a layer's time."""
RECORD_FIELDS: Final = ("status", "phase", "run_id", "environment", "time_s")
OPTIONAL_FIELDS: Final = ("origin", "regime", "binary", "error", "infinite")
DECISION_FIELDS: Final = (
    "environment", "run_id", "chosen", "members", "default", "default_us", "noise", "reason", "time_s", "origin",
)  # fmt: skip
MEMBER_FIELDS: Final = ("tactic", "tied", "regime", "measurements")
T4_FIELDS: Final = ("timestamp", "configuration", "objectives", "times", "invalidity", "correctness", "measurements")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True)
class Contents:
    """What T4 files hold of a store: `environments` those that records and decisions refer to, by id."""

    records: tuple[Record, ...]
    decisions: tuple[Decision, ...]
    environments: Mapping[str, Environment]


def t4_files(contents: Contents) -> dict[str, bytes]:
    """File names and bytes, the same whatever order the contents are in; what stands there twice is written once.

    Raises StoreError where a file would be larger than one that can be read.
    """
    records: dict[tuple[Key, Part], list[Record]] = {}
    decisions: dict[Key, list[Decision]] = {}
    for record in dict.fromkeys(contents.records):
        records.setdefault((record.key, record.part), []).append(record)
    for decision in dict.fromkeys(contents.decisions):
        decisions.setdefault(decision.key, []).append(decision)
        records.setdefault((decision.key, "layer"), [])
    result = {}
    for (key, part), name in _names_of(sorted(records)).items():
        decided = decisions.get(key, []) if part == "layer" else []
        data = _file(key, part, records[key, part], decided, contents.environments)
        if len(data) > MAX_T4_BYTES:
            raise StoreError(
                f"{name}: {len(records[key, part])} results need more than {MAX_T4_BYTES} bytes; "
                "`fitune cache prune` drops what stands in a store twice"
            )
        result[name] = data
    return result


def _names_of(files: Sequence[tuple[Key, Part]]) -> dict[tuple[Key, Part], str]:
    """A readable name for each file; those of keys that read alike end with a hash of the key."""
    stems = {file: _stem(*file) for file in files}
    times = Counter(stem.lower() for stem in stems.values())
    result = {}
    for (key, part), stem in stems.items():
        mark = hashlib.sha256(repr(encode_key(key)).encode()).hexdigest()[:12]
        result[key, part] = f"{stem}_{mark}{SUFFIX}" if times[stem.lower()] > 1 else f"{stem}{SUFFIX}"
    return result


def _stem(key: Key, part: Part) -> str:
    layer = key.layer
    name = layer_name(layer)
    if name == "layer":
        name = f"h{layer.hidden_size}-i{layer.intermediate_size}-e{layer.num_experts}-k{layer.top_k}"
    special = [layer.routing] if layer.routing != DEFAULT_ROUTING else []
    special += [layer.dispatch] if layer.dispatch != "all_gather" else []
    words = [name, layer.dtype, layer.device, *special, f"L{layer.local_experts}", f"N{key.num_tokens}", part]
    return "_".join(re.sub(r"[^A-Za-z0-9._-]+", "-", word)[:48].strip("-.") or "x" for word in words)


class Numbers:
    """Gives environments and regimes of one file their numbers, which do not depend on the order of records."""

    def __init__(self, environments: Iterable[str], regimes: Iterable[Regime]) -> None:
        self.environments = sorted(set(environments))
        self.regimes = sorted(set(regimes), key=encode_regime)
        self._numbers: dict[object, int] = {}
        for values in (self.environments, self.regimes):
            self._numbers.update({value: index for index, value in enumerate(values)})

    def refer(self, what: Named, value: object) -> Any:
        """The number of an environment or regime; a run id stands for itself."""
        return self._numbers[value] if what in (Named.ENVIRONMENT, Named.REGIME) else value


def _file(
    key: Key,
    part: Part,
    records: Sequence[Record],
    decisions: Sequence[Decision],
    environments: Mapping[str, Environment],
) -> bytes:
    found = [record.measurement for record in records if record.measurement is not None]
    found += [member.measurement for decision in decisions for member in decision.members]
    used = {record.environment_id for record in records} | {decision.environment_id for decision in decisions}
    numbers = Numbers(used, (measurement.regime for measurement in found))
    taken_in = [environments[identity] for identity in numbers.environments]
    own: dict[str, object] = {
        "format": FORMAT,
        "part": part,
        "key": dict(zip(KEY_FIELDS, encode_key(key), strict=True)),
        "environments": [encode_environment(environment) for environment in taken_in],
        "regimes": [dict(zip(REGIME_FIELDS, encode_regime(regime), strict=True)) for regime in numbers.regimes],
    }
    if decisions:
        own["decisions"] = _ordered(_decision_json(decision, numbers) for decision in decisions)
    results = _ordered(encode_result(record, numbers) for record in records)
    metadata = {
        "hardware": {"hardware_description": _distinct(map(_chip, taken_in))},
        "environment": {"requirements": _distinct(line for each in taken_in for line in _requirements(each))},
        "fitune": own,
    }
    value = {"schema_version": SCHEMA_VERSION, "metadata": metadata, "results": results}
    return (_dumped(value, indent=1) + "\n").encode()


def _dumped(value: object, indent: int | None = None) -> str:
    return json.dumps(value, indent=indent, ensure_ascii=False, allow_nan=False)


def _ordered(values: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Results or decisions by time; equal times by their text."""
    return sorted(values, key=lambda value: (value.get("fitune", value)["time_s"], _dumped(value)))


def _distinct(values: Iterable[Any]) -> list[Any]:
    result: list[Any] = []
    for value in values:
        if value not in result:
            result.append(value)
    return result


def _chip(environment: Environment) -> dict[str, object]:
    return {name: getattr(environment, name) for name in ("device", "arch", "num_sms", "power_cap_w", "driver", "cuda")}


def _requirements(environment: Environment) -> Iterator[str]:
    for name in ("fitune", "triton", "torch", "optuna", "python"):
        if version := getattr(environment, name):
            yield f"{name}=={version}"


def encode_result(record: Record, numbers: Numbers) -> dict[str, Any]:
    """A record as one of T4's results."""
    encoded: list[Any] = encode_record(record, numbers.refer)
    _, environment, run, _, status, time_s, origin, phase, binary, error, measured, accuracy = encoded
    infinite = [name for (name, _), value in zip(ERRORS, accuracy or (), strict=False) if value == math.inf]
    own = {
        "status": status,
        "phase": phase,
        "origin": origin,
        "run_id": run,
        "environment": environment,
        **({"regime": measured[4]} if measured else {}),
        "time_s": time_s,
        **({"binary": binary} if binary else {}),
        **({"error": error} if error else {}),
        **({"infinite": infinite} if infinite else {}),
    }
    result: dict[str, Any] = {
        "configuration": configuration(record.tactic),
        "objectives": ["time"],
        "times": {"runtimes": [record.measurement.median_us / 1000.0] if record.measurement is not None else []},
        "invalidity": INVALIDITY[record.status],
        "correctness": 0 if record.status is Status.WRONG_RESULT else 1,
        "measurements": _measurements(measured, accuracy),
        "fitune": own,
    }
    written = _timestamp(record.time_s)
    return {"timestamp": written, **result} if written else result


def _timestamp(time_s: float) -> str:
    """The time in UTC, as Kernel Tuner writes it; empty where the calendar ends before it."""
    try:
        return str(_EPOCH + timedelta(seconds=time_s))
    except OverflowError:
        return ""


def configuration(choice: Tactic | Stage) -> dict[str, str | int | bool]:
    """A tactic's text, and all its axes by name; in a whole tactic those of a GEMM begin with `gemm1_` or `gemm2_`."""
    axes: dict[str, str | int | bool] = {"tactic": str(choice), "family": choice.family, "tile_size": choice.tile_size}
    if isinstance(choice, Tactic):
        places = ["gather", "activation", "quantize", "finalize"]
        gemms = {**_gemm_axes(choice.gemm1, "gemm1_"), **_gemm_axes(choice.gemm2, "gemm2_")}
    else:
        places = ["gather", "activation", "quantize"] if choice.stage == "gemm1" else ["finalize"]
        gemms = _gemm_axes(choice.gemm, "")
    return {**axes, **{place: getattr(choice, place) for place in places}, **gemms}


def _gemm_axes(gemm: Gemm, prefix: str) -> dict[str, str | int | bool]:
    if isinstance(gemm, GemmTactic):
        return {f"{prefix}{axis.name}": getattr(gemm, axis.name) for axis in fields(gemm)}
    return {f"{prefix}option_{name}": value for name, value in gemm.options}


def _measurements(measured: list[Any] | None, accuracy: list[Any] | None) -> list[dict[str, object]]:
    """T4's measurements of what encode_measurement and encode_accuracy gave; T4 holds no infinite errors."""
    rows: list[tuple[str, object, str]] = []
    if measured is not None:
        median, low, high, samples, _, parts, sm_mhz, power_w = measured
        values = (median, low, high, samples, sm_mhz, power_w)
        rows += [(name, value, unit) for (name, unit), value in zip(TIMED, values, strict=True)]
        rows += [(OF_KERNEL + kernel, part_us, "us") for kernel, part_us in parts]
    if accuracy is not None:
        pairs = zip(ERRORS, accuracy, strict=True)
        rows += [(name, value, unit) for (name, unit), value in pairs if value < math.inf]
    return [{"name": name, "value": value, "unit": unit} for name, value, unit in rows]


def _decision_json(decision: Decision, numbers: Numbers) -> dict[str, Any]:
    encoded: list[Any] = encode_decision(decision, numbers.refer)
    value = dict(zip(DECISION_FIELDS, encoded[1:], strict=True))
    members = [
        (tactic, tied, measured[4], _measurements(measured, None)) for tactic, measured, tied in value["members"]
    ]
    value["members"] = [dict(zip(MEMBER_FIELDS, member, strict=True)) for member in members]
    return value
