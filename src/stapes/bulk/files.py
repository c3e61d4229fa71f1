"""Files that a power cut cannot leave half-written, one driver at a time, and zstd, which all of them are."""

from __future__ import annotations

import errno
import fcntl
import os
import secrets
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from stapes.errors import OutputError, UsageError

TEMPORARY = ".stapes-*.tmp"

_GLANCE = 1.0
"""Seconds that a lock is tried for: `is_locked` holds it for a moment."""


def durable(path: Path, *parts: bytes) -> None:
    """Write a file under a temporary name, sync it, and give it its own: it is there whole or not at all.

    Raises OutputError.
    """
    temporary = path.parent / f".stapes-{secrets.token_hex(6)}.tmp"
    try:
        try:
            with temporary.open("xb") as file:
                for part in parts:
                    file.write(part)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            with suppress(OSError):
                temporary.unlink(missing_ok=True)
            raise
        sync_folder(path.parent)
    except OSError as error:
        raise write_error(path, error) from error


def quick(path: Path, content: bytes) -> None:
    """The same without syncing, for what may be lost; a failure is passed over."""
    temporary = path.parent / f".stapes-{secrets.token_hex(6)}.tmp"
    try:
        temporary.write_bytes(content)
        temporary.replace(path)
    except OSError:
        with suppress(OSError):
            temporary.unlink(missing_ok=True)


def sync_folder(folder: Path) -> None:
    """Let the names in a folder survive a power cut."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_error(path: Path, error: OSError) -> OutputError:
    """What a failed write means, and the remedy."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        remedy = "the disk is full, or your share of it: free some space and run the same command again, it goes on"
    else:
        remedy = f"{error.strerror or error}: mend the permissions or choose another folder"
    return OutputError(f"{path} cannot be written ({remedy})")


@contextmanager
def locked(path: Path, *, shared: bool = False, wait: bool = False, busy: str = "") -> Iterator[None]:
    """Hold a lock on a file until the block ends or this process does, however it ends.

    The file stays and means nothing by itself. shared: beside others that share it. wait: until it is free.
    Raises UsageError with ``busy`` where another process has it, OutputError where there can be no lock.
    """
    try:
        handle = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    except OSError as error:
        raise write_error(path, error) from error
    try:
        mode = fcntl.LOCK_SH if shared else fcntl.LOCK_EX
        deadline = time.monotonic() + _GLANCE
        while True:
            try:
                fcntl.flock(handle, mode if wait else mode | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > deadline:
                    raise UsageError(busy) from None
                time.sleep(0.05)
            except OSError as error:
                raise OutputError(
                    f"{path} cannot be locked ({error.strerror}): this file system knows no locks, and two drivers "
                    "would spoil each other's work; choose a folder on another one"
                ) from error
        yield
    finally:
        os.close(handle)


def is_locked(path: Path) -> bool:
    """Whether a process holds a lock on a file, alone or shared."""
    try:
        handle = os.open(path, os.O_RDWR)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def zstandard() -> Any:
    """The package of that name. Raises UsageError without it."""
    try:
        import zstandard
    except ImportError:
        raise UsageError("bulk work needs zstandard: pip install 'stapes[bulk]'") from None
    return zstandard


def compress(data: bytes) -> bytes:
    """One zstd frame."""
    return zstandard().ZstdCompressor(level=6).compress(data)


def decompress(data: bytes) -> bytes:
    """The content of one zstd frame. Raises ValueError where it is damaged."""
    zstd = zstandard()
    try:
        return zstd.ZstdDecompressor().decompress(data)
    except zstd.ZstdError as error:
        raise ValueError(str(error)) from None
