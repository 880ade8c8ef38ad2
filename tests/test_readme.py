"""What the README shows works: its commands, in order, and its Python, as written."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
FLOWED = " ".join(README.split())
FITUNE = "import sys; from fitune.cli import main; sys.exit(main())"


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", README, re.DOTALL)


def run(*arguments: str, folder: Path) -> str:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "NO_COLOR": "1", "COLUMNS": "110"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{arguments}: {done.stderr}"
    return done.stdout


@pytest.mark.slow
def test_commands_and_code_of_the_readme_run(tmp_path: Path) -> None:
    commands = re.findall(r"^\$ fitune (.*)$", "\n".join(blocks("console")), re.MULTILINE)
    assert len(commands) >= 3
    for command in commands:
        measurer = ["--measurer", "recording"] if command.startswith("search") else []
        run("-c", FITUNE, *command.split(), *measurer, folder=tmp_path)
    programs = blocks("python")
    assert len(programs) == 2
    asked, called = (run("-c", program, folder=tmp_path) for program in programs)
    shown = blocks("text")[0].splitlines()
    assert asked.splitlines()[0] == shown[0] and asked.splitlines()[-1] == shown[-1]
    assert called == ""


def test_the_headline_is_that_of_the_results_page() -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    line = re.search(r"^\| the same, each time over its own load's floor \| (.*) \| (.*) \|$", page, re.MULTILINE)
    assert line is not None
    said = re.search(
        r"takes (0\.\d\d) of the time of the best public kernel of each cell in bf16 and (\d\.\d\d) in fp8", FLOWED
    )
    assert said is not None
    assert said.groups() == tuple(f"{float(value):.2f}" for value in line.groups())
