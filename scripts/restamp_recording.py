"""Prove that today's kernels compile to the binaries of a recording, and only then write their hash into it.

    python scripts/restamp_recording.py RECORDING [--workers 2] [--limit N]

A recording names the hash of the kernel sources it was measured with, and fitune calls its tactics stale once the
sources change, be it in a comment. This compiles every distinct binary that the recording holds (no GPU needed, but
the Triton version it was recorded with) and compares hashes of the generated code. If all agree, the times are still
those of today's kernels. If one differs, nothing is written and it is time to record anew. --limit checks only some
and never writes.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from fitune.cache import Recording, load_recording, save_recording
from fitune.measure.compile import compile_stages
from fitune.problem import Problem
from fitune.tactic import Stage
from fitune.target import kernel_source_hash, version_of


def distinct_binaries(recording: Recording) -> dict[Problem, dict[Stage, str]]:
    """One stage for every binary, by the problem to compile it for. Tiles compile alike whatever the token count."""
    first: dict[tuple[str, str], tuple[Problem, Stage]] = {}
    for record in recording.records:
        if record.binary and isinstance(record.tactic, Stage):
            first.setdefault((record.part, record.binary), (record.key.problem(), record.tactic))
    problems = {problem.shape: problem for problem, stage in first.values() if stage.family == "tile"}
    found: dict[Problem, dict[Stage, str]] = {}
    for (_, binary), (problem, stage) in first.items():
        place = problems[problem.shape] if stage.family == "tile" else problem
        found.setdefault(place, {})[stage] = binary
    return found


def restamped(recording: Recording, kernels: str) -> Recording:
    """The recording with `kernels` in its environments, and what was done in its note."""
    names = {}
    environments = {}
    for name, environment in recording.environments.items():
        made = replace(environment, kernels=kernels)
        names[name], environments[made.id] = made.id, made
    records = tuple(replace(item, environment_id=names[item.environment_id]) for item in recording.records)
    decisions = tuple(replace(item, environment_id=names[item.environment_id]) for item in recording.decisions)
    old = ", ".join(sorted({environment.kernels for environment in recording.environments.values()}))
    note = f"{recording.note}; measured with kernels {old}, whose binaries those of {kernels} equal"
    return replace(recording, environments=environments, records=records, decisions=decisions, note=note)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recording", type=Path)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=int)
    given = parser.parse_args()
    recording = load_recording(given.recording)
    triton = version_of("triton")
    recorded = {environment.triton for environment in recording.environments.values()}
    if recorded != {triton}:
        print(f"recorded with triton {', '.join(recorded)}, installed is {triton}: binaries cannot be compared")
        return 2
    kernels = kernel_source_hash()
    groups = distinct_binaries(recording)
    total = sum(map(len, groups.values()))
    done = different = 0
    for problem, stages in groups.items():
        chosen = list(stages)[: None if given.limit is None else given.limit - done]
        for report in compile_stages(chosen, problem, recording.target, workers=given.workers):
            done += 1
            if report.binary != stages[report.stage]:
                different += 1
                print(f"differs: {report.stage} ({report.status} {report.error})")
            elif done % 100 == 0:
                print(f"{done} of {total} equal", file=sys.stderr)
    print(f"{done} of {total} binaries compiled, {different} differ")
    if different or done < total:
        return 1 if different else 0
    save_recording(given.recording, restamped(recording, kernels))
    print(f"{given.recording}: kernels {kernels}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
