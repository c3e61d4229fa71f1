"""Where real recordings with transcripts are, beside the project; tests that need them skip where they are not."""

from pathlib import Path

DATA = Path(__file__).parents[2] / "shared" / "data"
