"""Loading never needs much more memory than the weights themselves take in the dtype they run in."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_whisper import random_weights, write_huggingface, write_openai

from stapes.checkpoints import catalog
from stapes.checkpoints.load import open_checkpoint
from stapes.inference.packed import can_pack

# Loads as the engine on the CPU does. A small model is loaded first, so that code that is read from disk and what the
# libraries set up once does not count.
_PROGRAM = """
import ctypes, re, sys
from pathlib import Path
import torch
from stapes.checkpoints import catalog
from stapes.checkpoints.load import load_whisper, open_checkpoint
from stapes.inference.packed import pack_module

def mebibytes(field):
    return int(re.search(field + r":\\s+(\\d+)", Path("/proc/self/status").read_text())[1]) / 1024

def load(path, parts):
    return load_whisper(open_checkpoint(path, "model", parts), torch.float32, torch.device("cpu"), pack_module)

name, warm_up = sys.argv[1:]
found = catalog.find(name)
load(Path(warm_up), None)
ctypes.CDLL(None).malloc_trim(0)
before = mebibytes("VmRSS")
model = load(found.path, found.parts)
print(max(mebibytes("VmHWM"), mebibytes("VmRSS")) - before)
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="reads /proc")
@pytest.mark.skipif(not can_pack(), reason="this PyTorch has no packed layers")
@pytest.mark.parametrize("name", ["tiny.en", "base"])
@pytest.mark.parametrize("format", ["package", "huggingface", "openai"])
def test_peak_is_under_1_3_times_the_weights(tmp_path, name, format):
    location = catalog.find(name)
    if location is None:
        pytest.skip(f"{name} is not on this machine: pip install 'stapes[demo]'")
    checkpoint = open_checkpoint(location.path, name, location.parts)
    weights = {ours: tensor.half().clone() for ours, tensor in checkpoint.read()}
    target = name
    if format == "huggingface":
        target = str(write_huggingface(tmp_path / "whole", weights, config=checkpoint.config))
        warm_up = write_huggingface(tmp_path / "small", random_weights(torch.float16))
    else:
        if format == "openai":
            target = str(write_openai(tmp_path / "whole.pt", weights, checkpoint.config))
        warm_up = write_openai(tmp_path / "small.pt", random_weights(torch.float16))
    size = 4 * sum(tensor.numel() for tensor in weights.values()) / 2**20
    command = [sys.executable, "-c", _PROGRAM, target, str(warm_up)]
    result = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True)
    growth = float(result.stdout)
    print(f"{name} as {format}: {growth:.0f} MiB, {growth / size:.3f} × the weights' {size:.1f} MiB")
    assert size / 2 < growth < 1.3 * size  # half, where a CPU multiplies with weights in fp16
