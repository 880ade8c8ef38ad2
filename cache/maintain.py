"""Merging stores and pruning one."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path

from fitune.cache.files import (
    TEMPORARY,
    exclusive,
    read_file,
    storage_error,
    sync_directory,
    temporary_name,
    try_lock,
    write_atomically,
)
from fitune.cache.frames import MAX_FILE_BYTES, Kind, header_frame
from fitune.cache.segment import Finding, Item, KeyFilter, StoreWriter, read_items
from fitune.cache.store import DAMAGED, LOCK, MARKER, Store, decision_order
from fitune.errors import StoreError
from fitune.problem import Key
from fitune.record import Decision, Record
from fitune.target import Environment

_DECISIONS_AND_ENVIRONMENTS = frozenset((Kind.DEFINE, Kind.DECISION))
_ALL = frozenset((Kind.DEFINE, Kind.RECORD, Kind.DECISION))


@dataclass(frozen=True, slots=True)
class MergeReport:
    """What a merge added, and how many items were there already."""

    environments: int
    records: int
    decisions: int
    duplicates: int


@dataclass(frozen=True, slots=True)
class PruneReport:
    """What a prune dropped and kept, items and bytes of all segments; `busy` segments have a live writer and were left
    alone, `damaged` lists what could not be read."""

    records_dropped: int
    decisions_dropped: int
    records_kept: int
    decisions_kept: int
    bytes_before: int
    bytes_after: int
    busy: tuple[Path, ...]
    damaged: tuple[Finding, ...]


def merge(store: Store, other: Store) -> MergeReport:
    """Append to `store` every environment, record and decision of `other` that it does not hold yet.

    Nothing is removed anywhere; a merge cut short is finished by running it again. Raises StoreError.
    """
    return add(store, (item for _, item in other.items(_ALL)))


def add(store: Store, items: Iterable[Item]) -> MergeReport:
    """Append to `store` every item it does not hold yet; an environment comes before what refers to it.

    An item is held when one equal in every field is. Raises StoreError.
    """
    counts: dict[type[Item], int] = {Environment: 0, Record: 0, Decision: 0}
    duplicates = 0
    with exclusive(store.path / LOCK), ExitStack() as stack:
        held: set[Item] = {item for _, item in store.items(_ALL)}
        writer: StoreWriter | None = None
        for item in items:
            if item in held:
                duplicates += not isinstance(item, Environment)
                continue
            if writer is None:
                writer = stack.enter_context(StoreWriter(store.segments_path, lambda: _environments(held)))
            writer.append(item)
            held.add(item)
            counts[type(item)] += 1
    return MergeReport(counts[Environment], counts[Record], counts[Decision], duplicates)


def _environments(items: set[Item]) -> dict[str, Environment]:
    return {item.id: item for item in items if isinstance(item, Environment)}


def prune(
    store: Store, *, kernels: str | None = None, drop_keys: KeyFilter | None = None, dry_run: bool = False
) -> PruneReport:
    """Drop what nothing needs any more. Raises StoreError.

    Dropped are items that stand in the store twice, decisions that a later one of the same key supersedes, records
    measured with another kernel source than `kernels` (a hash as in Environment.kernels) where that is given, and
    records of keys that `drop_keys` holds for. The latest decision of a key is in use and always stays, and so does
    every environment. Segments with a live writer are left alone.

    Each segment is written anew beside the old one, synced and read back before it takes the old one's place in one
    step: killed at any moment, the store holds everything that was to be kept. Segments with damaged parts are moved to
    the `damaged` folder, what could be read of them stays in the store. With `dry_run` nothing is changed and
    `bytes_after` is an estimate.
    """
    if not (store.path / MARKER).exists() and not dry_run:
        write_atomically(store.path / MARKER, header_frame("store"))
    with nullcontext() if dry_run else exclusive(store.path / LOCK):
        work = _Prune(store, _rule(store, kernels, drop_keys), dry_run)
        for path in store.segment_paths():
            work.segment(path)
        if not dry_run:
            _remove_temporaries(store.segments_path)
    return work.report()


Rule = Callable[[Item], bool]


def _rule(store: Store, kernels: str | None, drop_keys: KeyFilter | None) -> Rule:
    """Whether an item stays; asked once for each item, it says no to one it saw before."""
    latest: dict[Key, tuple[float, str, bytes]] = {}
    environments: dict[str, Environment] = {}
    for _, item in store.items(_DECISIONS_AND_ENVIRONMENTS, report=_ignore):
        if isinstance(item, Environment):
            environments[item.id] = item
        elif isinstance(item, Decision):
            latest[item.key] = max(decision_order(item), latest.get(item.key, (0.0, "", b"")))
    seen: set[Item] = set()

    def stays(item: Item) -> bool:
        if isinstance(item, Environment):
            return True
        if item in seen:
            return False
        seen.add(item)
        if isinstance(item, Decision):
            # Later than the latest known then: a writer added it meanwhile, and it is the one in use.
            return decision_order(item) >= latest.get(item.key, (0.0, "", b""))
        if drop_keys is not None and drop_keys(item.key):
            return False
        return kernels is None or environments[item.environment_id].kernels == kernels

    return stays


def _ignore(finding: Finding) -> None:
    """Findings are taken up when the segment they are in has its turn."""


class _Prune:
    """One prune at work, segment by segment."""

    def __init__(self, store: Store, stays: Rule, dry_run: bool) -> None:
        self.store = store
        self.stays = stays
        self.dry_run = dry_run
        self.busy: list[Path] = []
        self.damaged: list[Finding] = []
        self.counts = {(Record, True): 0, (Record, False): 0, (Decision, True): 0, (Decision, False): 0}
        self.bytes_before = self.bytes_after = 0

    def report(self) -> PruneReport:
        counts = self.counts
        return PruneReport(
            counts[Record, False],
            counts[Decision, False],
            counts[Record, True],
            counts[Decision, True],
            self.bytes_before,
            self.bytes_after,
            tuple(self.busy),
            tuple(self.damaged),
        )

    def segment(self, path: Path) -> None:
        with _locked(path) as free:
            data = read_file(path, MAX_FILE_BYTES)
            findings: list[Finding] = []
            items = list(read_items(path, data, report=findings.append))
            kept = [item for item in items if self.stays(item)] if free else items
            self._count(items, set(map(id, kept)))
            self.damaged.extend(finding for finding in findings if not finding.harmless)
            self.bytes_before += len(data)
            if not free:
                self.busy.append(path)
            changed = free and (len(kept) < len(items) or bool(findings))
            if not changed:
                self.bytes_after += len(data)
            elif self.dry_run:
                self.bytes_after += len(data) * len(kept) // max(1, len(items))
            else:
                self.bytes_after += self._replace(path, kept, keep_old=any(not f.harmless for f in findings))

    def _count(self, items: list[Item], kept: set[int]) -> None:
        for item in items:
            if isinstance(item, Record | Decision):
                self.counts[type(item), id(item) in kept] += 1

    def _replace(self, path: Path, kept: list[Item], *, keep_old: bool) -> int:
        """Put a segment of the kept items in the place of `path`; its size in bytes."""
        new = self._written(kept)
        try:
            if keep_old:
                folder = self.store.path / DAMAGED
                folder.mkdir(exist_ok=True)
                os.replace(_linked(path, temporary_name(folder / path.name)), folder / path.name)
                sync_directory(folder)
            if new is None:
                path.unlink()
            else:
                os.replace(new, path)
        except OSError as error:
            raise storage_error(path, "replace", error) from error
        sync_directory(path.parent)
        return 0 if new is None else path.stat().st_size

    def _written(self, kept: list[Item]) -> Path | None:
        """A new temporary segment of the kept items, synced and read back; None where there are none."""
        if not kept:
            return None
        known = {item.id: item for item in kept if isinstance(item, Environment)}
        with StoreWriter(self.store.segments_path, self.store.environments, temporary=True) as writer:
            for item in (*known.values(), *kept):
                writer.append(item)
        again = list(read_items(writer.path, read_file(writer.path, MAX_FILE_BYTES)))
        body = [item for item in again if not isinstance(item, Environment)]
        if body != [item for item in kept if not isinstance(item, Environment)]:
            raise StoreError(f"{writer.path}: reads back otherwise than written; check the disk, nothing was changed")
        return writer.path


def _linked(path: Path, name: Path) -> Path:
    """A second name for a file: a hard link, or a copy where the file system has none."""
    try:
        os.link(path, name)
    except OSError:
        shutil.copyfile(path, name)
    return name


@contextmanager
def _locked(path: Path) -> Iterator[bool]:
    """Whether the segment has no live writer, and keeps it so for the block."""
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise storage_error(path, "read", error) from error
    try:
        yield try_lock(handle) is True
    finally:
        os.close(handle)


def _remove_temporaries(folder: Path) -> None:
    """Remove what an earlier prune left when it was killed. Only prunes make such files here, one at a time."""
    for entry in folder.iterdir():
        if entry.name.startswith(".") and entry.name.endswith(TEMPORARY):
            with suppress(OSError):
                entry.unlink()
