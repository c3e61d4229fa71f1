"""What Whisper is to write for an utterance: the decoder's whole text, from the prompt to its end.

    <|startofprev|> prompt <|startoftranscript|> <|language|> <|transcribe|> <|notimestamps|> text <|endoftext|>
    <|startoftranscript|> <|language|> <|transcribe|> <|0.32|> text <|2.80|> <|2.80|> more <|4.10|> <|endoftext|>

The loss is on all that follows <|startoftranscript|> (Radford et al. 2022, 2.3). Where times are wanted and the
manifest has none, a text stands between two times that are left open: the model is told that a time comes here, and not
which.
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path

from stapes.data.manifest import Manifest, Utterance
from stapes.data.seeds import uniform
from stapes.errors import UsageError
from stapes.text.tokenizers import (
    LANGUAGES_WITHOUT_SPACES,
    TIMESTAMP_COUNT,
    TIMESTAMP_STEP,
    WhisperTokenizer,
    language_label,
)
from stapes.training.config import LabelOptions

_TIMED, _PROMPTED = 1, 2  # what a draw is for


class WhisperLabels:
    """Writes and reads labels of one model; implements `stapes.data.batching.UtteranceEncoder`.

    A time that is left open is written as its token's id plus ``size``.

    Args:
        tokenizer: of the model.
        file: its ``tokenizer.json``.
        text_context: tokens that the decoder has positions for.
        reused: languages without a token of their own → the language whose token they take over.
        is_training: False: neither times nor prompts, as the result is judged by its words.
    """

    def __init__(
        self,
        tokenizer: WhisperTokenizer,
        file: Path,
        text_context: int,
        options: LabelOptions,
        reused: Mapping[str, str] | None = None,
        *,
        is_training: bool = True,
    ) -> None:
        self.tokenizer, self.file, self.text_context = tokenizer, file, text_context
        self.options, self.reused, self.is_training = options, dict(reused or {}), is_training
        self.size = tokenizer.vocab_size
        for code, other in self.reused.items():
            if not tokenizer.is_multilingual or other not in tokenizer.language_ids:
                raise UsageError(f"model.language_tokens: the model has no token of {other!r} that {code!r} could take")
            if code in tokenizer.language_ids:
                raise UsageError(f"model.language_tokens: the model has a token for {code!r}: leave it out")

    @property
    def languages(self) -> tuple[str, ...]:
        """What the model can be told to write, and ``?`` for what it was not told."""
        return (*(self.tokenizer.language_ids or ("en",)), *self.reused, "?")

    @property
    def leaves_open(self) -> bool:
        """Whether there may be times that are left open."""
        return self.options.untimed == "any" and self.options.timestamps > 0

    def for_dev(self) -> WhisperLabels:
        """The same without times and prompts."""
        return WhisperLabels(self.tokenizer, self.file, self.text_context, self.options, self.reused, is_training=False)

    def encode_utterance(self, manifest: Manifest, number: int, key: int, speed: float = 1.0) -> list[int]:
        """The decoder's text, with the times that it has at that speed.

        Raises UsageError, naming the utterance, where it is too long or in no known language.
        """
        utterance, options, tokenizer = manifest[number], self.options, self.tokenizer
        timed = self.is_training and uniform(key, _TIMED) < options.timestamps
        timed = timed and (bool(utterance.segments) or options.untimed == "any")
        start = tokenizer.start_sequence(self._language(utterance), options.task, without_timestamps=not timed)
        written = [*start, *(self._timed(utterance, speed) if timed else self._text(utterance.text)), tokenizer.eot]
        if len(written) > self.text_context:
            raise UsageError(
                f"{utterance.id}: its text is {len(written)} tokens, and the decoder writes at most "
                f"{self.text_context}: cut it into shorter ones"
            )
        if self.is_training and number and uniform(key, _PROMPTED) < options.prompts:
            return [*self._prompt(manifest[number - 1], utterance, self.text_context - len(written)), *written]
        return written

    def _language(self, utterance: Utterance) -> str | None:
        """A language that the tokenizer knows; None for models of English alone."""
        if not self.tokenizer.is_multilingual:
            return None
        said = utterance.language or self.options.language
        if said is None:
            raise UsageError(f"{utterance.id}: its language is not known: set labels.language")
        code = self.code(said)
        if code not in self.tokenizer.language_ids:
            raise UsageError(
                f"{utterance.id}: the model has no token for its language {said!r}: let it take over that of one that "
                f"is like it, --set model.language_tokens.{said}=…"
            )
        return code

    def code(self, language: str) -> str:
        """The code of a language whose token stands for it: en for en-US, cs for hsb where that is reused."""
        for said in (language, language.replace("_", "-").partition("-")[0]):
            said = language_label(self.reused.get(said, said)) or said
            if said in self.tokenizer.language_ids:
                return said
        return language

    def _text(self, text: str) -> list[int]:
        return self.tokenizer.encode(f" {text.strip()}") if text.strip() else []

    def _timed(self, utterance: Utterance, speed: float) -> list[int]:
        """Times and texts, by turns."""
        if not utterance.segments:
            text = self._text(utterance.text)
            end = self.size + self._time(utterance.duration / speed)
            return [self.size + self._time(0.0), *text, end] if text else []
        ids: list[int] = []
        latest = 0.0
        for start, end, text in utterance.segments:
            start = max(latest, float(start) / speed)  # times never go back
            latest = max(start, float(end) / speed)
            ids += [self._time(start), *self._text(str(text)), self._time(latest)]
        return ids

    def _time(self, seconds: float) -> int:
        return self.tokenizer.timestamp_begin + min(TIMESTAMP_COUNT - 1, max(0, round(seconds / TIMESTAMP_STEP)))

    def _prompt(self, before: Utterance, utterance: Utterance, room: int) -> list[int]:
        """What was said before: as much of its end as there is room for, at most half of the decoder's text."""
        same_speaker = before.speaker is not None and before.speaker == utterance.speaker
        related = same_speaker or before.audio == utterance.audio
        most = min(room, self.text_context // 2) - 1
        text = self._text(before.text) if related else []
        return [self.tokenizer.sot_prev, *text[-most:]] if text and most > 0 else []

    def decode(self, ids: Sequence[int]) -> str:
        """The words of a label, or of what the model wrote: without prompt, markers and times."""
        ids = list(ids)
        if self.tokenizer.sot in ids:
            ids = ids[ids.index(self.tokenizer.sot) :]
        return self.tokenizer.decode(ids).strip()

    def units(self, text: str, language: str | None) -> str:
        """A text as words that can be counted: characters apart, where a language has no spaces."""
        if language is None or self.code(language) not in LANGUAGES_WITHOUT_SPACES:
            return text
        return " ".join("".join(text.split()))

    def save(self, folder: Path) -> None:
        """Keep the tokenizer in ``folder``."""
        shutil.copyfile(self.file, folder / "tokenizer.json")
