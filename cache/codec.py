"""Keys, environments, records and decisions to plain msgpack values and back, every field checked on the way in.

What repeats within a file (keys, environments, run ids, regimes) is written once as a definition with a number, and
records refer to the number: `refer(what, value)` gives it when writing, `Names` holds the definitions when reading.
Arrays are positional; their meaning changes only with the format version (see `frames`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import MISSING, dataclass, field, fields
from enum import IntEnum
from functools import lru_cache
from typing import Any, Final, TypeVar, get_args

from fitune.cache.checks import (
    FieldError,
    array,
    cleaned_prose,
    mapping,
    number,
    one_of,
    prose,
    shown,
    text,
    truth,
    whole,
)
from fitune.errors import ShapeError, TacticSyntaxError
from fitune.problem import Key, LayerKey
from fitune.record import Accuracy, Decision, Measurement, Member, Phase, Record, Regime, Status
from fitune.tactic import Gemm, LibraryGemm, Stage, Tactic, parse_stage, parse_tactic
from fitune.target import Environment, Target

T = TypeVar("T")

MAX_TOKENS: Final = 1 << 40
LAYER_FIELDS: Final = 10
MAX_TACTIC_NUMBER: Final = 1 << 16
_STATUSES: Final[dict[str, Status]] = {status.value: status for status in Status}
_PHASES: Final[tuple[str, ...]] = get_args(Phase)


class Named(IntEnum):
    """What a definition defines."""

    KEY = 1
    ENVIRONMENT = 2
    RUN = 3
    REGIME = 4


Refer = Callable[[Named, Any], int]


@dataclass(slots=True)
class Names:
    """The definitions read so far from one file, by number."""

    keys: dict[int, Key] = field(default_factory=dict)
    environments: dict[int, Environment] = field(default_factory=dict)
    runs: dict[int, str] = field(default_factory=dict)
    regimes: dict[int, Regime] = field(default_factory=dict)


def _named(table: dict[int, T], value: object, where: str) -> T:
    found = table.get(value) if type(value) is int else None
    if found is None:
        raise FieldError(where, f"{shown(value)} was not defined earlier in the file")
    return found


# Keys, environments, targets, regimes


def encode_key(key: Key) -> list[object]:
    """[hidden_size, intermediate_size, num_experts, top_k, dtype, activation, local_experts, dispatch, routing, device,
    num_tokens]"""
    values = (*(getattr(key.layer, part.name) for part in fields(LayerKey)), key.num_tokens)
    return [value if isinstance(value, str) else int(value) for value in values]


def decode_layer_key(values: tuple[object, ...], where: str) -> LayerKey:
    """A layer key that stands for a layer that can be. Raises FieldError."""
    checked: dict[str, Any] = {}
    for part, value in zip(fields(LayerKey), values, strict=True):
        inner = f"{where}.{part.name}"
        checked[part.name] = whole(value, inner, 1) if part.type == "int" else text(value, inner)
    layer = LayerKey(**checked)
    try:
        Key(layer, 1).problem()
    except ShapeError as error:
        raise FieldError(where, str(error)) from error
    return layer


def decode_key(value: object, where: str = "key") -> Key:
    """The inverse of encode_key. Raises FieldError."""
    values = array(value, where, LAYER_FIELDS + 1)
    layer = decode_layer_key(values[:LAYER_FIELDS], where)
    return Key(layer, whole(values[LAYER_FIELDS], f"{where}.num_tokens", 1, MAX_TOKENS))


def _encode_fields(value: Environment | Target) -> dict[str, object]:
    return {part.name: getattr(value, part.name) for part in fields(value) if part.init}


def _decode_fields(kind: type[Environment] | type[Target], value: object, where: str) -> dict[str, Any]:
    values = mapping(value, where)
    known = {part.name: part for part in fields(kind) if part.init}
    for name in values:
        if name not in known:
            raise FieldError(where, f"{shown(name)} is no field of it")
    result: dict[str, Any] = {}
    for name, part in known.items():
        inner = f"{where}.{name}"
        if name not in values:
            if part.default is MISSING:
                raise FieldError(inner, "it is missing")
        elif part.type == "int":
            result[name] = whole(values[name], inner)
        elif part.type == "float":
            result[name] = number(values[name], inner)
        else:
            result[name] = text(values[name], inner, empty=True)
    return result


def encode_environment(environment: Environment) -> dict[str, object]:
    """A map of the fields by name; the id is derived, so it is not stored."""
    return _encode_fields(environment)


def decode_environment(value: object, where: str = "environment") -> Environment:
    """The inverse of encode_environment; fields that a later fitune added take their defaults. Raises FieldError."""
    return Environment(**_decode_fields(Environment, value, where))


def encode_target(target: Target) -> dict[str, object]:
    """A map of the fields by name."""
    return _encode_fields(target)


def decode_target(value: object, where: str = "target") -> Target:
    """The inverse of encode_target. Raises FieldError."""
    target = Target(**_decode_fields(Target, value, where))
    if target.is_cuda and not target.arch[3:].isdecimal():
        raise FieldError(f"{where}.arch", f"{shown(target.arch)} is no arch; it looks like sm_90 or gfx942")
    return target


def encode_regime(regime: Regime) -> list[object]:
    """[timer, execution, l2, routing, seed, interleaved]"""
    return [regime.timer, regime.execution, regime.l2, regime.routing, regime.seed, regime.interleaved]


def decode_regime(value: object, where: str = "regime") -> Regime:
    """The inverse of encode_regime. Raises FieldError."""
    timer, execution, l2, routing, seed, interleaved = array(value, where, 6)
    return Regime(
        text(timer, f"{where}.timer"),
        text(execution, f"{where}.execution"),
        text(l2, f"{where}.l2"),
        text(routing, f"{where}.routing"),
        whole(seed, f"{where}.seed", -(2**63), 2**64 - 1),
        truth(interleaved, f"{where}.interleaved"),
    )


def encode_named(what: Named, value: Any) -> object:
    """The value of a definition."""
    if what is Named.KEY:
        return encode_key(value)
    if what is Named.ENVIRONMENT:
        return encode_environment(value)
    return encode_regime(value) if what is Named.REGIME else value


def define(names: Names, what: object, index: object, value: object) -> None:
    """Check a definition and put it into `names`. Raises FieldError."""
    number_ = whole(index, "definition.number")
    if what == Named.KEY:
        names.keys[number_] = decode_key(value)
    elif what == Named.ENVIRONMENT:
        names.environments[number_] = decode_environment(value)
    elif what == Named.RUN:
        names.runs[number_] = text(value, "run_id")
    elif what == Named.REGIME:
        names.regimes[number_] = decode_regime(value)
    else:
        raise FieldError("definition.what", f"{shown(what)} is not 1 to 4")


# Tactics


@lru_cache(maxsize=65536)
def _parsed(written: str) -> Tactic | Stage | str:
    """The tactic or stage that a text names, or what is wrong with the text."""
    try:
        found = parse_tactic(written) if " g1:" in written and " g2:" in written else parse_stage(written)
    except TacticSyntaxError as error:
        return str(error)
    gemms = (found.gemm,) if isinstance(found, Stage) else (found.gemm1, found.gemm2)
    if str(found) != written:
        return f"tactic {written!r} is written {str(found)!r}"
    if not _is_sane(found.tile_size) or not all(_is_sane_gemm(gemm) for gemm in gemms):
        return f"tactic {written!r}: its numbers must be from 1 to {MAX_TACTIC_NUMBER}"
    return found


def _is_sane(value: int) -> bool:
    return 1 <= value <= MAX_TACTIC_NUMBER


def _is_sane_gemm(gemm: Gemm) -> bool:
    if isinstance(gemm, LibraryGemm):
        return all(isinstance(value, str) or abs(value) <= MAX_TACTIC_NUMBER for _, value in gemm.options)
    numbers = (gemm.block_n, gemm.block_k, gemm.group_m, gemm.num_warps, gemm.num_stages, gemm.programs_per_sm)
    return all(_is_sane(value) for value in numbers)


def decode_choice(value: object, where: str) -> Tactic | Stage:
    """A tactic or stage from its text form, which must be the canonical one. Raises FieldError."""
    found = _parsed(text(value, where))
    if isinstance(found, str):
        raise FieldError(where, found)
    return found


def decode_tactic(value: object, where: str) -> Tactic:
    """A whole tactic from its text form. Raises FieldError."""
    found = decode_choice(value, where)
    if isinstance(found, Stage):
        raise FieldError(where, f"{shown(value)} is one stage; a whole tactic belongs here")
    return found


# Measurements, records, decisions


def encode_parts(parts: tuple[tuple[str, float], ...]) -> list[list[object]]:
    """[[kernel, µs], ...]"""
    return [[name, float(value)] for name, value in parts]


def decode_parts(value: object, where: str) -> tuple[tuple[str, float], ...]:
    """The inverse of encode_parts. Raises FieldError."""
    pairs = [array(pair, where, 2) for pair in array(value, where)]
    return tuple((text(name, where), number(part_us, f"{where}.us")) for name, part_us in pairs)


def encode_measurement(measurement: Measurement, refer: Refer) -> list[object]:
    """[median_us, ci_low_us, ci_high_us, samples, regime number, parts, sm_mhz, power_w]"""
    return [
        float(measurement.median_us),
        float(measurement.ci_low_us),
        float(measurement.ci_high_us),
        int(measurement.samples),
        refer(Named.REGIME, measurement.regime),
        encode_parts(measurement.parts_us),
        float(measurement.sm_mhz),
        float(measurement.power_w),
    ]


def decode_measurement(value: object, names: Names, where: str = "measurement") -> Measurement:
    """The inverse of encode_measurement. Raises FieldError."""
    median, low, high, samples, regime, parts, sm_mhz, power_w = array(value, where, 8)
    median_us = number(median, f"{where}.median_us", positive=True)
    low_us = number(low, f"{where}.ci_low_us", positive=True)
    high_us = number(high, f"{where}.ci_high_us", positive=True)
    if not low_us <= median_us <= high_us:
        raise FieldError(f"{where}.median_us", f"{median_us} lies outside its own interval {low_us} to {high_us}")
    return Measurement(
        median_us,
        low_us,
        high_us,
        whole(samples, f"{where}.samples", 1),
        _named(names.regimes, regime, f"{where}.regime"),
        decode_parts(parts, f"{where}.parts_us") if parts else (),
        number(sm_mhz, f"{where}.sm_mhz"),
        number(power_w, f"{where}.power_w"),
    )


def encode_record(record: Record, refer: Refer) -> list[object]:
    """[key number, environment number, run number, tactic, status, time_s, origin, phase, binary, error, measurement or
    nil, [max_abs, rms_relative] or nil]"""
    accuracy = record.accuracy
    return [
        refer(Named.KEY, record.key),
        refer(Named.ENVIRONMENT, record.environment_id),
        refer(Named.RUN, record.run_id),
        str(record.tactic),
        record.status.value,
        float(record.time_s),
        record.origin,
        record.phase,
        record.binary,
        cleaned_prose(record.error),
        None if record.measurement is None else encode_measurement(record.measurement, refer),
        None if accuracy is None else encode_accuracy(accuracy),
    ]


def encode_accuracy(accuracy: Accuracy) -> list[float]:
    """[max_abs, rms_relative]; NaN, the error of an output that was never written, becomes infinity."""
    return [math.inf if math.isnan(error) else float(error) for error in (accuracy.max_abs, accuracy.rms_relative)]


def decode_accuracy(value: object, where: str = "accuracy") -> Accuracy:
    """The inverse of encode_accuracy. Raises FieldError."""
    max_abs, rms_relative = array(value, where, 2)
    return Accuracy(_error(max_abs, f"{where}.max_abs"), _error(rms_relative, f"{where}.rms_relative"))


def _error(value: object, where: str) -> float:
    return math.inf if value == math.inf and type(value) is float else number(value, where)


def decode_record(value: object, names: Names) -> Record:
    """The inverse of encode_record. Raises FieldError."""
    key, environment, run, tactic, status, time_s, origin, phase, binary, error, measured, accuracy = array(
        value, "record", 12
    )
    found = _STATUSES.get(status) if type(status) is str else None
    if found is None:
        raise FieldError("record.status", f"{shown(status)} is not one of {', '.join(_STATUSES)}")
    if (measured is not None) != (found is Status.OK):
        held = "holds a" if measured is not None else "lacks its"
        raise FieldError("record.measurement", f"a record with status {found} {held} measurement")
    choice = decode_choice(tactic, "record.tactic")
    return Record(
        _named(names.keys, key, "record.key"),
        choice.stage if isinstance(choice, Stage) else "layer",
        choice,
        found,
        _named(names.environments, environment, "record.environment").id,
        _named(names.runs, run, "record.run_id"),
        number(time_s, "record.time_s"),
        text(origin, "record.origin"),
        one_of(phase, "record.phase", _PHASES),  # type: ignore[arg-type]
        None if measured is None else decode_measurement(measured, names),
        None if accuracy is None else decode_accuracy(accuracy),
        text(binary, "record.binary", empty=True),
        prose(error, "record.error"),
    )


def encode_decision(decision: Decision, refer: Refer) -> list[object]:
    """[key number, environment number, run number, chosen, [[tactic, measurement, tied], ...], default, default_us,
    noise, reason, time_s, origin]"""
    return [
        refer(Named.KEY, decision.key),
        refer(Named.ENVIRONMENT, decision.environment_id),
        refer(Named.RUN, decision.run_id),
        str(decision.chosen),
        [[str(m.tactic), encode_measurement(m.measurement, refer), m.tied] for m in decision.members],
        str(decision.default),
        float(decision.default_us),
        float(decision.noise),
        cleaned_prose(decision.reason),
        float(decision.time_s),
        decision.origin,
    ]


def _decode_member(value: object, names: Names, where: str) -> Member:
    tactic, measured, tied = array(value, where, 3)
    return Member(
        decode_tactic(tactic, f"{where}.tactic"),
        decode_measurement(measured, names, f"{where}.measurement"),
        truth(tied, f"{where}.tied"),
    )


def decode_decision(value: object, names: Names) -> Decision:
    """The inverse of encode_decision. Raises FieldError."""
    key, environment, run, chosen, members, default, default_us, noise, reason, time_s, origin = array(
        value, "decision", 11
    )
    listed = array(members, "decision.members")
    return Decision(
        _named(names.keys, key, "decision.key"),
        decode_tactic(chosen, "decision.chosen"),
        tuple(_decode_member(member, names, f"decision.members[{i}]") for i, member in enumerate(listed)),
        decode_tactic(default, "decision.default"),
        number(default_us, "decision.default_us"),
        number(noise, "decision.noise"),
        prose(reason, "decision.reason"),
        _named(names.environments, environment, "decision.environment").id,
        _named(names.runs, run, "decision.run_id"),
        number(time_s, "decision.time_s"),
        text(origin, "decision.origin"),
    )
