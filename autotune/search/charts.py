"""Optuna's charts of a store's stages: one HTML page per key and GEMM, an index, and plotly's script beside them."""

from __future__ import annotations

import importlib
import itertools
import re
import warnings
from collections.abc import Iterable
from html import escape
from pathlib import Path
from typing import Any, Final

import optuna
from optuna import visualization

from fitune.cells import layer_name
from fitune.errors import InputError
from fitune.search.export import study_name
from fitune.search.history import History
from fitune.search.importance import LEAST_STAGES, evaluator, timed_study
from fitune.search.pool import StagePool
from fitune.search.study import quiet

SCRIPT: Final = "plotly.min.js"
INDEX: Final = "index.html"
PAGE: Final = """<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><title>{title}</title>{script}
<style>body {{ font-family: sans-serif; max-width: 75rem; margin: 2rem auto; padding: 0 1rem; }}</style></head>
<body>
<h1>{title}</h1>
{body}
</body>
</html>
"""


def check_charts() -> None:
    """Raise ModuleNotFoundError where plotly is not installed."""
    importlib.import_module("plotly")


def write_charts(found: Iterable[History], folder: Path) -> list[Path]:
    """A page per history with more than one time, and an index of them; pages of the same name are replaced.

    Pages need no network: they read plotly's script from the same folder. Raises ModuleNotFoundError without plotly and
    InputError where `folder` is a file.
    """
    check_charts()
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; name a folder for the pages")
    folder.mkdir(parents=True, exist_ok=True)
    offline: Any = importlib.import_module("plotly.offline")
    (folder / SCRIPT).write_text(offline.get_plotlyjs(), encoding="utf-8")
    pages: list[Path] = []
    links = []
    for history in found:
        title, count = study_name(history.key, history.part), len(history.times_us)
        said = f"{count} stage{'' if count == 1 else 's'} with a time"
        if count < 2:
            links.append(f"<li>{escape(title)}: {said}, no charts</li>")
            continue
        page = folder / _file_name(history, {other.name for other in pages})
        page.write_text(_page(title, history), encoding="utf-8")
        pages.append(page)
        links.append(f'<li><a href="{escape(page.name)}">{escape(title)}</a>: {said}</li>')
    index = folder / INDEX
    listed = PAGE.format(title="Stages tried, by key and GEMM", script="", body=f"<ul>{''.join(links)}</ul>")
    index.write_text(listed, encoding="utf-8")
    return [index, *pages]


def _file_name(history: History, taken: set[str]) -> str:
    """A short name of the key and GEMM; numbered where another layer of the store has it."""
    layer = history.key.layer
    words = f"{layer_name(layer)} {layer.dtype} {layer.ep_label} {history.key.num_tokens} {history.part}"
    name = re.sub(r"[^A-Za-z0-9.]+", "-", words)
    numbered = (f"{name}-{number}.html" for number in itertools.count(2))
    return next(other for other in itertools.chain([f"{name}.html"], numbered) if other not in taken)


def _page(title: str, history: History) -> str:
    times = history.times_us
    pool = StagePool(tuple(times))
    study = timed_study(title, pool, list(times.values()))
    axes = [name for name, distribution in pool.distributions.items() if len(distribution.choices) > 1]
    with quiet(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        drawn = "\n".join(
            figure.to_html(full_html=False, include_plotlyjs=False) for figure in _figures(study, axes, len(times))
        )
    few = "" if len(times) >= LEAST_STAGES else f"<p>Fewer than {LEAST_STAGES} stages: no importances.</p>"
    return PAGE.format(title=escape(title), script=f'<script src="{SCRIPT}"></script>', body=f"{few}\n{drawn}")


def _figures(study: optuna.Study, axes: list[str], count: int) -> list[Any]:
    told = "µs"
    found = [visualization.plot_optimization_history(study, target_name=told)]
    if count >= LEAST_STAGES:
        found.append(visualization.plot_param_importances(study, evaluator=evaluator(), params=axes, target_name=told))
    found.append(visualization.plot_slice(study, params=axes, target_name=told))
    if len(axes) > 1:
        found.append(visualization.plot_parallel_coordinate(study, params=axes, target_name=told))
    return found
