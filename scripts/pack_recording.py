"""Pack several stores of one device into one recording, choosing per token count which stores speak.

    python scripts/pack_recording.py OUT NAME STORE:TOKENS [STORE:TOKENS ...] [--note TEXT]

TOKENS is `LOW-HIGH` (both ends included). Stores named later win where several hold the same stage, layer or decision
of a key. Name stores of different runs for different token counts where the runs' clocks differ, so that the times of
one key can be compared with each other. The recordings that fitune ships were packed with it.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from fitune.cache import Recording, open_store, save_recording
from fitune.cli.record import coverage, target_of
from fitune.problem import Key
from fitune.record import Decision, Record
from fitune.target import Environment


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("name")
    parser.add_argument("sources", nargs="+", metavar="STORE:LOW-HIGH")
    parser.add_argument("--note", default="")
    given = parser.parse_args()
    environments: dict[str, Environment] = {}
    records: dict[tuple[object, ...], Record] = {}
    decisions: dict[Key, Decision] = {}
    for source in given.sources:
        path, _, span = source.rpartition(":")
        low, high = (int(text) for text in span.split("-"))
        store = open_store(Path(path))
        environments |= store.environments()

        def wanted(key: Key, low: int = low, high: int = high) -> bool:
            return low <= key.num_tokens <= high

        for record in store.records(wanted):
            records[record.key, record.tactic, record.phase] = record
        decisions |= store.decisions(wanted)
    used = {item.environment_id for item in (*records.values(), *decisions.values())}
    kept = {name: environments[name] for name in sorted(used)}
    target = target_of(next(iter(kept.values())))
    found = coverage(records.values(), target)
    recording = Recording(target, given.name, "", kept, tuple(records.values()), tuple(decisions.values()))
    note = f"{found}. {given.note}".strip().rstrip(".")
    save_recording(given.out, replace(recording, note=note))
    print(f"{given.out}: {len(records)} records, {len(decisions)} decisions, {given.out.stat().st_size:,} bytes")
    print(note)


if __name__ == "__main__":
    main()
