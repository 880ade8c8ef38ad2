"""One segment: the append-only file of one writer, a header and then frames.

A definition frame gives a number to a key, an environment, a run id or a regime before the first frame that refers to
it, so a record's frame stays small and a reader meets each key once.
"""

from __future__ import annotations

import errno
import itertools
import os
import secrets
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, Final, Self

from fitune.cache.checks import FieldError, array, pack, unpack
from fitune.cache.codec import (
    Named,
    Names,
    decode_decision,
    decode_record,
    define,
    encode_decision,
    encode_named,
    encode_record,
)
from fitune.cache.files import storage_error, sync_directory, temporary_name, try_lock
from fitune.cache.frames import MAGIC, Damage, Frame, Kind, frame, header_frame, migrated, read_header, scan
from fitune.errors import CorruptStoreError, StoreError
from fitune.problem import Key
from fitune.record import Decision, Record
from fitune.target import Environment

Item = Environment | Record | Decision
KeyFilter = Callable[[Key], bool]

SUFFIX: Final = ".seg"
ROLL_BYTES: Final = 1 << 26
SYNC_EVERY_S: Final = 5.0


@dataclass(frozen=True, slots=True)
class Finding:
    """Something a check found: at byte `offset` of `file`. `harmless`: nothing that was stored is missing by it."""

    file: Path
    offset: int
    what: str
    harmless: bool = False

    def __str__(self) -> str:
        return f"{self.file}: at byte {self.offset}: {self.what}"


Report = Callable[[Finding], None]


def refuse(finding: Finding) -> None:
    """The strict way to take a finding: a torn tail is nothing, anything else a CorruptStoreError."""
    if not finding.harmless:
        raise CorruptStoreError(
            f"{finding}; `fitune cache prune` sets the damaged file aside and keeps what can be read"
        )


def read_items(
    path: Path,
    data: bytes,
    *,
    kinds: frozenset[Kind] = frozenset((Kind.DEFINE, Kind.RECORD, Kind.DECISION)),
    where: KeyFilter | None = None,
    report: Report = refuse,
) -> Iterator[Item]:
    """The items of a segment's bytes in the order written.

    `kinds` picks what is yielded (DEFINE: environments); frames of other kinds are skipped undecoded. `where` is asked
    once per key; records and decisions of keys it says no to are skipped undecoded. What is damaged goes to `report`
    and is skipped unless that raises. Raises NewerStoreError.
    """
    frames = scan(data)
    version = _read_start(path, data, next(frames, None), report)
    if version is None:
        return
    names = Names()
    wanted: dict[object, bool] = {}
    for found in frames:
        if isinstance(found, Damage):
            report(Finding(path, found.offset, found.what, harmless=found.torn))
            continue
        if found.kind not in kinds and found.kind != Kind.DEFINE and found.kind in _BODY:
            continue
        try:
            item = _decode(found, version, names, wanted, where)
        except FieldError as error:
            report(Finding(path, found.offset, f"field {error.field}: {error.what}"))
            continue
        if item is not None and found.kind in kinds:
            yield item


_BODY: Final = frozenset((Kind.DEFINE, Kind.RECORD, Kind.DECISION))


def _read_start(path: Path, data: bytes, first: Frame | Damage | None, report: Report) -> int | None:
    """Format version of a segment, None where there is nothing to read."""
    if first is None:
        report(Finding(path, 0, "the file is empty: its writer was killed at once", harmless=True))
        return None
    if isinstance(first, Frame):
        return read_header(path, first, "segment").format
    if first.torn and (data[: len(MAGIC)] == MAGIC[: len(data)] or not data.strip(b"\0")):
        report(Finding(path, 0, "the header is not whole: its writer was killed at once", harmless=True))
    else:
        report(Finding(path, 0, f"this is not a fitune segment: {first.what}"))
    return None


def _decode(
    found: Frame, version: int, names: Names, wanted: dict[object, bool], where: KeyFilter | None
) -> Item | None:
    if found.kind not in _BODY:
        raise FieldError("kind", f"{found.kind} is no kind of frame that a segment holds")
    value = migrated(found.kind, unpack(found.payload, "payload"), version)
    if found.kind == Kind.DEFINE:
        what, index, body = array(value, "definition", 3)
        define(names, what, index, body)
        if where is not None and what == Named.KEY:
            wanted[index] = where(names.keys[index])  # type: ignore[index]
        return names.environments[index] if what == Named.ENVIRONMENT else None  # type: ignore[index]
    if (
        where is not None
        and type(value) is tuple
        and value
        and type(value[0]) is int
        and not wanted.get(value[0], True)
    ):
        return None
    return decode_record(value, names) if found.kind == Kind.RECORD else decode_decision(value, names)


class StoreWriter:
    """Appends to a segment file of its own: one write per frame, so a kill loses at most the frame being written.

    What `append` returned from is in the operating system's hands: it survives any death of the process. It is forced
    to disk (fsync) after every decision, on the first append
    SYNC_EVERY_S after the last time, and on close, which bounds what a power cut takes.
    Safe to use from several threads; in a forked child it goes on in a new segment.
    """

    def __init__(
        self, folder: Path, known: Callable[[], dict[str, Environment]] | None = None, *, temporary: bool = False
    ) -> None:
        """`folder` holds the segments; `known` finds environments that this writer was not given.

        A `temporary` segment is not seen by readers, is synced on close only and grows to any size. Raises StoreError.
        """
        self._folder = folder
        self._known = known
        self._temporary = temporary
        self._lock = threading.Lock()
        self._environments: dict[str, Environment] = {}
        self._handle = -1
        self._start()

    def _start(self) -> None:
        self.path, self._handle = _new_segment(self._folder, self._temporary)
        self._process = os.getpid()
        self._numbers: dict[tuple[Named, object], int] = {}
        self._next_number = itertools.count()
        self._names = Names()
        self._synced_s = time.monotonic()
        self._empty = True
        try:
            self._write(header_frame("segment"))
        except BaseException:
            self._close()
            raise
        sync_directory(self._folder)

    def append(self, item: Item) -> None:
        """Store one item. A record or decision needs its environment appended before, here or in the store.

        Raises StoreError when it cannot be written (disk full, ...); the store is then as it was before the call.
        """
        with self._lock:
            if self._handle < 0:
                raise StoreError(f"cannot append to {self.path}: its writer is closed; open a new one")
            if os.getpid() != self._process or self._is_full():
                self._end()
                self._start()
            try:
                self._append(item)
            except FieldError as error:
                raise StoreError(
                    f"{type(item).__name__.lower()} not stored: field {error.field}: {error.what}"
                ) from error

    def _is_full(self) -> bool:
        return not self._temporary and os.fstat(self._handle).st_size >= ROLL_BYTES

    def _append(self, item: Item) -> None:
        if isinstance(item, Environment):
            self._environments[item.id] = item
            self._refer(Named.ENVIRONMENT, item.id)
            return
        if isinstance(item, Record):
            kind, payload = Kind.RECORD, pack(encode_record(item, self._refer))
            decode_record(unpack(payload, "record"), self._names)
        else:
            kind, payload = Kind.DECISION, pack(encode_decision(item, self._refer))
            decode_decision(unpack(payload, "decision"), self._names)
        self._write(frame(kind, payload))
        due = kind is Kind.DECISION or time.monotonic() - self._synced_s > SYNC_EVERY_S
        if due and not self._temporary:
            self._sync()

    def _refer(self, what: Named, value: Any) -> int:
        """The number of a key, environment (by id), run id or regime in this segment; defines it at first use."""
        number = self._numbers.get((what, value))
        if number is None:
            number = next(self._next_number)  # never given twice, even when a signal cuts what follows short
            body = encode_named(what, self._environment(value) if what is Named.ENVIRONMENT else value)
            payload = pack([what, number, body])
            define(self._names, what, number, unpack(pack(body), "definition"))
            self._write(frame(Kind.DEFINE, payload))
            self._numbers[what, value] = number
        return number

    def _environment(self, environment_id: str) -> Environment:
        if environment_id not in self._environments and self._known is not None:
            self._environments.update(self._known())
        found = self._environments.get(environment_id)
        assert found is not None, f"environment {environment_id!r} was never appended; append it before its records"
        return found

    def _write(self, data: bytes) -> None:
        """One write of one frame; what a failing disk took of it is cut off again."""
        size_bytes = os.fstat(self._handle).st_size
        try:
            written_bytes = os.write(self._handle, data)
            if written_bytes < len(data):
                # The rest tells why the first write fell short: a full disk raises here.
                os.ftruncate(self._handle, size_bytes)
                if os.write(self._handle, data) < len(data):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            with suppress(OSError):
                os.ftruncate(self._handle, size_bytes)
            raise storage_error(self.path, "append to", error) from error
        self._empty = self._empty and size_bytes == 0

    def _sync(self) -> None:
        try:
            os.fsync(self._handle)
        except OSError as error:
            raise storage_error(self.path, "sync", error) from error
        self._synced_s = time.monotonic()

    def flush(self) -> None:
        """Force everything appended so far to disk. Raises StoreError."""
        with self._lock:
            if self._handle >= 0:
                self._sync()

    def close(self) -> None:
        """Force everything to disk and end; a segment nothing was appended to is removed. Raises StoreError."""
        with self._lock:
            if self._handle >= 0:
                self._end()

    def _end(self) -> None:
        try:
            if os.getpid() == self._process:
                self._sync()
        finally:
            self._close()

    def _close(self) -> None:
        if self._empty and os.getpid() == self._process:
            with suppress(OSError):
                self.path.unlink()
        os.close(self._handle)
        self._handle = -1

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _new_segment(folder: Path, temporary: bool) -> tuple[Path, int]:
    """A new segment file, open for appending, locked against pruning for as long as it is open."""
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    while True:
        path = folder / f"{time.time_ns():020d}-{os.getpid()}-{secrets.token_hex(4)}{SUFFIX}"
        path = temporary_name(path) if temporary else path
        try:
            handle = os.open(path, flags, 0o666)
        except FileExistsError:
            continue
        except OSError as error:
            raise storage_error(path, "create", error) from error
        if try_lock(handle) is not False:
            return path, handle
        os.close(handle)  # a prune met the new file before its lock was taken; it may be about to go
