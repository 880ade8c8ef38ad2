"""Reads T4 files that fitune wrote, every field checked; see `t4` for what stands where."""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from fitune.cache.checks import FieldError, mapping, one_of, shown, text, unique_pairs, whole
from fitune.cache.codec import Names, decode_decision, decode_environment, decode_key, decode_record, decode_regime
from fitune.cache.files import read_file
from fitune.cache.t4 import (
    DECISION_FIELDS,
    ERRORS,
    FORMAT,
    KEY_FIELDS,
    LEAST_US,
    MAX_T4_BYTES,
    MEMBER_FIELDS,
    MOST_US,
    OF_KERNEL,
    OPTIONAL_FIELDS,
    ORIGIN,
    PARTS,
    RECORD_FIELDS,
    REGIME_FIELDS,
    SCHEMA_VERSION,
    T4_FIELDS,
    TIMED,
    UNITS,
    Contents,
    Numbers,
    encode_result,
)
from fitune.errors import CorruptStoreError, NewerStoreError, StoreError
from fitune.record import Decision, Record


def read_t4(path: Path) -> Contents:
    """What a file of t4_files holds. Raises StoreError: where it is missing or unreadable, another program's, of a
    newer format, or where a field is broken, missing or contradicts another; the error names file and field."""
    path = Path(path)
    try:
        data = read_file(path, MAX_T4_BYTES)
    except FileNotFoundError:
        raise StoreError(f"no T4 file at {path}; check the path") from None
    try:
        return _contents(path, _parsed(data))
    except FieldError as error:
        raise CorruptStoreError(f"{path}: field {error.field}: {error.what}") from error


def _parsed(data: bytes) -> object:
    try:
        return json.loads(
            data.decode(), object_pairs_hook=unique_pairs, parse_float=_finite, parse_constant=_no_constant
        )
    except (ValueError, RecursionError) as error:
        what = str(error).splitlines()[0][:120]
        raise FieldError("(whole file)", f"no valid JSON: {what}; name a file that `fitune export t4` wrote") from error


def _finite(written: str) -> float:
    value = float(written)
    if not math.isfinite(value):
        raise ValueError(f"{shown(written)} is too large a number")
    return value


def _no_constant(written: str) -> float:
    raise ValueError(f"{written} is no number that JSON knows")


def _contents(path: Path, value: object) -> Contents:
    head = mapping(value, "(whole file)")
    if "results" not in head:
        raise StoreError(
            f"{path}: holds no results, so it is no T4 results file; name one that `fitune export t4` wrote"
        )
    if "schema_version" not in head:
        raise FieldError("schema_version", "it is missing")
    version = text(head["schema_version"], "schema_version")
    if version != SCHEMA_VERSION:
        raise StoreError(f"{path}: T4 schema version {version!r}; this fitune reads {SCHEMA_VERSION}")
    results = _list(head["results"], "results")
    own = _own_metadata(path, head, results)
    names = Names()
    where = "metadata.fitune"
    names.keys[0] = decode_key(_row(own["key"], KEY_FIELDS, f"{where}.key"), f"{where}.key")
    part = one_of(own["part"], f"{where}.part", PARTS)
    for index, environment in enumerate(_list(own["environments"], f"{where}.environments")):
        names.environments[index] = decode_environment(environment, f"{where}.environments[{index}]")
    for index, regime in enumerate(_list(own["regimes"], f"{where}.regimes")):
        inner = f"{where}.regimes[{index}]"
        names.regimes[index] = decode_regime(_row(regime, REGIME_FIELDS, inner), inner)
    records = [_record(result, part, names, f"results[{index}]") for index, result in enumerate(results)]
    decisions = [
        _decision(decision, part, names, f"{where}.decisions[{index}]")
        for index, decision in enumerate(_list(own.get("decisions", []), f"{where}.decisions"))
    ]
    environments = {environment.id: environment for environment in names.environments.values()}
    return Contents(tuple(records), tuple(decisions), environments)


def _own_metadata(path: Path, head: dict[str, object], results: list[object]) -> dict[str, object]:
    """What fitune wrote into the metadata. Raises StoreError for files of others, and newer ones."""
    metadata = mapping(head.get("metadata", {}), "metadata")
    if "fitune" not in metadata:
        first = results[0] if results else None
        parameters = first.get("configuration") if type(first) is dict else None
        found = ", ".join(sorted(map(str, parameters))[:6])[:120] if type(parameters) is dict else ""
        raise StoreError(
            f"{path}: another program's results{f' (parameters {found!r})' if found else ''}; to make records of them, "
            "metadata.fitune is missing (key, environments, regimes), and in each result fitune (status, run, ...) and "
            "configuration.tactic; import files that `fitune export t4` wrote"
        )
    own = mapping(metadata["fitune"], "metadata.fitune")
    version = whole(own.get("format"), "metadata.fitune.format", 1)
    if version > FORMAT:
        raise NewerStoreError(
            f"{path}: metadata.fitune has format {version}, this fitune reads {FORMAT}; install a newer one"
        )
    return _object(own, ("format", "part", "key", "environments", "regimes"), "metadata.fitune", ("decisions",))


def _list(value: object, where: str) -> list[object]:
    if type(value) is not list:
        raise FieldError(where, f"{shown(value)} is no array")
    return value


def _object(
    value: object, required: Collection[str], where: str, optional: Collection[str] | None = None
) -> dict[str, object]:
    """An object that has the fields `required`; with `optional` given it has no others than those and these."""
    values = mapping(value, where)
    for name in required:
        if name not in values:
            raise FieldError(f"{where}.{name}", "it is missing")
    for name in values:
        if optional is not None and name not in required and name not in optional:
            raise FieldError(where, f"{shown(name)} is no field of it")
    return values


def _row(value: object, names: Sequence[str], where: str) -> tuple[object, ...]:
    """The values of an object that has exactly the fields `names`, in their order."""
    values = _object(value, names, where, ())
    return tuple(values[name] for name in names)


def _record(value: object, part: str, names: Names, where: str) -> Record:
    result = _object(value, ("configuration", "measurements", "fitune"), where)
    own = _object(result["fitune"], RECORD_FIELDS, f"{where}.fitune", OPTIONAL_FIELDS)
    tactic = _object(result["configuration"], ("tactic",), f"{where}.configuration")["tactic"]
    names.runs[0] = text(own["run_id"], f"{where}.fitune.run_id")
    read = _Measurements(result["measurements"], f"{where}.measurements")
    inner = f"{where}.fitune.infinite"
    infinite = [one_of(name, inner, dict(ERRORS)) for name in _list(own.get("infinite", []), inner)]
    encoded = (
        0,
        own["environment"],
        0,
        tactic,
        own["status"],
        own["time_s"],
        own.get("origin", ORIGIN),
        own["phase"],
        own.get("binary", ""),
        own.get("error", ""),
        read.timed(own.get("regime")),
        read.accuracy(infinite),
    )
    try:
        record = decode_record(encoded, names)
    except FieldError as error:
        raise FieldError(f"{where}.{error.field.removeprefix('record.')}", error.what) from error
    if record.part != part:
        raise FieldError(f"{where}.configuration.tactic", f"{shown(tactic)} is none of {part}")
    _check_derived(result, record, where)
    if record.measurement is not None:
        _check_time(record.measurement.median_us, f"{where}.measurements")
    return record


def _check_derived(result: dict[str, object], record: Record, where: str) -> None:
    """That T4's fields say what the record says. Raises FieldError."""
    regimes = [] if record.measurement is None else [record.measurement.regime]
    expected = encode_result(record, Numbers([record.environment_id], regimes))
    for name in T4_FIELDS:
        if name not in expected:
            continue
        difference = _difference(result.get(name), expected[name], f"{where}.{name}")
        if difference is not None:
            raise FieldError(*difference)


def _difference(found: Any, expected: Any, where: str) -> tuple[str, str] | None:
    """Field and words of the first place where a value of a file is not the expected one; None where all is equal."""
    if isinstance(expected, dict) and type(found) is dict and found.keys() == expected.keys():
        inner: Iterable[tuple[object, str]] = ((name, f"{where}.{name}") for name in expected)
    elif isinstance(expected, list) and type(found) is list and len(found) == len(expected):
        inner = ((index, f"{where}[{index}]") for index in range(len(expected)))
    elif isinstance(expected, dict | list):
        odd: Collection[str] = found.keys() ^ expected.keys() if type(found) is dict and type(expected) is dict else ()
        which = f": {', '.join(sorted(odd)[:6])[:120]!r} are missing or do not belong there" if odd else ""
        return where, f"{shown(found)} does not hold what belongs to this record{which}"
    elif isinstance(found, bool) == isinstance(expected, bool) and found == expected:
        return None
    else:
        return where, f"{shown(found)} contradicts the rest of the record, of which {shown(expected)} follows"
    differences = (_difference(found[place], expected[place], name) for place, name in inner)
    return next((difference for difference in differences if difference is not None), None)


class _Measurements:
    """T4's measurements of one result, read back; each name once, with the unit it is written with."""

    def __init__(self, value: object, where: str) -> None:
        self._values: dict[str, object] = {}
        self._parts: list[tuple[str, object]] = []
        for index, item in enumerate(_list(value, where)):
            inner = f"{where}[{index}]"
            name, found, unit = _row(item, ("name", "value", "unit"), inner)
            if type(name) is str and name.startswith(OF_KERNEL):
                self._parts.append((name.removeprefix(OF_KERNEL), found))
            elif type(name) is not str or name not in UNITS or name in self._values:
                raise FieldError(f"{inner}.name", f"{shown(name)} is no measurement of fitune's, or stands there twice")
            else:
                self._values[name] = found
            expected = UNITS.get(name, "us")
            if unit != expected:
                raise FieldError(f"{inner}.unit", f"{shown(unit)} stands where {expected!r} belongs")

    def timed(self, regime: object) -> tuple[object, ...] | None:
        """As encode_measurement gives it; None where nothing was timed."""
        names = [name for name, _ in TIMED]
        if regime is None and not self._parts and not any(name in self._values for name in names):
            return None
        median, low, high, samples, sm_mhz, power_w = (self._values.get(name) for name in names)
        return (median, low, high, samples, regime, tuple(self._parts), sm_mhz, power_w)

    def accuracy(self, infinite: Sequence[str]) -> tuple[object, object] | None:
        """As encode_accuracy gives it; None where nothing was compared."""
        first, second = (math.inf if name in infinite else self._values.get(name) for name, _ in ERRORS)
        return None if first is None and second is None else (first, second)


def _decision(value: object, part: str, names: Names, where: str) -> Decision:
    environment, run, chosen, members, *rest = _row(value, DECISION_FIELDS, where)
    if part != "layer":
        raise FieldError(where, f"decisions are of whole layers, this file is of {part}")
    names.runs[0] = text(run, f"{where}.run_id")
    read = []
    for index, member in enumerate(_list(members, f"{where}.members")):
        inner = f"{where}.members[{index}]"
        tactic, tied, regime, measured = _row(member, MEMBER_FIELDS, inner)
        read.append((tactic, _Measurements(measured, f"{inner}.measurements").timed(regime), tied))
    try:
        decision = decode_decision((0, environment, 0, chosen, tuple(read), *rest), names)
    except FieldError as error:
        raise FieldError(f"{where}.{error.field.removeprefix('decision.')}", error.what) from error
    _check_decision(decision, where)
    return decision


def _check_decision(decision: Decision, where: str) -> None:
    """That a decision follows from its members. Raises FieldError."""
    for index, member in enumerate(decision.members):
        _check_time(member.measurement.median_us, f"{where}.members[{index}].measurements")
    if decision.member(decision.chosen) is None:
        raise FieldError(f"{where}.chosen", f"{shown(str(decision.chosen))} is none of the members")
    default = decision.member(decision.default)
    default_us = 0.0 if default is None else default.measurement.median_us
    if decision.default_us != default_us:
        raise FieldError(f"{where}.default_us", f"{decision.default_us:g} where the members say {default_us:g}")
    if not 0.0 <= decision.noise <= 1.0:
        raise FieldError(f"{where}.noise", f"{decision.noise:g} is no share of a time, from 0 to 1")


def _check_time(median_us: float, where: str) -> None:
    """That a time could be one of a kernel. Raises FieldError."""
    if not LEAST_US <= median_us <= MOST_US:
        raise FieldError(where, f"{median_us:g} us is no time of a kernel: those lie from {LEAST_US:g} to {MOST_US:g}")
