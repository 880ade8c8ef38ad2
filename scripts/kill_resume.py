"""Kill a search at random moments, resume it each time, and see what that cost.

    python scripts/kill_resume.py [--kills 20] [--ep 8] [--tokens 1:4096] [--trials 40] [--sampler pool] [--seed 0]

Runs `fitune search` on a recording in a child process, sends it SIGKILL at a random moment (once it has stored a random
number of bytes, and up to 50 ms later), reads the store, starts the same command again, and so on; then lets it finish.
The child notes in a file of its own, after each return of the writer's `append`, what was handed over.

Checked: everything noted before a kill is in the store after it, and at the end; the store shows no damage but torn
tails, at most one a kill; no stage of a key is measured twice. The decisions are compared with those of a search that
nobody killed. The pool sampler asks in other batches after a kill and fits its model anew, so it may measure other
stages and settle on another tactic: both are timed on the recording then. Where all is measured
(`--sampler exhaustive --trials 0`) the decisions must be the same. Exit code 1 if a check fails.
"""

from __future__ import annotations

import argparse
import random
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

from fitune.cache import Store, open_store
from fitune.cache.segment import SUFFIX, Finding
from fitune.errors import StoreError
from fitune.measure.choose import choose_measurer
from fitune.problem import Key
from fitune.record import Decision, Record

PROGRAM = """
import os, sys
from fitune.cache.segment import StoreWriter
from fitune.cli import main
from fitune.target import Environment

notes = os.open(sys.argv.pop(1), os.O_WRONLY | os.O_APPEND | os.O_CREAT)
append = StoreWriter.append

def append_and_note(writer, item):
    append(writer, item)
    if not isinstance(item, Environment):
        os.write(notes, f"{type(item).__name__} {item.run_id} {item.time_s!r}\\n".encode())

StoreWriter.append = append_and_note
sys.exit(main())
"""


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill: seconds after the start, and what the store held then. `noted` items were handed over so far, of
    which `lost` are missing; `unnoted` ones are there though the child died before it could note them."""

    after_s: float
    records: int
    decisions: int
    noted: int
    lost: int
    unnoted: int
    torn: int


class Run:
    """One store, the command that fills it, and the child's notes."""

    def __init__(self, given: argparse.Namespace, folder: Path) -> None:
        self.path, self.notes = folder / "store", folder / "notes"
        folder.mkdir()
        options = f"search --model {given.model} --ep {given.ep} --tokens {given.tokens} --seed {given.seed}"
        options += f" --sampler {given.sampler} --measurer {given.measurer} --store {self.path}"
        if given.trials:
            options += f" --trials {given.trials}"
        self.command = [sys.executable, "-c", PROGRAM, str(self.notes), *options.split()]

    def finish(self) -> None:
        subprocess.run(self.command, check=True, capture_output=True)

    def stored_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.path.rglob(f"*{SUFFIX}"))

    def noted(self) -> set[str]:
        """Whole lines only: the child may have died while it wrote the last."""
        return set(self.notes.read_text().split("\n")[:-1]) if self.notes.exists() else set()

    def store(self) -> Store | None:
        try:
            return open_store(self.path)
        except StoreError:
            return None

    def kill_once(self, more_bytes: float, jitter_s: float) -> Kill | None:
        """Start the search, kill it `jitter_s` after it has stored `more_bytes`. None where it had finished."""
        started, enough = time.monotonic(), self.stored_bytes() + more_bytes
        child = subprocess.Popen(self.command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while child.poll() is None and self.stored_bytes() < enough:
            time.sleep(0.002)
        time.sleep(jitter_s)
        if child.poll() is not None:
            return None
        child.kill()
        child.wait()
        after_s = time.monotonic() - started
        noted, store = self.noted(), self.store()
        if store is None:
            return Kill(after_s, 0, 0, len(noted), len(noted), 0, 0)
        items = items_of(store)
        there = {name_of(item) for item in items}
        records = sum(isinstance(item, Record) for item in items)
        torn = sum(is_torn(finding) for finding in store.check())
        missing, extra = len(noted - there), len(there - noted)
        return Kill(after_s, records, len(items) - records, len(noted), missing, extra, torn)


def items_of(store: Store) -> list[Record | Decision]:
    return [*store.records(), *store.all_decisions()]


def name_of(item: Record | Decision) -> str:
    """How the child's notes call it: the clock is read once per item, to the microsecond or finer."""
    return f"{type(item).__name__} {item.run_id} {item.time_s!r}"


def is_torn(finding: Finding) -> bool:
    return finding.harmless and finding.file.suffix == SUFFIX


def compare(whole: dict[Key, Decision], resumed: dict[Key, Decision], measurer_text: str) -> list[str]:
    """A line for each key that was decided otherwise, with both tactics' times on the recording."""
    measurer, _ = choose_measurer(measurer_text, [key.problem() for key in whole], seed=0)
    lines = []
    for key, decision in whole.items():
        other = resumed.get(key)
        if other is None or other.chosen != decision.chosen:
            tactics = [decision.chosen] if other is None else [decision.chosen, other.chosen]
            outcomes = measurer.finals(key.problem(), tactics, 1)
            times = ["failed" if item.measurement is None else f"{item.measurement.median_us:.4g}" for item in outcomes]
            lines.append(f"  {key.layer.ep_label}, {key.num_tokens} tokens: {' µs, resumed '.join(times)} µs")
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--model", default="deepseek-v3")
    parser.add_argument("--ep", default="8")
    parser.add_argument("--tokens", default="1:4096")
    parser.add_argument("--trials", type=int, default=40, help="per key and GEMM; 0: no limit")
    parser.add_argument("--sampler", default="pool")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--measurer", default="recording")
    given = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="fitune-kill-"))
    try:
        return report(given, folder)
    finally:
        shutil.rmtree(folder)


def report(given: argparse.Namespace, folder: Path) -> int:
    chance = random.Random(given.seed)
    whole, killed = Run(given, folder / "whole"), Run(given, folder / "killed")
    whole.finish()
    share_bytes = whole.stored_bytes() / given.kills
    kills: list[Kill] = []
    print(" ".join(["fitune", *killed.command[4:]]).replace(str(killed.path), "STORE"))
    print("kill  after s  records  decisions  handed over  lost  not noted  torn tails")
    while len(kills) < given.kills:
        kill = killed.kill_once(chance.uniform(0.0, 1.5 * share_bytes), chance.uniform(0.0, 0.05))
        if kill is None:
            print(f"the search was done after {len(kills)} kills: give more --tokens or --trials", file=sys.stderr)
            break
        kills.append(kill)
        print(
            f"{len(kills):>4} {kill.after_s:>8.1f} {kill.records:>8} {kill.decisions:>10} {kill.noted:>12}"
            f" {kill.lost:>5} {kill.unnoted:>10} {kill.torn:>11}"
        )
    killed.finish()
    store = open_store(killed.path)
    items, findings = items_of(store), store.check()
    lost = killed.noted() - {name_of(item) for item in items}
    stages = [(item.key, item.tactic) for item in items if isinstance(item, Record) and item.part != "layer"]
    repeated = sum(count > 1 for count in Counter(stages).values())
    torn = sum(is_torn(finding) for finding in findings)
    damage = sum(not finding.harmless for finding in findings)
    reference, chosen = open_store(whole.path).decisions(), store.decisions()
    differing = compare(reference, chosen, given.measurer)
    print(f"{len(kills)} kills; at the end {len(items)} records and decisions, {len(lost)} handed over and lost")
    print(f"{torn} torn tails, other damage: {damage}; {len(stages)} stages measured, {repeated} of them twice")
    print(f"{len(reference)} keys decided without a kill, {len(chosen)} with; {len(differing)} otherwise")
    print("\n".join(differing), end="\n" if differing else "")
    sound = not lost and not repeated and not damage and torn <= len(kills) and chosen.keys() == reference.keys()
    sound = sound and not any(kill.lost for kill in kills)
    all_measured = given.sampler == "exhaustive" and not given.trials
    return 0 if sound and len(kills) == given.kills and not (all_measured and differing) else 1


if __name__ == "__main__":
    raise SystemExit(main())
