"""Pack several stores of one device into one recording, choosing per token count which stores speak.

    python scripts/pack_recording.py OUT NAME STORE:TOKENS [STORE:TOKENS ...] [--note TEXT]

TOKENS is `LOW-HIGH` (both ends included). Stores named later win where several hold the same stage, layer or decision
of a key. Name stores of different runs for different token counts where the runs' clocks differ, so that the times of
one key can be compared with each other. Decisions are taken anew from the recorded finals, by today's rule. The
recordings that fitune ships were packed with it.
"""

from __future__ import annotations

import argparse
from dataclasses import replace
from pathlib import Path

from fitune.cache import Recording, open_store, save_recording
from fitune.cli.record import coverage
from fitune.measure.protocol import Outcome
from fitune.problem import Key
from fitune.record import Decision, Record, Status
from fitune.search.decide import decide
from fitune.search.plan import key_distance, order_problems
from fitune.tactic import STAGES
from fitune.target import Environment, chip_of


def decided_anew(decisions: dict[Key, Decision]) -> list[Decision]:
    """The decisions that today's rule takes from the same finals, in the order in which a search takes them."""
    made: dict[Key, Decision] = {}
    order = {problem: rank for rank, problem in enumerate(order_problems([key.problem() for key in decisions]))}
    for key, old in sorted(decisions.items(), key=lambda item: order[item[0].problem()]):
        near = [made[other] for other in sorted(made, key=lambda other: (key_distance(key, other), other))]
        decision = decide(
            key,
            old.default,
            [Outcome(member.tactic, Status.OK, member.measurement) for member in old.members],
            old.noise,
            neighbours=[other.chosen for other in near],
            used_stages={other.chosen.stage(name) for other in near for name in STAGES},
            environment_id=old.environment_id,
            run_id=old.run_id,
            time_s=old.time_s,
            origin=old.origin,
        )
        assert decision is not None, "a decision has a finalist that worked"
        made[key] = decision
    return list(made.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("out", type=Path)
    parser.add_argument("name")
    parser.add_argument("sources", nargs="+", metavar="STORE:LOW-HIGH")
    parser.add_argument("--note", default="")
    parser.add_argument("--timed-only", action="store_true", help="leave out records without a time")
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
            if record.status is Status.OK or not given.timed_only:
                records[record.key, record.tactic, record.phase] = record
        decisions |= store.decisions(wanted)
    used = {item.environment_id for item in (*records.values(), *decisions.values())}
    kept = {name: environments[name] for name in sorted(used)}
    target = chip_of(next(iter(kept.values())))
    found = coverage(records.values(), target)
    recording = Recording(target, given.name, "", kept, tuple(records.values()), tuple(decided_anew(decisions)))
    note = f"{found}. {given.note}".strip().rstrip(".")
    save_recording(given.out, replace(recording, note=note))
    print(f"{given.out}: {len(records)} records, {len(decisions)} decisions, {given.out.stat().st_size:,} bytes")
    print(note)


if __name__ == "__main__":
    main()
