"""stapes writes what the reference implementations wrote, and is no worse where it decodes in its own way.

By default a few clips; everything with ``pytest tests/accuracy --accuracy`` (about an hour on two cores).
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from compare import COMPARISONS, GROUPS, Outcome, compare, differing_words
from corpora import read_references, select_clips, texts_of_seed
from make_references import SETS
from scoring import normalise, word_errors

import stapes
from stapes.recognizer import Recognizer


@pytest.fixture(scope="module")
def recognizer(request: pytest.FixtureRequest) -> Iterator[Recognizer]:
    opened = stapes.load(request.param, device="cpu", precision="fp32")
    yield opened
    opened.close()


def explain(outcome: Outcome) -> str:
    language = COMPARISONS[outcome.name].language
    lines = [f"{audio}: {differing_words(theirs, ours, language)}" for audio, theirs, ours in outcome.differing]
    return "\n".join([*outcome.missed, *lines])


@pytest.mark.data
@pytest.mark.parametrize("recognizer", ["tiny.en"], indirect=True)
def test_the_first_clips_have_the_texts_of_transformers(recognizer: Recognizer) -> None:
    outcome = compare("librispeech-tiny.en", recognizer, limit=12)
    assert outcome.identical == 12, explain(outcome)


@pytest.mark.data
@pytest.mark.accuracy
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(
    ("recognizer", "name"),
    [(COMPARISONS[name].model, name) for name in sorted(COMPARISONS, key=lambda name: COMPARISONS[name].model)],
    indirect=["recognizer"],
)
def test_set_reaches_its_reference(recognizer: Recognizer, name: str) -> None:
    outcome = compare(name, recognizer)
    assert not outcome.missed, explain(outcome)


@pytest.mark.data
@pytest.mark.accuracy
@pytest.mark.parametrize("recognizer", ["base"], indirect=True)
def test_languages_together_have_the_texts_of_transformers(recognizer: Recognizer) -> None:
    outcomes = [compare(name, recognizer) for name in GROUPS["asterisk"]]
    identical = sum(outcome.identical or 0 for outcome in outcomes)
    assert identical >= 0.995 * sum(outcome.clips for outcome in outcomes), "\n".join(map(explain, outcomes))


@pytest.mark.data
@pytest.mark.parametrize("name", SETS)
def test_references_hold_every_clip_once_for_each_seed(name: str) -> None:
    references = read_references(name)
    clips = [clip.audio for clip in select_clips(SETS[name].dataset)]
    for seed in SETS[name].seeds:
        assert list(texts_of_seed(references, seed)) == clips
    assert len({(r.audio, r.seed) for r in references}) == len(references)


def test_scores_forget_case_numerals_and_spelling_but_not_words() -> None:
    spoken = ["MISTER SMITH'S COLOUR IS TWENTY ONE", "no"]
    assert word_errors(spoken, ["Mr. Smith's color is 21.", "No!"], "en").errors == 0
    errors = word_errors(spoken, ["Mr. Smith's color 21 too.", ""], "en")
    assert (errors.errors, errors.words) == (3, 7)
    assert normalise("¿Qué tal?", "es") == "qué tal"
