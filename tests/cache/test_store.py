"""Stores: what is appended comes back; what cannot be used is refused in one line; failing writes cost nothing."""

import errno
import os
import resource
import stat
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fitune.cache import Store, load_table, open_store, segment
from fitune.cache.codec import encode_environment, encode_key
from fitune.cache.frames import FORMAT, MAX_FILE_BYTES, Kind, frame, header_frame
from fitune.cache.store import MARKER
from fitune.errors import CorruptStoreError, NewerStoreError, StoreError
from fitune.record import Record


def one_line(error: pytest.ExceptionInfo[StoreError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


def newer(role: str) -> bytes:
    return frame(Kind.HEADER, msgpack.packb({"role": role, "format": FORMAT + 1, "fitune": "9.1", "needs": "9.0"}))


def test_everything_comes_back(store: Store, world: Any) -> None:
    world.fill(store)
    again = open_store(store.path)
    assert again.records() == [*(world.record(number) for number in range(5)), world.failure()]
    assert again.decisions() == {world.key(): world.decision()}
    assert again.environments() == {world.environment.id: world.environment}
    assert again.check() == []


def test_records_are_ordered_by_time_over_all_writers(store: Store, world: Any) -> None:
    with store.writer() as first, store.writer() as second:
        for writer in (first, second):
            writer.append(world.environment)
        for number in (4, 1, 3):
            first.append(world.record(number))
        second.append(world.record(2))
    assert [record.time_s for record in store.records()] == [1001.0, 1002.0, 1003.0, 1004.0]


def test_what_was_appended_is_seen_before_the_writer_closes(store: Store, world: Any) -> None:
    with store.writer() as writer:
        writer.append(world.environment)
        writer.append(world.record())
        assert store.records() == [world.record()]


def test_the_latest_decision_counts_whatever_the_order(tmp_path: Path, world: Any) -> None:
    decisions = [world.decision(tile_size=16, time_s=5.0), world.decision(tile_size=32, time_s=9.0)]
    twins = [world.decision(tile_size=64, time_s=9.0, run="r"), world.decision(tile_size=128, time_s=9.0, run="r")]
    found = set()
    for number, order in enumerate(([0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1])):
        store = Store.open(tmp_path / str(number), create=True)
        with store.writer() as writer:
            writer.append(world.environment)
            for index in order:
                writer.append([*decisions, *twins][index])
        found.add(store.decisions()[world.key()])
        assert len(store.all_decisions()) == 4
    assert len(found) == 1
    assert found.pop().time_s == 9.0


def test_a_key_filter_is_asked_once_per_key_and_skips_the_rest(
    store: Store, world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    keys = [world.key(tokens) for tokens in (1, 2, 4)]
    with store.writer() as writer:
        writer.append(world.environment)
        for number in range(30):
            writer.append(world.record(number, keys[number % 3]))
    decoded: list[Record] = []
    real = segment.decode_record

    def counting(value: object, names: Any) -> Record:
        decoded.append(real(value, names))
        return decoded[-1]

    monkeypatch.setattr(segment, "decode_record", counting)
    asked = []
    found = store.records(lambda key: asked.append(key) or key == keys[1])
    assert asked == keys
    assert len(found) == len(decoded) == 10
    assert {record.key for record in found} == {keys[1]}


def test_an_environment_of_another_segment_is_known(store: Store, world: Any) -> None:
    world.fill(store)
    with store.writer() as writer:
        writer.append(world.record(50))
    assert store.records()[-2:] == [world.record(50), world.failure()]


def test_a_record_of_an_unknown_environment_is_our_mistake(store: Store, world: Any) -> None:
    with store.writer() as writer, pytest.raises(AssertionError, match="append it before"):
        writer.append(world.record())
    assert store.records() == store.check() == []


def test_what_would_not_read_back_is_not_written(store: Store, world: Any) -> None:
    with store.writer() as writer:
        writer.append(world.environment)
        writer.append(world.record(1))
        with pytest.raises(StoreError, match=r"record not stored: field record\.time_s: nan"):
            writer.append(replace(world.record(2), time_s=float("nan")))
        with pytest.raises(StoreError, match=r"record not stored: field record\.origin"):
            writer.append(replace(world.record(2), origin="ring\a"))
        with pytest.raises(StoreError, match=r"record not stored: .*surrogates not allowed"):
            writer.append(replace(world.record(2), origin="\ud800"))
        writer.append(world.record(3))
    assert store.records() == [world.record(1), world.record(3)]


def test_long_and_coloured_errors_are_kept_readable(store: Store, world: Any) -> None:
    with store.writer() as writer:
        writer.append(world.environment)
        writer.append(replace(world.failure(), error="begin \x1b[31m" + "x" * 100_000 + " end"))
    (record,) = store.records()
    assert record.error.startswith("begin \N{REPLACEMENT CHARACTER}[31m")
    assert record.error.endswith(" end")
    assert len(record.error) < 5000


def test_a_writer_with_nothing_to_say_leaves_no_file(store: Store) -> None:
    with store.writer():
        assert len(store.segment_paths()) == 1
    assert store.segment_paths() == []


def test_a_closed_writer_says_so(store: Store, world: Any) -> None:
    with store.writer() as writer:
        writer.append(world.environment)
    with pytest.raises(StoreError, match="its writer is closed"):
        writer.append(world.environment)


def test_a_large_segment_is_followed_by_another(store: Store, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(segment, "ROLL_BYTES", 2000)
    records = [world.record(number) for number in range(40)]
    with store.writer() as writer:
        writer.append(world.environment)
        for record in records:
            writer.append(record)
    assert len(store.segment_paths()) > 2
    assert store.records() == records
    assert store.check() == []


def test_a_forked_child_writes_a_segment_of_its_own(store: Store, world: Any) -> None:
    with store.writer() as writer:
        writer.append(world.environment)
        writer.append(world.record(1))
        child = os.fork()
        if child == 0:
            try:
                writer.append(world.record(2, world.key(99)))
                writer.close()
            finally:
                os._exit(0)
        os.waitpid(child, 0)
        writer.append(world.record(3, world.key(77)))
    assert store.records() == [world.record(1), world.record(2, world.key(99)), world.record(3, world.key(77))]
    assert len(store.segment_paths()) == 2


# Stores that are none


def test_a_missing_store_is_made_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b"
    with pytest.raises(StoreError, match=r"no store at .*b; check the path, or make one") as error:
        Store.open(path)
    one_line(error)
    assert not path.exists()
    assert Store.open(path, create=True).records() == []
    assert Store.open(path).decisions() == {}


def test_an_empty_folder_may_become_a_store(tmp_path: Path) -> None:
    (tmp_path / ".hidden").touch()
    (tmp_path / "misses.log").touch()
    with pytest.raises(StoreError, match="no store at"):
        Store.open(tmp_path)
    assert Store.open(tmp_path, create=True).check() == []


@pytest.mark.parametrize("create", [False, True])
def test_a_foreign_folder_is_left_alone(tmp_path: Path, create: bool) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(StoreError, match="not a fitune store; name a store or a new folder") as error:
        Store.open(tmp_path, create=create)
    one_line(error)
    assert os.listdir(tmp_path) == ["thesis.tex"]


@pytest.mark.parametrize("create", [False, True])
def test_a_file_is_no_store(tmp_path: Path, create: bool) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"something")
    with pytest.raises(StoreError, match="is a file, not a store folder") as error:
        Store.open(path, create=create)
    one_line(error)
    with pytest.raises(StoreError, match=r"file, not a store|is a file, not a folder"):
        Store.open(path / "below", create=True)


def test_a_newer_store_is_refused_with_the_version_needed(store: Store, world: Any) -> None:
    world.fill(store)
    (store.path / MARKER).write_bytes(newer("store"))
    with pytest.raises(NewerStoreError, match=r"fitune-store: format 2.*install fitune 9\.0 or newer") as error:
        Store.open(store.path)
    one_line(error)


def test_a_newer_segment_is_refused(store: Store, world: Any) -> None:
    world.fill(store)
    (store.segments_path / "9-newer.seg").write_bytes(newer("segment") + b"\x00unknown future")
    for call in (store.records, store.decisions, store.check, store.prune, lambda: Store.open(store.path)):
        with pytest.raises(NewerStoreError, match=r"9-newer\.seg: format 2, written by fitune 9\.1"):
            call()


def test_a_lost_marker_does_not_lock_records_away(store: Store, world: Any) -> None:
    world.fill(store)
    (store.path / MARKER).unlink()
    again = Store.open(store.path)
    assert len(again.records()) == 6
    assert [finding.what for finding in again.check()] == ["the marker file is missing"]


def test_a_broken_marker_says_what_to_do(store: Store, world: Any) -> None:
    world.fill(store)
    (store.path / MARKER).write_bytes(b"garbage")
    with pytest.raises(CorruptStoreError, match=r"fitune-store: at byte 0: .*delete this file"):
        Store.open(store.path)


def test_what_is_no_regular_file_is_not_waited_for(store: Store, world: Any) -> None:
    world.fill(store)
    os.mkfifo(store.segments_path / "0-pipe.seg")
    with pytest.raises(StoreError, match=r"0-pipe\.seg: it is not a file"):
        store.records()


def test_a_giant_file_is_not_read(store: Store) -> None:
    with open(store.segments_path / "0.seg", "wb") as file:
        file.write(header_frame("segment"))
        file.truncate(MAX_FILE_BYTES + 1)
    with pytest.raises(StoreError, match="more than fitune ever writes"):
        store.records()


# Damage


def test_a_cut_segment_loses_only_its_last_frame(store: Store, world: Any) -> None:
    path = world.fill(store, num_records=2)
    data = path.read_bytes()
    everything = [*store.records(), *store.all_decisions()]
    for cut in range(0, len(data), 11):
        path.write_bytes(data[:cut])
        found = [*store.records(), *store.all_decisions()]
        assert found == everything[: len(found)]
        assert all(finding.harmless for finding in store.check())
    path.write_bytes(data[:-1])
    assert store.decisions() == {}
    assert [*store.records()] == everything[:-1]


def test_zeros_after_a_power_cut_are_a_torn_tail(store: Store, world: Any) -> None:
    path = world.fill(store)
    path.write_bytes(path.read_bytes() + bytes(5000))
    (store.segments_path / "0.seg").write_bytes(bytes(4096))
    assert len(store.records()) == 6
    assert [finding.harmless for finding in store.check()] == [True, True]


def test_damage_inside_is_named_by_file_and_offset(store: Store, world: Any) -> None:
    path = world.fill(store)
    data = bytearray(path.read_bytes())
    offset = len(header_frame("segment"))
    data[offset + 30] ^= 0xFF
    path.write_bytes(data)
    with pytest.raises(
        CorruptStoreError, match=rf"\.seg: at byte {offset}: a frame's checksum .*fitune cache prune"
    ) as error:
        store.records()
    one_line(error)
    first = store.check()[0]
    assert (first.file, first.offset, first.harmless) == (path, offset, False)


@pytest.mark.parametrize(
    ("content", "what"),
    [
        (b"PK\x03\x04 a zip file", "not a fitune segment"),
        (header_frame("segment")[:-1], None),
        (b"", None),
        (frame(Kind.RECORD, b"\x90"), "a header belongs here"),
        (header_frame("table"), "is a fitune table, not a segment"),
        (header_frame("segment") + frame(Kind.TABLE, b"\x90"), "field kind: 5 is no kind"),
        (header_frame("segment") + frame(Kind.RECORD, b"\x90"), "field record: an array of 0 values"),
        (header_frame("segment") + frame(Kind.DEFINE, b"\x93\x01\x00\x90"), "field key: an array of 0 values"),
        (header_frame("segment") + frame(Kind.DEFINE, b"\x93\x07\x00\x90"), "field definition.what: 7"),
        (header_frame("segment") + frame(Kind.DEFINE, b"\x93\x01\x90\x90"), "field definition.number"),
        (header_frame("segment") + frame(Kind.DEFINE, b"\x91" * 90_000), "no valid msgpack"),
    ],
)
def test_hostile_segments_name_file_offset_and_field(store: Store, content: bytes, what: str | None) -> None:
    (store.segments_path / "0-odd.seg").write_bytes(content)
    if what is None:
        assert store.records() == []
        assert [finding.harmless for finding in store.check()] == [True]
        return
    with pytest.raises(StoreError, match=what) as error:
        store.records()
    assert "0-odd.seg" in one_line(error)


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=8),
    lambda inner: st.lists(inner, max_size=12) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=14,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.tuples(st.sampled_from(list(Kind)), VALUES), max_size=4))
def test_well_framed_nonsense_is_refused_not_believed(
    store: Store, world: Any, frames: list[tuple[Kind, object]]
) -> None:
    define = [
        frame(Kind.DEFINE, msgpack.packb([1, 0, encode_key(world.key())])),
        frame(Kind.DEFINE, msgpack.packb([2, 1, encode_environment(world.environment)])),
    ]
    body = [frame(kind, msgpack.packb(value)) for kind, value in frames]
    (store.segments_path / "0-odd.seg").write_bytes(b"".join([header_frame("segment"), *define, *body]))
    findings = store.check()
    assert len(findings) == len(frames)
    if frames:
        with pytest.raises(CorruptStoreError, match=r"0-odd\.seg: at byte \d+: field [\w.\[\]]+: "):
            list(store.items(frozenset(Kind)))


# Writing that fails


def test_a_disk_that_fills_up_costs_nothing_stored(store: Store, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    writer = store.writer()
    writer.append(world.environment)
    writer.append(world.record(1))
    real: Callable[[int, bytes], int] = os.write

    def full(handle: int, data: bytes) -> int:
        """Takes a part of the first try, then nothing, as a full disk does."""
        if len(data) > 20:
            return real(handle, data[:20])
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(StoreError, match="the disk is full; free some space") as error:
            writer.append(world.record(2))
        one_line(error)
        with pytest.raises(StoreError, match="the disk is full"):
            writer.append(world.record(3, world.key(1)))
    writer.append(world.record(4, world.key(1)))
    writer.close()
    assert store.records() == [world.record(1), world.record(4, world.key(1))]
    assert store.check() == []


FILL = """
import resource, sys
from pathlib import Path
from fitune.cache import Store
from fitune.errors import StoreError
store = Store.open(Path(sys.argv[1]))
records, environment = store.records(), *store.environments().values()
resource.setrlimit(resource.RLIMIT_FSIZE, (6000, 6000))
done = 0
try:
    with store.writer() as writer:
        writer.append(environment)
        while True:
            writer.append(records[0])
            done += 1
except StoreError as error:
    print(done, error)
"""


def test_a_size_limit_of_the_system_is_met_in_one_line(store: Store, world: Any) -> None:
    """A real short write: the kernel takes part of a frame and refuses the rest."""
    world.fill(store)
    before = store.records()
    result = subprocess.run(
        [sys.executable, "-c", FILL, str(store.path)], capture_output=True, text=True, check=True, timeout=60
    )
    done, message = result.stdout.split(" ", 1)
    assert "the disk is full" in message
    assert int(done) > 5
    assert len(store.records()) == len(before) + int(done)
    assert store.check() == []
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] != 6000


def test_a_read_only_store_reads_and_refuses_writing(store: Store, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world.fill(store)
    real = os.open

    def read_only(path: Any, flags: int, mode: int = 0o777, **more: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, "Read-only file system", str(path))
        return real(path, flags, mode, **more)

    monkeypatch.setattr(os, "open", read_only)
    with pytest.raises(StoreError, match="permission denied; give this user access, or name another place") as error:
        store.writer()
    one_line(error)
    for call in (store.prune, lambda: store.merge(store)):
        with pytest.raises(StoreError, match="permission denied"):
            call()
    assert len(store.records()) == 6
    assert len(load_table(store.path)) == 1
    assert store.prune(dry_run=True).records_dropped == 0


def test_permissions_of_the_system(store: Store, world: Any) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may write everywhere")
    path = world.fill(store)
    store.segments_path.chmod(stat.S_IRUSR | stat.S_IXUSR)
    with pytest.raises(StoreError, match="permission denied"):
        store.writer()
    store.segments_path.chmod(stat.S_IRWXU)
    path.chmod(0)
    with pytest.raises(StoreError, match="permission denied"):
        store.records()


def test_check_reports_strays_and_old_tables(store: Store, world: Any) -> None:
    world.fill(store)
    store.write_table()
    (store.segments_path / "notes.txt").touch()
    (store.path / ".table.fitable.1-a.tmp").touch()
    assert sorted(finding.what for finding in store.check()) == [
        "a temporary file left by a killed process; delete it",
        "this is no segment; it is not read",
    ]
    with store.writer() as writer:
        writer.append(world.environment)
        writer.append(world.decision(tile_size=128, time_s=9999.0))
    assert "older than the decisions; write the table anew" in [finding.what for finding in store.check()]
    store.table_path.write_bytes(b"junk")
    assert any("not a fitune table" in finding.what and not finding.harmless for finding in store.check())
