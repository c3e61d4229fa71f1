"""Compare stapes with the kept reference transcripts: same texts, same word error rate?

    python tests/accuracy/compare.py --set librispeech-base librispeech-tiny.en
    python tests/accuracy/compare.py --set asterisk                        # all five languages
    python tests/accuracy/compare.py --set speechocean-tiny.en --limit 40 --list
    python tests/accuracy/compare.py --set all --json accuracy.json

Kinds of set (MODEL is ``base`` or ``tiny.en``):

- ``librispeech-MODEL``, ``asterisk-LANGUAGE``: VAD, fallback, thresholds and timestamps off and the language forced,
  as the references of transformers were made. The texts should be the same to the character.
- ``librispeech-MODEL-defaults``: our defaults, language forced, against the same references.
- ``speechocean-MODEL``: our defaults, language forced, mean over three seeds, against faster-whisper's mean over its
  seeds on the same clips. Plain greedy decoding loops on these clips.
- ``joined-MODEL``, ``joined-MODEL-sequential``: the LibriSpeech clips joined into one recording with gaps of half a
  second, batched and sequential, against utterance by utterance.

The exit code is 1 when a set misses what it has to reach.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from difflib import SequenceMatcher
from functools import partial
from pathlib import Path

from corpora import ASTERISK_LANGUAGES, DATA, Clip, join_clips, read_references, select_clips, texts_of_seed
from scoring import normalise, word_errors

import stapes
from stapes.options import TranscribeOptions
from stapes.recognizer import Recognizer
from stapes.transcript import Transcript

PLAIN = {
    "vad": False,
    "temperature_increment_on_fallback": None,
    "without_timestamps": True,
    "compression_ratio_threshold": None,
    "logprob_threshold": None,
    "no_speech_threshold": None,
}
"""Options under which stapes does what transformers did for its references."""
SEEDS = (0, 1, 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """A set of clips, the reference for it, how stapes runs on it and what it has to reach."""

    references: str
    """Name of the file of references."""
    dataset: str
    model: str
    language: str = "en"
    options: dict[str, object] = field(default_factory=dict)
    seeds: tuple[int, ...] = (0,)
    joined: bool = False
    least_identical: float | None = None
    """Share of texts, in per cent, that have to be the same to the character."""
    most_wer_above: float | None = None
    """By how much, in per cent absolute, the word error rate may be above the reference's."""
    most_wer_apart: float | None = None
    """By how much it may differ to either side."""
    most_words: int | None = None
    """How many words may differ from the reference's."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a comparison found. Rates are per cent."""

    name: str
    clips: int
    seconds: float
    """Seconds stapes took, loading apart."""
    identical: int | None
    """Clips with exactly the reference's text; None where the clips were joined."""
    wer_reference: float
    wer_ours: float
    wer_of_seeds: list[float]
    differing_words: int
    """Words to change, after normalisation, to turn our texts into the reference's, under the first seed."""
    differing: list[tuple[str, str, str]]
    """Audio, the reference's text and ours, where they differ."""
    missed: list[str]
    """What the set had to reach and did not."""


def _comparisons() -> dict[str, Comparison]:
    sets = {}
    for model in ("base", "tiny.en"):
        librispeech = partial(
            Comparison, references=f"transformers-librispeech-{model}", dataset="librispeech", model=model
        )
        sets[f"librispeech-{model}"] = librispeech(options=PLAIN, least_identical=99.5, most_wer_apart=0.1)
        sets[f"librispeech-{model}-defaults"] = librispeech(most_wer_above=0.3)
        sets[f"speechocean-{model}"] = Comparison(
            references=f"faster-whisper-speechocean762-{model}",
            dataset="speechocean762",
            model=model,
            seeds=SEEDS,
            most_wer_above=0.0,
        )
        sets[f"joined-{model}"] = librispeech(joined=True, most_wer_above=0.5)
        sequential: dict[str, object] = {"condition_on_previous_text": True}
        sets[f"joined-{model}-sequential"] = librispeech(joined=True, options=sequential, most_wer_above=0.5)
    for language in ASTERISK_LANGUAGES:
        sets[f"asterisk-{language}"] = Comparison(
            references="transformers-asterisk-base",
            dataset="asterisk",
            model="base",
            language=language,
            options=PLAIN,
            most_words=2,
        )
    return sets


COMPARISONS = _comparisons()
GROUPS = {
    "all": list(COMPARISONS),
    "asterisk": [f"asterisk-{language}" for language in ASTERISK_LANGUAGES],
    "plain": [name for name, comparison in COMPARISONS.items() if comparison.options is PLAIN],
}


def compare(name: str, recognizer: Recognizer, data: Path = DATA, limit: int | None = None) -> Outcome:
    """Run stapes on the set ``name``, or on its first ``limit`` clips, and hold it against the references."""
    comparison = COMPARISONS[name]
    clips = [clip for clip in select_clips(comparison.dataset, data) if clip.language == comparison.language][:limit]
    references = read_references(comparison.references)
    start = time.perf_counter()
    if comparison.joined:
        texts = [[_transcribe_joined(recognizer, clips, comparison, data)]]
    else:
        texts = _transcribe_clips(recognizer, clips, comparison, data)
    seconds = time.perf_counter() - start

    language = comparison.language
    spoken = [clip.text for clip in clips]
    theirs = [[texts_of_seed(references, seed)[clip.audio] for clip in clips] for seed in comparison.seeds]
    wer_reference = _mean([word_errors(spoken, written, language).rate for written in theirs])
    if comparison.joined:
        spoken, theirs = [" ".join(spoken)], [[" ".join(theirs[0])]]
    ours = [word_errors(spoken, written, language) for written in texts]
    audio = [clip.audio for clip in clips] if not comparison.joined else ["joined"]
    differing = [row for row in zip(audio, theirs[0], texts[0], strict=True) if row[1] != row[2]]
    outcome = Outcome(
        name=name,
        clips=len(clips),
        seconds=seconds,
        identical=None if comparison.joined else len(clips) - len(differing),
        wer_reference=wer_reference,
        wer_ours=_mean([errors.rate for errors in ours]),
        wer_of_seeds=[errors.rate for errors in ours],
        differing_words=word_errors(theirs[0], texts[0], language).errors,
        differing=differing,
        missed=[],
    )
    outcome.missed.extend(_missed(comparison, outcome))
    return outcome


def _transcribe_clips(
    recognizer: Recognizer, clips: Sequence[Clip], comparison: Comparison, data: Path
) -> list[list[str]]:
    """Texts by seed and clip. A clip for which no sample was drawn is not transcribed again for the next seed."""
    texts: list[dict[str, str]] = []
    remaining = list(clips)
    for seed in comparison.seeds:
        options = _options(comparison, seed)
        found = _run(recognizer, [clip.path(data) for clip in remaining], options)
        now = dict(texts[-1]) if texts else {}
        now |= {clip.audio: found[clip.path(data)].text.strip() for clip in remaining}
        remaining = [clip for clip in remaining if _drew_samples(found[clip.path(data)], options)]
        texts.append(now)
    return [[of_seed[clip.audio] for clip in clips] for of_seed in texts]


def _transcribe_joined(recognizer: Recognizer, clips: Sequence[Clip], comparison: Comparison, data: Path) -> str:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "joined.wav"
        join_clips(clips, path, gap_seconds=0.5, data=data)
        return _run(recognizer, [path], _options(comparison, 0))[path].text.strip()


def _options(comparison: Comparison, seed: int) -> TranscribeOptions:
    return TranscribeOptions(language=comparison.language, seed=seed, **comparison.options)  # type: ignore[arg-type]


def _run(recognizer: Recognizer, paths: Sequence[Path], options: TranscribeOptions) -> dict[Path, Transcript]:
    transcripts = {}
    for transcript in recognizer.transcribe_many([str(path) for path in paths], options):
        if transcript.error is not None:
            raise RuntimeError(f"{transcript.path}: {transcript.error}")
        transcripts[Path(transcript.path or "")] = transcript
    return transcripts


def _drew_samples(transcript: Transcript, options: TranscribeOptions) -> bool:
    """Whether the text can depend on the seed: an attempt at temperature 0 failed, or nothing tells that none did."""
    if not options.temperature_increment_on_fallback:
        return False
    return not transcript.segments or any(
        segment.temperature > 0
        or segment.avg_logprob < (options.logprob_threshold or -1.0)
        or segment.compression_ratio > (options.compression_ratio_threshold or 2.4)
        for segment in transcript.segments
    )


def _missed(comparison: Comparison, outcome: Outcome) -> list[str]:
    missed = []
    gap = outcome.wer_ours - outcome.wer_reference
    if comparison.least_identical is not None and outcome.identical is not None:
        share = 100.0 * outcome.identical / outcome.clips
        if share < comparison.least_identical:
            missed.append(f"{share:.2f} % identical texts, at least {comparison.least_identical} % are needed")
    if comparison.most_wer_apart is not None and abs(gap) > comparison.most_wer_apart:
        missed.append(f"WER {gap:+.2f} from the reference's, at most ±{comparison.most_wer_apart} is allowed")
    if comparison.most_wer_above is not None and gap > comparison.most_wer_above:
        missed.append(f"WER {gap:+.2f} from the reference's, at most +{comparison.most_wer_above} is allowed")
    if comparison.most_words is not None and outcome.differing_words > comparison.most_words:
        missed.append(f"{outcome.differing_words} words differ, at most {comparison.most_words} may")
    return missed


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def show(outcome: Outcome, language: str, list_differing: bool) -> None:
    """Print one outcome, and where the texts part if asked."""
    same = "" if outcome.identical is None else f"{100 * outcome.identical / outcome.clips:6.2f} % identical, "
    seeds = f" (seeds {', '.join(f'{rate:.2f}' for rate in outcome.wer_of_seeds)})" if outcome.wer_of_seeds[1:] else ""
    print(
        f"{outcome.name}: {outcome.clips} clips, {same}WER reference {outcome.wer_reference:.2f} %, ours "
        f"{outcome.wer_ours:.2f} %{seeds}, {outcome.wer_ours - outcome.wer_reference:+.2f}; "
        f"{outcome.differing_words} words differ; {outcome.seconds:.0f} s; "
        + ("; ".join(f"MISSED: {what}" for what in outcome.missed) or "reached")
    )
    if list_differing:
        for audio, theirs, ours in outcome.differing:
            print(f"  {audio}")
            for their_words, our_words in differing_words(theirs, ours, language):
                print(f"    {their_words!r} -> {our_words!r}")


def differing_words(theirs: str, ours: str, language: str) -> list[tuple[str, str]]:
    """The stretches of words in which two texts differ; of the raw texts where they normalise to the same words."""
    a, b = normalise(theirs, language).split(), normalise(ours, language).split()
    if a == b:
        a, b = theirs.split(), ours.split()
    blocks = SequenceMatcher(None, a, b, autojunk=False).get_opcodes()
    return [(" ".join(a[i:j]), " ".join(b[k:m])) for kind, i, j, k, m in blocks if kind != "equal"]


def main() -> int:
    """Parse the command line, compare, print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--set", nargs="+", choices=[*GROUPS, *COMPARISONS], required=True, dest="names")
    parser.add_argument("--limit", type=int, help="only the first clips of every set")
    parser.add_argument("--list", action="store_true", help="print where the texts differ")
    parser.add_argument("--json", type=Path, help="write the outcomes here as well")
    parser.add_argument("--data", type=Path, default=DATA, help="folder of the recordings (default: %(default)s)")
    parser.add_argument("--device", default="cpu", help="device for stapes (default: %(default)s)")
    parser.add_argument("--precision", default="fp32", help="precision for stapes (default: %(default)s)")
    parser.add_argument("--model", help="folder to load in place of the model that a set names")
    arguments = parser.parse_args()

    names = list(dict.fromkeys(name for given in arguments.names for name in GROUPS.get(given, [given])))
    outcomes = []
    for model in dict.fromkeys(COMPARISONS[name].model for name in names):
        recognizer = stapes.load(arguments.model or model, device=arguments.device, precision=arguments.precision)
        try:
            for name in (name for name in names if COMPARISONS[name].model == model):
                outcomes.append(compare(name, recognizer, arguments.data, arguments.limit))
                show(outcomes[-1], COMPARISONS[name].language, arguments.list)
        finally:
            recognizer.close()
    plain = [outcome for outcome in outcomes if outcome.name in GROUPS["plain"]]
    if len(plain) > 1:
        clips, same = sum(outcome.clips for outcome in plain), sum(outcome.identical or 0 for outcome in plain)
        print(f"plain sets together: {same} of {clips} texts identical, {100 * same / clips:.2f} %")
    if arguments.json:
        rows = [asdict(outcome) for outcome in outcomes]
        arguments.json.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    return 1 if any(outcome.missed for outcome in outcomes) else 0


if __name__ == "__main__":
    raise SystemExit(main())
