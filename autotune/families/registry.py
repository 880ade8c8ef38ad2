"""Which families there are: the built-in ones, and those of installed packages, loaded at the first question.

A plugin that cannot be loaded is left out with one line of warning; it never stops the others.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from types import MappingProxyType
from typing import Final

from fitune.errors import InputError
from fitune.families import gemv, grouped_mm, tile
from fitune.families.protocol import Family

GROUP: Final = "fitune.families"
BUILT_IN: Final[tuple[Family, ...]] = (tile.FAMILY, gemv.FAMILY, grouped_mm.FAMILY)
NO_SORT_TILE: Final = 1

_NAME: Final = re.compile(r"(?!t\d+$)[a-z][a-z0-9_]*")
_LAUNCHING: Final = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")

_log = logging.getLogger(__name__)


@cache
def families() -> Mapping[str, Family]:
    """All families by name: built-in ones first, then plugins by name. `families.cache_clear()` loads anew."""
    found = {family.name: family for family in BUILT_IN}
    origins = dict.fromkeys(found, "fitune itself")
    for point in sorted(entry_points(group=GROUP), key=lambda point: (point.name, _origin(point), point.value)):
        try:
            found[point.name] = _load(point, origins)
            origins[point.name] = _origin(point)
        except InputError as error:
            _log.warning("family %r of %s is left out: %s", point.name, _origin(point), error)
    return MappingProxyType(found)


def find_family(name: str) -> Family | None:
    """The family of that name, or None where it is not installed."""
    return families().get(name)


def family_named(name: str) -> Family:
    """The family of that name. Raises InputError."""
    found = families().get(name)
    if found is None:
        known = ", ".join(families())
        raise InputError(f"family {name!r} is not installed; install the package that has it, or use one of {known}")
    return found


def runs_sort(name: str, tile_size: int) -> bool:
    """Whether a tactic of the family sorts the slots first; one that is not installed does unless its tile is 1."""
    family = find_family(name)
    return tile_size != NO_SORT_TILE if family is None else family.sorts


def _load(point: EntryPoint, origins: Mapping[str, str]) -> Family:
    """The family an entry point names. Raises InputError that says why it cannot be used and what to do."""
    advice = f"fix or uninstall {_origin(point)}"
    if not _NAME.fullmatch(point.name):
        raise InputError(f"its name must be a lower-case word, and not one like t64; {advice}")
    if point.name in origins:
        raise InputError(f"{origins[point.name]} already has a family of that name; uninstall one of the two")
    try:
        family = point.load()
    except Exception as error:
        raise InputError(f"{point.value} cannot be loaded ({_one_line(error)}); {advice}") from error
    if isinstance(family, type) or not isinstance(family, Family):
        raise InputError(f"{point.value} is no instance of fitune.families.Family; {advice}")
    if family.name != point.name:
        raise InputError(f"the family calls itself {family.name!r}, the names must agree; {advice}")
    if not _LAUNCHING.fullmatch(family.launching):
        raise InputError(f"launching is {family.launching!r}, it must read package.module:function; {advice}")
    return family


def _origin(point: EntryPoint) -> str:
    """The distribution of an entry point, as `name version`."""
    return "an unknown package" if point.dist is None else f"{point.dist.name} {point.dist.version}"


def _one_line(error: Exception) -> str:
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
