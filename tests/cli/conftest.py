"""A recording of invented times, and the command line run as a user runs it."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from fitune.cache import Recording, save_recording
from fitune.cli import main
from fitune.cost import predict_many_us
from fitune.models import preset
from fitune.problem import Problem, key_of
from fitune.record import Measurement, Record, Regime, Status
from fitune.space import default_tactic, pool
from fitune.tactic import STAGES, Stage
from fitune.target import KNOWN_TARGETS, Environment, kernel_source_hash

TARGET = KNOWN_TARGETS["sm_90"]
TOKENS = (16, 512)
EP_SIZES = (1, 8)
STAGES_KEPT = 40


@dataclass(frozen=True)
class Result:
    """How one command line ended."""

    code: int
    out: str
    err: str


Run = Callable[..., Result]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Run:
    """Run a command line inside this process."""
    monkeypatch.delenv("COLUMNS", raising=False)

    def call(*arguments: object) -> Result:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Result(code, captured.out, captured.err)

    return call


def environment(kernels: str | None = None, device: str = TARGET.device) -> Environment:
    return Environment(device, TARGET.arch, TARGET.num_sms, "0.1.0", kernels or kernel_source_hash(), triton="3.6.0")


def problems() -> list[Problem]:
    shape = preset("deepseek-v3").shape
    return [Problem(shape, shape.num_experts // ep, tokens) for ep in EP_SIZES for tokens in TOKENS]


def luck(*parts: object) -> float:
    """A number in [-1, 1] that depends on the parts alone."""
    digest = hashlib.sha256("|".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "little") / 2**63 - 1.0


def measured_stages(problem: Problem) -> list[Stage]:
    """Some legal stages of a problem, those of its default among them."""
    default = default_tactic(problem, TARGET)
    chosen: list[Stage] = []
    for name in STAGES:
        legal = pool(problem, TARGET, name)
        rows = np.random.default_rng(problem.num_tokens).choice(len(legal), STAGES_KEPT, replace=False)
        chosen += dict.fromkeys([default.stage(name), *(legal[row] for row in sorted(rows))])
    return chosen


def records_of(problem: Problem, taken_in: Environment) -> list[Record]:
    """Invented times around the cost model's; one stage fails."""
    stages = measured_stages(problem)
    times_us = predict_many_us(stages, problem, TARGET)
    key = key_of(problem, taken_in.device)
    found = []
    for row, (stage, predicted_us) in enumerate(zip(stages, times_us, strict=True)):
        time_us = float(predicted_us) * (1.0 + 0.2 * luck(stage, problem.local_experts))
        failed = row == 3
        found.append(
            Record(
                key,
                stage.stage,
                stage,
                Status.COMPILE_ERROR if failed else Status.OK,
                taken_in.id,
                "run",
                1000.0 + row,
                measurement=None if failed else Measurement(time_us, 0.997 * time_us, 1.003 * time_us, 10, Regime()),
                error="the compiler gave up" if failed else "",
            )
        )
    return found


def recording(device: str = TARGET.device) -> Recording:
    taken_in = environment(device=device)
    records = [record for problem in problems() for record in records_of(problem, taken_in)]
    return Recording(replace(TARGET, device=device), "invented", "", {taken_in.id: taken_in}, tuple(records))


@pytest.fixture(scope="session")
def recording_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("recording") / "invented.fitrec"
    save_recording(path, recording())
    return path


@pytest.fixture(scope="session")
def other_device() -> Recording:
    """The same times, said to be another chip's."""
    return recording(device="NVIDIA Other")


@pytest.fixture(scope="session")
def search_line() -> Callable[[Path, Path], list[object]]:
    """The arguments of a search of everything a recording file holds."""

    def line(recording_file: Path, store: Path) -> list[object]:
        tokens = ",".join(map(str, TOKENS))
        layer: list[object] = ["search", "--model", "deepseek-v3", "--ep", "1,8", "--tokens", tokens]
        return [*layer, "--store", store, "--measurer", f"recording:{recording_file}"]

    return line


@pytest.fixture(scope="session")
def tuned(
    recording_file: Path, search_line: Callable[[Path, Path], list[object]], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    """A store tuned on the recording; tests that change it work on a copy."""
    store = tmp_path_factory.mktemp("stores") / "tuned"
    assert main([str(argument) for argument in search_line(recording_file, store)]) == 0
    return store


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without a GPU, whatever this one has."""
    monkeypatch.setattr("fitune.measure.choose.why_no_gpu", lambda: "torch sees no CUDA or HIP device")
