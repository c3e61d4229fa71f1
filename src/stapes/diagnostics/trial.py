"""One real transcription on one device, in a process of its own: what a user would do next, with its result measured.

``python -m stapes.diagnostics.trial DEVICE MODEL AUDIO`` writes one record for ``children.run_child``.
"""

from __future__ import annotations

import importlib.util
import re
import sys
import time
from dataclasses import asdict, dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path

from stapes.diagnostics.children import emit, run_child

_MODULE = "stapes.diagnostics.trial"
# A first transcription on ROCm may compile for minutes; see devices.rocm.
_SECONDS = 600.0
CLIP_TEXT = "The quick brown fox jumps over the lazy dog."
"""What is said in the clip of the pytest-audioeval package."""


@dataclass(frozen=True)
class Trial:
    """What came out. Seconds of wall-clock time: to load, for the first and for a second transcription.

    ``agreement``: words in common with the CPU's text, 0 to 1; ``correct``: the same with what is really said, None
    where that is not known.
    """

    device: str
    model: str
    precision: str | None = None
    text: str | None = None
    audio_seconds: float | None = None
    load_seconds: float | None = None
    first_seconds: float | None = None
    second_seconds: float | None = None
    agreement: float | None = None
    correct: float | None = None
    failure: str | None = None


def find_clip() -> Path | None:
    """A spoken sentence that pip installed: the English pangram of pytest-audioeval, found without importing it."""
    spec = importlib.util.find_spec("pytest_audioeval")
    for folder in (spec.submodule_search_locations if spec else None) or []:
        clip = Path(folder) / "samples" / "audio" / "en" / "quick_brown_fox.wav"
        if clip.is_file():
            return clip
    return None


def run_trials(devices: list[str], model: str, audio: Path, spoken: str | None) -> list[Trial]:
    """Transcribe on each device in turn, and compare. spoken: the words of the audio, where they are known."""
    trials: list[Trial] = []
    for device in devices:
        result = run_child([_MODULE, device, model, str(audio)], _SECONDS)
        trial = Trial(device, model)
        if result.records:
            trial = Trial(**result.records[-1])
        failure = trial.failure or result.failure or (None if result.records else "said nothing")
        trials.append(replace(trial, failure=failure))
    return compare(trials, spoken)


def compare(trials: list[Trial], spoken: str | None) -> list[Trial]:
    """Fill in how far each text agrees with the CPU's and with what is said."""
    reference = next((trial.text for trial in trials if trial.device == "cpu"), None)
    return [
        replace(
            trial,
            agreement=agreement(reference, trial.text) if reference is not None and trial.text is not None else None,
            correct=agreement(spoken, trial.text) if spoken is not None and trial.text is not None else None,
        )
        for trial in trials
    ]


def agreement(wanted: str, found: str) -> float:
    """The share of words in common, in order, of the longer text; 1 for two empty ones."""
    first, second = (re.findall(r"\w+", text.lower()) for text in (wanted, found))
    if not first and not second:
        return 1.0
    matched = sum(block.size for block in SequenceMatcher(None, first, second, autojunk=False).get_matching_blocks())
    return matched / max(len(first), len(second))


def main(device: str, model: str, audio: str) -> None:
    """Load, transcribe twice, and write what came out."""
    trial = Trial(device, model)
    try:
        import stapes

        begin = time.perf_counter()
        recognizer = stapes.load(model, device=device, offline=True)
        loaded = time.perf_counter()
        transcript = recognizer.transcribe(audio)
        first = time.perf_counter()
        recognizer.transcribe(audio)
        second = time.perf_counter()
        trial = replace(
            trial,
            precision=str(recognizer.engine.dtype).removeprefix("torch."),
            text=transcript.text,
            audio_seconds=transcript.duration,
            load_seconds=loaded - begin,
            first_seconds=first - loaded,
            second_seconds=second - first,
        )
    except Exception as error:  # the report says what stopped it
        trial = replace(trial, failure=f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0]}"[:400])
    emit(asdict(trial))


if __name__ == "__main__":
    main(*sys.argv[1:])
