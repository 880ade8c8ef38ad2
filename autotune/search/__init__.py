"""Finds tactics: pool samplers for Optuna, the search over keys, and the decision at its end."""

from fitune.search.decide import decide, is_tied
from fitune.search.events import (
    Event,
    FinalsStarted,
    KeyDecided,
    KeyKept,
    KeySkipped,
    KeyStarted,
    SearchSummary,
    TrialDone,
)
from fitune.search.plan import SearchPlan, order_problems, restrict_to_recording
from fitune.search.pool import StagePool, suggest_stage
from fitune.search.run import run_search
from fitune.search.sampler import PoolExhausted, PoolSampler
from fitune.search.study import study_of

__all__ = [
    "Event",
    "FinalsStarted",
    "KeyDecided",
    "KeyKept",
    "KeySkipped",
    "KeyStarted",
    "PoolExhausted",
    "PoolSampler",
    "SearchPlan",
    "SearchSummary",
    "StagePool",
    "TrialDone",
    "decide",
    "is_tied",
    "order_problems",
    "restrict_to_recording",
    "run_search",
    "study_of",
    "suggest_stage",
]
