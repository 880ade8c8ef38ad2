"""Tables: the latest decisions in buckets, one hash for the same choices, broken files refused."""

import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fitune.bucket import BUCKET_RULE, Bucket
from fitune.cache import Store, Table, load_table
from fitune.cache.columns import pack_numbers
from fitune.cache.frames import MAX_FILE_BYTES, Frame, Kind, frame, header_frame, scan
from fitune.cache.table import table_of
from fitune.errors import CorruptStoreError, NewerStoreError, StoreError
from fitune.record import Decision


def decisions_of(world: Any) -> list[Decision]:
    return [
        world.decision(world.key(tokens, local), tile_size)
        for local in (32, 256)
        for tokens, tile_size in ((1, 16), (2, 16), (4, 64), (64, 128))
    ]


def table(world: Any, decisions: list[Decision] | None = None) -> Table:
    return table_of(decisions or decisions_of(world), {world.environment.id: world.environment})


def test_entries_hold_decision_and_bucket(world: Any) -> None:
    found = table(world)
    assert [layer.local_experts for layer in found.layers] == [32, 256]
    entries = found.layers[world.key().layer]
    assert [entry.bucket for entry in entries] == [
        Bucket(1, 1, 1),
        Bucket(2, 2, 2),
        Bucket(4, 3, 8),
        Bucket(64, 32, 64),
    ]
    assert [entry.tactic.tile_size for entry in entries] == [16, 16, 64, 128]
    assert [entry.state for entry in entries] == ["tuned", "tuned", "default", "tuned"]
    first = entries[0]
    assert (first.median_us, first.ci_low_us, first.ci_high_us, first.default_us) == (90.0, 89.5, 90.25, 120.0)
    assert first.environment == world.environment
    assert len(found) == 8


def test_a_decision_without_times_is_usable(world: Any) -> None:
    bare = replace(world.decision(), members=(), default_us=0.0)
    (entry,) = table(world, [bare]).entries()
    assert (entry.median_us, entry.default_us, entry.tactic) == (0.0, 0.0, bare.chosen)
    kept = replace(bare, chosen=bare.default, default_us=7.0)
    (entry,) = table(world, [kept]).entries()
    assert (entry.median_us, entry.state) == (7.0, "default")


def test_the_hash_sees_choices_and_nothing_else(world: Any) -> None:
    decisions = decisions_of(world)
    same = [
        replace(decision, time_s=9.0, run_id="other", members=(), default_us=1.0, noise=0.5, reason="other", origin="x")
        for decision in reversed(decisions)
    ]
    assert table(world).hash == table(world, same).hash
    assert len(table(world).hash) == 32
    other_environment = [replace(decision, environment_id=world.old_environment.id) for decision in decisions]
    environments = {world.old_environment.id: world.old_environment}
    assert table_of(other_environment, environments).hash == table(world).hash
    hashes = {table(world).hash, table(world, decisions[1:]).hash, table_of([], {}).hash}
    for index, decision in enumerate(decisions):
        changed = list(decisions)
        changed[index] = replace(decision, chosen=world.tactic(256, 256))
        hashes.add(table(world, changed).hash)
    moved = [replace(decisions[0], key=world.key(3)), *decisions[1:]]
    hashes.add(table(world, moved).hash)
    assert len(hashes) == 3 + len(decisions) + 1


def test_tables_come_back_from_bytes(world: Any) -> None:
    for found in (table(world), table_of([], {})):
        again = Table.from_bytes(found.to_bytes())
        assert again == found
        assert again.to_bytes() == found.to_bytes()


def test_a_store_writes_and_loads_its_table(store: Store, world: Any) -> None:
    with store.writer() as writer:
        writer.append(world.environment)
        for decision in decisions_of(world):
            writer.append(replace(decision, chosen=world.tactic(256), time_s=1.0))
            writer.append(decision)
    path = store.write_table()
    assert load_table(path) == load_table(store.path) == store.build_table() == table(world)
    assert store.check() == []


def test_a_table_is_replaced_in_one_step(store: Store, world: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world.fill(store)
    path = store.write_table()
    before = path.read_bytes()
    with store.writer() as writer:
        writer.append(world.decision(tile_size=256, time_s=9999.0))

    def refuse(source: object, target: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("os.replace", refuse)
        with pytest.raises(StoreError, match="the disk is full"):
            store.write_table()
    assert path.read_bytes() == before
    assert [entry.name for entry in store.path.glob(".*.tmp")] == []
    store.write_table()
    assert path.read_bytes() != before


def test_what_is_no_table_is_refused(tmp_path: Path, world: Any) -> None:
    with pytest.raises(StoreError, match=r"no table at .*missing; name a table file or a store folder"):
        load_table(tmp_path / "missing")
    path = tmp_path / "file"
    for content, what in [
        (b"", "the file is empty"),
        (b"\x7fELF", "is not a fitune table: .* at byte 0"),
        (header_frame("recording"), "is a fitune recording, not a table"),
        (header_frame("table"), "at byte .*: a table has two frames, this has 1"),
        (table(world).to_bytes() + b"x", "at byte .*get a fresh copy"),
    ]:
        path.write_bytes(content)
        with pytest.raises(StoreError, match=what):
            load_table(path)
    newer = {"role": "table", "format": 7, "fitune": "4", "needs": "3.9"}
    path.write_bytes(frame(Kind.HEADER, msgpack.packb(newer)))
    with pytest.raises(NewerStoreError, match=r"install fitune 3\.9"):
        load_table(path)


def test_every_cut_and_flip_is_noticed(world: Any) -> None:
    data = table(world).to_bytes()
    for position in range(0, len(data), 5):
        with pytest.raises(StoreError):
            Table.from_bytes(data[:position])
        flipped = bytearray(data)
        flipped[position] ^= 0x40
        with pytest.raises(StoreError):
            Table.from_bytes(bytes(flipped))


def with_payload(change: Any, world: Any) -> bytes:
    _, found = scan(table(world).to_bytes(), MAX_FILE_BYTES)
    assert isinstance(found, Frame)
    value = change(msgpack.unpackb(found.payload, use_list=True))
    return header_frame("table") + frame(Kind.TABLE, msgpack.packb(value))


def set_at(*path: Any) -> Any:
    """A change that puts path's last item at the position that the others name."""
    *where, last, new = path

    def change(value: Any) -> Any:
        inner = value
        for position in where:
            inner = inner[position]
        inner[last] = new
        return value

    return change


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (lambda value: value[:3], "field table: an array of 3"),
        (set_at(0, 7), r"field table\.bucket_rule"),
        (set_at(1, "0" * 32), r"field table\.hash: it does not fit"),
        (set_at(2, 1, [pack_numbers("I", [4]), b"t64x"]), r"field table\.tactics"),
        (set_at(2, 1, [pack_numbers("I", [2**32 - 1] * 9), b""]), r"field table\.tactics: the lengths add up"),
        (set_at(2, 1, [b"abc", b""]), "no whole number of values"),
        (set_at(2, 1, [pack_numbers("I", [1]), b"\xff"]), "no UTF-8"),
        (set_at(3, 0, pack_numbers("I", [9] * 8)), "member 9 is named of a pool of 2"),
        (set_at(3, 1, pack_numbers("q", [0] * 8)), r"field table\.tokens"),
        (set_at(3, 1, pack_numbers("q", [5] * 8)), "point 5 stands twice"),
        (set_at(3, 1, pack_numbers("q", [1, 2, 4, 8, 1, 2, 4])), "8 values stand where 7 belong"),
        (set_at(3, 4, pack_numbers("I", [3] * 8)), r"field table\.state"),
        (set_at(3, 5, pack_numbers("d", [float("nan")] * 8)), r"field table\.median_us"),
        (set_at(3, 8, pack_numbers("d", [-1.0] * 8)), r"field table\.default_us"),
        (set_at(3, 2, pack_numbers("I", [0] * 8)), r"field table\.hash"),
    ],
)
def test_hostile_tables_name_the_field(world: Any, change: Any, what: str) -> None:
    assert Table.from_bytes(with_payload(lambda value: value, world)) == table(world)
    with pytest.raises(CorruptStoreError, match=what):
        Table.from_bytes(with_payload(change, world), Path("some.fitable"))


def test_another_bucket_rule_is_refused(world: Any) -> None:
    with pytest.raises(StoreError, match=f"made for buckets by nearest, not {BUCKET_RULE}; write it anew"):
        Table.from_bytes(with_payload(set_at(0, "nearest"), world))


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([(0,), (2, 0), (2, 1, 0), (3, 1), (3, 5)]), st.none() | st.integers() | st.binary(max_size=70))
def test_odd_values_in_a_table_are_refused(world: Any, path: tuple[int, ...], value: object) -> None:
    if isinstance(value, int) and not -(2**63) <= value < 2**64:
        value = 0
    with pytest.raises(CorruptStoreError, match="field table"):
        Table.from_bytes(with_payload(set_at(*path, value), world))


def test_ten_thousand_entries_load_quickly(world: Any) -> None:
    decisions = [
        world.decision(world.key(tokens, local), (16, 32, 64, 128)[tokens % 4])
        for local in range(1, 101)
        for tokens in range(1, 101)
    ]
    data = table(world, decisions).to_bytes()
    best_s = float("inf")
    for _ in range(3):
        started_s = time.process_time()
        found = Table.from_bytes(data)
        best_s = min(best_s, time.process_time() - started_s)
    assert len(found) == 10_000
    assert best_s < 0.5  # some 0.06 s on an idle core; far above that, someone made it quadratic
