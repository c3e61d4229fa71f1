"""What the planner says a model takes on a GPU, beside what it takes: one window of 30 s, loading and graphs included.

    python -m stapes.benchmarks.memory medium --precision int4 --budget 800

The weights are random: memory does not depend on what they are.
"""

from __future__ import annotations

import argparse
from dataclasses import asdict

import numpy as np
import torch

from stapes.audio.features import WINDOW_SAMPLES
from stapes.benchmarks.random_weights import load_random, without_judgement
from stapes.checkpoints.sizes import published_config
from stapes.devices.backend import resolve
from stapes.devices.memory import save_gpu_memory
from stapes.errors import DeviceError
from stapes.inference.planner import plan, workspace_bytes
from stapes.options import TranscribeOptions

_MB = 10**6


def main() -> None:
    """Plan, load, transcribe noise, and print both sums. Exits with 1 where the model takes more than the budget."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--precision", default="auto")
    parser.add_argument("--budget", type=int, default=0, help="MB; default: what is free")
    parser.add_argument("--tokens", type=int, default=224)
    arguments = parser.parse_args()
    if 0 < arguments.budget < 4000:
        save_gpu_memory()
    device = resolve("cuda")
    if device.memory is None:
        raise DeviceError("memory is measured on a GPU, and PyTorch sees none here")
    free_before, _ = torch.cuda.mem_get_info(device.torch)
    budget = arguments.budget * _MB or free_before
    found = plan(
        published_config(arguments.model),
        budget,
        arguments.precision,
        slots=1,
        workspace=workspace_bytes(device.backend, device.architecture),
    )
    say = print
    say(found.reason)
    say("planned, MB: " + ", ".join(f"{name} {size / _MB:.0f}" for name, size in asdict(found.parts).items()))
    recognizer = load_random(
        arguments.model, tokens=arguments.tokens, device="cuda", precision=found.precision, batch_size=found.slots
    )
    loaded = torch.cuda.max_memory_reserved(device.torch)
    noise = np.random.default_rng(0).normal(0, 0.1, WINDOW_SAMPLES).astype(np.float32)
    options = without_judgement(TranscribeOptions(language="en", vad=False))
    recognizer.transcribe(noise, options, sample_rate=16_000)
    reserved = torch.cuda.max_memory_reserved(device.torch)
    allocated = torch.cuda.max_memory_allocated(device.torch)
    free, total = torch.cuda.mem_get_info(device.torch)
    say(
        f"measured, MB: reserved {reserved / _MB:.0f} (most while loading {loaded / _MB:.0f}, most allocated "
        f"{allocated / _MB:.0f}), planned {found.parts.total / _MB:.0f}; with the driver's own share "
        f"{(free_before - free) / _MB:.0f}, on the whole GPU {(total - free) / _MB:.0f}"
    )
    recognizer.close()
    if reserved > budget:
        raise SystemExit(1)


if __name__ == "__main__":
    main()
