"""Where fitune keeps things on this machine."""

from __future__ import annotations

import os
from pathlib import Path

from fitune.errors import InputError


def data_directory() -> Path:
    """The default store directory: $FITUNE_HOME, else $XDG_DATA_HOME/fitune, else ~/.local/share/fitune.

    Records are precious, so this is a data directory, not a cache directory. Raises InputError where none is known.
    """
    home = os.environ.get("FITUNE_HOME")
    if home:
        return Path(home)
    xdg = os.environ.get("XDG_DATA_HOME")
    if xdg:
        return Path(xdg) / "fitune"
    try:
        return Path.home() / ".local" / "share" / "fitune"
    except RuntimeError as error:
        raise InputError("no home directory is known; set FITUNE_HOME or give --store DIR") from error
