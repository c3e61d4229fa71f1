"""Speech recognition for AMD GPUs, NVIDIA GPUs and plain CPUs.

    import stapes
    recognizer = stapes.load("base")
    print(recognizer.transcribe("meeting.mp3").text)

Importing this package is cheap: PyTorch is imported when a model is loaded, not before.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

if "OMP_WAIT_POLICY" not in os.environ:
    # libgomp, which reads this as PyTorch is loaded, has threads wait awake for milliseconds. On a machine with other
    # work that takes the cores from those who are waited for: a window of Whisper base took 108 s on two cores beside
    # twelve busy processes, and 10 s so. Awake for microseconds is as fast where the cores are free.
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

__version__ = "0.1.0"

if TYPE_CHECKING:
    from stapes.errors import StapesError
    from stapes.loading import load
    from stapes.options import TranscribeOptions
    from stapes.progress import Cancellation
    from stapes.recognizer import Recognizer
    from stapes.transcript import Alternative, Segment, Transcript, Word

__all__ = [
    "Alternative",
    "Cancellation",
    "Recognizer",
    "Segment",
    "StapesError",
    "TranscribeOptions",
    "Transcript",
    "Word",
    "load",
]

_HOMES = {
    "Recognizer": "stapes.recognizer",
    "load": "stapes.loading",
    "StapesError": "stapes.errors",
    "TranscribeOptions": "stapes.options",
    "Alternative": "stapes.transcript",
    "Cancellation": "stapes.progress",
    "Segment": "stapes.transcript",
    "Transcript": "stapes.transcript",
    "Word": "stapes.transcript",
}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'stapes' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOMES])
