"""Limits for a process that decodes what nobody has looked at: hostile bytes may not take the machine with them."""

from __future__ import annotations

import contextlib
import resource


def confine(*, memory: int | None, file_bytes: int | None, open_files: int) -> None:
    """Limit this process for good: bytes of address space, bytes of a file that it writes, open files; no core dumps.

    None: no limit of ours. Where the system has set lower ones they stay.
    """
    limits = [(resource.RLIMIT_CORE, 0), (resource.RLIMIT_NOFILE, open_files)]
    if memory is not None:
        limits.append((resource.RLIMIT_AS, memory))
    if file_bytes is not None:
        limits.append((resource.RLIMIT_FSIZE, file_bytes))
    for kind, most in limits:
        _, hard = resource.getrlimit(kind)
        with contextlib.suppress(ValueError, OSError):
            resource.setrlimit(kind, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))
