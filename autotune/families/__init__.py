"""Kernel families: everything fitune knows about one way to run the two GEMMs, behind one protocol.

A family says which stages there are, which may run, what they should cost and how they are launched. `tile`, `gemv`
and `grouped_mm` are built in; others come from installed packages, by entry points of the group `fitune.families`.
Nothing here imports torch: the launching half of a family is a module of its own, imported at the first launch.
"""

from fitune.families.plain import library_terms
from fitune.families.protocol import Family, Footprint
from fitune.families.registry import families, family_named, find_family, runs_sort

__all__ = ["Family", "Footprint", "families", "family_named", "find_family", "library_terms", "runs_sort"]
