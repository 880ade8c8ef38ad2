"""What a dispatcher chooses, counts, reports and refuses. No kernel runs in this file."""

from __future__ import annotations

import copy
import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fitune.dispatch import Dispatcher, Runtime
from fitune.dispatch.plan import warm_counts
from fitune.dispatch.workspaces import WorkspacePool, round_up
from fitune.errors import CorruptStoreError, DispatchError, StoreError
from fitune.misses import power_of_two, scan_misses
from fitune.problem import Problem
from fitune.space import default_tactic
from fitune.target import KNOWN_TARGETS

POINTS = (1, 2, 4, 8, 16, 64)


@pytest.fixture
def dispatcher(small: Any, runtime: Runtime) -> Dispatcher:
    table = small.table()(POINTS, lambda count: replace(small.tactic, tile_size=16 if count < 16 else 32))
    return Dispatcher(table, small.shape, 4, runtime=runtime)


def test_hits_take_the_bucket_of_the_count(dispatcher: Dispatcher) -> None:
    for count, point in ((1, 1), (3, 4), (5, 4), (6, 8), (11, 8), (12, 16), (32, 16), (33, 64), (64, 64)):
        lookup = dispatcher.lookup(count)
        assert lookup.hit and lookup.entry is not None
        assert lookup.entry.bucket.point == point, count
        assert lookup.tactic.tile_size == (16 if point < 16 else 32)


def test_misses_get_one_default_for_each_power_of_two(dispatcher: Dispatcher, small: Any) -> None:
    for count in (65, 100, 128, 129, 5000):
        lookup = dispatcher.lookup(count)
        problem = Problem(small.shape, 4, power_of_two(count))
        assert not lookup.hit and lookup.entry is None
        assert lookup.reason == f"num_tokens: table has 1..64; asked {count}"
        assert lookup.tactic == default_tactic(problem, dispatcher._target)
    assert dispatcher.plan(65) is dispatcher.plan(127) is not dispatcher.plan(129)


def test_a_look_up_needs_a_token(dispatcher: Dispatcher) -> None:
    with pytest.raises(DispatchError, match="num_tokens is 0"):
        dispatcher.lookup(0)


def test_misses_are_said_once(dispatcher: Dispatcher, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "fitune.dispatch"):
        for count in (100, 101, 100, 128, 300):
            dispatcher.plan(count)
    assert [record.getMessage() for record in caplog.records] == [
        "no tuned tactic, using a default: num_tokens: table has 1..64; asked 100",
        "no tuned tactic, using a default: num_tokens: table has 1..64; asked 300",
    ]


def test_a_foreign_layer_is_said_once_and_written_for_each_size(
    small: Any, runtime: Runtime, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "misses.jsonl"
    tables = small.table()(POINTS)
    layers = [Dispatcher(tables, small.shape, 2, miss_log=path, runtime=runtime) for _ in range(3)]
    with caplog.at_level(logging.WARNING, "fitune.dispatch"):
        for layer in layers:
            for count in (3, 4, 100):
                layer.plan(count)
    reason = "local_experts: table has 4; asked 2"
    assert [record.getMessage() for record in caplog.records] == [f"no tuned tactic, using a default: {reason}"]
    misses = scan_misses(path).misses
    assert [(miss.num_tokens, miss.reason, miss.problem.num_tokens) for miss in misses] == [
        (3, reason, 4),
        (100, reason, 128),
    ]
    assert misses[0].problem.local_experts == 2


def test_a_miss_log_that_cannot_be_written_breaks_no_call(
    small: Any, runtime: Runtime, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("")
    layer = Dispatcher(None, small.shape, 4, miss_log=tmp_path / "file" / "misses.jsonl", runtime=runtime)
    layer.plan(3)
    layer.plan(300)
    assert layer.counters()["miss_lines_lost"] == 2
    assert sum("misses are not written" in record.getMessage() for record in caplog.records) == 1


def test_frozen_misses_raise_every_time(small: Any, runtime: Runtime) -> None:
    layer = Dispatcher(small.table()(POINTS), small.shape, 4, policy="frozen", runtime=runtime)
    assert layer.plan(64).entry is not None
    for _ in range(2):
        with pytest.raises(DispatchError, match=r"num_tokens: table has 1\.\.64; asked 65; tune it with fitune search"):
            layer(*small.tensors(65).args)
    assert layer.counters() | {"workspace_bytes": 0} == {
        "calls": 2,
        "hits": 0,
        "misses": 0,
        "stale": 0,
        "empty": 0,
        "refused": 2,
        "miss_lines_lost": 0,
        "workspace_bytes": 0,
    }


def test_frozen_without_a_matching_layer_does_not_warm(small: Any, runtime: Runtime) -> None:
    layer = Dispatcher(small.table()(POINTS), small.shape, 2, policy="frozen", runtime=runtime)
    with pytest.raises(DispatchError, match="local_experts: table has 4; asked 2"):
        layer.warm()


def test_no_tokens_give_no_rows_and_launch_nothing(dispatcher: Dispatcher, small: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(Dispatcher, "_launch", None)
    out = dispatcher(*small.tensors(0).args)
    assert (tuple(out.shape), out.dtype) == ((0, small.shape.hidden_size), torch.float32)
    into = torch.empty(0, small.shape.hidden_size)
    assert dispatcher(*small.tensors(0).args, out=into) is into
    assert dispatcher.counters()["empty"] == 2


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "x hidden": ({"x": torch.zeros(3, 31)}, r"x: shape is \[3, 31\]; it must be \[3, 32\]"),
    "x flat": ({"x": torch.zeros(32)}, r"x: shape is \[32\]; it must be \[any, 32\]"),
    "x dtype": ({"x": torch.zeros(3, 32, dtype=torch.bfloat16)}, "x: dtype is bf16; it must be fp32"),
    "x device": ({"x": torch.zeros(3, 32, device="meta")}, "x: it is on meta; this layer runs on cpu"),
    "x gradient": ({"x": torch.zeros(3, 32, requires_grad=True)}, "x: it requires a gradient"),
    "x list": ({"x": [[0.0]]}, "x: it is a list; give a torch tensor"),
    "ids float": ({"topk_ids": torch.zeros(3, 2)}, "topk_ids: dtype is fp32; it must be int32 or int64"),
    "ids top_k": ({"topk_ids": torch.zeros(3, 3, dtype=torch.int32)}, r"topk_ids: shape is \[3, 3\].*\[3, 2\]"),
    "ids tokens": ({"topk_ids": torch.zeros(4, 2, dtype=torch.int32)}, r"topk_ids: shape is \[4, 2\].*\[3, 2\]"),
    "weights dtype": ({"topk_weights": torch.zeros(3, 2, dtype=torch.float64)}, "topk_weights: dtype is float64"),
    "weights shape": ({"topk_weights": torch.zeros(3, 1)}, r"topk_weights: shape is \[3, 1\]"),
    "weights none": ({"topk_weights": None}, "topk_weights: it is a NoneType"),
    "w13 rows": ({"w13": torch.zeros(4, 31, 32)}, r"w13: shape is \[4, 31, 32\]; it must be \[4, 32, 32\]"),
    "w13 experts": ({"w13": torch.zeros(8, 32, 32)}, r"w13: shape is \[8, 32, 32\]"),
    "w13 dtype": ({"w13": torch.zeros(4, 32, 32, dtype=torch.float16)}, "w13: dtype is fp16; it must be fp32"),
    "w13 none": ({"w13": None}, "w13: it is a NoneType"),
    "w2 transposed": ({"w2": torch.zeros(4, 16, 32)}, r"w2: shape is \[4, 16, 32\]; it must be \[4, 32, 16\]"),
    "w2 device": ({"w2": torch.zeros(4, 32, 16, device="meta")}, "w2: it is on meta"),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_tensors_are_refused_in_one_line(name: str, dispatcher: Dispatcher, small: Any) -> None:
    changes, message = WRONG[name]
    with pytest.raises(DispatchError, match=message) as caught:
        dispatcher(*small.tensors(3).but(**changes).args)
    assert "\n" not in str(caught.value)
    assert dispatcher.counters()["calls"] == 0


def test_weights_are_checked_again_when_they_change(small: Any, runtime: Runtime, monkeypatch: Any) -> None:
    layer = Dispatcher(None, small.shape, 4, runtime=runtime)
    monkeypatch.setattr(Dispatcher, "_launch", lambda *_: None)
    tensors = small.tensors(3)
    layer(*tensors.args)
    monkeypatch.setattr(layer._binding, "_check_weights", None)
    layer(*tensors.args)
    monkeypatch.undo()
    monkeypatch.setattr(Dispatcher, "_launch", lambda *_: None)
    tensors.w13.data = torch.zeros(4, 30, 32)
    with pytest.raises(DispatchError, match=r"w13: shape is \[4, 30, 32\]"):
        layer(*tensors.args)
    with pytest.raises(DispatchError, match="w2: shape"):
        layer(*small.tensors(3).but(w2=torch.zeros(4, 32, 17)).args)


def test_remembered_weights_are_not_kept_alive(small: Any, runtime: Runtime, monkeypatch: Any) -> None:
    layer = Dispatcher(None, small.shape, 4, runtime=runtime)
    monkeypatch.setattr(Dispatcher, "_launch", lambda *_: None)
    tensors = small.tensors(3)
    layer(*tensors.args)
    ((first, second, *_),) = layer._binding._passed.values()
    del tensors
    assert first() is None and second() is None


@pytest.mark.parametrize(
    ("out", "message"),
    [
        (torch.zeros(2, 32), r"out: shape is \[2, 32\]"),
        (torch.zeros(3, 32, dtype=torch.float16), "out: dtype is fp16"),
        (torch.zeros(3, 32, device="meta"), "out: it is on meta"),
        (torch.zeros(32, 3).t(), "out: its column stride is 3"),
    ],
)
def test_a_wrong_out_is_refused(out: torch.Tensor, message: str, dispatcher: Dispatcher, small: Any) -> None:
    with pytest.raises(DispatchError, match=message):
        dispatcher(*small.tensors(3).args, out=out)


def test_out_must_not_be_x(dispatcher: Dispatcher, small: Any) -> None:
    tensors = small.tensors(3)
    with pytest.raises(DispatchError, match="out: it shares memory with x"):
        dispatcher(*tensors.args, out=tensors.x)


def test_stale_entries_are_used_and_flagged(small: Any, runtime: Runtime, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(Dispatcher, "_launch", lambda *_: None)
    layer = Dispatcher(small.table(kernels="0123456789abcdef")(POINTS), small.shape, 4, runtime=runtime)
    layer(*small.tensors(3).args)
    layer(*small.tensors(100).args)
    counters = layer.counters()
    assert (counters["hits"], counters["misses"], counters["stale"]) == (1, 1, 1)
    assert f"tuned with kernels 0123456789abcdef, these are {runtime.kernels}" in layer.explain(3)
    assert "6 of 6 entries" in caplog.text


def test_explain_names_evidence_and_reason(dispatcher: Dispatcher, small: Any) -> None:
    hit = dispatcher.explain(5)
    assert "5, tuned at 4 for 3..5" in hit
    assert str(small.tactic) in hit
    assert "hit, tuned: 20.0 µs [19.0, 21.0], default 30.0 µs" in hit
    assert dispatcher.table_hash in hit
    assert "stale" not in hit and "triton 3.6.0 when tuned" in hit
    miss = dispatcher.explain(65)
    assert "65, in no tuned bucket" in miss
    assert "miss, default tactic: num_tokens: table has 1..64; asked 65" in miss


def test_explaining_counts_and_logs_nothing(dispatcher: Dispatcher, caplog: pytest.LogCaptureFixture) -> None:
    dispatcher.explain(65)
    dispatcher.lookup(65)
    assert dispatcher.counters()["calls"] == 0
    assert caplog.records == []


def test_equal_decisions_have_equal_hashes_on_all_ranks(small: Any, runtime: Runtime) -> None:
    ranks = [
        Dispatcher(small.table()(POINTS), small.shape, 4, local_expert_offset=offset, runtime=runtime)
        for offset in (0, 4)
    ]
    assert ranks[0].table_hash == ranks[1].table_hash != ""
    assert Dispatcher(None, small.shape, 4, runtime=runtime).table_hash == ""
    assert Dispatcher(small.table()(POINTS[:-1]), small.shape, 4, runtime=runtime).table_hash != ranks[0].table_hash


def test_a_tactic_that_cannot_run_here_is_a_miss_with_its_reason(small: Any, runtime: Runtime) -> None:
    huge = replace(small.tactic, gemm1=replace(small.tactic.gemm1, block_n=256, block_k=512, num_stages=4))
    table = small.table()(POINTS, lambda count: huge if count == 4 else small.tactic)
    layer = Dispatcher(table, small.shape, 4, runtime=runtime)
    lookup = layer.lookup(4)
    assert not lookup.hit
    assert lookup.reason.startswith(f"tactic: the table's {huge} cannot run here (gemm1: shared memory: needs ")
    assert layer.lookup(8).hit
    assert layer.plan(4).entry is None


def test_entries_of_another_chip_can_be_asked_for(small: Any, runtime: Runtime) -> None:
    target = KNOWN_TARGETS["sm_90"]
    table = small.table(device=target.device)(
        POINTS, lambda count: default_tactic(Problem(small.shape, 4, count), target)
    )
    here = Dispatcher(table, small.shape, 4, device="cpu", runtime=runtime)
    assert here.lookup(4).reason == "device: table has NVIDIA H200; asked cpu"
    assert Dispatcher(table, small.shape, 4, device="cpu", target=target, runtime=runtime).lookup(4).hit


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"policy": "tune"}, "policy 'tune' is not known; use one of explain, frozen"),
        ({"device": "tpu0"}, "device: 'tpu0' is not one torch knows"),
        ({"device": "meta"}, "device: meta cannot run these kernels"),
    ],
)
def test_impossible_arguments(arguments: dict[str, Any], message: str, small: Any) -> None:
    with pytest.raises(DispatchError, match=message):
        Dispatcher(None, small.shape, 4, **arguments)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_gpu_that_is_not_there(small: Any) -> None:
    with pytest.raises(DispatchError, match="torch sees no GPU"):
        Dispatcher(None, small.shape, 4, device="cuda")


def test_a_table_that_cannot_be_trusted_stops_the_start(small: Any, tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="absent"):
        Dispatcher(tmp_path / "absent", small.shape, 4, runtime=Runtime())
    path = tmp_path / "table.fitune"
    whole = small.table()(POINTS).to_bytes()
    path.write_bytes(whole)
    assert Dispatcher(path, small.shape, 4, runtime=Runtime()).lookup(4).hit
    for broken in (whole[: len(whole) // 2], whole[:-1] + bytes([whole[-1] ^ 1]), b"not a table at all"):
        path.write_bytes(broken)
        with pytest.raises(CorruptStoreError):
            Dispatcher(path, small.shape, 4, runtime=Runtime())


def test_workspaces_are_shared_and_grow(small: Any) -> None:
    pool = WorkspacePool()
    device = torch.device("cpu")
    first = pool.get(small.shape, 4, device, 4)
    assert pool.get(small.shape, 4, device, 4) is first
    assert pool.get(small.shape, 2, device, 4) is not first
    workspace = first.shared(5, 0)
    assert workspace.max_tokens == 8 and first.shared(8, 0) is workspace
    grown = first.shared(9, 0)
    assert grown.max_tokens == 16 and first.shared(3, 0) is grown
    assert first.shared(3, 7) is not grown
    assert first.own(3) is not first.own(3)
    assert first.bytes == grown.bytes + first.shared(3, 7).bytes


def test_workspaces_go_with_their_dispatchers(small: Any, runtime: Runtime) -> None:
    layer = Dispatcher(None, small.shape, 4, runtime=runtime)
    assert len(runtime.workspaces._known) == 1
    del layer
    assert len(runtime.workspaces._known) == 0


def test_copies_of_a_model_share_their_dispatcher(dispatcher: Dispatcher) -> None:
    model = torch.nn.Module()
    model.moe = dispatcher
    assert copy.deepcopy(model).moe is dispatcher


def test_round_up_wastes_little() -> None:
    for count in (1, 2, 3, 700, 1024, 1025, 16384, 16385):
        size = round_up(count)
        assert count <= size and (size < 2 * count if count < 1024 else size < count + 1024)


def test_warm_counts_meet_every_class_of_argument() -> None:
    for low, high, top_k in ((1, 1, 8), (6, 11, 6), (33, 64, 8), (91, 181, 10), (11586, 16384, 1)):
        counts = warm_counts(low, high, top_k)

        def classes(count: int, top_k: int = top_k) -> tuple[bool, bool, int]:
            return count == 1, count % 16 == 0, (count * top_k - 1).bit_length()

        singles = [{classes(count)[i] for count in counts} for i in range(3)]
        wanted = [{classes(count)[i] for count in range(low, high + 1)} for i in range(3)]
        assert singles == wanted, (low, high, top_k)
