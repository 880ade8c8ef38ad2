"""What a running search says on stderr: a bar with best-so-far and time left on a terminal, else a line a key."""

from __future__ import annotations

import sys
import time
from types import TracebackType
from typing import Any, Final, Self

from rich.progress import BarColumn, Progress, TaskID, TextColumn

from fitune.cli.output import console, say
from fitune.problem import Key
from fitune.record import Decision
from fitune.render import microseconds, signed_percent
from fitune.search import Event, FinalsStarted, KeyDecided, KeyKept, KeySkipped, KeyStarted, TrialDone
from fitune.tactic import STAGES

LEAST_FRACTION: Final = 0.005
"""Below this share of the work no time left is guessed."""


class SearchProgress:
    """Listens to a search. Use it as a context manager around the run.

    `total` keys are expected until the search says how many it has to do; kept ones cost no time and are not counted.
    """

    def __init__(self, total: int, budget_s: float | None) -> None:
        self._total = total
        self._budget_s = budget_s
        self._done = 0
        self._shares: dict[str, float] = {}
        self._best_us: dict[str, float | None] = {}
        self._doing = ""
        self._started_s = time.monotonic()
        self._bar: Progress | None = None
        self._task = TaskID(0)
        if sys.stderr.isatty():
            self._bar = Progress(
                TextColumn("{task.fields[cells]}"),
                BarColumn(24),
                TextColumn("{task.fields[left]}"),
                TextColumn("{task.fields[doing]}", style="dim"),
                console=console(stderr=True),
                transient=True,
            )
            self._task = self._bar.add_task("", total=1.0, **self._texts())

    def __enter__(self) -> Self:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._bar is not None:
            self._bar.stop()

    def __call__(self, event: Event) -> None:
        match event:
            case KeyStarted():
                self._total = event.total
                self._shares, self._best_us = {}, {}
                self._doing = key_name(event.key)
            case TrialDone():
                self._shares[event.part] = min(1.0, event.done / max(1, event.planned))
                self._best_us[event.part] = event.best_us
            case FinalsStarted():
                self._shares = dict.fromkeys(STAGES, 1.0)
            case KeyDecided():
                self._finish(_decided(event.decision))
            case KeyKept():
                pass
            case KeySkipped():
                self._finish("")
                self.say(f"{key_name(event.key)}: left out, {event.reason}")
        if self._bar is not None:
            self._bar.update(self._task, completed=self.fraction, **self._texts())

    def say(self, text: str) -> None:
        """A line above the bar."""
        if self._bar is not None:
            self._bar.console.print(text, soft_wrap=True)
        else:
            say(text)

    @property
    def fraction(self) -> float:
        """Share of the work that is done, by keys and by what is measured of the current one."""
        return min(1.0, (self._done + sum(self._shares.values()) / len(STAGES)) / max(1, self._total))

    def left_s(self, now_s: float) -> float | None:
        """Seconds the search may still take; None while that cannot be told."""
        elapsed_s, fraction = now_s - self._started_s, self.fraction
        guess = elapsed_s * (1.0 - fraction) / fraction if fraction >= LEAST_FRACTION else None
        if self._budget_s is None:
            return guess
        within = max(0.0, self._budget_s - elapsed_s)
        return within if guess is None else min(guess, within)

    def _finish(self, line: str) -> None:
        self._done += 1
        self._shares, self._best_us = {}, {}
        if line and self._bar is None:
            say(f"[{self._done}/{self._total}] {line}")

    def _texts(self) -> dict[str, Any]:
        left_s = self.left_s(time.monotonic())
        best = ", ".join(f"{part} {microseconds(value)}" for part, value in self._best_us.items() if value is not None)
        return {
            "cells": f"{self._done}/{self._total} cells",
            "left": f"{clock(left_s)} left" if left_s is not None else "",
            "doing": f"{self._doing}{f': best {best} µs' if best else ''}",
        }


def clock(seconds: float) -> str:
    """75 -> 1:15."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def key_name(key: Key) -> str:
    """A key in words: `64 tokens EP 8`."""
    return f"{key.num_tokens} token{'' if key.num_tokens == 1 else 's'} {key.layer.ep_label}"


def _decided(decision: Decision) -> str:
    member = decision.member(decision.chosen)
    if member is None:
        return f"{key_name(decision.key)}: {decision.state}"
    ratio = member.measurement.median_us / decision.default_us - 1.0
    time_us = microseconds(member.measurement.median_us)
    return f"{key_name(decision.key)}: {time_us} µs, {signed_percent(ratio)} against default, {decision.state}"
