"""On a GPU itself: beam search and alignment by kernels are those of plain PyTorch."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from stapes.decoding import ctc_beam
from stapes.decoding.ctc_align import align
from stapes.decoding.ctc_align_stream import StreamAligner
from stapes.decoding.ctc_beam import Fusion, Hypothesis, PrefixBeamSearch
from stapes.decoding.ctc_fusion import Hotwords, TokenNGram, WordNGram
from stapes.decoding.ngram import NGramModel, read_arpa
from stapes.decoding.ngram_estimate import estimate, write_arpa
from stapes.kernels import jit
from stapes.text.ctc_tokenizer import CTCTokenizer

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

GPU = torch.device("cuda")
TOKENS = ["<pad>", "<s>", "</s>", "<unk>", "|", *"ETAOINSHRDLCUMWFGYPBVKXJQZ'"]
LETTERS = CTCTokenizer({token: id for id, token in enumerate(TOKENS)})
WORDS = ["THE", "CAT", "SAT", "ON", "MAT", "A", "DOG", "IN", "RAIN", "SO", "IT'S"]


def speech(seed: int, rows: int, frames: int) -> torch.Tensor:
    """What a model says of random words: peaks among blanks, some of them wrong; (rows, frames, labels) float32."""
    draw = np.random.default_rng(seed)
    logits = draw.normal(scale=1.2, size=(rows, frames, LETTERS.size)).astype(np.float32)
    for row in range(rows):
        text = "|".join(draw.choice(WORDS, size=frames // 8))
        labels = np.zeros(frames, dtype=int)
        for place, letter in enumerate(text[: frames // 3]):
            labels[3 * place : 3 * place + int(draw.integers(1, 3))] = LETTERS.vocabulary[letter]
        wrong = draw.random(frames) < 0.05
        labels[wrong] = draw.integers(4, LETTERS.size, int(wrong.sum()))
        logits[row, np.arange(frames), labels] += 8.0 * draw.uniform(0.5, 1.0, frames)
    return torch.from_numpy(logits).log_softmax(-1)


def build(folder: Path, text: list[list[str]], order: int) -> NGramModel:
    write_arpa(estimate(text, order), folder / "model.arpa")
    return read_arpa(folder / "model.arpa")


def fusions_for(name: str, folder: Path) -> list[Fusion]:
    draw = np.random.default_rng(0)
    rare = ["".join(draw.choice(list("ETAOINSHRDL"), size=int(draw.integers(1, 7)))) for _ in range(2000)]
    text = [draw.choice([*WORDS * 40, *rare], size=6).tolist() for _ in range(1000)]
    each: dict[str, list[Fusion]] = {
        "none": [],
        "words": [WordNGram(build(folder, text, 3), LETTERS, device=GPU)],
        "letters": [TokenNGram(build(folder, [list("|".join(words)) for words in text], 5), LETTERS, device=GPU)],
        "hotwords": [
            Hotwords(["RAIN", "THE DOG"], LETTERS, device=GPU),
            WordNGram(build(folder, text, 2), LETTERS, unknown_score=-9.0, device=GPU),
        ],
    }
    return each[name]


@pytest.mark.parametrize("name", ["none", "words", "letters", "hotwords"])
@pytest.mark.parametrize(("beam", "tokens"), [(32, None), (20, 12), (60, None)])
def test_the_kernel_finds_what_plain_pytorch_finds(
    name: str, beam: int, tokens: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = PrefixBeamSearch(0, beam, tokens, fusions_for(name, tmp_path), banned=[1, 2, 3])
    log_probs, lengths = speech(beam, 6, 120).to(GPU), torch.tensor([120, 1, 0, 77, 119, 64], device=GPU)

    def run() -> list[list[Hypothesis]]:
        state = search.start(6, GPU)
        for first in (0, 60):
            part = (lengths - first).clamp(0, 60)
            search.advance(state, log_probs[:, first : first + 60], part)
        return search.finish(state, n_best=3)

    found = run()
    assert not {name for name, _ in jit.refusals if name.startswith("ctc")}
    monkeypatch.setattr(ctc_beam, "can_launch", lambda device: False)
    wanted = run()
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine[0].tokens == theirs[0].tokens
        assert mine[0].frames == theirs[0].frames
        np.testing.assert_allclose([h.score for h in mine], [h.score for h in theirs], atol=2e-3)


def test_alignment_is_that_of_the_cpu() -> None:
    log_probs = speech(1, 4, 300)
    lengths = [300, 120, 7, 299]
    texts = [LETTERS.encode("THE|CAT|SAT|ON|THE|MAT" * 3), LETTERS.encode("IT'S"), [], LETTERS.encode("A|DOG")]
    found = align(log_probs.to(GPU), lengths, texts, blank=0)
    wanted = align(log_probs, lengths, texts, blank=0)
    for mine, theirs in zip(found, wanted, strict=True):
        assert mine.logprob == pytest.approx(theirs.logprob, rel=1e-5)
        assert [token[:3] for token in mine.tokens] == [token[:3] for token in theirs.tokens]


def test_a_recording_is_aligned_as_it_comes() -> None:
    log_probs = speech(2, 1, 4000)[0]
    (best,) = PrefixBeamSearch(0, 1)(log_probs[None], torch.tensor([4000]))
    ids = best[0].tokens
    (wanted,) = align(log_probs[None], [4000], [ids], blank=0)
    for frames in (None, 4000):
        aligner = StreamAligner(ids, 0, LETTERS.size, frames=frames, band=512, span=1024)
        for part in log_probs.to(GPU).split(300):
            aligner.feed(part)
        found = aligner.finish()
        assert found.logprob == pytest.approx(wanted.logprob, rel=1e-5)
        assert [token[:3] for token in found.tokens] == [token[:3] for token in wanted.tokens]
    assert not {name for name, _ in jit.refusals if name.startswith("ctc")}
