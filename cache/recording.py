"""Recordings: a measured tactic space in one small file, to be played back where there is no GPU.

Values stand in columns, each column's bytes in planes, all of it compressed with zlib. To keep files small, times are
rounded to 1 ns (`time_s` to 1 ms), clocks, power and errors to 32-bit floats; what was rounded once stays as it is.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from itertools import accumulate
from pathlib import Path
from typing import Any, Final

from fitune.cache.checks import FieldError, array, cleaned_prose, corrupt, pack, prose, text, unpack, whole
from fitune.cache.codec import (
    Named,
    Names,
    decode_choice,
    decode_decision,
    decode_parts,
    decode_target,
    define,
    encode_accuracy,
    encode_decision,
    encode_named,
    encode_parts,
    encode_target,
)
from fitune.cache.columns import (
    Code,
    Pool,
    from_planes,
    pack_blobs,
    pack_numbers,
    pack_texts,
    planes,
    unpack_blobs,
    unpack_numbered,
    unpack_numbers,
    unpack_texts,
)
from fitune.cache.files import read_file, write_atomically
from fitune.cache.frames import MAX_FILE_BYTES, Kind, frame, header_frame, migrated, read_single
from fitune.errors import StoreError
from fitune.record import Accuracy, Decision, Measurement, Part, Phase, Record, Status
from fitune.tactic import Stage, Tactic
from fitune.target import Environment, Target

SUFFIX: Final = ".fitrec"
MAX_PLAIN_BYTES: Final = 1 << 28
_STATUSES: Final = tuple(Status)
_PHASES: Final[tuple[Phase, ...]] = ("search", "final")
_NS_PER_US: Final = 1000.0
_MS_PER_S: Final = 1000.0
_MAX_NS: Final = 2**50
_WIDTHS: Final[dict[Code, int]] = {"I": 4, "q": 8, "d": 8, "f": 4}


@dataclass(frozen=True, slots=True)
class Recording:
    """What was measured on one chip: the ground truth a recorded search plays against.

    `environments` holds, by id, at least those that records and decisions refer to. `note` says in words how it was
    made and how exhaustive it is.
    """

    target: Target
    name: str
    note: str
    environments: Mapping[str, Environment]
    records: tuple[Record, ...]
    decisions: tuple[Decision, ...] = ()


class _Pools:
    """The pools of one recording while it is written; numbers start at 0 in each."""

    def __init__(self) -> None:
        self.named: dict[Named, Pool[Any]] = {what: Pool() for what in Named}
        self.tactics: Pool[Tactic | Stage] = Pool()
        self.texts: Pool[str] = Pool()
        self.parts: Pool[bytes] = Pool()

    def refer(self, what: Named, value: Any) -> int:
        return self.named[what].number(value)

    def packed(self, environments: Mapping[str, Environment]) -> list[object]:
        result: list[object] = []
        for what in Named:
            values = self.named[what].values()
            if what is Named.ENVIRONMENT:
                values = [environments[environment_id] for environment_id in values]
            result.append(pack_blobs([pack(encode_named(what, value)) for value in values]))
        tactics = [str(tactic) for tactic in self.tactics.values()]
        return [*result, pack_texts(tactics), pack_texts(self.texts.values()), pack_blobs(self.parts.values())]


def _column(code: Code, values: Sequence[float]) -> bytes:
    return planes(pack_numbers(code, values), _WIDTHS[code])


def _ns(time_us: float) -> int:
    return max(1, round(time_us * _NS_PER_US))


def _encode_records(records: Sequence[Record], pools: _Pools) -> list[bytes]:
    """Columns of all records, then of those with a measurement, then of those with an accuracy."""
    measured = [record.measurement for record in records if record.measurement is not None]
    errors = [encode_accuracy(record.accuracy) for record in records if record.accuracy is not None]
    times_ms = [round(record.time_s * _MS_PER_S) for record in records]
    medians_ns = [_ns(found.median_us) for found in measured]
    return [
        _column("I", [pools.refer(Named.KEY, record.key) for record in records]),
        _column("I", [pools.refer(Named.ENVIRONMENT, record.environment_id) for record in records]),
        _column("I", [pools.refer(Named.RUN, record.run_id) for record in records]),
        _column("I", [pools.tactics.number(record.tactic) for record in records]),
        _column("I", [_STATUSES.index(record.status) for record in records]),
        _column("q", [now - before for now, before in zip(times_ms, [0, *times_ms], strict=False)]),
        _column("I", [pools.texts.number(record.origin) for record in records]),
        _column("I", [_PHASES.index(record.phase) for record in records]),
        _column("I", [pools.texts.number(record.binary) for record in records]),
        _column("I", [pools.texts.number(cleaned_prose(record.error)) for record in records]),
        _column("I", [record.accuracy is not None for record in records]),
        _column("q", medians_ns),
        _column("q", [mid - _ns(m.ci_low_us) for mid, m in zip(medians_ns, measured, strict=True)]),
        _column("q", [_ns(m.ci_high_us) - mid for mid, m in zip(medians_ns, measured, strict=True)]),
        _column("I", [m.samples for m in measured]),
        _column("I", [pools.refer(Named.REGIME, m.regime) for m in measured]),
        _column("I", [pools.parts.number(pack(encode_parts(m.parts_us))) for m in measured]),
        _column("f", [m.sm_mhz for m in measured]),
        _column("f", [m.power_w for m in measured]),
        _column("f", [error[0] for error in errors]),
        _column("f", [error[1] for error in errors]),
    ]


_NUM_COLUMNS: Final = 21


def save_recording(path: Path, recording: Recording) -> None:
    """Write a recording to `path` in one step. Raises StoreError where it cannot be written or would not read back."""
    path = Path(path)
    pools = _Pools()
    used = {record.environment_id for record in recording.records}
    used.update(decision.environment_id for decision in recording.decisions)
    missing = used - set(recording.environments)
    assert not missing, f"environments {missing} are not in the recording"
    try:
        for environment_id in recording.environments:
            pools.refer(Named.ENVIRONMENT, environment_id)
        columns = _encode_records(recording.records, pools)
        decisions = pack_blobs([pack(encode_decision(decision, pools.refer)) for decision in recording.decisions])
        head = [encode_target(recording.target), recording.name, cleaned_prose(recording.note)]
        plain = pack([*head, len(recording.records), pools.packed(recording.environments), columns, decisions])
        decoded = _decode(unpack(plain, "recording"))
    except (FieldError, ValueError, OverflowError) as error:
        raise StoreError(f"cannot write {path}: the recording holds a value that cannot be stored: {error}") from error
    assert len(decoded.records) == len(recording.records)
    data = header_frame("recording") + frame(Kind.RECORDING, zlib.compress(plain, 9), MAX_FILE_BYTES)
    write_atomically(path, data)


def load_recording(path: Path) -> Recording:
    """Read a recording. Raises StoreError where it is missing, unreadable, foreign, broken or newer."""
    path = Path(path)
    try:
        data = read_file(path, MAX_FILE_BYTES)
    except FileNotFoundError as error:
        raise StoreError(f"no recording at {path}; check the path") from error
    header, found = read_single(path, data, "recording", Kind.RECORDING)
    try:
        return _decode(migrated(Kind.RECORDING, unpack(_inflated(found.payload), "recording"), header.format))
    except FieldError as error:
        raise corrupt(path, found.offset, error) from error


def _inflated(payload: bytes) -> bytes:
    """The uncompressed bytes; more than MAX_PLAIN_BYTES of them are never made."""
    unpacker = zlib.decompressobj()
    try:
        plain = unpacker.decompress(payload, MAX_PLAIN_BYTES)
    except zlib.error as error:
        raise FieldError("recording", f"it cannot be unpacked: {error}") from error
    if not unpacker.eof or unpacker.unused_data:
        raise FieldError("recording", f"it does not unpack to one value of at most {MAX_PLAIN_BYTES} bytes")
    return plain


def _decode(value: object) -> Recording:
    target, name, note, count, pools, columns, decisions = array(value, "recording", 7)
    num_records = whole(count, "recording.num_records", high=MAX_PLAIN_BYTES)
    packed = array(pools, "recording.pools", len(Named) + 3)
    names = Names()
    for what, blobs in zip(Named, packed, strict=False):
        for index, blob in enumerate(unpack_blobs(blobs, f"recording.{what.name.lower()}")):
            define(names, what, index, unpack(blob, f"recording.{what.name.lower()}"))
    records = _decode_records(
        num_records, array(columns, "recording.columns", _NUM_COLUMNS), packed[len(Named) :], names
    )
    return Recording(
        decode_target(target),
        text(name, "recording.name"),
        prose(note, "recording.note"),
        {environment.id: environment for environment in names.environments.values()},
        tuple(records),
        tuple(
            decode_decision(unpack(blob, "decision"), names) for blob in unpack_blobs(decisions, "recording.decisions")
        ),
    )


class _Columns:
    """The columns of a recording, each checked as a whole."""

    def __init__(self, columns: tuple[object, ...]) -> None:
        self._columns = iter(columns)

    def numbers(self, code: Code, name: str, count: int) -> Sequence[int]:
        field = f"recording.{name}"
        return unpack_numbers(code, from_planes(next(self._columns), _WIDTHS[code], field), field, count)

    def numbered(self, name: str, count: int, pool: int) -> Sequence[int]:
        field = f"recording.{name}"
        return unpack_numbered(from_planes(next(self._columns), 4, field), field, count, pool)

    def floats(self, name: str, count: int, *, infinite: bool = False) -> list[float]:
        values: list[float] = list(self.numbers("f", name, count))
        top = float("inf")
        if not all(0.0 <= value < top or (infinite and value == top) for value in values):
            raise FieldError(f"recording.{name}", "its values must be finite numbers of 0 or more")
        return values


def _decode_records(count: int, columns: tuple[object, ...], pools: tuple[object, ...], names: Names) -> list[Record]:
    tactics = [decode_choice(written, "recording.tactics") for written in unpack_texts(pools[0], "recording.tactics")]
    parts: list[Part] = [tactic.stage if isinstance(tactic, Stage) else "layer" for tactic in tactics]
    texts = unpack_texts(pools[1], "recording.texts")
    read = _Columns(columns)
    keys = read.numbered("key", count, len(names.keys))
    environments = read.numbered("environment", count, len(names.environments))
    runs = read.numbered("run", count, len(names.runs))
    choices = read.numbered("tactic", count, len(tactics))
    statuses = read.numbered("status", count, len(_STATUSES))
    times_s = _decode_times(read.numbers("q", "time", count))
    origins = _strings(read.numbered("origin", count, len(texts)), texts, "origin", text)
    phases = read.numbered("phase", count, len(_PHASES))
    binaries = _strings(read.numbered("binary", count, len(texts)), texts, "binary", _text_or_empty)
    errors = _strings(read.numbered("error", count, len(texts)), texts, "error", prose)
    accurate = read.numbered("accurate", count, 2)
    measured = [_STATUSES[status] is Status.OK for status in statuses]
    measurements = iter(_decode_measurements(read, sum(measured), unpack_blobs(pools[2], "recording.parts"), names))
    num_accurate = sum(accurate)
    accuracies = map(
        Accuracy,
        read.floats("max_abs", num_accurate, infinite=True),
        read.floats("rms_relative", num_accurate, infinite=True),
    )
    ids = {index: environment.id for index, environment in names.environments.items()}
    return [
        Record(
            names.keys[keys[i]],
            parts[choices[i]],
            tactics[choices[i]],
            _STATUSES[statuses[i]],
            ids[environments[i]],
            names.runs[runs[i]],
            times_s[i],
            origins[i],
            _PHASES[phases[i]],
            next(measurements) if measured[i] else None,
            next(accuracies) if accurate[i] else None,
            binaries[i],
            errors[i],
        )
        for i in range(count)
    ]


def _text_or_empty(value: object, field: str) -> str:
    return text(value, field, empty=True)


def _strings(column: Sequence[int], texts: Sequence[str], name: str, check: Callable[[object, str], str]) -> list[str]:
    """A column of texts; each distinct one is checked once."""
    checked = {index: check(texts[index], f"recording.{name}") for index in set(column)}
    return [checked[index] for index in column]


def _decode_times(steps_ms: Sequence[int]) -> list[float]:
    times_ms = list(accumulate(steps_ms))
    if times_ms and not 0 <= min(times_ms) <= max(times_ms) < _MAX_NS:
        raise FieldError("recording.time", "times must be 0 or more and of this age")
    return [time_ms / _MS_PER_S for time_ms in times_ms]


def _decode_measurements(read: _Columns, count: int, packed_parts: Sequence[bytes], names: Names) -> list[Measurement]:
    parts = [decode_parts(unpack(blob, "recording.parts"), "recording.parts") for blob in packed_parts]
    medians = read.numbers("q", "median", count)
    below = read.numbers("q", "ci_low", count)
    above = read.numbers("q", "ci_high", count)
    samples = read.numbers("I", "samples", count)
    regimes = read.numbered("regime", count, len(names.regimes))
    part_numbers = read.numbered("parts", count, len(parts))
    sm_mhz = read.floats("sm_mhz", count)
    power_w = read.floats("power_w", count)
    for median, low, high, taken in zip(medians, below, above, samples, strict=True):
        if not 0 <= low < median < _MAX_NS or not 0 <= high < _MAX_NS or not 1 <= taken < 2**31:
            raise FieldError("recording.median", f"{median} ns -{low} +{high} of {taken} samples is no measurement")
    return [
        Measurement(
            medians[i] / _NS_PER_US,
            (medians[i] - below[i]) / _NS_PER_US,
            (medians[i] + above[i]) / _NS_PER_US,
            samples[i],
            names.regimes[regimes[i]],
            parts[part_numbers[i]],
            sm_mhz[i],
            power_w[i],
        )
        for i in range(count)
    ]


def embedded_recordings() -> list[Path]:
    """Recordings shipped in the installed package, in order of name; empty where there are none."""
    folder = resources.files("fitune") / "data"
    if not folder.is_dir():
        return []
    return sorted(Path(str(entry)) for entry in folder.iterdir() if entry.name.endswith(SUFFIX))
