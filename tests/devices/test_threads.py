"""What is computed in a thread of its own leaves nothing behind."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from stapes.devices.threads import in_own_thread

PROBE = """
import time
from pathlib import Path
import torch
from stapes.devices.threads import in_own_thread

def threads():
    return len(list(Path("/proc/self/task").iterdir()))

torch.set_num_threads(3)
before = threads()
there = in_own_thread(lambda: (torch.ones(1 << 22).exp_().sum(), threads())[1])
for _ in range(200):
    if threads() == before:
        break
    time.sleep(0.05)
print(before, there, threads())
"""


def test_it_returns_and_raises_what_the_function_does() -> None:
    assert in_own_thread(lambda: 7) == 7
    with pytest.raises(KeyError, match="this"):
        in_own_thread(lambda: {}["this"])


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="the system does not list a process's threads")
def test_no_helper_of_openmp_stays() -> None:
    found = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True, check=True, timeout=120)
    before, there, after = map(int, found.stdout.split())
    assert there > before + 1, "the sum was not computed by several threads: this test shows nothing"
    assert after == before
