"""The buffers that calls work in.

Outside CUDA-graph capture, all dispatchers of one layer kind share a workspace for each stream. It grows, never
shrinks, and is freed with the last of those dispatchers. Calls on one stream run one after another, so they can share;
two threads must not issue calls on one stream at the same time.

During capture, and as an operator of a compiled program, each call takes a workspace of its own from torch's
allocator and lets go of it at its end. Torch serves it from the graph's private pool: no cudaMalloc that capture
forbids, the pool hands the same memory to the next call of the capture, and it stays alive as long as the graph. A
shared workspace would do worse: a graph keeps raw pointers, so growing the workspace later would leave the graph with
freed memory.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

import torch

from fitune.kernels.layer import Workspace
from fitune.problem import LayerShape

_FINE_TOKENS = 1024
_STRIDE_STEP = 16


class SharedWorkspace:
    """The workspaces of one layer kind on one device, by stream."""

    def __init__(
        self, shape: LayerShape, local_experts: int, device: torch.device, num_sms: int, fp8: torch.dtype
    ) -> None:
        self._shape = shape
        self._local_experts = local_experts
        self._device = device
        self._num_sms = num_sms
        self._fp8 = fp8
        self._by_stream: dict[int, Workspace] = {}

    @property
    def bytes(self) -> int:
        """Memory held over all streams."""
        return sum(workspace.bytes for workspace in self._by_stream.values())

    def shared(self, num_tokens: int, stream: int) -> Workspace:
        """The workspace of a stream, grown to `num_tokens` if it must be. Never call it during graph capture."""
        workspace = self._by_stream.get(stream)
        if workspace is None or workspace.max_tokens < num_tokens:
            workspace = None
            self._by_stream.pop(stream, None)
            workspace = self._by_stream[stream] = self.own(round_up(num_tokens))
        return workspace

    def own(self, num_tokens: int) -> Workspace:
        """A workspace for one call, from torch's allocator.

        In fp8 layers its size is a stride of the rows' scales, which kernels are compiled for as a multiple of 16 or as
        another number: here it is always the former, so that calls of every size share their binaries.
        """
        if self._shape.scales:
            num_tokens = -(-num_tokens // _STRIDE_STEP) * _STRIDE_STEP
        return Workspace.allocate(
            self._shape, self._local_experts, num_tokens, self._device, num_sms=self._num_sms, fp8=self._fp8
        )


class WorkspacePool:
    """Finds the shared workspace of a layer kind. Holds none alive by itself."""

    def __init__(self) -> None:
        self._known: WeakValueDictionary[tuple[LayerShape, int, torch.device, int, torch.dtype], SharedWorkspace]
        self._known = WeakValueDictionary()

    def get(
        self,
        shape: LayerShape,
        local_experts: int,
        device: torch.device,
        num_sms: int,
        fp8: torch.dtype = torch.float8_e4m3fn,
    ) -> SharedWorkspace:
        """The workspaces of a layer kind; `fp8` is the e4m3 form of the device."""
        key = (shape, local_experts, device, num_sms, fp8)
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = SharedWorkspace(*key)
        return found


def round_up(num_tokens: int) -> int:
    """The size to grow to: a power of two up to 1024 tokens, a multiple of 1024 above."""
    if num_tokens <= _FINE_TOKENS:
        return 1 << (num_tokens - 1).bit_length()
    return -(-num_tokens // _FINE_TOKENS) * _FINE_TOKENS
