"""Transcribe one clip with a model that pip installed: what `make demo` runs, and how the library is used."""

from __future__ import annotations

import importlib.util
import os
import time
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # everything is here already

import stapes


def example_clip() -> Path:
    """Return the English pangram among the clips of the pytest-audioeval package, found without importing it."""
    spec = importlib.util.find_spec("pytest_audioeval")
    if spec is None or not spec.submodule_search_locations:
        raise SystemExit("pytest-audioeval is not installed: run `make demo`")
    return Path(spec.submodule_search_locations[0]) / "samples" / "audio" / "en" / "quick_brown_fox.wav"


def main() -> None:
    """Print the words, the language and the real-time factor."""
    clip = example_clip()
    recognizer = stapes.load("base")
    begin = time.perf_counter()
    transcript = recognizer.transcribe(clip)
    seconds = time.perf_counter() - begin
    print(f"\n  {transcript.text}\n")
    print(f"language          {transcript.language} ({transcript.language_probability:.0%})")
    print(f"audio             {transcript.duration:.1f} s, {clip.name}")
    print(f"model             {transcript.model} on {recognizer.device.name}")
    print(f"real-time factor  {seconds / transcript.duration:.3f} ({transcript.duration / seconds:.1f} × real time)")


if __name__ == "__main__":
    main()
