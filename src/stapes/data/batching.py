"""Batches for training: utterances of a manifest read, augmented, tokenised and padded, by processes of their own.

    data = TrainingData("train.jsonl.gz", tokenizer, budget_seconds=480, world_size=8, rank=rank, workers=8)
    for batch in data:                                # what is left of this epoch; the next loop is the next epoch
        batch = batch.to(device)
        ...
        checkpoint["data"] = data.state_dict()        # the batch just yielded is done

Every batch of a bucket has the same shape on all ranks. A row that could not be read, and one that only fills the
shape up, repeats another row with weight 0: multiply losses by ``weights``, and divide by their sum over all ranks.
"""

from __future__ import annotations

import shutil
import signal
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

from stapes.audio.decode import SAMPLE_RATE
from stapes.data.buckets import BatchPlan, Bucket, BucketSampler
from stapes.data.manifest import Manifest, Utterance
from stapes.data.reading import read_promised
from stapes.data.seeds import generator, mix_keys
from stapes.data.windows import Window, share_rows
from stapes.errors import StapesError, UsageError

__all__ = [
    "IGNORED",
    "Augment",
    "Batch",
    "BatchPlan",
    "Bucket",
    "BucketSampler",
    "Skipped",
    "TextEncoder",
    "TrainingData",
    "UtteranceEncoder",
]

IGNORED = -100
"""Fills ``Batch.targets`` up: what ``torch.nn.functional.cross_entropy`` ignores by default."""

_TARGET_MULTIPLE = 16  # targets are padded to multiples of it: few shapes
_SHARED_MEMORY = Path("/dev/shm")  # noqa: S108  # where processes hand batches over
_SHARED_FRACTION = 0.8
_MAX_NAMED = 1000  # skipped utterances that are remembered by name
_HOPELESS = 3  # batches in a row without one readable utterance


class TextEncoder(Protocol):
    """A tokenizer, as training needs it."""

    def encode(self, text: str) -> list[int]:
        """Token ids of a text. Raises UsageError where it cannot be spelt."""
        ...


@runtime_checkable
class UtteranceEncoder(Protocol):
    """A tokenizer that needs to know more of an utterance than its text."""

    def encode_utterance(self, manifest: Manifest, number: int, key: int, speed: float = 1.0) -> list[int]:
        """Token ids of an utterance of the manifest, played at that speed. All chance comes from ``key``. Raises
        StapesError where there are none, which leaves the utterance out."""
        ...


class Augment(Protocol):
    """Changes to recordings that make a model robust. Called in processes that read."""

    @property
    def speeds(self) -> Sequence[float]:
        """Each utterance is played at one of these; its length changes with it."""
        ...

    def __call__(self, samples: np.ndarray, speed: float, random: np.random.Generator) -> np.ndarray:
        """float32 (samples,) at 16 kHz to about samples / speed of them. All chance comes from ``random``."""
        ...


@dataclass(frozen=True, slots=True)
class Skipped:
    """An utterance that could not be used, and why."""

    id: str
    audio: str
    reason: str


@dataclass(frozen=True, slots=True)
class Batch:
    """Utterances of similar length. Tensors lie on the CPU until ``to``; B rows, S samples, L tokens."""

    waveforms: Tensor
    """float32 (B, S), 16 kHz, zeros beyond ``lengths``."""
    lengths: Tensor
    """int64 (B,), samples."""
    targets: Tensor
    """int64 (B, L), token ids, ``IGNORED`` beyond ``target_lengths``."""
    target_lengths: Tensor
    """int64 (B,)."""
    weights: Tensor
    """float32 (B,): 1, or 0 for a row that only fills the shape up."""
    keys: Tensor
    """int64 (B,): what chance is made of for this utterance in this epoch; see ``masking``."""
    rehearsed: Tensor
    """bool (B,): whether a row is of the rehearsal manifest."""
    ids: tuple[str, ...]
    texts: tuple[str, ...]
    speakers: tuple[str | None, ...]
    languages: tuple[str | None, ...]
    samples: int
    """What each row is padded to in the end, at 16 kHz: S, or more where the network's input is longer."""
    epoch: int
    bucket: int
    """All batches with the same bucket have the same S, and the same ``samples``; with windows the latter alone."""
    ends_step: bool
    """Whether this is the last of the ``accumulate`` batches of a step."""
    ends_epoch: bool
    skipped: tuple[Skipped, ...]
    """Utterances of this batch that could not be used."""
    state: Mapping[str, Any]
    """``TrainingData.state_dict()`` once this batch is done."""

    def __len__(self) -> int:
        return len(self.ids)

    @property
    def seconds(self) -> float:
        """Seconds of audio, without padding and fillers."""
        return float((self.lengths * self.weights).sum()) / SAMPLE_RATE

    @property
    def padded_seconds(self) -> float:
        """Seconds that a network computes."""
        return len(self) * self.samples / SAMPLE_RATE

    def to(self, device: torch.device | str, *, non_blocking: bool = True) -> Batch:
        """The batch with its tensors on ``device``."""
        return replace(self, **{n: t.to(device, non_blocking=non_blocking) for n, t in self._tensors().items()})

    def pin_memory(self) -> Batch:
        """The batch with its tensors where a GPU can fetch them by itself."""
        return replace(self, **{name: tensor.pin_memory() for name, tensor in self._tensors().items()})

    def rows(self, start: int, stop: int) -> Batch:
        """A batch of some of the rows, such as half of them where memory ran out."""
        parts: dict[str, Any] = {name: tensor[start:stop] for name, tensor in self._tensors().items()}
        names = {name: getattr(self, name)[start:stop] for name in ("ids", "texts", "speakers", "languages")}
        return replace(self, **parts, **names)

    def _tensors(self) -> dict[str, Tensor]:
        values = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in values.items() if isinstance(value, Tensor)}


class TrainingData:
    """The batches of one rank. A loop over it gives what is left of the epoch; the next loop is the next epoch.

    Args:
        manifest: lhotse CutSets (``.jsonl.gz``, ``.jsonl``), or a ``Manifest``.
        tokenizer: text to token ids.
        budget_seconds: most seconds of one batch, padding included.
        augment: changes to the recordings; None leaves them as they are.
        world_size, rank, seed, accumulate, buckets, edges, max_rows, shuffle: see ``BucketSampler``.
        workers: processes that read ahead; 0 reads in the loop itself.
        prefetch: batches that each of them reads ahead.
        pin_memory: None: where there is a GPU.
        window_seconds: the network pads every utterance to so many seconds itself, and takes none that is longer:
            batches are drawn from all of them alike, and come only as long as their longest.
        rehearsal, rehearsal_share: utterances of another manifest that take this share of each batch's rows, drawn for
            each batch anew. Only with ``window_seconds``; an epoch goes through ``manifest``.

    Raises UsageError for a manifest or options that make no sense and, while reading, where nothing can be used.
    """

    def __init__(
        self,
        manifest: str | Path | Sequence[str | Path] | Manifest,
        tokenizer: TextEncoder | UtteranceEncoder,
        *,
        budget_seconds: float,
        augment: Augment | None = None,
        world_size: int = 1,
        rank: int = 0,
        seed: int = 0,
        accumulate: int = 1,
        buckets: int = 32,
        edges: np.ndarray | None = None,
        max_rows: int | None = None,
        shuffle: bool = True,
        workers: int = 0,
        prefetch: int = 2,
        pin_memory: bool | None = None,
        window_seconds: float | None = None,
        rehearsal: Manifest | None = None,
        rehearsal_share: float = 0.0,
    ) -> None:
        if not isinstance(manifest, Manifest):
            manifest = Manifest(*([manifest] if isinstance(manifest, str | Path) else manifest))
        self.manifest = manifest
        window = None
        lengths, speeds = manifest.durations, (1.0,) if augment is None else augment.speeds
        if window_seconds is not None:
            own, others = share_rows(budget_seconds, window_seconds, max_rows, rehearsal_share if rehearsal else 0.0)
            window = Window(window_seconds, rehearsal, others / own)
            budget_seconds, max_rows = own * window_seconds, own
            lengths, speeds = np.full(len(manifest), window_seconds), (1.0,)  # the reader draws the speed
        self.sampler = BucketSampler(
            lengths,
            budget_seconds,
            world_size,
            rank,
            seed,
            accumulate=accumulate,
            buckets=buckets,
            max_rows=max_rows,
            speeds=speeds,
            keys=manifest.keys,
            edges=edges,
            shuffle=shuffle,
        )
        self.skipped: dict[str, Skipped] = {}
        """By id, at most a thousand; ``skipped_count`` counts all, each time anew."""
        self.skipped_count = 0
        self._reader = _Reader(manifest, tokenizer, augment, seed, window)
        self._workers, self._prefetch = workers, prefetch
        # Windows travel only as long as their longest, with rehearsal's rows beside the manifest's own.
        slowest = 1.0 if augment is None else min(augment.speeds)
        self._filled = 1.0 if window is None else window.filled(manifest, slowest)
        self._rehearsed = 0.0
        if window is not None and rehearsal is not None:
            self._rehearsed = len(manifest) * window.ratio * float(rehearsal.durations.mean())
        self._pin = torch.cuda.is_available() if pin_memory is None else pin_memory
        self._state = self.sampler.state_dict()
        self._batches: Iterator[Batch] | None = None
        self._hopeless = 0

    @property
    def epoch(self) -> int:
        """The epoch that the next batch belongs to, from 0."""
        return int(self._state["epoch"])

    def steps(self, epoch: int = 0) -> int:
        """How many steps an epoch has."""
        return self.sampler.steps(epoch)

    @property
    def epoch_seconds(self) -> float:
        """Seconds of audio in an epoch, with those of the rehearsal, about."""
        return float(self.manifest.durations.sum()) + self._rehearsed

    def __iter__(self) -> Iterator[Batch]:
        while True:
            if self._batches is None:
                self._batches = iter(self._loader())
            batch = self._next(self._batches)
            self._state = batch.state
            self._note(batch)
            yield batch
            if batch.ends_epoch:
                return

    def trial_batches(self) -> Iterator[Batch]:
        """One full batch of each shape, the longest first: to find out what fits, and to compile. Changes no state."""
        for plan in self.sampler.trial_plans():
            yield self._reader[plan]

    def state_dict(self) -> dict[str, Any]:
        """Where the batch after the one last yielded comes from. The same on every rank; what was read ahead is not
        counted as done."""
        return dict(self._state)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there, on another number of ranks or with another budget perhaps; see ``BucketSampler``."""
        self.close()
        self.sampler.load_state_dict(state)
        self._state = self.sampler.state_dict()

    def close(self) -> None:
        """End the processes that read ahead. A loop afterwards starts new ones, and misses nothing."""
        if self._batches is not None:
            self._batches = None
            self.sampler.load_state_dict(self._state)

    def _loader(self) -> DataLoader[Batch]:
        workers, prefetch = self._ahead()
        return DataLoader(
            self._reader,
            sampler=self.sampler,  # pyright: ignore[reportArgumentType]  # any iterable will do
            batch_size=None,
            num_workers=workers,
            prefetch_factor=prefetch if workers else None,
            pin_memory=self._pin,
            collate_fn=_same,  # pyright: ignore[reportArgumentType]  # without a batch size it gets one item
            worker_init_fn=_start_worker,
            # Forked: the manifest is shared, and nobody's script is run a second time.
            multiprocessing_context="fork" if workers else None,
            generator=torch.Generator(),  # the loader draws a number; the model's chance must not notice
        )

    def _ahead(self) -> tuple[int, int]:
        """(Processes, batches that each reads ahead): fewer where the memory that they share holds no more.

        Containers have 64 MiB of it by default, two batches or so; past its end a process dies by SIGBUS.
        """
        if not self._workers or not _SHARED_MEMORY.is_dir():
            return self._workers, self._prefetch
        largest = max(bucket.rows * bucket.samples * 4 for bucket in self.sampler.buckets)
        largest = round(largest * self._filled)
        room = int(_SHARED_FRACTION * shutil.disk_usage(_SHARED_MEMORY).free / largest)
        # Each process has one batch more in work than it has read ahead.
        prefetch = max(1, min(self._prefetch, room // self._workers - 1))
        workers = min(self._workers, room // (prefetch + 1))
        if (workers, prefetch) != (self._workers, self._prefetch):
            warnings.warn(
                f"{_SHARED_MEMORY} has room for {room} batches: {workers} instead of {self._workers} processes read "
                f"ahead, {prefetch} batches each; give a container more (--shm-size)",
                RuntimeWarning,
                stacklevel=2,
            )
        return workers, prefetch

    def _next(self, batches: Iterator[Batch]) -> Batch:
        try:
            return next(batches)
        except RuntimeError as error:
            if "DataLoader worker" not in str(error):
                raise
            raise StapesError(
                f"A process that reads audio died ({error}): memory or /dev/shm ran out; use fewer workers, or give a "
                "container more of it (--shm-size)"
            ) from error

    def _note(self, batch: Batch) -> None:
        self.skipped_count += len(batch.skipped)
        for each in batch.skipped:
            if len(self.skipped) < _MAX_NAMED:
                self.skipped[each.id] = each
        self._hopeless = self._hopeless + 1 if batch.skipped and not batch.weights.any() else 0
        if self._hopeless == _HOPELESS:
            raise UsageError(
                f"{_HOPELESS} batches in a row without one usable utterance; the last: {batch.skipped[-1].reason}"
            )


class _Reader(Dataset[Batch]):
    """Reads what a plan says. Lives in the processes that read; shares nothing that changes."""

    def __init__(
        self,
        manifest: Manifest,
        tokenizer: TextEncoder | UtteranceEncoder,
        augment: Augment | None,
        seed: int,
        window: Window | None = None,
    ) -> None:
        self._manifest, self._tokenizer, self._augment, self._seed = manifest, tokenizer, augment, seed
        self._window = window

    def __getitem__(self, plan: BatchPlan) -> Batch:
        places = [(self._manifest, int(index)) for index in plan.indices]
        weights, speeds = plan.weights.copy(), plan.speeds
        if self._window is not None and (picked := self._window.rehearsed(self._manifest.keys, plan, self._seed)):
            places += picked
            weights = np.concatenate([weights, np.ones(len(picked), np.float32)])
            speeds = np.concatenate([speeds, np.ones(len(picked))])
        rows, samples = len(places), plan.samples
        utterances = [manifest[number] for manifest, number in places]
        targets: list[list[int]] = [[] for _ in utterances]
        own_keys = np.array([manifest.keys[number] for manifest, number in places], np.uint64)
        keys = mix_keys(own_keys, self._seed, plan.epoch).view(np.int64)
        rehearsed = np.arange(rows) >= len(plan.indices)
        reads: dict[int, np.ndarray] = {}
        skipped = []
        for row in map(int, np.flatnonzero(weights)):
            utterance = utterances[row]
            try:
                random = generator(self._seed, plan.epoch, int(own_keys[row]))
                speed = self._speed(utterance, float(speeds[row]), random)
                targets[row] = self._encode(*places[row], utterance, int(keys[row]), speed)
                reads[row] = self._read(utterance, speed, random)[:samples]
            except StapesError as error:
                weights[row] = 0
                skipped.append(Skipped(utterance.id, utterance.audio, str(error)))
        longest = samples if self._window is None else self._window.samples([*reads.values()])
        waveforms, lengths = torch.zeros(rows, longest), np.zeros(rows, np.int64)
        for row, read in reads.items():
            lengths[row] = len(read)
            waveforms[row, : len(read)] = torch.from_numpy(read)
        used = np.flatnonzero(weights)
        for number, row in enumerate(np.flatnonzero(weights == 0)):
            if not len(used):  # silence, in which nothing is said
                lengths[row], targets[row] = longest, []
                continue
            other = used[number % len(used)]
            waveforms[row], lengths[row], targets[row] = waveforms[other], lengths[other], targets[other]
            utterances[row], keys[row], rehearsed[row] = utterances[other], keys[other], rehearsed[other]
        return Batch(
            waveforms=waveforms,
            lengths=torch.from_numpy(lengths),
            targets=_pad(targets),
            target_lengths=torch.tensor([len(ids) for ids in targets]),
            weights=torch.from_numpy(weights),
            keys=torch.from_numpy(keys),
            rehearsed=torch.from_numpy(rehearsed),
            ids=tuple(utterance.id for utterance in utterances),
            texts=tuple(utterance.text for utterance in utterances),
            speakers=tuple(utterance.speaker for utterance in utterances),
            languages=tuple(utterance.language for utterance in utterances),
            samples=plan.samples,
            epoch=plan.epoch,
            bucket=plan.bucket,
            ends_step=plan.ends_step,
            ends_epoch=plan.ends_epoch,
            skipped=tuple(skipped),
            state=plan.state,
        )

    def _encode(self, manifest: Manifest, number: int, utterance: Utterance, key: int, speed: float) -> list[int]:
        if isinstance(self._tokenizer, UtteranceEncoder):
            return self._tokenizer.encode_utterance(manifest, number, key, speed)
        return self._tokenizer.encode(utterance.text)

    def _speed(self, utterance: Utterance, planned: float, random: np.random.Generator) -> float:
        if self._window is None:
            return planned
        return self._window.speed(utterance, self._augment.speeds if self._augment else (1.0,), random)

    def _read(self, utterance: Utterance, speed: float, random: np.random.Generator) -> np.ndarray:
        samples = read_promised(utterance.audio, utterance.start, utterance.duration, utterance.channel)
        return samples if self._augment is None else self._augment(samples, speed, random)


def _pad(targets: Sequence[Sequence[int]]) -> Tensor:
    longest = max(1, *map(len, targets)) if targets else 1
    padded = np.full((len(targets), -(-longest // _TARGET_MULTIPLE) * _TARGET_MULTIPLE), IGNORED, np.int64)
    for row, ids in enumerate(targets):
        padded[row, : len(ids)] = ids
    return torch.from_numpy(padded)


def _same(batch: Batch) -> Batch:
    return batch


def _start_worker(number: int) -> None:
    """Ctrl-C is the main process's business: it ends the others, by SIGTERM."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
