"""What the dispatchers of one process share."""

from __future__ import annotations

import itertools
import logging
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Final
from weakref import WeakValueDictionary

from fitune.cache import Table, load_table
from fitune.dispatch.workspaces import WorkspacePool
from fitune.errors import DispatchError
from fitune.misses import Miss, MissLog
from fitune.target import kernel_source_hash

if TYPE_CHECKING:
    from fitune.dispatch.dispatcher import Dispatcher

log: Final = logging.getLogger("fitune.dispatch")


class Runtime:
    """Workspaces, loaded tables and what was already reported, shared so that many layers say and load things once."""

    def __init__(self) -> None:
        self.workspaces = WorkspacePool()
        self.dispatchers: dict[tuple[object, ...], Dispatcher] = {}
        self._tables: dict[Path, Table] = {}
        self._said: set[tuple[object, ...]] = set()
        self._live: WeakValueDictionary[int, Dispatcher] = WeakValueDictionary()
        self._handles = itertools.count(1)

    @cached_property
    def kernels(self) -> str:
        """Hash of the device code that runs in this process."""
        return kernel_source_hash()

    def table(self, path: Path) -> Table:
        """The table at a path, read once. Raises StoreError."""
        if path not in self._tables:
            self._tables[path] = load_table(path)
        return self._tables[path]

    def forget(self) -> None:
        """Drop the kept dispatchers and tables."""
        self.dispatchers.clear()
        self._tables.clear()

    def register(self, dispatcher: Dispatcher) -> int:
        """A number under which compiled graphs find a dispatcher as long as it lives."""
        handle = next(self._handles)
        self._live[handle] = dispatcher
        return handle

    def live(self, handle: int) -> Dispatcher:
        """The dispatcher behind a number. Raises DispatchError when it is gone."""
        dispatcher = self._live.get(handle)
        if dispatcher is None:
            raise DispatchError(
                f"dispatcher {handle} is gone, yet compiled code calls it; keep the dispatcher alive beside that code, "
                "and use fitune.fused_moe in code that is saved and loaded elsewhere"
            )
        return dispatcher

    def say_once(self, what: object, message: str, *values: object) -> None:
        """Log a warning, once for each `what`."""
        if self._first(("log", what)):
            log.warning(message, *values)

    def write_miss(self, path: Path, miss: Miss) -> bool:
        """Write a line to a miss log, once for each layer, power of two and path. False when it was lost."""
        if not self._first(("miss", path, miss.problem, miss.layer.device)):
            return True
        try:
            written = MissLog(path).append(miss)
        except OSError as error:
            self.say_once(("miss log", path), "miss log %s: %s; misses are not written", path, error.strerror or error)
            return False
        if not written:
            self.say_once(("miss log", path), "miss log %s is full; search with it, then delete it", path)
        return written

    def _first(self, what: tuple[object, ...]) -> bool:
        if what in self._said:
            return False
        self._said.add(what)
        return True


DEFAULT: Final = Runtime()
