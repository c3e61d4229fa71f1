"""Kernels in Triton's interpreter, on the CPU: what they compute is what their references compute.

Each file interpreted_*.py runs in a process of its own, for which TRITON_INTERPRET=1 is set before any import.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="Triton is not installed")


@pytest.mark.parametrize("file", sorted(Path(__file__).parent.glob("interpreted_*.py")), ids=lambda file: file.stem)
def test_kernels_equal_their_references(file):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n0", "-p", "no:cacheprovider", str(file)],
        env={**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-2000:]
