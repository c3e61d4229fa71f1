"""Batches for a network that pads every utterance to one length itself, as Whisper does to 30 s.

All utterances cost the same there, so that batches are drawn from all of them alike; and some of a batch may be
rehearsal: utterances of what the network could do before, so that it does not forget it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from stapes.audio.decode import SAMPLE_RATE
from stapes.data.buckets import BatchPlan
from stapes.data.manifest import Manifest, Utterance
from stapes.data.seeds import generator
from stapes.errors import AudioError, UsageError


class Window(NamedTuple):
    """What such a network hears at once, and what is rehearsed."""

    seconds: float
    rehearsal: Manifest | None
    ratio: float
    """Rows of ``rehearsal`` for each row of the manifest itself."""

    def rehearsed(self, keys: np.ndarray, plan: BatchPlan, seed: int) -> list[tuple[Manifest, int]]:
        """The utterances that are rehearsed in a batch, drawn by what else is in it; keys: of all utterances."""
        if self.rehearsal is None:
            return []
        count, total = round(self.ratio * len(plan.indices)), len(self.rehearsal)
        random = generator(seed, plan.epoch, *map(int, keys[plan.indices]))
        return [(self.rehearsal, int(number)) for number in random.choice(total, count, replace=total < count)]

    def speed(self, utterance: Utterance, speeds: Sequence[float], random: np.random.Generator) -> float:
        """One of the speeds that an utterance may be played at. Raises AudioError where it is too long then."""
        speed = float(speeds[int(random.integers(len(speeds)))]) if len(speeds) > 1 else float(speeds[0])
        seconds = utterance.duration / speed
        if seconds > self.seconds + 1 / SAMPLE_RATE:
            raise AudioError(
                f"{utterance.id}: {seconds:.1f} s are more than the {self.seconds:g} s that the model hears at once: "
                "cut it, or leave such out with `stapes prepare --max-seconds`"
            )
        return speed

    def filled(self, manifest: Manifest, slowest: float) -> float:
        """Samples that the largest batch has on its way to the network, as a share of those of whole windows of the
        manifest's own rows. slowest: the lowest speed that utterances are played at."""
        longest = max(float(each.durations.max()) for each in (manifest, self.rehearsal) if each is not None) / slowest
        return (1 + self.ratio) * min(1.0, (longest + 1) / self.seconds)

    def samples(self, reads: Sequence[np.ndarray]) -> int:
        """What a batch of these recordings is padded to on its way to the network: whole seconds, few shapes."""
        longest = -(-max(map(len, reads), default=1) // SAMPLE_RATE) * SAMPLE_RATE
        return min(round(self.seconds * SAMPLE_RATE), longest)


def share_rows(budget: float, window: float, max_rows: int | None, share: float) -> tuple[int, int]:
    """Rows of a batch of ``budget`` seconds that are the manifest's own, and those for rehearsal.

    Raises UsageError where there is no room for one of each.
    """
    rows = int(budget / window + 1e-9)
    rows = rows if max_rows is None else min(rows, max_rows)
    others = min(rows - 1, max(1, round(rows * share))) if share else 0
    if rows < 1 or (share and others < 1):
        raise UsageError(
            f"a batch of {budget:g} s holds {rows} windows of {window:g} s: raise data.batch_seconds"
            + (" for rehearsal beside them" if share else "")
        )
    return rows - others, others
