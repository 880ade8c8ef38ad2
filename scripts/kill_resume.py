"""Kill a search at random moments, resume it each time, and see what that cost.

    python scripts/kill_resume.py [--kills 20] [--ep 8] [--tokens 1:4096] [--trials 40] [--seed 0]

Runs `fitune search` on a recording in a child process, sends it SIGKILL at a random moment (after a random
number of bytes stored, and up to 50 ms more), reads the store, starts
the same command again, and so on; then lets it finish. Checked: every record that was readable after a kill is still
there at the end, the store shows no damage but torn tails, no stage of a key is measured twice, and the decisions are
those of a search that nobody killed. Exit code 1 if anything of that fails.
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

from fitune.cache import open_store
from fitune.errors import StoreError
from fitune.record import Record

PROGRAM = "import sys; from fitune.cli import main; sys.exit(main())"


@dataclass(frozen=True, slots=True)
class Kill:
    """One kill: seconds after the start, and what the store held then; `torn` counts tails torn so far."""

    after_s: float
    records: int
    decisions: int
    torn: int


def search_command(given: argparse.Namespace, store: Path) -> list[str]:
    options = f"search --model deepseek-v3 --ep {given.ep} --tokens {given.tokens} --trials {given.trials}"
    options += f" --seed {given.seed} --measurer {given.measurer} --store {store}"
    return [sys.executable, "-c", PROGRAM, *options.split()]


def identity(record: Record) -> tuple[object, ...]:
    return record.key, record.part, record.tactic, record.run_id, record.time_s


def records_of(store: Path) -> list[Record]:
    try:
        return open_store(store).records()
    except StoreError:
        return []


def stored_bytes(store: Path) -> int:
    return sum(path.stat().st_size for path in store.rglob("*.seg")) if store.exists() else 0


def kill_once(command: list[str], store: Path, more_bytes: float, jitter_s: float) -> Kill | None:
    """Start the search, kill it `jitter_s` after it has stored `more_bytes`, read the store. None where it finished."""
    started, enough = time.monotonic(), stored_bytes(store) + more_bytes
    child = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while child.poll() is None and stored_bytes(store) < enough:
        time.sleep(0.002)
    time.sleep(jitter_s)
    if child.poll() is not None:
        return None
    child.kill()
    child.wait()
    after_s = time.monotonic() - started
    torn = sum("torn" in finding.what for finding in open_store(store).check())
    return Kill(after_s, len(records_of(store)), len(open_store(store).decisions()), torn)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--ep", default="8")
    parser.add_argument("--tokens", default="1:4096")
    parser.add_argument("--trials", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--measurer", default="recording")
    given = parser.parse_args()
    chance = random.Random(given.seed)
    folder = Path(tempfile.mkdtemp(prefix="fitune-kill-"))
    whole, killed = folder / "whole", folder / "killed"
    subprocess.run(search_command(given, whole), check=True, capture_output=True)
    share_bytes = stored_bytes(whole) / given.kills
    command = search_command(given, killed)
    seen: set[tuple[object, ...]] = set()
    kills: list[Kill] = []
    while len(kills) < given.kills:
        kill = kill_once(command, killed, chance.uniform(0.0, 1.5 * share_bytes), chance.uniform(0.0, 0.05))
        if kill is None:
            print(f"the search was done after {len(kills)} kills: give more --tokens or --trials", file=sys.stderr)
            break
        seen |= {identity(record) for record in records_of(killed)}
        kills.append(kill)
        print(f"kill {len(kills):>2} after {kill.after_s:4.1f} s: {kill.records:>5} records, {kill.decisions} decided")
    subprocess.run(command, check=True, capture_output=True)
    store = open_store(killed)
    final = store.records()
    lost = seen - {identity(record) for record in final}
    counted = Counter((record.key, record.tactic) for record in final if record.part != "layer")
    repeated = [stage for stage, count in counted.items() if count > 1]
    damage = [finding for finding in store.check() if not finding.harmless]
    reference = {key: decision.chosen for key, decision in open_store(whole).decisions().items()}
    chosen = {key: decision.chosen for key, decision in store.decisions().items()}
    differing = [key.num_tokens for key in reference if chosen.get(key) != reference[key]]
    print(f"{len(kills)} kills, {max((kill.torn for kill in kills), default=0)} torn tails")
    print(f"{len(final)} records at the end, {len(seen)} seen after kills, {len(lost)} of those lost")
    print(f"{len(counted)} stages measured, {len(repeated)} more than once; damage beside torn tails: {len(damage)}")
    print(f"{len(reference)} decisions, {len(differing)} other than without a kill {differing or ''}")
    shutil.rmtree(folder)
    return 1 if lost or repeated or damage or set(chosen) != set(reference) else 0


if __name__ == "__main__":
    raise SystemExit(main())
