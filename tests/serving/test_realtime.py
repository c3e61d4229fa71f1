"""WS /v1/realtime: the official SDK transcribes a recording; broken clients and connections cost no words."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import openai
import pytest
import soxr
from recordings import pcm16
from servers import Server, until
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.sync.client import ClientConnection, connect

from clips import clips_folder
from ctc_models import babble
from stapes.audio.decode import open_audio

NAME = "conversation.item.input_audio_transcription"
FOX = "the quick brown fox jumps over the lazy dog"


def fox() -> np.ndarray:
    """A real sentence, float32 at 16 kHz, with silence before and after it."""
    path = clips_folder() / "en" / "quick_brown_fox.wav"
    with open_audio(path) as stream:
        pcm = np.concatenate([chunk[0] for chunk in stream])
    return np.concatenate([np.zeros(8_000, np.float32), pcm, np.zeros(16_000, np.float32)])


def at_24k(pcm: np.ndarray) -> bytes:
    return (np.clip(soxr.resample(pcm, 16_000, 24_000), -1, 1) * 32767).astype("<i2").tobytes()


def spoken(text: str) -> str:
    return "".join(c for c in text.lower() if c.isalpha() or c == " ").strip()


def append(data: bytes) -> str:
    return json.dumps({"type": "input_audio_buffer.append", "audio": base64.b64encode(data).decode()})


class Line:
    """A connection, and all that came over it."""

    def __init__(self, socket: ClientConnection) -> None:
        self.socket = socket
        self.events: list[dict[str, Any]] = []
        self.session: dict[str, Any] = self.until("session.created")["session"]

    def send(self, event: dict[str, Any]) -> None:
        self.socket.send(json.dumps(event))

    def update(self, **given: Any) -> None:
        self.send({"type": "session.update", "session": {"type": "transcription", "audio": {"input": given}}})

    def play(self, data: bytes, size: int = 9_600, wait: float = 0.0) -> None:
        for first in range(0, len(data), size):
            self.socket.send(append(data[first : first + size]))
            time.sleep(wait)

    def until(self, type: str, seconds: float = 20.0) -> dict[str, Any]:
        """The next event of a type; all before it are kept."""
        end = time.monotonic() + seconds
        while True:
            event = json.loads(self.socket.recv(timeout=max(0.01, end - time.monotonic())))
            self.events.append(event)
            if event["type"] == type:
                return event

    def of(self, type: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["type"] == type]


@contextmanager
def line(server: Server, query: str = "", **settings: Any) -> Iterator[Line]:
    address = f"{server.url.replace('http', 'ws')}/v1/realtime?intent=transcription{query}"
    with connect(address, max_size=None, **settings) as socket:
        yield Line(socket)


def test_the_official_sdk_transcribes_a_recording(whisper: Server):
    data = at_24k(fox())

    async def talk() -> list[Any]:
        client = openai.AsyncOpenAI(base_url=f"{whisper.url}/v1", api_key="none")
        events = []
        async with client.realtime.connect(model="whisper-1", extra_query={"intent": "transcription"}) as connection:
            await connection.session.update(
                session={
                    "type": "transcription",
                    "audio": {
                        "input": {
                            "format": {"type": "audio/pcm", "rate": 24_000},
                            "transcription": {"model": "gpt-4o-transcribe", "language": "en"},
                            "turn_detection": {"type": "server_vad", "silence_duration_ms": 400},
                        }
                    },
                    "include": ["item.input_audio_transcription.logprobs"],
                }
            )
            for first in range(0, len(data), 9_600):
                await connection.input_audio_buffer.append(audio=base64.b64encode(data[first : first + 9_600]).decode())
            async for event in connection:
                events.append(event)
                assert event.type != "error", event
                if event.type == f"{NAME}.completed":
                    break
        await client.close()
        return events

    events = asyncio.run(asyncio.wait_for(talk(), 60))
    kinds = [event.type for event in events]
    order = [
        "session.created",
        "session.updated",
        "input_audio_buffer.speech_started",
        "input_audio_buffer.speech_stopped",
        "input_audio_buffer.committed",
        "conversation.item.added",
        f"{NAME}.completed",
    ]
    assert [kind for kind in dict.fromkeys(kinds) if kind in order] == order
    last = events[-1]
    assert spoken(last.transcript) == FOX
    assert last.usage.type == "duration"
    assert last.logprobs
    assert "".join(event.delta for event in events if event.type == f"{NAME}.delta") == last.transcript
    assert len({event.item_id for event in events if hasattr(event, "item_id")}) == 1


def test_the_old_shape_and_the_telephone(whisper: Server):
    pcm = soxr.resample(fox(), 16_000, 8_000)
    magnitude = np.minimum(np.abs(pcm) * 32768 + 132, 32767).astype(int)
    exponent = np.floor(np.log2(magnitude)).astype(int) - 7
    data = (~((pcm < 0) * 128 | exponent << 4 | magnitude >> exponent + 3 & 15)).astype(np.uint8).tobytes()
    with line(whisper) as talk:
        talk.send(
            {
                "type": "transcription_session.update",
                "session": {
                    "input_audio_format": "g711_ulaw",
                    "input_audio_transcription": {"model": "whisper-1", "language": "en"},
                    "turn_detection": None,
                },
            }
        )
        updated = talk.until("transcription_session.updated")["session"]
        assert updated["input_audio_format"] == "g711_ulaw"
        assert updated["turn_detection"] is None
        talk.play(data, 1_600)
        talk.send({"type": "input_audio_buffer.commit"})
        committed = talk.until("input_audio_buffer.committed")
        assert talk.until("conversation.item.created")["item"]["id"] == committed["item_id"]
        completed = talk.until(f"{NAME}.completed")
        assert completed["item_id"] == committed["item_id"]
        assert spoken(completed["transcript"]) == FOX
        assert not talk.of("input_audio_buffer.speech_started")


def test_a_broken_connection_loses_nothing(whisper: Server):
    """TranscriptionSuite #239: a dropped socket lost all that had been streamed."""
    data = at_24k(np.concatenate([fox(), fox()]))
    with line(whisper) as talk:
        session = talk.session["id"]
        talk.play(data[: len(data) * 3 // 8])
        talk.until("input_audio_buffer.acknowledged")
        talk.socket.socket.close()  # no goodbye
    time.sleep(0.3)
    with line(whisper, f"&session_id={session}") as talk:
        assert talk.session["id"] == session
        had = talk.session["audio_ms"]
        assert 0 < had <= len(data) * 3 // 8 / 48
        talk.play(data[had * 48 :])
        texts = [spoken(talk.until(f"{NAME}.completed")["transcript"])]
        texts.append(spoken(talk.until(f"{NAME}.completed")["transcript"]))
        assert texts == [FOX, FOX]
        starts = [event["audio_start_ms"] for event in talk.of("input_audio_buffer.speech_started")]
        assert all(start < len(data) / 48 for start in starts)
    with line(whisper, f"&session_id={session}") as talk:
        assert talk.session["id"] != session  # it was closed in good order: it is over


def test_words_wait_for_a_client_that_was_away(whisper: Server):
    with line(whisper) as talk:
        session = talk.session["id"]
        talk.play(at_24k(fox()))
        talk.until("input_audio_buffer.speech_started")
        talk.socket.socket.close()
    time.sleep(4)
    with line(whisper, f"&session_id={session}") as talk:
        assert spoken(talk.until(f"{NAME}.completed")["transcript"]) == FOX


@pytest.fixture
def live(guarded: Server) -> Server:
    return guarded


KEY = {"additional_headers": {"Authorization": "Bearer first-key"}}


def test_keys_of_browsers_and_others(live: Server):
    with line(live, subprotocols=["realtime", "openai-insecure-api-key.second-key"]) as talk:
        assert talk.socket.subprotocol == "realtime"
    for settings in ({}, {"subprotocols": ["realtime", "openai-insecure-api-key.wrong"]}):
        with pytest.raises((InvalidStatus, ConnectionClosed)), line(live, **settings):
            pass


def test_a_session_is_its_clients_alone(live: Server):
    with line(live, **KEY) as talk:
        talk.play(pcm16(babble(1)))
        talk.until("input_audio_buffer.acknowledged")
        other = {"additional_headers": {"Authorization": "Bearer second-key"}}
        with line(live, f"&session_id={talk.session['id']}", **other) as stranger:
            assert stranger.session["id"] != talk.session["id"]


@pytest.mark.parametrize(
    ("event", "code"),
    [
        ("no json", "invalid_json"),
        ("[1, 2]", "invalid_event"),
        ('{"type": "response.create"}', "unknown_event"),
        ('{"type": "input_audio_buffer.append", "audio": "***"}', "invalid_audio"),
        ('{"type": "input_audio_buffer.append"}', "invalid_audio"),
        ('{"type": "input_audio_buffer.commit"}', "input_audio_buffer_commit_empty"),
        ('{"type": "session.update", "session": {"type": "realtime"}}', "invalid_value"),
        ('{"type": "session.update", "session": {"audio": {"input": {"format": {"type": "opus"}}}}}', "invalid_value"),
        (
            '{"type": "session.update", "session": {"audio": {"input": {"transcription": {"model": "gpt-9"}}}}}',
            "model_not_found",
        ),
        (
            '{"type": "session.update", "session": {"audio": {"input": {"turn_detection": {"threshold": 1e999}}}}}',
            "invalid_value",
        ),
        (
            '{"type": "session.update", "session": {"audio": {"input": {"turn_detection": {"threshold": 7}}}}}',
            "invalid_value",
        ),
    ],
)
def test_what_makes_no_sense_is_said_and_the_session_goes_on(live: Server, event: str, code: str):
    with line(live, **KEY) as talk:
        talk.socket.send(event)
        assert talk.until("error")["error"]["code"] == code
        talk.update(transcription={"language": "en"})
        assert talk.until("session.updated")["session"]["audio"]["input"]["transcription"]["language"] == "en"


def test_one_who_only_talks_nonsense_has_to_go(live: Server):
    with line(live, **KEY) as talk:
        for _ in range(40):
            talk.socket.send("nonsense")
        with pytest.raises(ConnectionClosed):
            talk.until("never")


def test_a_client_that_reads_nothing_and_idle_ones_hurt_nobody(live: Server):
    """whisper_streaming #106, and 60 s silence of others: everybody else is heard."""
    data = pcm16(babble(2))
    with line(live, **KEY) as deaf:
        deaf.play(data * 3, 48_000)
        with line(live, **KEY) as idle, line(live, **KEY) as talk:
            talk.update(turn_detection=None)
            talk.play(data)
            talk.send({"type": "input_audio_buffer.commit"})
            completed = talk.until(f"{NAME}.completed")
            assert completed["usage"]["type"] == "duration"
            assert not idle.of("error")


def test_a_lost_engine_is_told_and_the_session_goes_on(live: Server):
    headers = KEY["additional_headers"]
    with line(live, **KEY) as talk:
        session = talk.session["id"]
        talk.update(turn_detection=None)
        talk.play(pcm16(babble(1)))
        talk.until("input_audio_buffer.acknowledged")
        restarts = live.metric("stapes_engine_restarts", headers)
        os.kill(live.engine_pid(), 9)
        assert talk.until("error")["error"]["type"] == "service_unavailable_error"
        talk.socket.socket.close()
    until(lambda: live.metric("stapes_engine_restarts", headers) > restarts, 30)
    with line(live, f"&session_id={session}", **KEY) as talk:
        assert talk.session["id"] == session
        assert talk.session["audio"]["input"]["turn_detection"] is None
        talk.play(pcm16(babble(2)))  # waits until the engine is there
        talk.send({"type": "input_audio_buffer.commit"})
        assert "transcript" in talk.until(f"{NAME}.completed", 40)


def test_there_is_no_work_left_of_clients_that_have_gone(live: Server):
    """wenet #2716, speaches #129: sessions end with their connections."""
    for _ in range(5):
        with line(live, **KEY) as talk:
            talk.play(pcm16(babble(1)))
    until(lambda: live.metric("stapes_engine_windows_in_slots", KEY["additional_headers"]) == 0, 10)
