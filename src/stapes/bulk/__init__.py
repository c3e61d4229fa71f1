"""Transcription of thousands of hours, past one machine: nothing lost, nothing twice.

Inputs become a plan of shards (`plan`), an executor gives them to workers on this machine or on a Ray cluster
(`executor`, `local`, `on_ray`), each worker runs files through a recogniser (`engine`) that it has decoded in
processes of their own (`decode_worker`), and the driver (`driver`) writes each finished shard whole (`store`).

    import stapes.bulk
    for row in stapes.bulk.read("OUT"):
        print(row["audio"], row["text"])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from stapes.bulk.store import read

__all__ = ["read"]


def __getattr__(name: str) -> Any:
    if name == "read":
        from stapes.bulk import store

        return store.read
    raise AttributeError(f"module 'stapes.bulk' has no attribute {name!r}")
