"""Processes that die, clients that leave, long files beside short ones, an end in order."""

from __future__ import annotations

import asyncio
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from recordings import pcm16, wav
from servers import Server, until

from clips import clips
from stapes.audio.decode import read_audio


@pytest.fixture(scope="module")
def fox() -> bytes:
    return next(clip for clip in clips("en") if clip.stem == "quick_brown_fox").read_bytes()


Windows = Callable[[int], bytes]


@pytest.fixture(scope="module")
def windows(fox: bytes) -> Windows:
    """So many windows of half a minute, with a sentence in each."""
    (one,) = read_audio(fox)
    return lambda count: wav(pcm16(np.tile(np.pad(one, (0, 480_000 - len(one))), count)))


class Background:
    """A request that goes on in a thread."""

    def __init__(self, server: Server, audio: bytes, **fields: str) -> None:
        self.answer: httpx.Response | None = None
        self.error: Exception | None = None
        self._client = httpx.Client(timeout=120)

        def work() -> None:
            try:
                self.answer = self._client.post(
                    f"{server.url}/v1/audio/transcriptions", files={"file": ("a.wav", audio)}, data=fields
                )
            except Exception as error:
                self.error = error

        self.thread = threading.Thread(target=work, daemon=True)
        self.thread.start()

    def done(self, seconds: float = 60) -> httpx.Response:
        self.thread.join(seconds)
        assert self.answer is not None, self.error
        return self.answer


def at_work(server: Server) -> float:
    return server.metric("stapes_engine_audio_seconds_outstanding")


def ask(server: Server, audio: bytes, **fields: str) -> httpx.Request:
    files = {"file": ("a.wav", audio)}
    return httpx.Request(
        "POST",
        f"{server.url}/v1/audio/transcriptions",
        files=files,
        data=fields,
        extensions={"timeout": dict.fromkeys(("connect", "read", "write", "pool"), 60)},
    )


def test_a_client_that_leaves_cancels_its_work(whisper: Server, windows: Windows) -> None:
    """speaches #129, sglang-omni #2111, oh-my-pi #4097: work went on after the client had left; whisper_streaming #106:
    or died."""
    until(lambda: at_work(whisper) == 0, 10)
    with httpx.Client(timeout=60) as client:
        answer = client.send(ask(whisper, windows(20), vad="false", stream="true"), stream=True)
        assert next(answer.iter_lines()).startswith("data:")  # text comes long before the end
        answer.close()
    is_rid_of_all(whisper)

    async def leave() -> None:
        async with httpx.AsyncClient(timeout=60) as client:
            call = asyncio.create_task(client.send(ask(whisper, windows(20), vad="false")))
            while not whisper.metric("stapes_engine_windows_in_slots"):
                await asyncio.sleep(0.05)
            call.cancel()

    asyncio.run(leave())
    is_rid_of_all(whisper)
    left = [event["status"] for event in whisper.requests() if event.get("left")]
    assert left[-2:] == [499, 499]
    assert not [event for event in whisper.events if "Traceback" in event.get("text", "")]


def is_rid_of_all(server: Server) -> None:
    until(lambda: at_work(server) == 0, 2)
    until(lambda: server.metric("stapes_engine_windows_in_slots") == 0, 10)


def test_three_seconds_do_not_wait_for_ten_minutes(whisper: Server, fox: bytes, windows: Windows) -> None:
    """whisper.cpp #1803: a 3 s clip waited two minutes behind a file of ten.

    open-webui #24169: transcribing inside an asynchronous route stopped the whole server; here it answers meanwhile.
    """

    def seconds() -> float:
        began = time.monotonic()
        assert whisper.post(fox).status_code == 200
        return time.monotonic() - began

    alone = min(seconds() for _ in range(2))
    with httpx.Client(timeout=120) as client:
        answer = client.send(ask(whisper, windows(20), vad="false", stream="true"), stream=True)
        lines = answer.iter_lines()
        next(lines)
        beside = sorted(seconds() for _ in range(3))
        began = time.monotonic()
        assert httpx.get(f"{whisper.url}/livez").status_code == 200
        assert time.monotonic() - began < 0.5  # vLLM PR #44612: /health took 25 s beside decoding
        assert whisper.metric("stapes_engine_audio_seconds_outstanding") > 100  # it is at work all the while
        answer.close()
    # A bulk window in the middle of its encoding is not interrupted: that is the difference.
    assert beside[1] < 3 * alone + 1


def test_the_web_process_is_without_pytorch(whisper: Server, fox: bytes) -> None:
    assert whisper.post(fox).status_code == 200
    assert "libtorch" not in Path(f"/proc/{whisper.process.pid}/maps").read_text()
    assert "libtorch" in Path(f"/proc/{whisper.engine_pid()}/maps").read_text()


def test_many_at_once_share_batches(whisper: Server, fox: bytes) -> None:
    """FunASR #3528 and #3529 (one lock for all), sglang-omni #1470 (eight at once ended it), faster-whisper #1055 and
    #660, whisperX #972 (each of them took memory of its own)."""
    want = whisper.post(fox).json()["text"]

    def counted() -> tuple[float, float]:
        time.sleep(1)  # engines tell their counts twice a second
        return whisper.metric("stapes_batch_decoded_sum"), whisper.metric("stapes_batch_decoded_count")

    rows, steps = counted()
    calls = [Background(whisper, fox) for _ in range(8)]
    assert {call.done().json()["text"] for call in calls} == {want}
    now_rows, now_steps = counted()
    assert (now_rows - rows) / (now_steps - steps) > 1.5


def test_a_killed_engine_comes_back_and_requests_are_run_again(whisper: Server, fox: bytes, windows: Windows) -> None:
    """sglang-omni #1470: a dead scheduler left nothing but refused connections.

    What was said in a stream cannot be unsaid: it ends with an error, never as if it were whole.
    """
    want = whisper.post(fox).json()["text"]
    with httpx.Client(timeout=60) as client:
        stream = client.send(ask(whisper, windows(20), vad="false", stream="true"), stream=True)
        lines = stream.iter_lines()
        next(lines)
        calls = [Background(whisper, windows(4), vad="false") for _ in range(2)]
        until(lambda: whisper.metric("stapes_requests_at_work") == 3, 20)
        pid, killed = whisper.engine_pid(), time.monotonic()
        os.kill(pid, signal.SIGKILL)
        rest = [line for line in lines if line]
    assert '"error"' in rest[-1]
    assert not any("transcript.text.done" in line for line in rest)
    assert httpx.get(f"{whisper.url}/readyz").status_code == 503
    until(lambda: httpx.get(f"{whisper.url}/readyz").status_code == 200, 10)
    assert time.monotonic() - killed < 10
    assert whisper.engine_pid() != pid
    for call in calls:
        answer = call.done()
        assert answer.status_code == 200, answer.text
        assert answer.json()["text"].lower().count("fox") == 4
    assert whisper.post(fox).json()["text"] == want
    assert sum(bool(event.get("begun_again")) for event in whisper.requests()) == 2


@pytest.fixture(scope="module")
def own(small_model: Path) -> Iterator[Server]:
    """A server that tests may break, the last of them for good."""
    server = Server(
        *("--model", str(small_model), "--shutdown-seconds", "1", "--canary-seconds", "0.3"),
        *("--stall-seconds", "2", "--decode-seconds", "1", "--decoders", "1", "--idle-timeout", "0.5"),
    )
    yield server.ready()
    if server.process.poll() is None:
        server.process.kill()


def test_an_engine_that_hangs_is_found_out(own: Server, speech: bytes) -> None:
    """gnome-speech2text #6: /health was well while inference was dead. Here the canary tells, and the process goes."""
    pid = own.engine_pid()
    os.kill(pid, signal.SIGSTOP)
    until(lambda: own.metric("stapes_engine_restarts") == 1, 10)
    until(lambda: httpx.get(f"{own.url}/readyz").status_code == 200, 10)
    assert any(event["event"] == "engine_stalled" for event in own.events)
    assert own.post(speech, vad="false").json()["text"]


def test_a_decoder_that_hangs_or_dies_hurts_its_own_request_alone(own: Server, speech: bytes) -> None:
    (pid,) = decoders_of(own)
    os.kill(pid, signal.SIGSTOP)
    answer = own.post(speech, vad="false")
    assert answer.status_code == 504
    assert answer.json()["error"]["type"] == "timeout_error"
    assert own.post(speech, vad="false").json()["text"]
    (pid,) = decoders_of(own)
    os.kill(pid, signal.SIGKILL)
    assert own.post(speech, vad="false").json()["text"]
    assert not any(b"STAPES" in environment(pid) for pid in decoders_of(own))


def decoders_of(server: Server) -> list[int]:
    found = []
    for folder in Path("/proc").iterdir():
        if folder.name.isdecimal():
            try:
                parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
                command = (folder / "cmdline").read_bytes()
            except OSError:
                continue
            if int(parent) == server.process.pid and b"decode_worker" in command:
                found.append(int(folder.name))
    return found


def environment(pid: int) -> bytes:
    return Path(f"/proc/{pid}/environ").read_bytes()


def test_models_go_when_idle_and_come_when_asked_for(own: Server, speech: bytes) -> None:
    text = own.post(speech, vad="false").json()["text"]
    until(lambda: not own.sdk().models.retrieve("small").to_dict()["loaded"], 10)
    assert httpx.get(f"{own.url}/readyz").status_code == 200
    assert own.post(speech, vad="false").json()["text"] == text


def test_the_end_is_in_order(own: Server, speech: bytes) -> None:
    """Told to stop, it finishes what it can, hands back the rest with 503, and leaves nothing behind."""
    os.kill(own.engine_pid(), signal.SIGSTOP)  # this request can never be done
    call = Background(own, speech, vad="false")
    until(lambda: own.metric("stapes_engine_audio_seconds_outstanding") > 0, 5)
    children = decoders_of(own)
    assert own.stop() == 0
    answer = call.done()
    assert answer.status_code == 503
    assert answer.json()["error"]["code"] == "shutting_down"
    assert "retry-after" in answer.headers
    assert not list(own.spool.iterdir())
    for pid in (*children, own.engine_pid()):
        with pytest.raises(ProcessLookupError):
            os.kill(pid, 0)
