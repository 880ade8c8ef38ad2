"""A store: a folder of segments, everything ever measured and decided, and the table derived from it.

    STORE/fitune-store      a header frame: says that this folder is a store, and of which format
    STORE/segments/*.seg    one append-only file per writer
    STORE/table.fitable     the derived table, written atomically; can be made anew at any time
    STORE/lock              held by merge and prune; readers and writers need no lock
    STORE/damaged/          segments that `prune` set aside because parts of them could not be read

Readers take what is there: all whole frames of all segments. A frame cut off at a segment's end (its writer was killed)
is passed over; any other damage is a CorruptStoreError that names file, offset and field.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from fitune.cache.checks import pack
from fitune.cache.codec import Named, encode_decision
from fitune.cache.files import TEMPORARY, read_file, storage_error, write_atomically
from fitune.cache.frames import (
    HEADER_BYTES,
    MAX_FILE_BYTES,
    Damage,
    Frame,
    Kind,
    header_frame,
    read_header,
    scan,
)
from fitune.cache.segment import SUFFIX, Finding, Item, KeyFilter, Report, StoreWriter, read_items, refuse
from fitune.cache.table import Table, read_table, table_of
from fitune.errors import CorruptStoreError, FituneError, StoreError
from fitune.problem import Key
from fitune.record import Decision, Record
from fitune.target import Environment

if TYPE_CHECKING:
    from fitune.cache.maintain import MergeReport, PruneReport

MARKER: Final = "fitune-store"
SEGMENTS: Final = "segments"
TABLE: Final = "table.fitable"
LOCK: Final = "lock"
DAMAGED: Final = "damaged"
_MAX_HEADER_BYTES: Final = HEADER_BYTES + 4096
_RECORDS: Final = frozenset((Kind.RECORD,))
_DECISIONS: Final = frozenset((Kind.DECISION,))
_ENVIRONMENTS: Final = frozenset((Kind.DEFINE,))


class Store:
    """One store directory. Holds no file open and no content in memory: every call reads what is there now."""

    def __init__(self, path: Path) -> None:
        """Use Store.open, which checks first."""
        self.path = path

    @classmethod
    def open(cls, path: Path, *, create: bool = False) -> Store:
        """The store at `path`, made there if `create` and nothing but an empty or missing folder is there.

        Raises StoreError where there is no store, it cannot be read or made, or `path` is something else;
        CorruptStoreError and NewerStoreError where a file's first frame says so.
        """
        path = Path(path)
        store = cls(path)
        try:
            kind = _kind_of(path)
            if kind == "missing" and create:
                _create(path)
            elif kind == "missing":
                raise StoreError(f"no store at {path}; check the path, or make one with `fitune search --store {path}`")
            elif kind == "store" and create:
                (path / SEGMENTS).mkdir(exist_ok=True)
            elif kind == "foreign":
                raise StoreError(f"{path} is a folder of other files, not a fitune store; name a store or a new folder")
        except OSError as error:
            raise storage_error(path, "open the store", error) from error
        store._check_headers()
        return store

    @property
    def segments_path(self) -> Path:
        """Folder of the segment files."""
        return self.path / SEGMENTS

    @property
    def table_path(self) -> Path:
        """Where write_table puts the table."""
        return self.path / TABLE

    def segment_paths(self) -> list[Path]:
        """The segment files in order of name, which is the order they were begun in. Raises StoreError."""
        try:
            names = {entry.name for entry in os.scandir(self.segments_path) if entry.name.endswith(SUFFIX)}
        except FileNotFoundError:
            return []
        except OSError as error:
            raise storage_error(self.segments_path, "list", error) from error
        return [self.segments_path / name for name in sorted(names) if not name.startswith(".")]

    def _check_headers(self) -> None:
        marker = self.path / MARKER
        try:
            data = read_file(marker, _MAX_HEADER_BYTES)
        except FileNotFoundError:
            pass  # a store without its marker has segments, each with a header of its own
        else:
            first = next(scan(data), None)
            if not isinstance(first, Frame):
                what = first.what if isinstance(first, Damage) else "it is empty"
                raise CorruptStoreError(f"{marker}: at byte 0: {what}; delete this file, the records do not need it")
            read_header(marker, first, "store")
        for path in self.segment_paths():
            try:
                first = next(scan(read_file(path, MAX_FILE_BYTES, first_bytes=_MAX_HEADER_BYTES)), None)
            except FileNotFoundError:
                continue
            if isinstance(first, Frame) and first.kind == Kind.HEADER:
                read_header(path, first, "segment")

    def items(
        self, kinds: frozenset[Kind], where: KeyFilter | None = None, report: Report = refuse
    ) -> Iterator[tuple[Path, Item]]:
        """Items of all segments with the file each stands in; parameters as for segment.read_items."""
        for path in self.segment_paths():
            try:
                data = read_file(path, MAX_FILE_BYTES)
            except FileNotFoundError:
                continue  # a prune removes a segment only once nothing in it is needed
            for item in read_items(path, data, kinds=kinds, where=where, report=report):
                yield path, item

    def environments(self) -> dict[str, Environment]:
        """Every environment by its id. Raises StoreError."""
        found = (item for _, item in self.items(_ENVIRONMENTS) if isinstance(item, Environment))
        return {environment.id: environment for environment in found}

    def records(self, where: KeyFilter | None = None) -> list[Record]:
        """All records, oldest first; with `where`, those of keys it holds for (it is asked once per key and segment).

        Raises StoreError.
        """
        found = [item for _, item in self.items(_RECORDS, where) if isinstance(item, Record)]
        found.sort(key=lambda record: record.time_s)
        return found

    def all_decisions(self, where: KeyFilter | None = None) -> list[Decision]:
        """All decisions, superseded ones included, oldest first. Raises StoreError."""
        found = [item for _, item in self.items(_DECISIONS, where) if isinstance(item, Decision)]
        found.sort(key=decision_order)
        return found

    def decisions(self, where: KeyFilter | None = None) -> dict[Key, Decision]:
        """The latest decision of each key: the same ones whatever file or order they were stored in."""
        return {decision.key: decision for decision in self.all_decisions(where)}

    def writer(self) -> StoreWriter:
        """A writer with a segment file of its own; use it as a context manager. Raises StoreError at once where the
        store cannot be written."""
        return StoreWriter(self.segments_path, self.environments)

    def build_table(self) -> Table:
        """The table of the latest decisions. Raises StoreError."""
        decisions: dict[Key, Decision] = {}
        environments: dict[str, Environment] = {}
        found: list[Decision] = []
        for _, item in self.items(_DECISIONS | _ENVIRONMENTS):
            if isinstance(item, Environment):
                environments[item.id] = item
            elif isinstance(item, Decision):
                found.append(item)
        for decision in sorted(found, key=decision_order):
            decisions[decision.key] = decision
        return table_of(decisions.values(), environments)

    def write_table(self) -> Path:
        """Write the table of the latest decisions to `table_path`; a reader sees the old one or the new one whole."""
        write_atomically(self.table_path, self.build_table().to_bytes())
        return self.table_path

    def check(self) -> list[Finding]:
        """Everything that is not as fitune wrote it, in all files; empty for a sound store.

        Findings marked harmless cost nothing that was stored: frames cut off by a kill, left-over temporary files, a
        table older than the decisions. Raises NewerStoreError, and StoreError for files that cannot be read.
        """
        findings: list[Finding] = []
        for _ in self.items(frozenset((Kind.DEFINE, Kind.RECORD, Kind.DECISION)), report=findings.append):
            pass
        if not (self.path / MARKER).exists():
            findings.append(Finding(self.path / MARKER, 0, "the marker file is missing", harmless=True))
        findings.extend(self._stray_files())
        if self.table_path.exists():
            findings.extend(self._check_table(damaged=any(not finding.harmless for finding in findings)))
        return findings

    def _stray_files(self) -> Iterator[Finding]:
        for folder in (self.path, self.segments_path):
            for entry in sorted(folder.iterdir()) if folder.is_dir() else ():
                if entry.name.startswith(".") and entry.name.endswith(TEMPORARY):
                    yield Finding(entry, 0, "a temporary file left by a killed process; delete it", harmless=True)
                elif folder == self.segments_path and entry.suffix != SUFFIX:
                    yield Finding(entry, 0, "this is no segment; it is not read", harmless=True)

    def _check_table(self, *, damaged: bool) -> Iterator[Finding]:
        try:
            table = read_table(self.table_path)
        except FituneError as error:
            yield Finding(self.table_path, 0, f"{error}; write the table anew")
            return
        if not damaged and table.hash != self.build_table().hash:
            yield Finding(self.table_path, 0, "older than the decisions; write the table anew", harmless=True)

    def merge(self, other: Store) -> MergeReport:
        """Add what `other` holds and this store does not; see maintain.merge."""
        from fitune.cache.maintain import merge

        return merge(self, other)

    def add(self, items: Iterable[Item]) -> MergeReport:
        """Add the items this store does not hold; see maintain.add."""
        from fitune.cache.maintain import add

        return add(self, items)

    def prune(
        self, *, kernels: str | None = None, drop_keys: KeyFilter | None = None, dry_run: bool = False
    ) -> PruneReport:
        """Drop what is superseded, never a decision in use; see maintain.prune."""
        from fitune.cache.maintain import prune

        return prune(self, kernels=kernels, drop_keys=drop_keys, dry_run=dry_run)


def decision_order(decision: Decision) -> tuple[float, str, bytes]:
    """Sorts decisions by time; equal times by content, so that every copy of a store agrees on the latest."""

    def refer(what: Named, value: object) -> int:
        return 0

    return decision.time_s, decision.run_id, pack(encode_decision(decision, refer))


def _kind_of(path: Path) -> str:
    """`store`, `missing` (or an empty folder) or `foreign`. Raises StoreError for a file."""
    if not path.exists():
        return "missing"
    if not path.is_dir():
        raise StoreError(f"{path} is a file, not a store folder; name the folder that holds a store")
    if (path / MARKER).exists():
        return "store"
    names = {name for name in os.listdir(path) if not name.startswith(".")}
    segments = path / SEGMENTS
    if SEGMENTS in names and any(name.endswith(SUFFIX) for name in os.listdir(segments)):
        return "store"
    own = {MARKER, SEGMENTS, TABLE, LOCK}
    return "foreign" if any(name not in own and not name.startswith("misses") for name in names) else "missing"


def _create(path: Path) -> None:
    (path / SEGMENTS).mkdir(parents=True, exist_ok=True)
    write_atomically(path / MARKER, header_frame("store"))


def open_store(path: Path) -> Store:
    """The store at `path`. Raises StoreError where there is none or it cannot be read."""
    return Store.open(path)


def load_table(path: Path) -> Table:
    """The table of a store (its latest decisions, always current) or of a table file. Raises StoreError."""
    path = Path(path)
    return Store.open(path).build_table() if path.is_dir() else read_table(path)
