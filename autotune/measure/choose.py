"""Which measurer a user gets for `--measurer auto|gpu|recording[:FILE]`."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from fitune.cache.recording import embedded_recordings, load_recording
from fitune.errors import InputError, NoGpuError, StoreError
from fitune.measure.protocol import Measurer
from fitune.measure.recording import RecordingMeasurer
from fitune.problem import Problem

CHOICES = "auto, gpu, recording or recording:FILE"


class Choice(NamedTuple):
    """A measurer, and one line that says what it is and why; empty when it is what was asked for by name."""

    measurer: Measurer
    note: str


def choose_measurer(
    text: str,
    problems: Sequence[Problem],
    *,
    seed: int = 0,
    histograms: Mapping[str, Sequence[float]] | None = None,
    compile_workers: int | None = None,
) -> Choice:
    """The measurer for `problems`. torch is imported only where a GPU may be used.

    `histograms` holds the weights of `file:` routing profiles by their text. Raises InputError for an unknown choice,
    NoGpuError when a GPU is asked for and none is usable, StoreError for a recording that cannot be used.
    """
    kind, _, file = text.partition(":")
    if kind == "recording":
        if text.endswith(":"):
            raise InputError(f"measurer {text!r} names no file; give recording:FILE, or recording for the shipped one")
        return Choice(_recording(Path(file) if file else None, problems), "")
    if text == "gpu":
        return Choice(_gpu(problems, seed, histograms, compile_workers), "")
    if text != "auto":
        raise InputError(f"measurer {text!r} is not known; use {CHOICES}")
    reason = why_no_gpu()
    if not reason:
        measurer = _gpu(problems, seed, histograms, compile_workers)
        return Choice(measurer, f"measuring on {measurer.target.device}")
    player = _recording(None, problems)
    return Choice(player, f"no GPU here ({reason}): playing the shipped recording of {player.target.device}")


def why_no_gpu() -> str:
    """Why this machine cannot measure; empty when it can. No GPU context is made."""
    for package in ("torch", "triton"):
        if importlib.util.find_spec(package) is None:
            return f"{package} is not installed"
    import torch

    if not torch.cuda.is_available():
        return "torch sees no CUDA or HIP device"
    return ""


def _gpu(
    problems: Sequence[Problem],
    seed: int,
    histograms: Mapping[str, Sequence[float]] | None,
    compile_workers: int | None,
) -> Measurer:
    reason = why_no_gpu()
    if reason:
        raise NoGpuError(f"no usable GPU: {reason}; run on a machine with one, or use --measurer recording")
    from fitune.measure.compile import CompilePool
    from fitune.measure.gpu import GpuMeasurer

    measurer = GpuMeasurer(problems=problems, seed=seed, histograms=histograms)
    if compile_workers != 0:
        measurer.use_precompiler(CompilePool(measurer.target, workers=compile_workers))
    return measurer


def _recording(path: Path | None, problems: Sequence[Problem]) -> RecordingMeasurer:
    """The named recording, or the embedded one that knows the most of `problems`."""
    if path is not None:
        return RecordingMeasurer(load_recording(path))
    shipped = embedded_recordings()
    if not shipped:
        raise StoreError("no recording is shipped with this fitune; give one as --measurer recording:FILE")
    players = [RecordingMeasurer(load_recording(each)) for each in shipped]
    return max(players, key=lambda player: len(set(problems) & set(player.problems())))
