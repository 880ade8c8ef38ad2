"""Whole calls: results, buffers, compiled graphs. The kernels run under Triton's interpreter."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import triton

import fitune
from fitune.cache import Store
from fitune.dispatch import Dispatcher, Runtime, forget
from fitune.dispatch.ops import dispatch_op, fused_moe_op
from fitune.errors import DispatchError, InputError, StoreError
from fitune.misses import MISS_LOG_NAME, read_misses

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="needs Triton's interpreter on the CPU")


@pytest.fixture
def dispatcher(small: Any, runtime: Runtime) -> Dispatcher:
    table = small.table()((1, 2, 4, 8), lambda count: small.other if count == 8 else small.tactic)
    return Dispatcher(table, small.shape, 4, local_expert_offset=2, runtime=runtime)


@pytest.fixture(autouse=True)
def own_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FITUNE_HOME", str(tmp_path / "home"))


def close(actual: torch.Tensor, wanted: torch.Tensor) -> None:
    torch.testing.assert_close(actual, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("num_tokens", [1, 3, 7, 9])
def test_hits_and_misses_give_the_layer(num_tokens: int, dispatcher: Dispatcher, small: Any) -> None:
    tensors = small.tensors(num_tokens)
    tensors.topk_ids[0, 0] = -1
    result = dispatcher(*tensors.args)
    close(result, small.expected(tensors, offset=2))
    counters = dispatcher.counters()
    assert (counters["hits"], counters["misses"]) == ((1, 0) if num_tokens <= 8 else (0, 1))


def test_ids_may_be_int64_and_tensors_strided(dispatcher: Dispatcher, small: Any) -> None:
    tensors = small.tensors(3)
    wide = torch.full((3, 64), float("nan"))
    wide[:, :32] = tensors.x
    strided = tensors.but(x=wide[:, :32], topk_ids=tensors.topk_ids.long().t().contiguous().t())
    close(dispatcher(*strided.args), small.expected(tensors, offset=2))


def test_out_is_filled_and_returned(dispatcher: Dispatcher, small: Any) -> None:
    tensors = small.tensors(3)
    out = torch.full((3, small.shape.hidden_size), float("nan"))
    assert dispatcher(*tensors.args, out=out) is out
    close(out, small.expected(tensors, offset=2))


def test_out_with_overlapping_rows_is_refused(dispatcher: Dispatcher, small: Any) -> None:
    tensors = small.tensors(3)
    with pytest.raises(DispatchError, match="out: its row stride is 0, so rows overlap"):
        dispatcher(*tensors.args, out=torch.empty(1, small.shape.hidden_size).expand(3, -1))


def test_routing_is_read_as_the_search_reads_it(small: Any) -> None:
    table = small.table(routing="zipf:1.2")({4})
    assert Dispatcher(table, small.shape, 4, routing="zipf:1.20", device="cpu").lookup(4).hit
    with pytest.raises(InputError, match="'zipf:abc'"):
        Dispatcher(table, small.shape, 4, routing="zipf:abc", device="cpu")


@pytest.mark.parametrize("num_tokens", [2, 8, 9])
def test_a_rank_without_rows_gives_zeros(num_tokens: int, dispatcher: Dispatcher, small: Any) -> None:
    tensors = small.tensors(num_tokens)
    tensors.topk_ids[:] = torch.tensor([0, 7])
    result = dispatcher(*tensors.args, out=torch.full_like(tensors.x, float("nan")))
    assert torch.equal(result, torch.zeros_like(tensors.x))


def test_calls_of_other_sizes_between_do_not_disturb(dispatcher: Dispatcher, small: Any) -> None:
    first, second = small.tensors(7, seed=1), small.tensors(2, seed=2)
    before = dispatcher(*first.args)
    kept = before.clone()
    dispatcher(*second.args)
    assert torch.equal(before, kept)
    assert torch.equal(dispatcher(*first.args), kept)


def test_warm_runs_every_tactic_and_counts_no_call(dispatcher: Dispatcher, small: Any) -> None:
    launches = dispatcher.warm()
    assert launches == 2 * 8
    assert all(plan.ran for plan in dispatcher._plans if plan is not None)
    counters = dispatcher.counters()
    assert counters["calls"] == 0
    held = counters["workspace_bytes"]
    dispatcher(*small.tensors(8).args)
    assert dispatcher.counters()["workspace_bytes"] == held


def test_warm_takes_the_counts_given(small: Any, runtime: Runtime, caplog: pytest.LogCaptureFixture) -> None:
    layer = Dispatcher(None, small.shape, 4, runtime=runtime)
    tensors = small.tensors(1)
    assert layer.warm(tensors.w13, tensors.w2, num_tokens=[3, 0]) == 2
    assert list(layer._defaults) == [4]
    with pytest.raises(DispatchError, match="w13: shape"):
        layer.warm(tensors.w2, tensors.w2, num_tokens=[3])


def test_a_cpu_without_the_interpreter_is_refused(small: Any, runtime: Runtime, monkeypatch: Any) -> None:
    layer = Dispatcher(None, small.shape, 4, runtime=runtime)
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = False
        with pytest.raises(DispatchError, match="TRITON_INTERPRET=1"):
            layer(*small.tensors(2).args)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compiled_graphs_hold_a_call_whole(backend: str, dispatcher: Dispatcher, small: Any) -> None:
    def model(x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
        return dispatcher(x * 2.0, *rest) + 1.0

    compiled = torch.compile(model, backend=backend, fullgraph=True, dynamic=True)
    for num_tokens in (3, 5, 9):
        tensors = small.tensors(num_tokens)
        wanted = small.expected(tensors.but(x=tensors.x * 2.0), offset=2) + 1.0
        close(compiled(*tensors.args), wanted)
    assert dispatcher.counters()["calls"] == 3


def test_compiled_graphs_fill_out(dispatcher: Dispatcher, small: Any) -> None:
    tensors = small.tensors(3)
    out = torch.zeros_like(tensors.x)
    compiled = torch.compile(lambda *args: dispatcher(*args, out=out), backend="aot_eager", fullgraph=True)
    compiled(*tensors.args)
    close(out, small.expected(tensors, offset=2))


@pytest.mark.parametrize("num_tokens", [0, 3])
def test_the_operators_keep_torchs_rules(num_tokens: int, small: Any, tmp_path: Path) -> None:
    layer = Dispatcher(small.table()((1, 2, 4)), small.shape, 4)
    args = small.tensors(num_tokens).args
    torch.library.opcheck(dispatch_op, (*args, layer._handle))
    path = tmp_path / "table.fitune"
    path.write_bytes(small.table()((1, 2, 4)).to_bytes())
    texts = (str(path), "all_gather", "", "explain", "")
    torch.library.opcheck(fused_moe_op, (*args, small.shape.num_experts, 0, *texts))
    forget()


def test_a_graph_that_outlives_its_dispatcher_says_so(small: Any) -> None:
    layer = Dispatcher(None, small.shape, 4)
    handle = layer._handle
    del layer
    with pytest.raises(DispatchError, match=f"dispatcher {handle} is gone"):
        dispatch_op(*small.tensors(2).args, handle)


@pytest.fixture
def store(small: Any, tmp_path: Path) -> Path:
    maker = small.table()
    path = tmp_path / "store"
    with Store.open(path, create=True).writer() as writer:
        writer.append(maker.environment)
        for decision in maker.decisions((1, 2, 4), lambda count: small.tactic):
            writer.append(decision)
    yield path
    forget()


def test_fused_moe_reads_a_store_and_writes_its_misses(store: Path, small: Any) -> None:
    tensors = small.tensors(3)
    result = fitune.fused_moe(*tensors.args, num_experts=8, local_expert_offset=2, store=store)
    close(result, small.expected(tensors, offset=2))
    assert not (store / MISS_LOG_NAME).exists()
    tensors = small.tensors(9)
    close(fitune.fused_moe(*tensors.args, num_experts=8, store=store), small.expected(tensors))
    assert [problem.num_tokens for problem in read_misses(store / MISS_LOG_NAME)] == [16]
    assert Store.open(store).check() == []


def test_fused_moe_compiles_and_exports(store: Path, small: Any) -> None:
    class Layer(torch.nn.Module):
        def forward(self, x: torch.Tensor, *rest: torch.Tensor) -> torch.Tensor:
            result: torch.Tensor = fitune.fused_moe(x, *rest, num_experts=8, store=str(store))
            return result

    tensors = small.tensors(3)
    close(torch.compile(Layer(), backend="aot_eager", fullgraph=True)(*tensors.args), small.expected(tensors))
    exported = torch.export.export(Layer(), tensors.args)
    close(exported.module()(*tensors.args), small.expected(tensors))


def test_fused_moe_without_a_store(small: Any, tmp_path: Path, monkeypatch: Any, caplog: Any) -> None:
    home = tmp_path / "none"
    monkeypatch.setenv("FITUNE_HOME", str(home))
    shape = replace(small.shape, hidden_size=16)
    tensors = small.tensors(2, shape)
    with caplog.at_level(logging.WARNING, "fitune.dispatch"):
        close(fitune.fused_moe(*tensors.args, num_experts=8), small.expected(tensors))
    assert f"table: no store at {home}; make one with fitune search" in caplog.text
    assert not home.exists()
    forget()
    home.mkdir()
    fitune.fused_moe(*tensors.args, num_experts=8)
    assert [entry.name for entry in home.iterdir()] == [MISS_LOG_NAME]
    forget()
    fitune.fused_moe(*tensors.args, num_experts=8)
    forget()
    (home / "other").write_text("")
    with pytest.raises(StoreError, match="folder of other files"):
        fitune.fused_moe(*tensors.args, num_experts=8)
    with pytest.raises(StoreError):
        fitune.fused_moe(*tensors.args, num_experts=8, store=tmp_path / "absent")
    forget()


def test_forget_reads_a_store_anew(store: Path, small: Any) -> None:
    def hits() -> bool:
        try:
            fitune.fused_moe(*small.tensors(8).args, num_experts=8, store=store, policy="frozen")
        except DispatchError:
            return False
        return True

    assert not hits()
    maker = small.table()
    with Store.open(store).writer() as writer:
        writer.append(maker.environment)
        for decision in maker.decisions((8,), lambda count: small.tactic):
            writer.append(decision)
    assert not hits()
    forget()
    assert hits()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"w13": torch.zeros(4, 31, 32)}, "w13: 31 rows; it must be 2"),
        ({"x": torch.zeros(32)}, r"x: shape is \[32\]; it must have 2 dimensions"),
        ({"x": torch.zeros(3, 32, dtype=torch.float64)}, "x: dtype is float64; it must be one of bf16, fp16, fp32"),
        ({"w13": None}, "must be torch tensors"),
        ({"x": np.zeros((3, 32), dtype=np.float32)}, "torch tensors?$"),
        ({"w2": torch.zeros(4, 16, 32)}, "w2: shape"),
    ],
)
def test_fused_moe_refuses_wrong_tensors(change: dict[str, Any], message: str, small: Any) -> None:
    with pytest.raises(DispatchError, match=message):
        fitune.fused_moe(*small.tensors(3).but(**change).args, num_experts=8)
