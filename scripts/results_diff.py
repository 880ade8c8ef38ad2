"""The part of the results page that asks why EP sizes chose differently."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import combinations
from typing import Any

from fitune.diff import DiffReport, DiffRow, Real, Regret, Side, Verdict, diff_sides
from fitune.render import regret_text
from fitune.tactic import Tactic

Table = Callable[[str, Iterable[Sequence[object]]], str]
Short = Callable[[Tactic], str]
POWER_TOKENS = 4096
COLUMNS = (Verdict.SAME, Verdict.TIE, Verdict.UNDECIDED, Verdict.NOT_ENUMERATED, Verdict.REAL)


def diff_values(sides: Mapping[int, Side], table: Table, short: Short) -> dict[str, Any]:
    """Every pair of EP sizes: what they add up to, and each row that differs."""
    reports = [diff_sides(sides[a], sides[b]) for a, b in combinations(sorted(sides), 2)]
    rows = [row for report in reports for row in report.rows if row.differs]
    costs = [regret for row in rows for regret in (row.regret_a_on_b, row.regret_b_on_a)]
    assert not any(regret.judgement == "faster" for regret in costs), "a choice was missed: say so on the page"
    counts = Counter(row.verdict for row in rows)
    real = [row for row in rows if row.verdict is Verdict.REAL]
    sources = Counter(cost_of(row).source for row in real)
    measured = [cost_of(row).ratio or 0.0 for row in real if cost_of(row).source == "measured"]
    families = {row.num_tokens for row in real if "family" in row.fields}
    heading = f" pair|{'|'.join(str(kind).replace('_', ' ') for kind in COLUMNS)}| real at tokens (known by)"
    return {
        "diff_summary": table(heading, map(_summary, reports)),
        "num_differing": len(rows),
        "num_ties": counts[Verdict.TIE],
        "num_undecided": counts[Verdict.UNDECIDED],
        "num_real": len(real),
        "num_measured": sources["measured"],
        "num_composed": sources["composed"],
        "families": ", ".join(map(str, sorted(families))),
        "measured_span": f"{100.0 * min(measured):+.1f} to {100.0 * max(measured):+.1f} %",
        "power_hint": _power_hint(real),
        "diffs": "\n\n".join(_report(report, table, short) for report in reports),
    }


def cost_of(row: DiffRow) -> Regret:
    """The cost that a real difference rests on."""
    assert isinstance(row.evidence, Real)
    return row.evidence.regret


def _power_hint(real: Sequence[DiffRow]) -> str:
    """What to make of sums of stages that were timed under the power cap, where a verdict rests on them."""
    capped = {row.num_tokens for row in real if row.num_tokens >= POWER_TOKENS and cost_of(row).source == "composed"}
    if not capped:
        return ""
    listed = " and ".join(f"{tokens:,}" for tokens in sorted(capped))
    return (
        f" Those at {listed} tokens compare stages timed at different moments under the power cap: take them as a "
        "hint, not as a finding."
    )


def _summary(report: DiffReport) -> Sequence[object]:
    other = set(report.counts) - set(COLUMNS)
    assert not other, f"the table has no column for {other}"
    real = [f"{row.num_tokens:,} ({cost_of(row).source})" for row in report.rows if row.verdict is Verdict.REAL]
    pair = f"{report.label_a} against {report.label_b}"
    return (pair, *(report.counts.get(kind, 0) for kind in COLUMNS), ", ".join(real) or "-")


def _report(report: DiffReport, table: Table, short: Short) -> str:
    rows = []
    for row in report.rows:
        if row.differs:
            assert row.tactic_a is not None and row.tactic_b is not None
            tactics = f"{short(row.tactic_a)}<br>{short(row.tactic_b)}"
            costs = f"{regret_text(row.regret_a_on_b)}<br>{regret_text(row.regret_b_on_a)}"
            verdict = str(row.verdict).replace("_", " ")
            rows.append((f"{row.num_tokens:,}", verdict, tactics, costs, row.sentence))
    heading = f"tokens| verdict| tactics: {report.label_a}, then {report.label_b}|on other| why"
    return f"### {report.label_a} against {report.label_b}\n\n{table(heading, rows)}"
