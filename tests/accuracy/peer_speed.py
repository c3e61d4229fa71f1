"""Speed of stapes and of faster-whisper on the same audio, in turn, in one run.

    python tests/accuracy/peer_speed.py --model base
    python tests/accuracy/peer_speed.py --model tiny.en --minutes 3 --rounds 5

Clips of LibriSpeech's test split are joined with half a second between them. Both systems read the same file, find
speech, decode windows in batches: fp32, greedy, no timestamps, language given, the same number of threads. Models are
loaded and warmed before the clock starts. Each round runs one after the other, and the next round the other way
round, so that a change of the machine's clock speed meets both. The figure is the median of the rounds' ratios.
"""

from __future__ import annotations

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from corpora import Clip, join_clips, select_clips
from make_references import unpack_weights

WARM_UP_CLIPS = 4


def open_stapes(model: str, batch_size: int, threads: int) -> Callable[[Path], str]:
    """stapes' default batched algorithm."""
    import stapes

    recognizer = stapes.load(model, device="cpu", precision="fp32", threads=threads)
    options = stapes.TranscribeOptions(
        language="en", beam_size=1, without_timestamps=True, vad=True, batch_size=batch_size
    )

    def transcribe(path: Path) -> str:
        (transcript,) = recognizer.transcribe_many([str(path)], options)
        if transcript.error is not None:
            raise RuntimeError(transcript.error)
        return transcript.text.strip()

    return transcribe


def open_faster_whisper(folder: Path, batch_size: int, threads: int) -> Callable[[Path], str]:
    """faster-whisper's batched pipeline: its defaults leave out timestamps and find speech first."""
    from faster_whisper import BatchedInferencePipeline, WhisperModel

    model = WhisperModel(str(folder), device="cpu", compute_type="float32", cpu_threads=threads)
    pipeline = BatchedInferencePipeline(model)

    def transcribe(path: Path) -> str:
        segments, _ = pipeline.transcribe(str(path), language="en", beam_size=1, batch_size=batch_size)
        return "".join(segment.text for segment in segments).strip()

    return transcribe


def choose(minutes: float) -> list[Clip]:
    """The first clips of the test split that together last at least ``minutes``."""
    chosen, seconds = [], 0.0
    for clip in select_clips("librispeech"):
        if seconds >= 60.0 * minutes:
            break
        chosen.append(clip)
        seconds += clip.duration
    return chosen


def main() -> None:
    """Parse the command line, run the rounds, print each and the median ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=("base", "tiny.en"), default="base")
    parser.add_argument("--minutes", type=float, default=7.0, help="of audio (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=3, help="(default: %(default)s)")
    parser.add_argument("--batch-size", type=int, default=8, help="for both (default: %(default)s)")
    parser.add_argument("--threads", type=int, default=2, help="for both (default: %(default)s)")
    parser.add_argument("--models", type=Path, default=Path(".cache/reference-models"), help="faster-whisper's weights")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = str(arguments.threads)  # read when the libraries are imported, below

    from scoring import word_errors

    unpack_weights(arguments.models)
    clips = choose(arguments.minutes)
    systems = {
        "stapes": open_stapes(arguments.model, arguments.batch_size, arguments.threads),
        "faster-whisper": open_faster_whisper(
            arguments.models / "ct2" / arguments.model, arguments.batch_size, arguments.threads
        ),
    }
    texts: dict[str, str] = {}
    ratios = []
    with tempfile.TemporaryDirectory() as folder:
        warm_up, audio = Path(folder) / "warm-up.wav", Path(folder) / "joined.wav"
        join_clips(clips[:WARM_UP_CLIPS], warm_up, gap_seconds=0.5)
        seconds = join_clips(clips, audio, gap_seconds=0.5)
        for transcribe in systems.values():
            transcribe(warm_up)
        print(
            f"{arguments.model}, {seconds / 60:.1f} minutes, batch {arguments.batch_size}, {arguments.threads} threads"
        )
        for number in range(arguments.rounds):
            speed = {}
            for name in sorted(systems, reverse=number % 2 == 0):
                start = time.perf_counter()
                texts[name] = systems[name](audio)
                speed[name] = seconds / (time.perf_counter() - start)
            ratios.append(speed["stapes"] / speed["faster-whisper"])
            shown = ", ".join(f"{name} {speed[name]:.1f} x real time" for name in systems)
            print(f"round {number + 1}: {shown}, ratio {ratios[-1]:.2f}", flush=True)
    print(f"median ratio stapes / faster-whisper: {statistics.median(ratios):.2f}")
    spoken = " ".join(clip.text for clip in clips)
    for name, text in texts.items():
        print(f"{name}: WER {word_errors([spoken], [text], 'en').rate:.2f} %")


if __name__ == "__main__":
    main()
