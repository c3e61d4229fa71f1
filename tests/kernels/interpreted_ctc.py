"""Run in Triton's interpreter by test_interpreted.py: CTC's kernels equal what they stand in for."""

from __future__ import annotations

from collections import defaultdict
from itertools import product
from math import exp, log
from pathlib import Path

import numpy as np
import pytest
import torch

from stapes.decoding import ctc_beam
from stapes.decoding.ctc_beam import Fusion, Hypothesis, PrefixBeamSearch
from stapes.decoding.ctc_fusion import Hotwords, TokenNGram, WordNGram
from stapes.decoding.ngram import NGramModel, read_arpa
from stapes.decoding.ngram_estimate import estimate, write_arpa
from stapes.kernels import ctc_viterbi
from stapes.kernels.ctc_viterbi import launch_trace, launch_viterbi, trace_reference, viterbi_reference
from stapes.text.ctc_tokenizer import CTCTokenizer

LETTERS = CTCTokenizer({"<pad>": 0, "|": 1, "A": 2, "B": 3}, unknown=None, start=None, end=None)


def random_log_probs(seed: int, rows: int, frames: int, size: int) -> torch.Tensor:
    draw = np.random.default_rng(seed)
    return torch.from_numpy(draw.normal(scale=2.0, size=(rows, frames, size))).log_softmax(-1).float()


def build(folder: Path, text: list[list[str]], order: int) -> NGramModel:
    write_arpa(estimate(text, order), folder / "model.arpa")
    return read_arpa(folder / "model.arpa")


def fusions_for(name: str, folder: Path) -> list[Fusion]:
    draw = np.random.default_rng(0)
    some = ["".join(draw.choice(["A", "B"], size=int(draw.integers(1, 5)))) for _ in range(60)]
    words = build(folder, [some[place : place + 6] for place in range(0, 60, 6)], 3)
    tokens = build(folder, [["A", "|", "A", "B"], ["B", "A"]], 3)
    each: dict[str, list[Fusion]] = {
        "none": [],
        "words": [WordNGram(words, LETTERS)],
        "unknown words": [WordNGram(words, LETTERS, unknown_score=-6.0)],
        "expected words": [Hotwords(["AB A", "BB"], LETTERS), WordNGram(words, LETTERS)],
        "tokens": [TokenNGram(tokens, LETTERS), Hotwords(["AB A", "BB"], LETTERS)],
    }
    return each[name]


def heard(search: PrefixBeamSearch, windows: list[tuple[torch.Tensor, torch.Tensor]]) -> list[list[Hypothesis]]:
    state = search.start(len(windows[0][0]), torch.device("cpu"))
    for log_probs, lengths in windows:
        search.advance(state, log_probs, lengths)
    return search.finish(state, n_best=search.beam_size)


@pytest.mark.parametrize("name", ["none", "words", "unknown words", "expected words", "tokens"])
@pytest.mark.parametrize(("beam", "tokens"), [(5, None), (4, 2)])
def test_the_beam_is_that_of_plain_pytorch(
    name: str, beam: int, tokens: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    search = PrefixBeamSearch(0, beam, tokens_per_frame=tokens, fusions=fusions_for(name, tmp_path))
    windows = [
        (random_log_probs(1, 3, 6, 4), torch.tensor([6, 2, 4])),
        (random_log_probs(2, 3, 4, 4), torch.tensor([4, 0, 1])),
    ]
    launches = []
    launch = ctc_beam.launch_beam
    monkeypatch.setattr(ctc_beam, "launch_beam", lambda *given: launches.append(1) or launch(*given))
    found = heard(search, windows)
    assert len(launches) == 2
    monkeypatch.setattr(ctc_beam, "can_launch", lambda device: False)
    wanted = heard(search, windows)
    assert len(launches) == 2
    for mine, theirs in zip(found, wanted, strict=True):
        assert [(h.tokens, h.frames) for h in mine] == [(h.tokens, h.frames) for h in theirs]
        np.testing.assert_allclose([h.score for h in mine], [h.score for h in theirs], atol=1e-4)
        np.testing.assert_allclose([h.acoustic for h in mine], [h.acoustic for h in theirs], atol=1e-4)


def test_a_beam_for_everything_finds_every_text() -> None:
    log_probs = random_log_probs(3, 1, 3, 3)
    expected: defaultdict[tuple[int, ...], float] = defaultdict(float)
    for path in product(range(3), repeat=3):
        text = tuple(b for a, b in zip((1, *path), path, strict=False) if a != b and b != 1)
        expected[text] += exp(sum(log_probs[0, frame, label].item() for frame, label in enumerate(path)))
    found = PrefixBeamSearch(1, 16)(log_probs, torch.tensor([3]), n_best=16)[0]
    assert {tuple(h.tokens) for h in found} == expected.keys()
    for hypothesis in found:
        assert hypothesis.score == pytest.approx(log(expected[tuple(hypothesis.tokens)]), abs=1e-4)


@pytest.mark.parametrize("beam", [5, 8])
def test_of_texts_that_are_equally_likely_as_many_are_kept_as_there_is_room_for(beam: int) -> None:
    log_probs = torch.full((1, 4, 4), 0.25).log()
    found = PrefixBeamSearch(0, beam)(log_probs, torch.tensor([4]), n_best=beam)[0]
    texts = [tuple(hypothesis.tokens) for hypothesis in found]
    assert len(set(texts)) == beam
    exact = PrefixBeamSearch(0, 400)(log_probs.double(), torch.tensor([4]), n_best=400)[0]
    scores = {tuple(hypothesis.tokens): hypothesis.score for hypothesis in exact}
    assert all(hypothesis.score <= scores[text] + 1e-5 for hypothesis, text in zip(found, texts, strict=True))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("states", [1, 9, 33])
def test_viterbi(states: int, keep: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ctc_viterbi, "_BLOCK", 16)
    draw = torch.Generator().manual_seed(states)
    begin = torch.randn(3, states, generator=draw).masked_fill_(torch.rand(3, states, generator=draw) < 0.3, -np.inf)
    emissions = torch.randn(3, 9, 5, generator=draw)
    labels = torch.randint(5, (3, states), generator=draw)
    skip = torch.where(torch.rand(3, states, generator=draw) < 0.5, 0.0, -np.inf)
    for stretch in (range(8), range(3, 8), range(0)):
        given = (begin, emissions, [8, 5, 2], labels, skip, stretch, keep)
        for mine, theirs in zip(launch_viterbi(*given), viterbi_reference(*given), strict=True):
            assert torch.equal(mine, theirs)


@pytest.mark.parametrize("paths", [1, 200])
@pytest.mark.parametrize("keep", [False, True])
def test_paths_back(paths: int, keep: bool) -> None:
    draw = torch.Generator().manual_seed(paths)
    choices = torch.randint(3, (7, 2, 40), generator=draw, dtype=torch.uint8)
    places = torch.randint(14, 40, (2, paths), generator=draw, dtype=torch.int32)
    for mine, theirs in zip(launch_trace(choices, places, keep), trace_reference(choices, places, keep), strict=True):
        assert torch.equal(mine, theirs)
