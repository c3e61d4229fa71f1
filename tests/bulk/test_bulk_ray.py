"""The same job on a Ray cluster of two nodes: the same files, whatever is killed."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from made_bulk import fake_job, made_model, write_recordings
from test_bulk_jobs import SHARDS, rows_of, shard_bytes, wait_for

from stapes.bulk.store import Store

ray = pytest.importorskip("ray", reason="Ray is not installed: pip install 'stapes[ray]'")


@pytest.fixture
def cluster(workers_find_the_engine: None) -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2, "object_store_memory": 80 << 20})
    cluster.add_node(num_cpus=2, object_store_memory=80 << 20)
    yield cluster
    ray.shutdown()
    cluster.shutdown()


def test_two_nodes_write_what_one_machine_writes(cluster: Any, tmp_path: Path) -> None:
    folder, model = tmp_path / "in", made_model(tmp_path)
    write_recordings(folder, 18)
    write_recordings(folder / "long", 2, seconds=61)  # each in a task of its own
    (folder / "text.wav").write_text("no sound")
    local = fake_job([folder], tmp_path / "local", model, **SHARDS)
    spread = fake_job([folder], tmp_path / "ray", model, workers=2, ray=cluster.address, **SHARDS)
    assert shard_bytes(tmp_path / "ray") == shard_bytes(tmp_path / "local")
    assert spread["errors"] == local["errors"] == {"audio": 1}
    assert {row["status"] for id, row in rows_of(tmp_path / "ray").items() if "long" in id} == {"ok"}


def test_losing_an_actor_and_a_node_loses_no_recording(cluster: Any, tmp_path: Path) -> None:
    folder, out, model = tmp_path / "in", tmp_path / "out", made_model(tmp_path)
    for path in write_recordings(folder, 80):
        path.rename(path.with_name(f"slow-{path.name}"))
    further = cluster.add_node(num_cpus=2, object_store_memory=80 << 20)
    result: list[Any] = []
    job = threading.Thread(
        target=lambda: result.append(fake_job([folder], out, model, workers=3, ray=cluster.address, **SHARDS))
    )
    job.start()
    store = Store(out)
    try:
        wait_for(lambda: len(store.finished()) >= 2)
        killed = kill_an_engine()
        wait_for(lambda: len(store.finished()) >= 5)
    finally:
        cluster.remove_node(further)
        job.join(240)
    assert killed
    assert result
    rows = rows_of(out)
    assert len(rows) == 80
    assert {row["status"] for row in rows.values()} == {"ok"}


def kill_an_engine() -> bool:
    """Kill -9 the process of an actor that is an engine."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            with contextlib.suppress(OSError):
                if b"ray::_Engine" in path.read_bytes():
                    os.kill(int(path.parent.name), signal.SIGKILL)
                    return True
        time.sleep(0.1)
    return False
