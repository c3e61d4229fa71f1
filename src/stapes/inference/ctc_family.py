"""CTC models as a `Family`: one language, or one of many; greedy, or beam search with what speaks for a text."""

from __future__ import annotations

import threading
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from stapes.decoding.ngram import NGramModel, read_arpa
from stapes.errors import UsageError
from stapes.inference.ctc_model import CTCModel
from stapes.inference.ctc_recording import CTCRecording, CTCTask
from stapes.inference.ctc_search import DEFAULT_BEAM, Search, fusions
from stapes.inference.feed import FeedMaker
from stapes.inference.torch_ctc import TorchCTCEngine
from stapes.options import TranscribeOptions
from stapes.text.tokenizers import language_label

_LEAVE_OUT = "leave it out, or use a Whisper"
_NOT_ANY_MORE = "leave it out: it does not draw samples, try again or judge its text"
_USELESS: dict[str, tuple[tuple[Any, ...], str]] = {
    # The option → values that say what is done anyway, and the remedy for any other.
    "task": (("transcribe",), "translation needs a multilingual Whisper, such as medium"),
    "without_timestamps": ((False,), "leave it out: times cost nothing here"),
    "condition_on_previous_text": ((False,), _LEAVE_OUT),
    "temperature": ((0.0,), _NOT_ANY_MORE),
    "temperature_increment_on_fallback": ((0.2, 0.0, None), _NOT_ANY_MORE),
    "best_of": ((5,), "say --beam-size and --n-best instead"),
    "patience": ((1.0,), "leave it out: its beam search ends with the recording"),
    "length_penalty": ((None,), "leave it out: its beam search needs none"),
    "initial_prompt": ((None,), "say --hotwords for words to expect, or --lm for a language model"),
    "carry_initial_prompt": ((False,), "say --hotwords for words to expect, or --lm for a language model"),
    "compression_ratio_threshold": ((2.4, None), _NOT_ANY_MORE),
    "logprob_threshold": ((-1.0, None), _NOT_ANY_MORE),
    "no_speech_threshold": ((0.6, None), "leave it out: silence is found by --vad"),
    "hallucination_silence_threshold": ((None,), "leave it out: silence is found by --vad"),
    "suppress_tokens": (("-1", ""), _LEAVE_OUT),
}


class CTCFamily:
    """A CTC model and its engine."""

    replays = True

    def __init__(self, name: str, model: CTCModel, engine: TorchCTCEngine, config: Any, parameters: int) -> None:
        self.name, self.model, self.engine = name, model, engine
        self.config, self.parameters = config, parameters
        self.tokenizer = model.tokenizer_for(None)
        self._lock = threading.Lock()
        self._searches: dict[Any, Search] = {}

    def can_be_told(self, language: str) -> bool:
        return not self.model.languages or language in self.model.languages

    def check(self, options: TranscribeOptions) -> TranscribeOptions:
        for option, (values, remedy) in _USELESS.items():
            if getattr(options, option) not in values:
                raise UsageError(f"--{option.replace('_', '-')} does not work with CTC models ({self.name}): {remedy}")
        if options.lm is None and options.lm_weight != TranscribeOptions().lm_weight:
            raise UsageError("--lm-weight needs --lm FILE.arpa, the language model that it weighs")
        if self.model.languages:
            self.model.tokenizer_for(options.language)
            return options
        return replace(options, language=language_label(options.language))

    def feeds(self, options: TranscribeOptions) -> FeedMaker:
        adapter = options.language if self.model.languages else None
        tokenizer = self.model.tokenizer_for(adapter)
        task = CTCTask(
            model=self.model,
            tokenizer=tokenizer,
            adapter=adapter,
            language=options.language or tokenizer.language,
            search=self.search(options, adapter),
            vad=options.vad,
            word_timestamps=options.word_timestamps,
        )
        return partial(CTCRecording, task)

    def search(self, options: TranscribeOptions, adapter: str | None) -> Search | None:
        """The beam search that the options ask for; made once for all calls that ask for the same."""
        hotwords = _phrases(options.hotwords)
        if options.beam_size == 1 and options.n_best == 1 and options.lm is None and not hotwords:
            return None
        beam = options.beam_size if options.beam_size > 1 else DEFAULT_BEAM
        beam = max(beam, options.n_best)
        key = (adapter, beam, options.n_best, _stamp(options.lm), options.lm_weight, hotwords)
        with self._lock:
            if key not in self._searches:
                tokenizer = self.model.tokenizer_for(adapter)
                lm: NGramModel | None = None if options.lm is None else read_arpa(options.lm)
                spoken_for = fusions(tokenizer, self.model.device, lm, options.lm_weight, hotwords)
                # One at a time: language models are large.
                self._searches = {key: Search(tokenizer, beam, options.n_best, spoken_for)}
            return self._searches[key]


def _phrases(hotwords: str | None) -> tuple[str, ...]:
    """Phrases that commas part; where there is no comma, words."""
    parts = (hotwords or "").split("," if "," in (hotwords or "") else None)
    return tuple(part.strip() for part in parts if part.strip())


def _stamp(lm: str | None) -> Any:
    """What changes when the file does."""
    if lm is None:
        return None
    try:
        status = Path(lm).stat()
    except OSError:  # reading it will say what is wrong
        return lm
    return lm, status.st_mtime_ns, status.st_size
