"""Reads the small files that users name: model configs and histograms."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from fitune.errors import InputError


def read_input(path: Path, limit_bytes: int, name: str, advice: str) -> bytes:
    """All bytes of a file of at most `limit_bytes`. Raises InputError, which begins with `name` and ends with `advice`.

    What is no regular file is refused: opening a named pipe would wait for a writer for ever.
    """
    try:
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(handle, "rb") as stream:
            if not stat.S_ISREG(os.fstat(handle).st_mode):
                raise InputError(f"{name}: it is no regular file; {advice}")
            raw = stream.read(limit_bytes + 1)
    except InputError:
        raise
    except OSError as error:
        raise InputError(f"{name}: cannot be read ({error.strerror or type(error).__name__}); {advice}") from None
    except ValueError:
        raise InputError(f"{name!r} holds a zero byte and so is no file name; {advice}") from None
    if len(raw) > limit_bytes:
        raise InputError(f"{name}: larger than {limit_bytes} bytes; {advice}")
    return raw
