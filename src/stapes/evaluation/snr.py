"""An estimate of the signal-to-noise ratio of a recording of speech, for breakdowns."""

from __future__ import annotations

import numpy as np

from stapes.audio.decode import SAMPLE_RATE

FRAME = SAMPLE_RATE // 40
HOP = SAMPLE_RATE // 100
_NOISE_PERCENTILE = 10
_SPEECH_RATIO = 2.0  # 3 dB above the noise
_FLOOR = 1e-9  # −90 dBFS: below it is digital silence and dither
RANGE = (-10.0, 60.0)
"""What is reported at most, in dB; levels beyond it cannot be told apart."""


def estimate_snr(samples: np.ndarray) -> float | None:
    """Signal-to-noise ratio in dB, from the levels of frames; None below a quarter of a second or for silence.

    samples: float32 ``(samples,)`` at 16 kHz. The noise power N is the 10th percentile of the mean squares of 25 ms
    frames every 10 ms (speech pauses more often than that), at least −90 dBFS. The power S of speech in noise is the
    mean of the frames more than 3 dB above N. The estimate is 10·log₁₀((S − N) / N), kept within −10 and 60 dB. It
    supposes steady noise, and pauses: a clip cut into the middle of speech comes out too low.
    """
    if len(samples) < SAMPLE_RATE // 4:
        return None
    # Mean squares of overlapping frames from one running sum, in float64: 1 h of speech loses nothing.
    energy = np.concatenate([[0.0], np.cumsum(np.square(samples, dtype=np.float64))])
    starts = np.arange(0, len(samples) - FRAME + 1, HOP)
    powers = np.maximum(energy[starts + FRAME] - energy[starts], 0.0) / FRAME
    if powers.max() <= _FLOOR:
        return None
    noise = max(float(np.percentile(powers, _NOISE_PERCENTILE)), _FLOOR)
    loud = powers[powers > _SPEECH_RATIO * noise]
    if not len(loud):
        return RANGE[0]
    return float(np.clip(10 * np.log10(loud.mean() / noise - 1), *RANGE))
