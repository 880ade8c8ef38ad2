"""The torch half, imported at the first launch."""

import torch
from torch.nn.functional import silu

from fitune.kernels.launch import Launcher
from fitune.kernels.layer import LayerArgs, Workspace
from fitune.kernels.plugin import compiles_only
from fitune.tactic import Stage


def run_stage(stage: Stage, args: LayerArgs, ws: Workspace, out: torch.Tensor, launch: Launcher) -> None:
    if compiles_only(launch):
        return
    expert_of_slot = args.topk_ids - args.local_expert_offset  # [N, K]
    hidden = ws.hidden[: args.num_slots].view(args.num_tokens, args.top_k, -1)
    total = torch.zeros(out.shape, dtype=torch.float32, device=out.device)
    for expert in range(args.local_experts):
        mine = (expert_of_slot == expert)[..., None]
        if stage.stage == "gemm1":
            gate, up = (args.x @ args.w13[expert].T).float().chunk(2, dim=-1)
            hidden.copy_(torch.where(mine, (silu(gate) * up).to(hidden.dtype)[:, None], hidden))
        else:
            rows = torch.where(mine, (hidden @ args.w2[expert].T).float(), 0.0)
            total += (rows * args.topk_weights[..., None]).sum(dim=1)
    if stage.stage == "gemm2":
        out.copy_(total)
