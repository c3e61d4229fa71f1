"""The contract, through OpenAI's own client: what it sends is understood, what it gets is what it expects."""

from __future__ import annotations

import asyncio
import io
import json
import math
from pathlib import Path
from typing import Any, get_args

import numpy as np
import openai
import pytest
from recordings import pcm16, wav
from servers import Server

from clips import clips
from stapes.audio.decode import read_audio

FOX = "quick brown fox jumps over the lazy dog"


@pytest.fixture(scope="module")
def fox() -> Path:
    return next(clip for clip in clips("en") if clip.stem == "quick_brown_fox")


@pytest.fixture(scope="module")
def dialogue(fox: Path) -> bytes:
    """Two speakers, each on a channel of their own, one after the other."""
    (one,) = read_audio(fox)
    silence = np.zeros_like(one)
    return wav(pcm16(np.stack([np.concatenate([one, silence]), np.concatenate([silence, one])])), channels=2)


def said(text: str) -> str:
    return " ".join("".join(c for c in text.lower() if c.isalpha() or c.isspace()).split())


@pytest.mark.parametrize("model", ["whisper-1", "tiny.en"])
def test_json_by_any_of_openais_model_names(whisper: Server, fox: Path, model: str) -> None:
    answer = whisper.sdk().audio.transcriptions.create(model=model, file=fox)
    assert FOX in said(answer.text)
    assert answer.usage is not None
    assert answer.usage.type == "duration"
    assert answer.languages is not None
    assert answer.languages[0].code == "en"


def test_async_client(whisper: Server, fox: Path) -> None:
    async def ask() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{whisper.url}/v1", api_key="none", max_retries=0) as client:
            calls = [client.audio.transcriptions.create(model="whisper-1", file=fox) for _ in range(3)]
            return [answer.text for answer in await asyncio.gather(*calls)]

    texts = asyncio.run(ask())
    assert len(set(texts)) == 1
    assert FOX in said(texts[0])


def test_text_and_subtitles(whisper: Server, fox: Path) -> None:
    create = whisper.sdk().audio.transcriptions.create
    assert FOX in said(create(model="whisper-1", file=fox, response_format="text"))
    srt = create(model="whisper-1", file=fox, response_format="srt")
    assert srt.startswith("1\n00:00:0")
    assert " --> 00:00:0" in srt
    vtt = create(model="whisper-1", file=fox, response_format="vtt")
    assert vtt.startswith("WEBVTT\n\n00:0")


def test_verbose_json_without_granularities_has_segments(whisper: Server, fox: Path) -> None:
    """speaches #58: verbose_json failed when no granularities were given."""
    answer = whisper.sdk().audio.transcriptions.create(model="whisper-1", file=fox, response_format="verbose_json")
    assert answer.language == "english"
    assert answer.words is None
    assert answer.segments
    segment = answer.segments[0]
    assert 0 <= segment.start < segment.end <= answer.duration + 0.01
    assert segment.avg_logprob < 0
    assert segment.tokens
    assert said("".join(each.text for each in answer.segments)) == said(answer.text)


@pytest.mark.parametrize("granularities", [["word"], ["word", "segment"]])
def test_granularities(whisper: Server, fox: Path, granularities: list[Any]) -> None:
    """speaches #29: the SDK says timestamp_granularities[] with brackets."""
    answer = whisper.sdk().audio.transcriptions.create(
        model="whisper-1", file=fox, response_format="verbose_json", timestamp_granularities=granularities
    )
    assert (answer.words is not None) == ("word" in granularities)
    assert (answer.segments is not None) == ("segment" in granularities)
    if answer.words is not None:
        assert said(" ".join(word.word for word in answer.words)) == said(answer.text)
        assert all(a.start <= b.start for a, b in zip(answer.words, answer.words[1:], strict=False))
        assert not any(word.word.startswith(" ") for word in answer.words)


def test_granularities_separated_by_commas(whisper: Server, fox: Path) -> None:
    fields = {"response_format": "verbose_json", "timestamp_granularities": "word,segment"}
    answer = whisper.post(fox.read_bytes(), **fields).json()
    assert answer["words"]
    assert answer["segments"]


def test_logprobs_are_those_of_the_words(whisper: Server, fox: Path) -> None:
    answer = whisper.sdk().audio.transcriptions.create(model="gpt-4o-transcribe", file=fox, include=["logprobs"])
    assert answer.logprobs
    assert "".join(each.token or "" for each in answer.logprobs).strip() == answer.text
    for each in answer.logprobs:
        assert bytes(map(int, each.bytes or [])).decode() == each.token
        assert -14 < (each.logprob or 1) <= 0
    words = whisper.sdk().audio.transcriptions.create(
        model="whisper-1", file=fox, response_format="verbose_json", timestamp_granularities=["word"]
    )
    probabilities = [word.to_dict()["probability"] for word in words.words or []]
    assert [math.exp(each.logprob or 0) for each in answer.logprobs] == pytest.approx(probabilities, abs=1e-3)


def test_stream(whisper: Server, fox: Path) -> None:
    whole = whisper.sdk().audio.transcriptions.create(model="gpt-4o-transcribe", file=fox)
    events = list(
        whisper.sdk().audio.transcriptions.create(
            model="gpt-4o-transcribe", file=fox, stream=True, include=["logprobs"], response_format="json"
        )
    )
    assert [event.type for event in events][-1] == "transcript.text.done"
    deltas = [event for event in events if event.type == "transcript.text.delta"]
    assert "".join(event.delta for event in deltas).strip() == whole.text
    assert all(event.logprobs for event in deltas)
    done = events[-1]
    assert done.type == "transcript.text.done"
    assert done.text == whole.text


def test_stream_of_a_long_recording_comes_as_it_is_done(whisper: Server, fox: Path) -> None:
    """OpenWhispr #2150: without timestamps and VAD only the last sentence came back. Here: all of it, in order."""
    (one,) = read_audio(fox)
    gap = np.zeros(16_000 * 22, np.float32)
    long = wav(pcm16(np.concatenate([one, gap, one, gap, one])))
    fields = {"vad": "false", "without_timestamps": "true"}
    events = list(
        whisper.sdk().audio.transcriptions.create(
            model="whisper-1", file=("long.wav", long), stream=True, extra_body=fields
        )
    )
    deltas = [event.delta for event in events if event.type == "transcript.text.delta"]
    assert len(deltas) >= 2
    done = events[-1]
    assert done.type == "transcript.text.done"
    assert "".join(deltas).strip() == done.text
    assert said(done.text).count(FOX) == 3


def test_diarized_json_tells_speakers_apart_by_channel(whisper: Server, dialogue: bytes) -> None:
    create = whisper.sdk().audio.transcriptions.create
    answer = create(model="gpt-4o-transcribe-diarize", file=("call.wav", dialogue), response_format="diarized_json")
    assert [segment.speaker for segment in answer.segments] == ["A", "B"]
    assert said(answer.text).count(FOX) == 2
    assert answer.segments[0].start < 1 < 2 < answer.segments[1].start
    events = list(
        create(
            model="gpt-4o-transcribe-diarize", file=("c.wav", dialogue), response_format="diarized_json", stream=True
        )
    )
    segments = [event for event in events if event.type == "transcript.text.segment"]
    assert [(each.id, each.speaker, each.text) for each in segments] == [
        (each.id, each.speaker, each.text) for each in answer.segments
    ]


def test_diarized_json_of_one_channel_is_refused_with_the_reason(whisper: Server, fox: Path) -> None:
    with pytest.raises(openai.BadRequestError, match="one channel"):
        whisper.sdk().audio.transcriptions.create(model="whisper-1", file=fox, response_format="diarized_json")


def test_chunking_strategy_in_both_forms(whisper: Server, fox: Path) -> None:
    create = whisper.sdk().audio.transcriptions.create
    assert FOX in said(create(model="whisper-1", file=fox, chunking_strategy="auto").text)
    answer = create(
        model="whisper-1",
        file=fox,
        chunking_strategy={"type": "server_vad", "threshold": 0.6},
        extra_body={"chunking_strategy[silence_duration_ms]": 300},
    )
    assert FOX in said(answer.text)
    (warning, *_) = answer.to_dict()["warnings"]  # what was not followed is said
    assert "chunking_strategy" in warning
    text = json.dumps({"type": "server_vad", "threshold": 3})
    assert whisper.post(fox.read_bytes(), chunking_strategy=text).status_code == 400


def test_hints_reach_the_model(whisper: Server, fox: Path) -> None:
    create = whisper.sdk().audio.transcriptions.create
    told = create(
        model="whisper-1",
        file=fox,
        prompt="A fable of FOX and DOG.",
        temperature=0.0,
        language="en",
        keywords=["fox", "dog"],
        extra_body={"hallucination_silence_threshold": 2, "word_timestamps": True, "beam_size": 2},
    )
    assert FOX in said(told.text)


def test_translations_need_a_model_that_can(whisper: Server, fox: Path) -> None:
    with pytest.raises(openai.BadRequestError, match="cannot translate"):
        whisper.sdk().audio.translations.create(model="whisper-1", file=fox)


def test_models(whisper: Server) -> None:
    client = whisper.sdk()
    assert [model.id for model in client.models.list()] == ["tiny.en"]
    assert client.models.retrieve("whisper-1").id == "whisper-1"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("openai/whisper-large")


def test_an_unknown_model_is_404_and_nothing_is_fetched(whisper: Server, fox: Path) -> None:
    """LocalAI #9395 and vllm-mlx #68: a model's name in a request must never become a download."""
    for name in ("openai/whisper-small", "small", "https://example.org/model", "../../etc/passwd"):
        with pytest.raises(openai.NotFoundError) as caught:
            whisper.sdk().audio.transcriptions.create(model=name, file=fox)
        assert caught.value.code == "model_not_found"
        assert caught.value.param == "model"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "xml"}, "response_format"),
        ({"temperature": "hot"}, "temperature"),
        ({"temperature": "3"}, "temperature"),
        ({"language": "Klingon"}, "language"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities"),
        ({"response_format": "srt", "stream": "true"}, "stream"),
        ({"response_format": "text", "include[]": "logprobs"}, "include"),
        ({"stream": "maybe"}, "stream"),
        ({"lm": "/etc/passwd"}, "lm"),
        ({"batch_size": "999"}, "batch_size"),
        ({"beam_size": "0"}, "beam_size"),
        ({"beems": "1"}, "beems"),
        ({"known_speaker_names[]": "Ann"}, "known_speaker_names"),
    ],
)
def test_what_makes_no_sense_is_400_and_names_the_field(
    whisper: Server, fox: Path, fields: dict[str, str], param: str
) -> None:
    """daymade PR #257: errors came as 200. Here: OpenAI's error object, with its field."""
    answer = whisper.post(fox.read_bytes(), **fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["param"] == param
    assert error["type"] == "invalid_request_error"
    assert "--" not in error["message"]  # fields, not flags


def test_every_format_of_the_sdk_is_known() -> None:
    from openai.types import AudioResponseFormat

    from stapes.serving.parameters import Format

    assert set(get_args(AudioResponseFormat)) <= set(get_args(Format))


def test_file_object_and_bytes(whisper: Server, fox: Path) -> None:
    create = whisper.sdk().audio.transcriptions.create
    assert FOX in said(create(model="whisper-1", file=io.BytesIO(fox.read_bytes())).text)
    assert FOX in said(create(model="whisper-1", file=("name.ogg", fox.read_bytes(), "video/mp4")).text)
