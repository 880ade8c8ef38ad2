"""Eight writers at once, killed at random: what append returned from is there, and nothing is broken."""

import os
import random
import signal
import time
from collections import defaultdict
from typing import Any

from fitune.cache import Store

NUM_WRITERS = 8
ROUNDS = 2


def write_until_killed(store: Store, world: Any, writer_number: int, acknowledge: int) -> None:
    key = world.key(writer_number + 1)
    with store.writer() as writer:
        writer.append(world.environment)
        for number in range(1_000_000):
            writer.append(world.record(number, key))
            if number % 50 == 49:
                writer.append(world.decision(key, time_s=5000.0 + number))
            os.write(acknowledge, writer_number.to_bytes(4, "little") + number.to_bytes(4, "little"))


def test_killed_writers_lose_at_most_the_frame_being_written(store: Store, world: Any) -> None:
    rng = random.Random(7)
    read_end, write_end = os.pipe()
    children: list[int] = []
    acknowledged: dict[int, int] = {}
    for writer_number in range(NUM_WRITERS * ROUNDS):
        child = os.fork()
        if child == 0:
            try:
                os.close(read_end)
                write_until_killed(store, world, writer_number, write_end)
            finally:
                os._exit(1)
        children.append(child)
        if len(children) == NUM_WRITERS:
            acknowledged |= _count(_kill_all(children, rng, read_end))
            children = []
    os.close(write_end)
    os.close(read_end)

    found: dict[int, list[int]] = defaultdict(list)
    for record in store.records():
        found[record.key.num_tokens - 1].append(round(record.time_s - 1000.0))
    assert sum(acknowledged.values()) > 0
    for writer_number, count in acknowledged.items():
        numbers = found[writer_number]
        assert numbers == list(range(len(numbers)))
        assert count <= len(numbers) <= count + 1
    assert all(finding.harmless for finding in store.check())
    assert len(store.segment_paths()) <= NUM_WRITERS * ROUNDS


def _kill_all(children: list[int], rng: random.Random, read_end: int) -> bytes:
    """Kill the children one by one at random moments, reading what they acknowledge meanwhile."""
    data = b""
    os.set_blocking(read_end, False)
    deadlines = sorted((time.monotonic() + rng.uniform(0.1, 0.8), child) for child in children)
    while deadlines:
        data += _read(read_end)
        while deadlines and time.monotonic() >= deadlines[0][0]:
            _, child = deadlines.pop(0)
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        time.sleep(0.002)
    while more := _read(read_end):
        data += more
    return data


def _read(handle: int) -> bytes:
    try:
        return os.read(handle, 1 << 16)
    except BlockingIOError:
        return b""


def _count(data: bytes) -> dict[int, int]:
    """Per writer, how many records it was told are stored."""
    counts: dict[int, int] = {}
    for start in range(0, len(data), 8):
        writer_number = int.from_bytes(data[start : start + 4], "little")
        counts[writer_number] = int.from_bytes(data[start + 4 : start + 8], "little") + 1
    return counts
