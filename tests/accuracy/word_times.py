"""How well word times fit: clips joined with short gaps, their first and last words against the waveform.

    python tests/accuracy/word_times.py --model base
    python tests/accuracy/word_times.py --model tiny.en --clips 20

Clips of LibriSpeech's test split are joined with gaps of 0 to 300 ms and transcribed as one recording, without VAD.
The truth is where each clip's sound begins and ends: its first and last frame of 10 ms within 40 dB of its loudest.
Compared are the times of a clip's first and last word, where they were recognised.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from difflib import SequenceMatcher

import numpy as np
from corpora import SAMPLE_RATE, Clip, decode, select_clips
from scoring import normalise

import stapes
from stapes.recognizer import Recognizer
from stapes.transcript import Transcript

LONGEST_GAP = 0.3
FRAME = SAMPLE_RATE // 100


@dataclass(frozen=True, slots=True)
class Edges:
    """Absolute errors in seconds of the words that were recognised: starts of first and ends of last words."""

    starts: np.ndarray
    ends: np.ndarray
    clips: int

    @property
    def all(self) -> np.ndarray:
        """Both kinds."""
        return np.concatenate([self.starts, self.ends])


def sounding(samples: np.ndarray) -> tuple[float, float]:
    """Seconds at which the first frame within 40 dB of the loudest begins and the last ends."""
    frames = samples[: len(samples) // FRAME * FRAME].reshape(-1, FRAME)
    level = 10 * np.log10(np.square(frames, dtype=np.float64).mean(axis=1) + 1e-12)
    loud = np.flatnonzero(level >= level.max() - 40.0)
    return loud[0] / 100, (loud[-1] + 1) / 100


def join(clips: list[Clip], seed: int) -> tuple[np.ndarray, list[tuple[float, float]]]:
    """The clips as one recording with random gaps, and where each one's sound begins and ends in it."""
    generator = np.random.default_rng(seed)
    parts, truth, position = [], [], 0
    for clip in clips:
        samples = decode(clip.path())
        gap = np.zeros(round(generator.uniform(0, LONGEST_GAP) * SAMPLE_RATE), np.float32)
        begin, end = sounding(samples)
        truth.append((position / SAMPLE_RATE + begin, position / SAMPLE_RATE + end))
        parts += [samples, gap]
        position += len(samples) + len(gap)
    return np.concatenate(parts), truth


def measure(transcript: Transcript, clips: list[Clip], truth: list[tuple[float, float]]) -> Edges:
    """Match recognised words with spoken ones, and compare the edges of each clip's first and last."""
    spoken, first, last = [], {}, {}
    for index, clip in enumerate(clips):
        words = normalise(clip.text, "en").split()
        if words:
            first[len(spoken)], last[len(spoken) + len(words) - 1] = index, index
            spoken += words
    heard, times = [], []
    for segment in transcript.segments:
        for word in segment.words or []:
            for part in normalise(word.word, "en").split():
                heard.append(part)
                times.append(word)
    starts, ends = [], []
    for a, b, size in SequenceMatcher(None, spoken, heard, autojunk=False).get_matching_blocks():
        for offset in range(size):
            if a + offset in first:
                starts.append(abs(times[b + offset].start - truth[first[a + offset]][0]))
            if a + offset in last:
                ends.append(abs(times[b + offset].end - truth[last[a + offset]][1]))
    return Edges(np.array(starts), np.array(ends), len(clips))


def run(recognizer: Recognizer, clips: list[Clip], seed: int = 0) -> Edges:
    """Join, transcribe, measure."""
    samples, truth = join(clips, seed)
    transcript = recognizer.transcribe(samples, sample_rate=SAMPLE_RATE, language="en", vad=False, word_timestamps=True)
    return measure(transcript, clips, truth)


def main() -> None:
    """Parse the command line, run, print medians and 90th percentiles."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="base")
    parser.add_argument("--clips", type=int, default=None, help="only so many")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    arguments = parser.parse_args()
    recognizer = stapes.load(arguments.model, device=arguments.device, precision="fp32")
    edges = run(recognizer, select_clips("librispeech")[: arguments.clips], arguments.seed)
    for name, errors in (("first words", edges.starts), ("last words", edges.ends), ("both", edges.all)):
        median, high = np.percentile(errors, [50, 90]) * 1000
        print(
            f"{name}: {len(errors)} of {edges.clips} clips, median {median:.0f} ms, 90th percentile {high:.0f} ms, "
            f"{100 * np.mean(errors < 0.1):.0f} % under 100 ms"
        )


if __name__ == "__main__":
    main()
