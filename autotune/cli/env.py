"""`fitune env`: versions, GPU, kernels, store and shipped recordings; what a bug report needs."""

from __future__ import annotations

import platform
import shutil
import subprocess
from typing import Any, Final

import typer

from fitune.cli import options

EXAMPLES = """\b
Examples:
  fitune env
  fitune env --json"""
PACKAGES: Final = ("torch", "triton", "optuna", "numpy", "msgpack", "typer", "rich", "matplotlib")


def register(app: typer.Typer) -> None:
    app.command("env", short_help="Show versions, GPU, kernels and recordings.", epilog=EXAMPLES)(env)


def env(json: options.Json = False) -> None:
    """Show what this machine has: versions, GPU, kernels, store directory, shipped recordings."""
    from fitune.settings import data_directory
    from fitune.target import kernel_source_hash, version_of

    facts: dict[str, Any] = {
        "fitune": version_of("fitune"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: version_of(name) or None for name in PACKAGES},
        "gpus": gpus(),
        "kernels": kernel_source_hash(),
        "store": str(data_directory()),
        "recordings": recordings(),
    }
    if json:
        from fitune.cli.output import emit_json

        emit_json(facts)
        return
    _print(facts)


def gpus() -> list[str]:
    """GPUs as their driver names them; empty where no driver's tool answers."""
    for tool, arguments in (
        ("nvidia-smi", ["--query-gpu=name,driver_version", "--format=csv,noheader"]),
        ("amd-smi", ["static", "--asic", "--csv"]),
    ):
        path = shutil.which(tool)
        if path is None:
            continue
        try:
            text = subprocess.run([path, *arguments], capture_output=True, text=True, timeout=20, check=True).stdout
        except (OSError, subprocess.SubprocessError):
            continue
        return [line.strip() for line in text.splitlines() if line.strip()]
    return []


def recordings() -> list[dict[str, Any]]:
    """The recordings this installation ships."""
    from fitune.cache import embedded_recordings, load_recording
    from fitune.errors import StoreError

    found: list[dict[str, Any]] = []
    for path in embedded_recordings():
        try:
            recording = load_recording(path)
        except StoreError as error:
            found.append({"file": path.name, "error": str(error)})
            continue
        found.append(
            {
                "file": path.name,
                "name": recording.name,
                "device": recording.target.device,
                "records": len(recording.records),
                "cells": len({record.key for record in recording.records}),
                "note": recording.note,
            }
        )
    return found


def _print(facts: dict[str, Any]) -> None:
    packages = facts["packages"]
    lines = [
        ("fitune", facts["fitune"]),
        ("python", facts["python"]),
        ("platform", facts["platform"]),
        *((name, version or "not installed") for name, version in packages.items()),
        ("GPU", "; ".join(facts["gpus"]) or "none"),
        ("kernels", facts["kernels"]),
        ("store", facts["store"]),
    ]
    for name, value in lines:
        print(f"{name:<11} {value}")
    for item in facts["recordings"]:
        told = item.get("error") or f"{item['device']}, {item['cells']} cells, {item['records']} measurements"
        print(f"{'recording':<11} {item['file']}: {told}")
    if not facts["recordings"]:
        print(f"{'recording':<11} none shipped")
