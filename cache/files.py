"""Files: whole reads with a limit, atomic writes, locks, and operating-system errors in words."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final

from fitune.errors import StoreError

TEMPORARY: Final = ".tmp"
_FULL: Final = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
_DENIED: Final = (errno.EACCES, errno.EPERM, errno.EROFS)


def storage_error(path: Path, action: str, error: OSError) -> StoreError:
    """One line for a failed file operation: what failed, on which file, why, and what to do."""
    if error.errno in _FULL:
        advice = "the disk is full; free some space and run again, what was stored before is intact"
    elif error.errno in _DENIED:
        advice = "permission denied; give this user access, or name another place with --store DIR"
    elif error.errno == errno.ENOENT:
        advice = "there is no such file or folder; check the path"
    elif error.errno == errno.ENOTDIR:
        advice = "a part of this path is a file, not a folder; check the path"
    elif error.errno == errno.EISDIR:
        advice = "it is a folder, not a file; name the file"
    else:
        advice = f"{error.strerror or error}; check the disk and the path"
    return StoreError(f"cannot {action} {path}: {advice}")


def read_file(path: Path, limit_bytes: int, first_bytes: int = -1) -> bytes:
    """All bytes, or the first few, of a regular file of at most `limit_bytes`.

    Raises FileNotFoundError, or StoreError for the rest.
    """
    try:
        # Without O_NONBLOCK, opening a named pipe would wait for a writer for ever.
        handle = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(handle, "rb") as file:
            status = os.fstat(handle)
            if not stat.S_ISREG(status.st_mode):
                raise StoreError(f"cannot read {path}: it is not a file; name a file or store that fitune wrote")
            if status.st_size > limit_bytes:
                raise StoreError(f"cannot read {path}: its {status.st_size} bytes are more than fitune ever writes")
            return file.read(limit_bytes if first_bytes < 0 else first_bytes)
    except FileNotFoundError:
        raise
    except OSError as error:
        raise storage_error(path, "read", error) from error


def sync_directory(path: Path) -> None:
    """Make renames and new names in a folder durable, where the file system can."""
    with suppress(OSError):
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)


def temporary_name(path: Path) -> Path:
    """A hidden, unique neighbour of `path` to write to before it is renamed."""
    return path.with_name(f".{path.name}.{os.getpid()}-{secrets.token_hex(4)}{TEMPORARY}")


def write_atomically(path: Path, data: bytes) -> None:
    """Put `data` at `path`: a reader sees the old file or the new one, never a part. Raises StoreError."""
    temporary = temporary_name(path)
    try:
        try:
            with open(temporary, "xb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            os.replace(temporary, path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise
    except OSError as error:
        raise storage_error(path, "write", error) from error
    sync_directory(path.parent)


def try_lock(handle: int) -> bool | None:
    """Take the exclusive lock of an open file without waiting: True when taken, False where another holds it.

    None where the file system knows no locks.
    """
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return None
    return True


@contextmanager
def exclusive(path: Path) -> Iterator[None]:
    """Hold the lock file `path` (made where missing, never removed) for the block. Raises StoreError.

    Waits for whoever holds it; the operating system frees the lock of a process that died.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    except OSError as error:
        raise storage_error(path, "lock", error) from error
    try:
        with suppress(OSError):
            fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)
