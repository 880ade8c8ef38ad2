"""auto, gpu and recording: who measures, and what is said about it."""

from pathlib import Path

import pytest

from fitune.cache.recording import Recording, save_recording
from fitune.errors import InputError, NoGpuError, StoreError
from fitune.measure import choose
from fitune.measure.choose import choose_measurer
from fitune.target import KNOWN_TARGETS, Environment


@pytest.fixture
def recording_file(tmp_path: Path) -> Path:
    path = tmp_path / "empty.fitrec"
    environment = Environment("NVIDIA H200", "sm_90", 132, "0.1.0", "k")
    save_recording(path, Recording(KNOWN_TARGETS["sm_90"], "a name", "", {environment.id: environment}, (), ()))
    return path


@pytest.mark.parametrize("text", ["", "cpu", "GPU", "auto:x", "gpu:0"])
def test_unknown_choices(text: str) -> None:
    with pytest.raises(InputError, match="use auto, gpu, recording"):
        choose_measurer(text, [])


def test_a_recording_without_its_name() -> None:
    with pytest.raises(InputError, match="names no file"):
        choose_measurer("recording:", ())


def test_gpu_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "why_no_gpu", lambda: "torch is not installed")
    with pytest.raises(
        NoGpuError, match="torch is not installed; run on a machine with one, or use --measurer"
    ) as caught:
        choose_measurer("gpu", [])
    assert caught.value.exit_code == 3


def test_a_named_recording(recording_file: Path) -> None:
    measurer, note = choose_measurer(f"recording:{recording_file}", [])
    assert (measurer.name, note, measurer.target.arch) == ("recording", "", "sm_90")


def test_a_missing_recording(tmp_path: Path) -> None:
    with pytest.raises(StoreError):
        choose_measurer(f"recording:{tmp_path / 'no.fitrec'}", [])


def test_auto_without_a_gpu_says_what_it_plays(recording_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "why_no_gpu", lambda: "torch sees no CUDA or HIP device")
    monkeypatch.setattr(choose, "embedded_recordings", lambda: [recording_file])
    _, note = choose_measurer("auto", [])
    assert "torch sees no CUDA" in note and KNOWN_TARGETS["sm_90"].device in note


def test_nothing_shipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choose, "embedded_recordings", list)
    with pytest.raises(StoreError, match="recording:FILE"):
        choose_measurer("recording", [])
