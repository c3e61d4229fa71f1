"""Jobs to test with: recordings, a model that is none, and an engine that needs no time."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from recordings import pcm16, wav

from stapes.audio.decode import open_audio
from stapes.bulk.engine import Opened
from stapes.bulk.job import run_job
from stapes.bulk.options import JobOptions
from stapes.bulk.spec import Spec, digest
from stapes.errors import StapesError
from stapes.options import TranscribeOptions
from stapes.transcript import Segment, Transcript

HERE = Path(__file__).parent


def write_recordings(folder: Path, count: int, seconds: float = 0.3) -> list[Path]:
    """So many short recordings, each of its own loudness, in two folders."""
    paths = []
    for number in range(count):
        path = folder / ("a" if number % 2 else "b") / f"{number:04d}.wav"
        path.parent.mkdir(parents=True, exist_ok=True)
        tone = np.sin(np.arange(round(seconds * 16_000)) / 20) * (number + 1) / (count + 1)
        path.write_bytes(wav(pcm16(tone.astype(np.float32))))
        paths.append(path)
    return paths


def made_model(folder: Path) -> str:
    """A file that stands for a model."""
    path = folder / "model.bin"
    path.write_bytes(b"weights")
    return str(path)


class FakeTranscriber:
    """Writes how long and how loud a recording is; does what the names of recordings say."""

    def transcribe_many(
        self, audio: Iterable[Any], options: TranscribeOptions, *, progress: Any
    ) -> Iterator[Transcript]:
        for source in audio:
            name = Path(source.item.audio).name
            if "kills" in name:
                os.kill(os.getpid(), signal.SIGKILL)
            if "slow" in name:
                time.sleep(0.05)
            yield self._one(source, progress)

    def _one(self, source: Any, progress: Any) -> Transcript:
        try:
            with open_audio(source) as stream:
                samples = np.concatenate([*stream, np.zeros((stream.channels, 0), np.float32)], axis=1)
                warnings, damaged = stream.warnings, stream.damaged
        except StapesError as error:
            return Transcript(path=source.name, error=str(error))
        seconds = samples.shape[1] / 16_000
        progress.advance(seconds)
        text = f" loud {np.abs(samples).max():.3f}"
        segment = Segment(0, 0, 0.0, seconds, text, avg_logprob=-0.1, compression_ratio=1.0)
        return Transcript(
            text=text.strip(),
            language="en",
            language_probability=0.9,
            duration=seconds,
            segments=[segment],
            path=source.name,
            model="fake",
            warnings=list(warnings),
            damaged=damaged,
        )


def open_fake(spec: Spec, device: str, threads: int | None) -> Opened:
    """As `stapes.bulk.engine.open_recognizer`, at once."""
    if spec.options.initial_prompt == "die at once":
        raise RuntimeError("there is no engine")
    return Opened(FakeTranscriber(), 2, False, {"device": device})


def fake_job(inputs: list[Any], out: Path, model: str, **settings: Any) -> dict[str, Any]:
    """Run a job with that engine in processes of its own; ``settings``: of JobOptions, and ``options``."""
    options = settings.pop("options", TranscribeOptions())
    listener = settings.pop("progress", None)
    job = JobOptions(**{"workers": 1, "decoders": 1, **settings})
    return run_job(
        [str(each) for each in inputs],
        out,
        model=model,
        options=options,
        job=job,
        device="cpu",
        progress=listener,
        make_spec=fake_spec,
    )


def fake_spec(model: str, settings: dict[str, Any], progress: Any, **rest: Any) -> Spec:
    revision = digest(Path(model).read_bytes().decode())
    return Spec(model=model, settings=settings, revision=revision, engine="made_bulk:open_fake", **rest)
