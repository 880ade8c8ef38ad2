"""Stage 5: the two decisions rest on times that were taken differently."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar, Final

from fitune.diff.pair import Pair
from fitune.diff.verdict import FieldDifference, Verdict
from fitune.measure.recording import COMPOSED

REGIME_FIELDS: Final = ("timer", "execution", "l2", "interleaved")
CLOCK_TOLERANCE: Final = 0.10
"""SM clocks of one problem that are further apart than this make times incomparable."""


@dataclass(frozen=True, slots=True)
class OtherRegime:
    """Evidence: every field of the regime that differs, with both values."""

    verdict: ClassVar[Verdict] = Verdict.OTHER_REGIME
    fields: tuple[FieldDifference, ...]

    def sentence(self) -> str:
        return f"timed under another regime: {', '.join(map(str, self.fields))}"


def find(pair: Pair) -> OtherRegime | None:
    fields = (*_regime(pair), *_clocks(pair))
    return OtherRegime(fields) if fields else None


def _regime(pair: Pair) -> Iterator[FieldDifference]:
    a, b = pair.a.regime, pair.b.regime
    if a is None or b is None:
        return
    composed = COMPOSED in (a.execution, b.execution)
    for name in REGIME_FIELDS:
        if composed and name in ("execution", "interleaved"):
            continue  # a sum of recorded parts is weaker evidence, not another way to run the layer
        x, y = str(getattr(a, name)), str(getattr(b, name))
        if x != y:
            yield FieldDifference(name, x, y)


def _clocks(pair: Pair) -> Iterator[FieldDifference]:
    """Power caps of one device; clocks seen only where both sides ran one problem, as other loads draw other power."""
    a, b = pair.a.environment, pair.b.environment
    if a is not None and b is not None and a.device == b.device:
        caps = a.power_cap_w, b.power_cap_w
        if min(caps) > 0.0 and caps[0] != caps[1]:
            yield FieldDifference("power cap", f"{caps[0]:g} W", f"{caps[1]:g} W")
    first, second = pair.a.measurement, pair.b.measurement
    if pair.same_problem and first is not None and second is not None:
        clocks = first.sm_mhz, second.sm_mhz
        if min(clocks) > 0.0 and max(clocks) / min(clocks) - 1.0 > CLOCK_TOLERANCE:
            yield FieldDifference("SM clock", f"{clocks[0]:g} MHz", f"{clocks[1]:g} MHz")
