"""Errors on dev utterances, in all and by language: what a model gains in one language it may lose in another."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from stapes.training.metrics import TextScores


class LanguageScores:
    """Implements `stapes.training.metrics.DevScores`.

    languages: those that there may be; the last stands for any other.
    """

    def __init__(self, languages: Sequence[str]) -> None:
        self.all = TextScores()
        self.languages = {language: TextScores() for language in languages}
        self._other = languages[-1]

    def add(self, language: str | None, reference: str, hypothesis: str) -> None:
        """Count one utterance."""
        said = (language or "").partition("-")[0]
        known = next((name for name in (language, said) if name in self.languages), self._other)
        self.all.add(reference, hypothesis)
        self.languages[known].add(reference, hypothesis)

    def add_loss(self, loss: float, units: float) -> None:
        """Count a batch's loss."""
        self.all.loss += loss
        self.all.units += units

    @property
    def score(self) -> float:
        """The word error rate."""
        return self.all.wer

    def figures(self) -> dict[str, float]:
        """For the log: each language's own rates where there are several."""
        out = self.all.figures()
        heard = {language: scores for language, scores in self.languages.items() if scores.words}
        for language, scores in heard.items() if len(heard) > 1 else ():
            out |= {f"wer_{language}": scores.wer, f"cer_{language}": scores.cer}
        return out

    def text(self) -> str:
        """For people."""
        return self.all.text()

    def tensor(self) -> Tensor:
        """For summing over the processes."""
        return torch.stack([self.all.tensor(), *(scores.tensor() for scores in self.languages.values())])

    def of(self, tensor: Tensor) -> LanguageScores:
        """The other way round."""
        made = LanguageScores(tuple(self.languages))
        made.all = TextScores.of(tensor[0])
        made.languages = {name: TextScores.of(row) for name, row in zip(self.languages, tensor[1:], strict=True)}
        return made
