"""What only a GPU can show: graphs, streams, Inductor, and that warming leaves nothing to compile."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton

from fitune.dispatch import Dispatcher, Runtime
from fitune.dispatch.device import target_of
from fitune.errors import DispatchError
from fitune.problem import LayerShape, Problem
from fitune.space import default_tactic

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    pytest.mark.skipif(os.environ.get("TRITON_INTERPRET", "0") != "0", reason="needs TRITON_INTERPRET=0"),
]

SHAPE = LayerShape(512, 256, 16, 4, "bf16")
POINTS = (1, 4, 16, 64, 256)


def make_dispatcher(small: Any, runtime: Runtime, shape: LayerShape) -> Dispatcher:
    target = target_of(torch.device("cuda", 0))
    maker = replace(small.table(), shape=shape, device=target.device)
    table = maker(POINTS, lambda count: default_tactic(Problem(shape, 4, count), target))
    return Dispatcher(table, shape, 4, runtime=runtime)


@pytest.fixture
def dispatcher(small: Any, runtime: Runtime) -> Dispatcher:
    return make_dispatcher(small, runtime, SHAPE)


def tensors(small: Any, num_tokens: int, seed: int = 0, shape: LayerShape = SHAPE) -> Any:
    made = small.tensors(num_tokens, shape, seed=seed)
    moved = {name: getattr(made, name).cuda() for name in ("x", "w13", "w2", "topk_weights", "topk_ids")}
    for name in ("x", "w13", "w2"):
        moved[name] = (moved[name] * 0.2).bfloat16()
    return made.but(**moved)


def close(actual: torch.Tensor, small: Any, made: Any) -> None:
    floats = {name: getattr(made, name).float() for name in ("x", "w13", "w2")}
    wanted = small.expected(made.but(**floats))
    torch.testing.assert_close(actual.float(), wanted, rtol=2e-2, atol=2e-3)


@pytest.fixture
def compiled() -> Iterator[list[str]]:
    """Names of the kernels compiled or loaded since."""
    names: list[str] = []
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.jit_post_compile_hook = lambda **info: names.append(str(info["repr"]))
        yield names


def test_warming_leaves_nothing_to_compile(runtime: Runtime, small: Any, compiled: list[str]) -> None:
    shape = replace(SHAPE, hidden_size=448)  # of this test alone, so that no other has compiled for it
    dispatcher = make_dispatcher(small, runtime, shape)
    made = tensors(small, 256, shape=shape)
    dispatcher.warm(made.w13, made.w2)
    assert compiled
    compiled.clear()
    for count in range(1, 257):
        part = tensors(small, count, shape=shape)
        dispatcher(part.x, made.w13, made.w2, part.topk_weights, part.topk_ids)
        dispatcher(part.x, made.w13, made.w2, part.topk_weights, part.topk_ids.long())
    assert compiled == []
    assert dispatcher.counters()["hits"] == 512


@pytest.mark.parametrize("num_tokens", [1, 5, 64, 300])
def test_a_captured_call_replays_on_new_inputs(num_tokens: int, dispatcher: Dispatcher, small: Any) -> None:
    made = tensors(small, num_tokens)
    dispatcher.warm(made.w13, made.w2, num_tokens=[num_tokens])
    held = dispatcher.counters()["workspace_bytes"]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = dispatcher(*made.args)
    assert dispatcher.counters()["workspace_bytes"] == held
    dispatcher(*tensors(small, 1000).args)
    for seed in (1, 2):
        fresh = tensors(small, num_tokens, seed)
        made.x.copy_(fresh.x)
        made.topk_ids.copy_(fresh.topk_ids)
        graph.replay()
        torch.cuda.synchronize()
        close(out, small, made)


def test_layers_of_one_capture_reuse_the_pools_memory(dispatcher: Dispatcher, small: Any) -> None:
    made = tensors(small, 256)
    dispatcher.warm(made.w13, made.w2, num_tokens=[256])
    sizes = []
    for layers in (1, 8):
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            x = made.x
            for _ in range(layers):
                x = dispatcher(x, made.w13, made.w2, made.topk_weights, made.topk_ids)
        sizes.append(torch.cuda.memory_reserved() - before)
        del graph, x
    assert sizes[1] < 2 * sizes[0] + (8 << 20)


def test_warming_is_refused_during_capture(dispatcher: Dispatcher, small: Any) -> None:
    with torch.cuda.graph(torch.cuda.CUDAGraph()), pytest.raises(DispatchError, match="warm before the capture"):
        dispatcher.warm()


def test_streams_have_workspaces_of_their_own(dispatcher: Dispatcher, small: Any) -> None:
    first, second = tensors(small, 64, 1), tensors(small, 64, 2)
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    results = []
    for _ in range(20):
        for stream, made in zip(streams, (first, second), strict=True):
            with torch.cuda.stream(stream):
                results.append((dispatcher(*made.args), made))
    torch.cuda.synchronize()
    for out, made in results[-4:]:
        close(out, small, made)


@pytest.mark.parametrize("mode", ["default", "reduce-overhead"])
def test_inductor_runs_the_call_whole(mode: str, dispatcher: Dispatcher, small: Any) -> None:
    made = tensors(small, 64)
    dispatcher.warm(made.w13, made.w2, num_tokens=[64])
    compiled = torch.compile(lambda *args: dispatcher(*args) * 2.0, mode=mode, fullgraph=True)
    for _ in range(4):
        result = compiled(*made.args).clone()
    close(result / 2.0, small, made)
