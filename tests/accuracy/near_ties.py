"""Where a narrower precision writes another text than fp32: was it a tie?

    python tests/accuracy/near_ties.py --model base --precision fp16 bf16

Every clip is written in fp32 and in the other precision, greedily and without timestamps. Where the texts part, both
models read what they still agree on, and two numbers are printed: how far fp32 preferred its own token to the other
one, and how far the two models' logits are apart there. A parting is a near-tie where the preference is smaller than
what the logits are off by. Exit code 1 where one is not.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from corpora import DATA, select_clips

import stapes
from stapes.audio.decode import read_audio
from stapes.inference.engine import DecodeRequest
from stapes.inference.gpu_whisper import GpuWhisperEngine
from stapes.recognizer import Recognizer


def tokens_of(recognizer: Recognizer, clips: list[np.ndarray]) -> list[list[int]]:
    """The greedy text of each clip, without the end."""
    request, engine = request_of(recognizer), recognizer.engine
    written: dict[int, list[int]] = {}
    active: dict[Any, int] = {}
    position = 0
    while len(written) < len(clips):
        batch = clips[position : position + 8]
        if batch and engine.free_slots(request) >= len(batch):
            slots = engine.admit([request] * len(batch), engine.encode(batch))
            active.update(zip(slots, range(position, position + len(batch)), strict=True))
            position += len(batch)
        engine.step(4)
        for slot, result in engine.harvest():
            written[active.pop(slot)] = result.tokens
            engine.release(slot)
    return [written[number] for number in range(len(clips))]


def request_of(recognizer: Recognizer) -> DecodeRequest:
    tokenizer = recognizer.tokenizer
    prompt = tokenizer.start_sequence("en" if tokenizer.is_multilingual else None, without_timestamps=True)
    return DecodeRequest(
        prompt=tuple(prompt),
        sot_index=0,
        timestamps=False,
        suppressed=recognizer.family.suppressed(stapes.TranscribeOptions()),
        stop_loops=False,
    )


@torch.inference_mode()
def logits_after(recognizer: Recognizer, clip: np.ndarray, text: list[int]) -> torch.Tensor:
    """Logits (vocabulary,), float32, of what follows the prompt and ``text``."""
    engine = recognizer.engine
    assert isinstance(engine, GpuWhisperEngine)
    memory = engine.decoder.new_memory(1, engine.quantize_memory)
    rows = torch.zeros(1, dtype=torch.int32, device=engine.device)
    engine.decoder.remember(engine._states(engine.encode([clip])), memory, rows)
    tokens = torch.tensor([[*request_of(recognizer).prompt, *text]], device=engine.device)
    states, _ = engine.decoder.read(tokens, memory, rows)
    return engine.decoder.logits(states[:, -1])[0].cpu()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="base")
    parser.add_argument("--precision", nargs="+", default=["fp16", "bf16"])
    parser.add_argument("--data", type=Path, default=DATA)
    parser.add_argument("--limit", type=int)
    arguments = parser.parse_args()
    clips = [read_audio(clip.path(arguments.data))[0] for clip in select_clips("librispeech", arguments.data)]
    clips = [clip for clip in clips if len(clip) <= 480_000][: arguments.limit]
    exact = stapes.load(arguments.model, device="cuda", precision="fp32", batch_size=32)
    truth = tokens_of(exact, clips)
    end, bad = exact.tokenizer.eot, 0
    for precision in arguments.precision:
        narrow = stapes.load(arguments.model, device="cuda", precision=precision, batch_size=32)
        found = tokens_of(narrow, clips)
        parted = [number for number in range(len(clips)) if found[number] != truth[number]]
        for number in parted:
            ours, theirs = [*found[number], end], [*truth[number], end]
            at = next(i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b)
            wide, rounded = (logits_after(each, clips[number], theirs[:at]) for each in (exact, narrow))
            margin = float(wide[theirs[at]] - wide[ours[at]])
            error = float((rounded - wide).abs()[[ours[at], theirs[at]]].sum())
            print(f"{precision} clip {number} token {at}: margin {margin:.3f}, logits off by {error:.3f}")
            bad += margin > error
        print(f"{precision}: {len(clips) - len(parted)} of {len(clips)} texts are those of fp32")
        narrow.close()
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
