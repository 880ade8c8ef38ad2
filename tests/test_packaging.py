"""What gets installed: one package from three folders, nothing else importable, and what each extra brings."""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

FOLDERS = {"fitune": "autotune", "fitune.cache": "cache", "fitune.kernels": "kernels"}

# argv: the folder installed into, the folder of this environment's packages, then modules that must be found.
# Run with -S, so that the environment's own fitune is not seen.
IMPORTS = """
import importlib.util, pathlib, site, sys
installed, packages, *names = sys.argv[1:]
sys.path.insert(0, installed)
site.addsitedir(installed)
foreign = [name for name in ("autotune", "cache", "kernels", "tests", "scripts") if importlib.util.find_spec(name)]
assert not foreign, foreign
sys.path.append(packages)
import fitune, fitune.cache, fitune.problem
missing = [name for name in names if not importlib.util.find_spec(name)]
assert not missing, missing
print(pathlib.Path(fitune.__file__).parent)
"""


@pytest.fixture(scope="module")
def project(repository: Path) -> dict[str, Any]:
    return tomllib.loads((repository / "pyproject.toml").read_text())


@pytest.fixture(scope="module")
def source(repository: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what a clone holds, so that building leaves nothing behind."""
    copy = tmp_path_factory.mktemp("source")
    ignored = shutil.ignore_patterns("__pycache__", "*.egg-info")
    for name in (*FOLDERS.values(), "tests"):
        shutil.copytree(repository / name, copy / name, ignore=ignored)
    for file in repository.iterdir():
        if file.is_file() and not file.name.startswith("."):
            shutil.copy(file, copy / file.name)
    return copy


def modules(repository: Path) -> set[str]:
    """All modules of the source tree under their import names."""
    found = set()
    for package, folder in FOLDERS.items():
        for file in (repository / folder).rglob("*.py"):
            inside = file.relative_to(repository / folder).with_suffix("").parts
            found.add(".".join([package, *(part for part in inside if part != "__init__")]))
    return found


def run(*command: str | Path, cwd: Path) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    words = [str(word) for word in command]
    done = subprocess.run(words, cwd=cwd, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def build_backend(source: Path, out: Path, hook: str) -> Path:
    out.mkdir(parents=True, exist_ok=True)
    code = "import sys; from setuptools import build_meta; getattr(build_meta, sys.argv[1])(sys.argv[2])"
    run(sys.executable, "-c", code, hook, out, cwd=source)
    return next(out.iterdir())


def names_of_requirements(requirements: list[str]) -> set[str]:
    return {re.split(r"[<>=;\[ ]", item)[0] for item in requirements}


# ---- quick ----


def test_every_package_folder_is_declared(repository: Path, project: dict[str, Any]) -> None:
    on_disk = set()
    for package, folder in FOLDERS.items():
        for file in (repository / folder).rglob("__init__.py"):
            on_disk.add(".".join([package, *file.parent.relative_to(repository / folder).parts]))
    assert set(project["tool"]["setuptools"]["packages"]) == on_disk
    assert project["tool"]["setuptools"]["package-dir"] == FOLDERS


def test_nobody_gets_what_they_do_not_need(project: dict[str, Any]) -> None:
    extras = project["project"]["optional-dependencies"]
    heavy = {"torch", "triton", "optuna", "matplotlib"}
    assert names_of_requirements(project["project"]["dependencies"]) == {"msgpack", "numpy"}
    assert not heavy & names_of_requirements(extras["cli"])
    assert not {"torch", "triton", "matplotlib"} & names_of_requirements(extras["search"])
    assert names_of_requirements(extras["dispatch"]) == {"torch", "triton"}


def test_the_pins_cover_what_the_project_asks_for(repository: Path, project: dict[str, Any]) -> None:
    lines = (repository / "constraints.txt").read_text().splitlines()
    pins = dict(line.split("==") for line in lines if line and not line.startswith("#"))
    asked = [*project["project"]["dependencies"]]
    for extra in project["project"]["optional-dependencies"].values():
        asked += extra
    missing = {name for name in names_of_requirements(asked) if name not in pins} - {"fitune"}
    assert not missing
    assert (pins["torch"], pins["triton"]) == ("2.13.0", "3.7.1")


def test_the_marker_for_types_is_there(repository: Path) -> None:
    assert (repository / "autotune" / "py.typed").is_file()


LIGHT = """
import sys
class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {"torch", "triton", "optuna", "typer", "rich", "matplotlib"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Refuse())
import importlib
for name in sys.argv[1:]:
    importlib.import_module(name)
"""


def test_the_leaves_the_cache_and_diff_load_with_nothing_but_the_core(repository: Path) -> None:
    leaves = ["problem", "tactic", "bucket", "target", "record", "errors", "settings", "routing", "models"]
    names = ["fitune", "fitune.cache", "fitune.diff", *(f"fitune.{leaf}" for leaf in leaves)]
    run(sys.executable, "-c", LIGHT, *names, cwd=repository / "tests")


def test_without_typer_the_command_says_what_to_install(repository: Path) -> None:
    code = LIGHT + "from fitune.cli import main\nsys.argv = ['fitune', 'show']\nsys.exit(main())\n"
    words = [sys.executable, "-c", code]
    done = subprocess.run(words, cwd=repository / "tests", capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stdout == ""
    assert len(done.stderr.strip().splitlines()) == 1
    assert "fitune[" in done.stderr


# ---- builds ----


@pytest.mark.slow
def test_the_wheel_holds_every_module_under_fitune_alone(source: Path, tmp_path: Path) -> None:
    wheel = build_backend(source, tmp_path / "dist", "build_wheel")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    check_wheel(site, source)
    assert imported_from(site, source, tmp_path) == site / "fitune"


@pytest.mark.slow
def test_the_sdist_builds_the_same_wheel(source: Path, tmp_path: Path) -> None:
    sdist = build_backend(source, tmp_path / "dist", "build_sdist")
    with tarfile.open(sdist) as archive:
        archive.extractall(tmp_path, filter="data")
    unpacked = tmp_path / sdist.name.removesuffix(".tar.gz")
    for name in ("LICENSE", "CHANGELOG.md", "constraints.txt", "tests/conftest.py", "autotune/py.typed"):
        assert (unpacked / name).is_file(), name
    wheel = build_backend(unpacked, tmp_path / "wheel", "build_wheel")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    check_wheel(site, source)


@pytest.mark.slow
def test_an_editable_install_maps_the_folders_and_nothing_else(source: Path, tmp_path: Path) -> None:
    wheel = build_backend(source, tmp_path / "dist", "build_editable")
    site = tmp_path / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    assert imported_from(site, source, tmp_path) == source / "autotune"


def check_wheel(site: Path, source: Path) -> None:
    info = next(site.glob("*.dist-info"))
    assert (info / "top_level.txt").read_text().split() == ["fitune"]
    assert sorted(path.name for path in site.iterdir()) == ["fitune", info.name]
    shipped = {
        ".".join(part for part in path.relative_to(site).with_suffix("").parts if part != "__init__")
        for path in site.rglob("*.py")
    }
    assert shipped == modules(source)
    assert (site / "fitune" / "py.typed").is_file()
    data = {path.name for path in (source / "autotune" / "data").glob("*") if path.is_file()}
    assert {path.name for path in (site / "fitune" / "data").glob("*")} == data
    metadata = (info / "METADATA").read_text()
    assert "License-Expression: Apache-2.0" in metadata
    assert (info / "licenses" / "LICENSE").read_text() == (source / "LICENSE").read_text()
    assert "fitune = fitune.cli:main" in (info / "entry_points.txt").read_text()


def imported_from(site: Path, source: Path, cwd: Path) -> Path:
    """The folder that `import fitune` takes when `site` is where packages are installed."""
    spec = importlib.util.find_spec("msgpack")
    assert spec is not None
    assert spec.origin is not None
    top_level = sorted(name for name in modules(source) if name.count(".") == 1)
    packages = Path(spec.origin).parent.parent
    return Path(run(sys.executable, "-I", "-S", "-c", IMPORTS, site, packages, *top_level, cwd=cwd).strip())
