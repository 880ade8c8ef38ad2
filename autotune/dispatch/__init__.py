"""The runtime side: looks the tactic of a call up and launches it. Tunes nothing."""

from fitune.dispatch.api import forget, fused_moe
from fitune.dispatch.dispatcher import Dispatcher, Policy
from fitune.dispatch.plan import Lookup
from fitune.dispatch.runtime import Runtime

__all__ = ["Dispatcher", "Lookup", "Policy", "Runtime", "forget", "fused_moe"]
