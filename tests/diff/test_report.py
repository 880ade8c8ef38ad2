"""The report as a whole: its sentence, its counts, its JSON, and sides made of a store on disk."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from fitune.cache import Store
from fitune.diff import CASCADE, DiffReport, Verdict, diff_sides, differing_fields, side_of, to_json
from fitune.tactic import parse_tactic


def report(make: SimpleNamespace) -> DiffReport:
    """Five loads: one the same, one real, one tied, one untimed, one of A alone."""

    def decisions(experts: int, home: Any, guest: Any) -> list[Any]:
        at = {tokens: make.key(tokens, experts) for tokens in (2048, 4096, 8192, 16384)}
        return [
            make.decided(at[2048], [(make.SMALL, 100.0)]),
            make.decided(at[4096], [(home, 100.0), (guest, 109.0)]),
            make.decided(at[8192], [(home, 100.0), (guest, 100.2)]),
            make.decided(at[16384], [(home, 100.0)]),
        ]

    a = [*decisions(256, make.LARGE, make.SMALL), make.decided(make.key(1, 256), [(make.SMALL, 5.0)])]
    return diff_sides(make.side("EP 1", a), make.side("EP 16", decisions(16, make.SMALL, make.LARGE)))


def test_the_summary(make: SimpleNamespace) -> None:
    found = report(make)
    assert [row.verdict.value for row in found.rows] == ["only_a", "same", "real", "tie", "undecided"]
    assert found.sentence() == (
        "EP 1 and EP 16 chose differently in 3 of 4 rows: 1 real, 1 tied, 1 undecided; "
        "real at 4096 tokens; 1 only in EP 1"
    )
    assert list(found.counts) == [Verdict.TIE, Verdict.REAL, Verdict.UNDECIDED, Verdict.SAME, Verdict.ONLY_A]


def test_nothing_in_common(make: SimpleNamespace) -> None:
    a = make.side("A", [make.decided(make.key(1, hidden_size=4096), [(make.SMALL, 5.0)])])
    b = make.side("B", [make.decided(make.key(1), [(make.SMALL, 5.0)])])
    assert diff_sides(a, b).sentence() == "A and B have no load in common; 1 only in A; 1 only in B"
    assert diff_sides(make.side("A", []), make.side("B", [])).rows == ()


def test_json_holds_every_row_and_round_trips(make: SimpleNamespace) -> None:
    found = report(make)
    data = json.loads(json.dumps(to_json(found), allow_nan=False))
    assert data["counts"] == {"tie": 1, "real": 1, "undecided": 1, "same": 1, "only_a": 1}
    assert [row["num_tokens"] for row in data["rows"]] == [1, 2048, 4096, 8192, 16384]
    real = data["rows"][2]
    assert parse_tactic(real["tactic_a"]) == make.LARGE
    assert real["key_b"]["ep"] == "EP 16"
    assert real["regret_a_on_b"]["source"] == "measured"
    assert real["evidence"]["mechanism"]["foreign_here"]["gemm1"]["tiles"] > 0
    assert data["rows"][0]["key_b"] is None


def test_differing_fields(make: SimpleNamespace) -> None:
    assert differing_fields(make.SMALL, make.LARGE) == ("tile_size", "gemm1.num_warps", "gemm2.num_warps")
    assert differing_fields(make.SMALL, make.SMALL) == ()


def test_one_store_two_ep_sizes(make: SimpleNamespace, tmp_path: Path) -> None:
    store = Store.open(tmp_path / "store", create=True)
    one, sixteen = make.key(4096, 256), make.key(4096, 16)
    with store.writer() as writer:
        writer.append(make.ENVIRONMENT)
        writer.append(make.tried(one, make.SMALL.stage("gemm1"), 50.0))
        writer.append(make.decided(one, [(make.LARGE, 100.0), (make.SMALL, 108.0)]))
        writer.append(make.decided(sixteen, [(make.SMALL, 100.0), (make.LARGE, 109.0)]))
    store = Store.open(tmp_path / "store")
    a = side_of(store, local_experts=256, label="EP 1")
    b = side_of(store, local_experts=16, label="EP 16")
    assert (len(a.records), len(b.records)) == (1, 0)
    (row,) = diff_sides(a, b).rows
    assert row.verdict is Verdict.REAL
    (row,) = (row for row in diff_sides(a, side_of(store, label="both")).rows if row.differs or row.key_a)
    assert row.verdict is Verdict.SAME


def test_the_cascade_stands_in_the_order_of_its_verdicts() -> None:
    names = [find.__module__.rpartition(".")[2] for find in CASCADE]
    assert names == [verdict.value for verdict in list(Verdict)[: len(CASCADE)]]
