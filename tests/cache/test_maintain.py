"""Merging and pruning: nothing is lost, whatever happens in between."""

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from fitune.cache import MergeReport, Store, maintain
from fitune.cache.frames import header_frame
from fitune.errors import CorruptStoreError, StoreError


def contents(store: Store) -> tuple[Any, ...]:
    return store.records(), store.all_decisions(), store.environments()


def test_merge_is_a_union_without_doubles(store: Store, tmp_path: Path, world: Any) -> None:
    world.fill(store, 5)
    other = Store.open(tmp_path / "other", create=True)
    world.fill(other, 7)
    with other.writer() as writer:
        writer.append(world.old_environment)
        writer.append(world.record(100, environment=world.old_environment))
    before = contents(other)
    assert store.merge(other) == MergeReport(environments=1, records=3, decisions=0, duplicates=7)
    assert set(store.records()) == set(other.records())
    assert len(store.records()) == 9
    assert store.environments() == other.environments()
    assert store.merge(other) == MergeReport(0, 0, 0, duplicates=10)
    assert contents(other) == before
    assert store.check() == []


def test_merging_a_store_with_itself_or_a_copy_changes_nothing(store: Store, tmp_path: Path, world: Any) -> None:
    world.fill(store)
    before = contents(store)
    names = store.segment_paths()
    shutil.copytree(store.path, tmp_path / "copy")
    for other in (store, Store.open(tmp_path / "copy")):
        assert store.merge(other).records == 0
    assert contents(store) == before
    assert store.segment_paths() == names


def test_merge_order_does_not_matter_to_decisions(tmp_path: Path, world: Any) -> None:
    hashes = set()
    for order in ((16, 1.0), (32, 3.0), (128, 2.0)), ((128, 2.0), (16, 1.0), (32, 3.0)):
        total = Store.open(tmp_path / f"total{order[0][0]}", create=True)
        for tile_size, time_s in order:
            part = Store.open(tmp_path / f"part{order[0][0]}-{tile_size}", create=True)
            with part.writer() as writer:
                writer.append(world.environment)
                writer.append(world.decision(tile_size=tile_size, time_s=time_s))
            total.merge(part)
        assert total.decisions()[world.key()].chosen.tile_size == 32
        hashes.add(total.build_table().hash)
    assert len(hashes) == 1


def test_a_damaged_store_is_not_merged_silently(store: Store, tmp_path: Path, world: Any) -> None:
    other = Store.open(tmp_path / "other", create=True)
    path = world.fill(other)
    data = bytearray(path.read_bytes())
    data[-300] ^= 1
    path.write_bytes(data + header_frame("segment"))
    with pytest.raises(CorruptStoreError, match="at byte"):
        store.merge(other)


@pytest.fixture
def old_store(store: Store, world: Any) -> Store:
    """Two segments: superseded decisions, a double, records of another kernel source, two keys."""
    with store.writer() as writer:
        writer.append(world.environment)
        writer.append(world.old_environment)
        for number in range(4):
            writer.append(world.record(number))
            writer.append(world.record(number + 10, world.key(64)))
        writer.append(world.decision(tile_size=16, time_s=1.0))
        writer.append(world.decision(world.key(64), time_s=1.0))
    with store.writer() as writer:
        writer.append(world.old_environment)
        writer.append(world.record(20, environment=world.old_environment))
        writer.append(world.decision(tile_size=32, time_s=2.0))
        writer.append(world.record(3))
    return store


def test_prune_drops_what_is_superseded_and_nothing_in_use(old_store: Store, world: Any) -> None:
    decisions, environments = old_store.decisions(), old_store.environments()
    planned = old_store.prune(dry_run=True)
    assert len(old_store.all_decisions()) == 3
    report = old_store.prune()
    for found in (planned, report):
        assert (found.records_dropped, found.records_kept) == (1, 9)
        assert (found.decisions_dropped, found.decisions_kept) == (1, 2)
        assert found.busy == found.damaged == ()
    assert report.bytes_after == sum(path.stat().st_size for path in old_store.segment_paths()) < report.bytes_before
    assert old_store.decisions() == decisions
    assert old_store.all_decisions() == sorted(decisions.values(), key=lambda decision: decision.time_s)
    assert old_store.environments() == environments
    assert old_store.check() == []
    again = old_store.prune()
    assert (again.records_dropped, again.decisions_dropped) == (0, 0)
    assert again.bytes_after == again.bytes_before == report.bytes_after


def test_prune_by_kernel_source_and_by_key_keeps_decisions(old_store: Store, world: Any) -> None:
    decisions = old_store.decisions()
    assert old_store.prune(kernels=world.environment.kernels).records_dropped == 2
    assert {record.environment_id for record in old_store.records()} == {world.environment.id}
    assert old_store.prune(drop_keys=lambda key: key == world.key(64)).records_dropped == 4
    assert {record.key for record in old_store.records()} == {world.key()}
    assert old_store.decisions() == decisions


def test_prune_of_everything_else_keeps_the_decisions(old_store: Store) -> None:
    decisions = old_store.decisions()
    assert old_store.prune(drop_keys=lambda key: True).records_kept == 0
    assert old_store.records() == []
    assert old_store.decisions() == decisions


def test_prune_leaves_a_live_writers_segment_alone(old_store: Store, world: Any) -> None:
    with old_store.writer() as writer:
        writer.append(world.environment)
        writer.append(world.record(50, world.key(64)))
        report = old_store.prune(drop_keys=lambda key: key == world.key(64))
        assert report.busy == (writer.path,)
        assert report.records_dropped == 5
        writer.append(world.record(51, world.key(64)))
    assert [record.time_s for record in old_store.records(lambda key: key == world.key(64))] == [1050.0, 1051.0]
    assert old_store.check() == []


def test_a_decision_made_while_pruning_stays(old_store: Store, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A writer adds a later decision after the prune looked which ones are in use, and ends before its turn."""
    late = world.decision(tile_size=128, time_s=77.0)
    real = maintain._rule

    def rule(*arguments: Any) -> Any:
        found = real(*arguments)
        with old_store.writer() as writer:
            writer.append(world.environment)
            writer.append(late)
        return found

    monkeypatch.setattr(maintain, "_rule", rule)
    old_store.prune()
    assert old_store.decisions()[world.key()] == late


def test_prune_sets_a_damaged_segment_aside_and_keeps_the_rest(old_store: Store, world: Any) -> None:
    path = old_store.segment_paths()[0]
    whole = old_store.records()
    data = bytearray(path.read_bytes())
    data[data.rindex(b"t64")] ^= 1
    path.write_bytes(data)
    with pytest.raises(CorruptStoreError):
        old_store.decisions()
    report = old_store.prune()
    assert [finding.file for finding in report.damaged] == [path]
    assert (old_store.path / "damaged" / path.name).read_bytes() == bytes(data)
    assert old_store.check() == []
    assert set(old_store.records()) == set(whole)
    assert set(old_store.decisions()) == {world.key()}


def test_prune_cleans_up_after_kills(old_store: Store) -> None:
    whole = set(old_store.records())
    path = old_store.segment_paths()[0]
    path.write_bytes(path.read_bytes() + b"\xf1FT\n\x03")
    (old_store.segments_path / ".1.seg.7-a.tmp").write_bytes(b"half")
    (old_store.segments_path / "0.seg").write_bytes(b"")
    (old_store.path / "fitune-store").unlink()
    assert len(old_store.check()) == 4
    assert old_store.prune().damaged == ()
    assert old_store.check() == []
    assert set(old_store.records()) == whole
    assert not (old_store.path / "damaged").exists()


@pytest.mark.parametrize("call", ["replace", "fsync", "link", "unlink", "write"])
@pytest.mark.parametrize("after", [0, 1, 2])
def test_a_prune_cut_short_anywhere_loses_nothing(
    old_store: Store, world: Any, monkeypatch: pytest.MonkeyPatch, call: str, after: int
) -> None:
    """The process dies (here: an exception nobody catches) at the first, second or third of each kind of step."""
    path = old_store.segment_paths()[0]
    path.write_bytes(path.read_bytes() + b"junk" + header_frame("segment"))  # damaged, so that it is set aside
    needed_decisions = {world.key(): 2.0, world.key(64): 1.0}
    real, count = getattr(os, call), 0

    class Killed(BaseException):
        pass

    def dying(*arguments: Any, **more: Any) -> Any:
        nonlocal count
        count += 1
        if count > after:
            raise Killed
        return real(*arguments, **more)

    with monkeypatch.context() as patch:
        patch.setattr(os, call, dying)
        try:
            old_store.prune()
        except Killed:
            assert count == after + 1
    old_store.prune()
    assert [finding for finding in old_store.check() if not finding.harmless] == []
    assert {record.time_s for record in old_store.records()} == {1000.0 + n for n in (0, 1, 2, 3, 10, 11, 12, 13, 20)}
    assert {key: decision.time_s for key, decision in old_store.decisions().items()} == needed_decisions
    assert (old_store.path / "damaged" / path.name).exists()


def test_a_full_disk_leaves_the_store_as_it_was(old_store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    before = {path: path.read_bytes() for path in old_store.segment_paths()}

    def full(handle: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(StoreError, match="the disk is full"):
            old_store.prune()
    assert {path: path.read_bytes() for path in old_store.segment_paths()} == before
    assert old_store.prune().decisions_dropped == 1
