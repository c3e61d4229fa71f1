"""What a client may ask of a live session, in both shapes, is what the session does and what it says it does."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stapes.options import TranscribeOptions, TurnOptions
from stapes.serving.failures import ApiError
from stapes.serving.realtime_settings import LiveSettings
from stapes.serving.served import Served

SERVED = Served(["base", "tiny.en"])
PLAIN = LiveSettings(model="base")
LOGPROBS = "item.input_audio_transcription.logprobs"


def present(**given: Any) -> LiveSettings:
    return PLAIN.updated({"type": "transcription", "audio": {"input": given}}, SERVED, is_beta=False)


def beta(**given: Any) -> LiveSettings:
    return PLAIN.updated(given, SERVED, is_beta=True)


@pytest.mark.parametrize(
    ("format", "kept"),
    [
        ({"type": "audio/pcm"}, ("pcm16", 24_000, 48_000)),
        ({"type": "audio/pcm", "rate": 24_000}, ("pcm16", 24_000, 48_000)),
        ({"type": "audio/pcm", "rate": 16_000}, ("pcm16", 16_000, 32_000)),
        ({"type": "audio/pcmu"}, ("g711_ulaw", 8_000, 8_000)),
        ({"type": "audio/pcma"}, ("g711_alaw", 8_000, 8_000)),
    ],
)
def test_formats(format: dict[str, Any], kept: tuple[str, int, int]):
    settings = present(format=format)
    assert (settings.format, settings.rate, settings.bytes_per_second) == kept
    said = settings.describe("sess_1", 0, 0)["audio"]["input"]["format"]
    assert present(format=said) == settings
    old = beta(input_audio_format=kept[0])
    assert old.format == kept[0]
    assert old.is_beta


def test_transcription():
    asked = {"model": "gpt-4o-transcribe", "language": "de", "prompt": "Umlaute", "keywords": ["Zürich", "Bern"]}
    settings = present(transcription=asked)
    assert settings.options == {"language": "de", "initial_prompt": "Umlaute", "hotwords": "Zürich, Bern"}
    assert settings.describe("sess_1", 0, 0)["audio"]["input"]["transcription"] == asked
    assert present(transcription={"languages": ["fr"]}).language == "fr"
    assert present(transcription={"languages": ["fr", "de"]}).language is None  # found out
    assert beta(input_audio_transcription={"model": "tiny.en"}).model == "tiny.en"


@pytest.mark.parametrize(
    ("asked", "turns"),
    [
        (None, TurnOptions(manual=True)),
        ({"type": "server_vad"}, TurnOptions()),
        (
            {"type": "server_vad", "threshold": 0.3, "prefix_padding_ms": 100, "silence_duration_ms": 250.0},
            TurnOptions(threshold=0.3, prefix_padding_ms=100, silence_duration_ms=250),
        ),
        ({"type": "semantic_vad", "eagerness": "high"}, TurnOptions(silence_duration_ms=300)),
    ],
)
def test_turn_detection(asked: Any, turns: TurnOptions):
    for both in (present(turn_detection=asked), beta(turn_detection=asked)):
        assert both.turns == turns
        assert TurnOptions(**both.turn_options) == turns
    back = present(turn_detection=asked).updated(
        {"audio": {"input": {"turn_detection": {"type": "server_vad"}}}}, SERVED, is_beta=False
    )
    assert not back.turns.manual


def test_what_is_not_named_stays():
    settings = present(transcription={"language": "de"}, turn_detection=None)
    further = settings.updated({"include": [LOGPROBS]}, SERVED, is_beta=False)
    assert (further.language, further.turns.manual, further.logprobs) == ("de", True, True)
    assert not further.needs_anew(settings)
    assert further.needs_anew(present(transcription={"language": "en"}))


@pytest.mark.parametrize(
    ("given", "param"),
    [
        ({"format": {"type": "audio/pcm", "rate": 44_100}}, "session.audio.input.format.rate"),
        ({"format": "pcm16"}, "session.audio.input.format.type"),
        ({"transcription": {"prompt": "x" * 5000}}, "session.audio.input.transcription.prompt"),
        ({"transcription": {"keywords": "a"}}, "session.audio.input.transcription.keywords"),
        ({"transcription": []}, "session.audio.input.transcription"),
        ({"turn_detection": {"type": "guess"}}, "session.audio.input.turn_detection.type"),
        ({"turn_detection": {"threshold": 10**400}}, "session.audio.input.turn_detection.threshold"),
        ({"turn_detection": {"threshold": True}}, "session.audio.input.turn_detection.threshold"),
        (
            {"turn_detection": {"type": "semantic_vad", "eagerness": "wild"}},
            "session.audio.input.turn_detection.eagerness",
        ),
    ],
)
def test_what_makes_no_sense_names_the_field(given: dict[str, Any], param: str):
    with pytest.raises(ApiError) as refused:
        present(**given)
    assert (refused.value.status, refused.value.param) == (400, param)


@pytest.mark.parametrize("session", [None, [], "x", {"audio": 3}, {"audio": {"input": []}}, {"include": ["all"]}])
def test_shapes_that_are_none(session: Any):
    with pytest.raises(ApiError):
        PLAIN.updated(session, SERVED, is_beta=False)


def test_ranges_are_the_recognisers():
    for asked in ({"silence_duration_ms": 1}, {"threshold": 2}, {"prefix_padding_ms": -1}):
        with pytest.raises(ApiError, match=next(iter(asked))):
            present(turn_detection={"type": "server_vad", **asked})


NAMES = [
    *("type", "audio", "input", "format", "rate", "transcription", "model", "language", "prompt", "keywords"),
    *("languages", "turn_detection", "threshold", "silence_duration_ms", "prefix_padding_ms", "eagerness", "include"),
    *("input_audio_format", "input_audio_transcription"),
]
WORDS = ["transcription", "audio/pcm", "pcm16", "server_vad", "semantic_vad", "base", "de", "", LOGPROBS]
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.sampled_from(WORDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(NAMES), inner, max_size=4),
    max_leaves=12,
)


@settings(max_examples=300, deadline=None)
@given(session=st.dictionaries(st.sampled_from(NAMES), JSON, max_size=5), inner=JSON, is_beta=st.booleans())
def test_whatever_is_asked_is_done_or_refused(session: dict[str, Any], inner: Any, is_beta: bool):
    if not is_beta:
        session = {"include": session.get("include"), "audio": {"input": inner}}
    try:
        changed = PLAIN.updated(session, SERVED, is_beta=is_beta)
    except ApiError:
        return
    json.dumps(changed.describe("sess_1", 0, 0))
    TranscribeOptions(**changed.options)
