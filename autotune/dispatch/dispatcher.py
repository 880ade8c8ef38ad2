"""The dispatcher: one MoE layer kind on one device, from a call's token count to launched kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Final, Literal

import torch
from torch import Tensor

from fitune.cache import Entry, Table, load_table
from fitune.dispatch import report
from fitune.dispatch.binding import ID_DTYPES, Binding
from fitune.dispatch.device import check_can_run, check_dtype, resolve_device, target_of
from fitune.dispatch.lookup import build_lookup
from fitune.dispatch.ops import dispatch_op
from fitune.dispatch.plan import Lookup, Plan, prepare, warm_counts
from fitune.dispatch.runtime import DEFAULT, Runtime
from fitune.dispatch.scales import NO_SCALES, SCALE_NAMES, ScaleTensors, gathered
from fitune.errors import DispatchError
from fitune.kernels.layer import LayerArgs, fp8_of
from fitune.misses import Miss, power_of_two
from fitune.problem import DEFAULT_ROUTING, DEFAULT_TOKENS, Dispatch, LayerKey, LayerShape, Problem, layer_key
from fitune.routing import check_routing
from fitune.space import LAUNCH_RULES, default_tactic, legality, rule_of
from fitune.tactic import STAGES
from fitune.target import Target

Policy = Literal["explain", "frozen"]
POLICIES: Final[tuple[Policy, ...]] = ("explain", "frozen")


class Dispatcher:
    """Runs one kind of MoE layer with the tactics of a table.

    A call with N tokens takes the entry whose bucket holds N. Where the table has none (another layer, another GPU, a
    count outside the tuned bounds), the call runs with a default tactic that is legal everywhere, the miss is counted,
    logged once with the fields that differ, and written to `miss_log`; under `policy="frozen"` it raises DispatchError
    instead. Nothing is tuned here.

    table: a Table, the path of a table file or store, or None for no tuned tactics. A path is read at once and an
    unreadable, corrupt or newer file raises StoreError: a server does not start on a table it cannot trust. Where many
    layers need a dispatcher, read the table once with fitune.load_table and give it to each.
    shape, local_experts, local_expert_offset, dispatch: the layer and this rank's part of it, as in Problem.
    routing: the routing profile to take tactics for; None takes what the table has (`random` first).
    device: where calls run; None is the current GPU, or the CPU (under Triton's interpreter) where there is none.
    target: the chip whose entries are taken, where that is not the chip of `device`.
    """

    def __init__(
        self,
        table: Table | Path | str | None,
        shape: LayerShape,
        local_experts: int,
        *,
        local_expert_offset: int = 0,
        dispatch: Dispatch = "all_gather",
        routing: str | None = None,
        device: torch.device | str | int | None = None,
        policy: Policy = "explain",
        miss_log: Path | str | None = None,
        target: Target | None = None,
        runtime: Runtime = DEFAULT,
        absent: str = "",
    ) -> None:
        if policy not in POLICIES:
            raise DispatchError(f"policy {policy!r} is not known; use one of {', '.join(POLICIES)}")
        profile = DEFAULT_ROUTING if routing is None else check_routing(str(routing))
        self._problem: Final = Problem(shape, local_experts, 0, profile, dispatch, local_expert_offset)
        self._offset: Final = local_expert_offset
        self._scales: Final = shape.scales
        self._runtime: Final = runtime
        self._policy: Final = policy
        self._miss_log: Final = None if miss_log is None else Path(miss_log)
        self._table: Final = load_table(Path(table)) if isinstance(table, (str, Path)) else table
        self._device: Final = resolve_device(device)
        self._target: Final = target or target_of(self._device)
        check_dtype(shape, self._target)
        fp8 = fp8_of(target_of(self._device).arch)
        self._binding: Final = Binding(shape, local_experts, self._device, fp8)
        self._workspaces: Final = runtime.workspaces.get(shape, local_experts, self._device, self._target.num_sms, fp8)
        self._can_run = False
        self._asked: Final = layer_key(self._problem, self._target.device)
        self._lookup: Final = build_lookup(self._table, self._asked, any_routing=routing is None, absent=absent)
        self._unusable: dict[int, str] = {}
        self._plans: Final = [self._tuned_plan(index, entry) for index, entry in enumerate(self._lookup.entries)]
        self._plans.append(None)
        self._defaults: dict[int, Plan] = {}
        self._dense: Final = self._lookup.dense
        self._dense_size: Final = len(self._dense)
        self._count: Final = {"empty": 0, "refused": 0, "miss_lines_lost": 0}
        self._handle: Final = DEFAULT.register(self)
        self._warn_of_stale_entries()

    def __call__(
        self,
        x: Tensor,
        w13: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        out: Tensor | None = None,
        w13_scale: Tensor | None = None,
        w2_scale: Tensor | None = None,
        x_scale: Tensor | None = None,
        hidden_scale: Tensor | None = None,
    ) -> Tensor:
        """The layer's output [N, H] of this rank, in x's dtype; zeros for tokens without a local expert.

        x [N, H]; w13 [L, 2I, H], gate rows first; w2 [L, H, I]; topk_weights [N, K] float32; topk_ids [N, K] int32 or
        int64 over all experts of the layer; ids of other ranks and -1 contribute nothing. N may be 0. The result is
        written to `out` where that is given. Raises DispatchError for wrong tensors, and for a miss when frozen.

        fp8 layers have e4m3 weights, bf16 x and results, and float32 scales as LayerArgs describes them: w13_scale and
        w2_scale, and under `fp8_tensor` also x_scale and hidden_scale. Other layers have none.
        """
        if torch.compiler.is_compiling():
            scaled = (w13_scale, w2_scale, x_scale, hidden_scale)
            result: Tensor = dispatch_op(x, w13, w2, topk_weights, topk_ids, self._handle, *scaled)
            return result if out is None else out.copy_(result)
        scales = gathered(w13_scale, w2_scale, x_scale, hidden_scale)
        return self._call(x, w13, w2, topk_weights, topk_ids, scales, out, keep=True)

    def in_operator(
        self,
        x: Tensor,
        w13: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        scales: ScaleTensors = NO_SCALES,
    ) -> Tensor:
        """The call as an operator of a compiled program makes it: nothing it allocates outlives it but the result.

        Such a program may run under a memory pool of its own (Inductor's CUDA graphs), where a workspace kept for
        later calls would be an allocation that nobody accounts for.
        """
        return self._call(x, w13, w2, topk_weights, topk_ids, scales, None, keep=False)

    def _call(
        self,
        x: Tensor,
        w13: Tensor,
        w2: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        scales: ScaleTensors,
        out: Tensor | None,
        *,
        keep: bool,
    ) -> Tensor:
        num_tokens = self._binding.check(x, w13, w2, topk_weights, topk_ids, scales)
        if out is None:
            out = x.new_empty((num_tokens, self._problem.shape.hidden_size))
        else:
            self._binding.check_out(out, x)
        if num_tokens == 0:
            self._count["empty"] += 1
            return out
        plan = self._plans[self._dense[num_tokens]] if num_tokens < self._dense_size else None
        if plan is None:
            plan = self._plan_off_table(num_tokens)
        plan.calls += 1
        args = LayerArgs(x, w13, w2, topk_weights, topk_ids, self._offset, self._scales, *scales)
        self._launch(plan, args, num_tokens, out, keep)
        return out

    def __deepcopy__(self, memo: dict[int, object]) -> Dispatcher:
        """Copies of a model share its dispatchers: they hold no weights."""
        return self

    def plan(self, num_tokens: int) -> Plan:
        """The launch plan for a count of 1 or more, as a call finds it. Raises DispatchError for a miss when frozen."""
        plan = self._plans[self._dense[num_tokens]] if num_tokens < self._dense_size else None
        return self._plan_off_table(num_tokens) if plan is None else plan

    def lookup(self, num_tokens: int) -> Lookup:
        """What a count would get. Counts nothing, logs nothing, launches nothing."""
        if num_tokens < 1:
            raise DispatchError(f"num_tokens is {num_tokens}; a look-up wants 1 or more")
        index = self._lookup.index(num_tokens)
        plan = self._plans[index]
        if plan is not None:
            return Lookup(plan.tactic, True, "", plan.entry)
        reason = self._unusable.get(index) or self._lookup.miss_reason(num_tokens)
        return Lookup(self._default_plan(num_tokens).tactic, False, reason, None)

    def warm(
        self,
        w13: Tensor | None = None,
        w2: Tensor | None = None,
        *,
        num_tokens: Sequence[int] | None = None,
        w13_scale: Tensor | None = None,
        w2_scale: Tensor | None = None,
        x_scale: Tensor | None = None,
        hidden_scale: Tensor | None = None,
    ) -> int:
        """Compile and load every kernel that later calls can need, and reserve their workspace; returns the launches.

        Runs each tactic with no routed rows on token counts that between them meet all its binaries: those of all
        tuned buckets (of the defaults for 1 to 16384 tokens where there are none), or of the buckets of the counts
        given. Give the real weights and their scales (they are not read): a binary depends on their strides and
        alignment, and the stand-ins made otherwise take their memory for the time of the call. Raises DispatchError
        during graph capture and for a miss when frozen.
        """
        if self._capturing():
            raise DispatchError("warm: a CUDA graph is being captured on this stream; warm before the capture")
        shape, binding = self._problem.shape, self._binding
        counts = self._counts_to_warm(num_tokens)
        if not counts:
            return 0
        w13 = self._stand_in(binding.w13_shape, binding.weight_dtype) if w13 is None else w13
        w2 = self._stand_in(binding.w2_shape, binding.weight_dtype) if w2 is None else w2
        scales = self._scales_to_warm(gathered(w13_scale, w2_scale, x_scale, hidden_scale))
        most = max(counts)
        x = torch.zeros((most, shape.hidden_size), dtype=binding.dtype, device=self._device)
        out = torch.empty_like(x)
        weights = torch.zeros((most, shape.top_k), dtype=torch.float32, device=self._device)
        binding.check(x, w13, w2, weights, torch.zeros_like(weights, dtype=torch.int32), scales)
        for dtype in ID_DTYPES:
            ids = torch.full((most, shape.top_k), -1, dtype=dtype, device=self._device)
            for n in sorted(counts, reverse=True):
                args = LayerArgs(x[:n], w13, w2, weights[:n], ids[:n], self._offset, self._scales, *scales)
                self._launch(self.plan(n), args, n, out[:n], keep=True)
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return len(counts) * len(ID_DTYPES)

    def counters(self) -> dict[str, int]:
        """Calls by how they ended: hits, misses, stale (hits on entries tuned with other kernels), empty (N = 0).

        `misses` ran on a default; `refused` are misses that raised because of the policy. `miss_lines_lost` are lines
        the miss log had no room for or could not take; `workspace_bytes` is the memory shared with all dispatchers of
        this layer kind.
        """
        tuned = [plan for plan in self._plans if plan is not None]
        hits = sum(plan.calls for plan in tuned)
        misses = sum(plan.calls for plan in self._defaults.values())
        return {
            "calls": hits + misses + self._count["empty"] + self._count["refused"],
            "hits": hits,
            "misses": misses,
            "stale": sum(plan.calls for plan in tuned if plan.stale),
            **self._count,
            "workspace_bytes": self._workspaces.bytes,
        }

    def explain(self, num_tokens: int) -> str:
        """Several lines that say which tactic a count gets, from where, and what speaks against it."""
        return report.explain(self.lookup(num_tokens), num_tokens, self.key, self.table_hash, self._runtime.kernels)

    @property
    def key(self) -> LayerKey:
        """The layer key that is looked up."""
        return self._lookup.asked

    @property
    def table_hash(self) -> str:
        """Content hash of the table's decisions, the same on ranks that will choose the same; empty without table."""
        return "" if self._table is None else self._table.hash

    @property
    def policy(self) -> Policy:
        return self._policy

    def _launch(self, plan: Plan, args: LayerArgs, num_tokens: int, out: Tensor, keep: bool) -> None:
        if not self._can_run:
            check_can_run(self._device)
            self._can_run = True
        device = self._device
        if device.type == "cpu":
            plan.launch(args, self._workspaces.shared(num_tokens, 0), out)
        elif device.index != torch.cuda.current_device():
            with torch.cuda.device(device):
                self._launch_on_gpu(plan, args, num_tokens, out, keep)
        else:
            self._launch_on_gpu(plan, args, num_tokens, out, keep)
        plan.ran = True

    def _launch_on_gpu(self, plan: Plan, args: LayerArgs, num_tokens: int, out: Tensor, keep: bool) -> None:
        if torch.cuda.is_current_stream_capturing():
            if not plan.ran:
                message = "tactic %s is compiled during CUDA-graph capture, which can fail; call warm() before it"
                self._runtime.say_once(("cold", plan.tactic), message, plan.tactic)
            keep = False
        if keep:
            workspace = self._workspaces.shared(num_tokens, torch._C._cuda_getCurrentRawStream(self._device.index))
        else:
            workspace = self._workspaces.own(num_tokens)
        plan.launch(args, workspace, out)

    def _plan_off_table(self, num_tokens: int) -> Plan:
        """The plan of a count that the dense map has none for: far beyond it, or a miss."""
        index = self._lookup.index(num_tokens)
        plan = self._plans[index]
        if plan is not None:
            return plan
        known = self._defaults.get(power_of_two(num_tokens))
        if known is not None and self._policy != "frozen":
            return known
        reason = self._unusable.get(index) or self._lookup.miss_reason(num_tokens)
        self._report_miss(num_tokens, reason)
        if self._policy == "frozen":
            self._count["refused"] += 1
            raise DispatchError(
                f"no tuned tactic: {reason}; tune it with fitune search, or allow defaults with policy='explain'"
            )
        return self._default_plan(num_tokens)

    def _report_miss(self, num_tokens: int, reason: str) -> None:
        what = (self.key, reason if self._lookup.mismatch else power_of_two(num_tokens))
        self._runtime.say_once(what, "no tuned tactic, using a default: %s", reason)
        if self._miss_log is not None:
            miss = Miss(self.key, num_tokens, reason)
            self._count["miss_lines_lost"] += not self._runtime.write_miss(self._miss_log, miss)

    def _default_plan(self, num_tokens: int) -> Plan:
        """The default of a count's power of two, so that a new count seldom means a new binary."""
        point = power_of_two(num_tokens)
        plan = self._defaults.get(point)
        if plan is None:
            tactic = default_tactic(replace(self._problem, num_tokens=point), self._target)
            plan = self._defaults[point] = prepare(tactic)
        return plan

    def _tuned_plan(self, index: int, entry: Entry) -> Plan | None:
        """The plan of an entry; None where its tactic cannot run here, which is then a miss with that reason."""
        problem = replace(self._problem, num_tokens=entry.bucket.point)
        for name in STAGES:
            reason = legality(entry.tactic.stage(name), problem, self._target)
            if rule_of(reason) in LAUNCH_RULES:
                self._unusable[index] = f"tactic: the table's {entry.tactic} cannot run here ({name}: {reason})"
                return None
        return prepare(entry.tactic, entry, stale=entry.environment.kernels != self._runtime.kernels)

    def _warn_of_stale_entries(self) -> None:
        stale = sum(plan is not None and plan.stale for plan in self._plans)
        if stale:
            self._runtime.say_once(
                ("stale", self.table_hash, self.key),
                "%d of %d entries for %s local experts were tuned with other kernels; they are used: tune again",
                stale,
                len(self._lookup.entries),
                self.key.local_experts,
            )

    def _counts_to_warm(self, num_tokens: Sequence[int] | None) -> set[int]:
        top_k = self._problem.shape.top_k
        if num_tokens is not None:
            ranges = [self._range_of(count) for count in num_tokens if count > 0]
        elif self._lookup.entries:
            ranges = [(entry.bucket.low, entry.bucket.high) for entry in self._lookup.entries]
        else:
            ranges = [self._range_of(count) for count in DEFAULT_TOKENS]
        return {count for low, high in ranges for count in warm_counts(low, high, top_k)}

    def _range_of(self, num_tokens: int) -> tuple[int, int]:
        """The counts up to this one that share its tactic."""
        entry = self._lookup.entry(num_tokens)
        return (power_of_two(num_tokens) // 2 + 1 if entry is None else entry.bucket.low), num_tokens

    def _stand_in(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self._device)

    def _scales_to_warm(self, given: ScaleTensors) -> ScaleTensors:
        """The scales given, with stand-ins where the layer has others beside them."""
        found = dict(zip(SCALE_NAMES, given, strict=True))
        for name, (shape, _) in self._binding.scales.items():
            if found[name] is None:
                found[name] = torch.ones(shape, dtype=torch.float32, device=self._device)
        return gathered(**found)

    def _capturing(self) -> bool:
        return self._device.type == "cuda" and torch.cuda.is_current_stream_capturing()
