"""An hour with a server: good clients among bad ones, then an engine that is killed.

    export PYTHONPATH=tests:tests/audio
    python tests/serving/soak.py --minutes 60 --model base
    python tests/serving/soak.py --minutes 5 --model tiny.en --clients 4 --idle 200

Clients ask for transcripts whole, streamed and with words, and speak in live sessions; among them are those that leave
in the middle, upload slowly or by half, send garbage, bombs, too many bytes, wrong keys, unknown models; idle sockets
stand around all the time. Every request has to be answered, every good one as the first time it was asked, ``/readyz``
has to be 200 throughout, and memory, handles and files must not grow after the first fifth. Then the engine gets
``kill -9``, three times: it has to be back in 10 s, and what was on its way has to be answered with 200 or 503. Prints
JSON; exit code 1 when any of this fails.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import json
import os
import random
import signal
import sys
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import httpx
import numpy as np
from recordings import encode, pcm16, wav
from servers import Server, until
from websockets.asyncio.client import ClientConnection, connect

from clips import clips
from ctc_models import babble
from stapes.audio.decode import read_audio

KEY = {"authorization": "Bearer soak-key"}
GROWTH = 1.15
"""What may be in use at the end, as a multiple of what was after the first fifth."""


class Soak:
    """The clients of one server, and what became of their requests."""

    def __init__(self, server: Server, arguments: argparse.Namespace) -> None:
        self.server, self.arguments = server, arguments
        self.random = random.Random(arguments.seed)
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []
        self.latencies: list[float] = []
        self.answers: dict[tuple[str, str], Any] = {}
        self.audio = {path.stem: path.read_bytes() for path in clips("en")}
        self.sound = {name: read_audio(audio)[0] for name, audio in self.audio.items()}
        long = np.concatenate([babble(90, seed) * 0.3 for seed in range(2)])
        self.audio["long"] = wav(pcm16(long))
        bomb = io.BytesIO()
        encode(bomb, np.zeros(16_000 * 900, np.float32), "flac", "flac")
        self.bomb = bomb.getvalue()
        # Connections rest for a shorter time than at the server: whoever closes must be the one that sends.
        limits = httpx.Limits(max_connections=None, keepalive_expiry=20)
        self.client = httpx.AsyncClient(timeout=300, limits=limits, headers=KEY)

    def post(self, audio: bytes, headers: dict[str, str] | None = None, **fields: str) -> httpx.Request:
        return self.client.build_request(
            "POST",
            f"{self.server.url}/v1/audio/transcriptions",
            files={"file": ("a.wav", audio)},
            data=fields,
            headers=headers,
        )

    async def good(self) -> None:
        name = self.random.choice(sorted(self.audio))
        form = self.random.choice(["json", "text", "srt", "verbose_json"])
        fields = {"response_format": form}
        if form == "verbose_json":
            fields["timestamp_granularities[]"] = "word"
        began = time.monotonic()
        answer = await self.client.send(self.post(self.audio[name], **fields))
        self.expect(answer, 200)
        if name != "long":
            self.latencies.append(time.monotonic() - began)
        if answer.status_code == 200 and self.answers.setdefault((name, form), answer.text) != answer.text:
            self.faults.append(f"{name} as {form} was answered otherwise than before")

    async def streamed(self) -> None:
        name = self.random.choice(sorted(self.audio))
        answer = await self.client.send(self.post(self.audio[name], stream="true"))
        self.expect(answer, 200)
        if "transcript.text.done" not in answer.text:
            self.faults.append("a stream had no end")

    async def leaves(self) -> None:
        call = asyncio.create_task(self.client.send(self.post(self.audio["long"])))
        await asyncio.sleep(self.random.uniform(0, 2))
        call.cancel()
        await asyncio.gather(call, return_exceptions=True)

    async def leaves_stream(self) -> None:
        request = self.post(self.audio["long"], stream="true")
        answer = await self.client.send(request, stream=True)
        self.expect(answer, 200)
        await anext(answer.aiter_lines(), None)
        await answer.aclose()

    async def uploads_half(self) -> None:
        address = urlsplit(self.server.url)
        _, writer = await asyncio.open_connection(address.hostname, address.port)
        body = self.post(self.audio["long"])
        head = f"POST /v1/audio/transcriptions HTTP/1.1\r\nHost: localhost\r\nAuthorization: {KEY['authorization']}\r\n"
        head += (
            f"Content-Type: {body.headers['content-type']}\r\nContent-Length: {body.headers['content-length']}\r\n\r\n"
        )
        writer.write(head.encode() + body.read()[:100_000])
        await asyncio.sleep(self.random.uniform(0, 1))
        writer.close()

    async def uploads_slowly(self) -> None:
        body = self.post(self.audio["quick_brown_fox"])
        content = body.read()

        async def pieces() -> Any:
            for begin in range(0, len(content), 10_000):
                yield content[begin : begin + 10_000]
                await asyncio.sleep(0.2)

        headers = {"content-type": body.headers["content-type"]}
        self.expect(await self.client.post(body.url, content=pieces(), headers=headers), 200)

    async def lives(self) -> None:
        """A turn that is spoken, not at the pace of speech; its text is the same whatever else goes on."""
        name = self.random.choice(sorted(self.sound))
        async with self.session() as line:
            await self.speak(line, name)
            await line.send(json.dumps({"type": "input_audio_buffer.commit"}))
            async for message in line:
                event = json.loads(message)
                if event["type"] == "error":
                    self.faults.append(f"a live session: {event['error']['message'][:200]}")
                    return
                if event["type"].endswith("input_audio_transcription.completed"):
                    break
        self.counts["turns"] += 1
        if self.answers.setdefault((name, "live"), event["transcript"]) != event["transcript"]:
            self.faults.append(f"{name} was heard live otherwise than before")

    async def leaves_live(self) -> None:
        async with self.session() as line:
            await self.speak(line, self.random.choice(sorted(self.sound)))
            line.transport.abort()  # no goodbye

    def session(self) -> Any:
        url = f"{self.server.url.replace('http', 'ws')}/v1/realtime?intent=transcription"
        return connect(url, additional_headers=KEY, open_timeout=60)

    async def speak(self, line: ClientConnection, name: str) -> None:
        given = {"format": {"type": "audio/pcm", "rate": 16_000}, "turn_detection": None}
        await line.send(
            json.dumps({"type": "session.update", "session": {"type": "transcription", "audio": {"input": given}}})
        )
        data = pcm16(self.sound[name])
        for first in range(0, len(data), 16_000):
            audio = base64.b64encode(data[first : first + 16_000]).decode()
            await line.send(json.dumps({"type": "input_audio_buffer.append", "audio": audio}))

    async def refused(self) -> None:
        noise = self.random.randbytes(30_000)
        request, status = self.random.choice(
            [
                (self.post(noise), 415),
                (self.post(self.bomb), 413),
                (self.post(bytes(12_000_000)), 413),
                (self.post(noise, {"authorization": "Bearer wrong"}), 401),
                (self.post(noise, model="openai/whisper-small"), 404),
                (self.post(b""), 400),
                (self.post(noise, beam_size="many"), 400),
                (self.post(noise, {"origin": "https://evil.example"}), 403),
            ]
        )
        self.expect(await self.client.send(request), status)

    def expect(self, answer: httpx.Response, status: int) -> None:
        self.counts[str(answer.status_code)] += 1
        if answer.status_code not in (status, 429):
            self.faults.append(f"{answer.status_code} where {status} was due: {answer.text[:200]}")

    async def client_loop(self, until_time: float) -> None:
        ways: list[Callable[[], Awaitable[None]]] = [
            *[self.good] * 6, *[self.streamed] * 2, *[self.lives] * 2, self.leaves, self.leaves_stream,
            self.leaves_live, self.uploads_half, self.uploads_slowly, *[self.refused] * 4,
        ]  # fmt: skip
        while time.monotonic() < until_time:
            way = self.random.choice(ways)
            try:
                await way()
                self.counts[way.__name__] += 1
            except Exception as error:  # an answer that never came
                self.faults.append(f"{way.__name__}: {type(error).__name__} {error}")

    async def stand_around(self, until_time: float) -> None:
        """Sockets that say nothing, opened again whenever the server closes them."""
        address = urlsplit(self.server.url)

        async def one() -> None:
            while time.monotonic() < until_time:
                try:
                    reader, writer = await asyncio.open_connection(address.hostname, address.port)
                    await asyncio.wait_for(reader.read(1), max(0.1, until_time - time.monotonic()))
                    writer.close()
                except (OSError, TimeoutError):
                    await asyncio.sleep(0.5)

        await asyncio.gather(*(one() for _ in range(self.arguments.idle)))

    async def watch(self, until_time: float) -> list[dict[str, float]]:
        """Readiness each second; what is in use, twenty times."""
        samples: list[dict[str, float]] = []
        step = self.arguments.minutes * 60 / 20
        due = time.monotonic() + step
        while time.monotonic() < until_time:
            await asyncio.sleep(1)
            try:
                answer = await self.client.get(f"{self.server.url}/readyz")
                if answer.status_code != 200:
                    self.faults.append(f"not ready: {answer.text}")
            except httpx.HTTPError as error:
                self.faults.append(f"/readyz was not answered: {type(error).__name__} {error}")
            if time.monotonic() >= due:
                due += step
                samples.append(in_use(self.server))
                print(samples[-1], dict(self.counts), self.faults[-1:], file=sys.stderr, flush=True)
        return samples

    async def kill_engine(self) -> float:
        """Seconds until it was back."""
        calls = [asyncio.create_task(self.client.send(self.post(self.audio["long"]))) for _ in range(4)]
        await asyncio.sleep(1.5)
        began = time.monotonic()
        os.kill(self.server.engine_pid(), signal.SIGKILL)
        await asyncio.sleep(0.5)
        await asyncio.to_thread(until, lambda: httpx.get(f"{self.server.url}/readyz").status_code == 200, 60)
        took = time.monotonic() - began
        if took > 10:
            self.faults.append(f"the engine was back after {took:.1f} s")
        for answer in await asyncio.gather(*calls):
            self.counts[f"{answer.status_code} after a kill"] += 1
            if answer.status_code not in (200, 503):
                self.faults.append(f"{answer.status_code} after the engine was killed")
        return took

    async def run(self) -> dict[str, Any]:
        end = time.monotonic() + self.arguments.minutes * 60
        clients = [self.client_loop(end) for _ in range(self.arguments.clients)]
        samples, *_ = await asyncio.gather(self.watch(end), self.stand_around(end), *clients)
        self.check(samples)
        back = [await self.kill_engine() for _ in range(3)]
        await asyncio.sleep(2)
        left = [path.name for path in self.server.spool.rglob("*") if path.is_file()]
        if left:
            self.faults.append(f"files were left: {left[:5]}")
        seconds = sorted(self.latencies)
        return {
            "minutes": self.arguments.minutes,
            "counts": dict(self.counts),
            "clip_seconds": {f"p{q}": round(seconds[len(seconds) * q // 100], 3) for q in (50, 95, 99)}
            if seconds
            else {},
            "in_use": samples,
            "engine_back_seconds": [round(seconds, 2) for seconds in back],
            "faults": self.faults[:50],
        }

    def check(self, samples: list[dict[str, float]]) -> None:
        settled, last = samples[len(samples) // 5], samples[-3:]
        for name, before in settled.items():
            now = min(sample[name] for sample in last)
            if now > before * GROWTH + 20:
                self.faults.append(f"{name} grew from {before:g} to {now:g}")


def in_use(server: Server) -> dict[str, float]:
    """Memory in MB and handles of the web process and of its engine."""
    out: dict[str, float] = {}
    for name, pid in {"web": server.process.pid, "engine": server.engine_pid()}.items():
        status = Path(f"/proc/{pid}/status").read_text()
        out[f"{name}_mb"] = round(int(status.partition("VmRSS:")[2].split()[0]) / 1024, 1)
        if name == "engine":
            out["engine_handles"] = len(list(Path(f"/proc/{pid}/fd").iterdir()))
            out["engine_threads"] = int(status.partition("Threads:")[2].split()[0])
    return out


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--minutes", type=float, default=60)
    parser.add_argument("--model", default="base")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--idle", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    server = Server(
        *("--model", arguments.model, "--device", arguments.device, "--max-upload", "10MB"),
        *("--max-audio-seconds", "600"),
        STAPES_API_KEY="soak-key",
    ).ready()
    try:
        report = asyncio.run(Soak(server, arguments).run())
    finally:
        server.stop()
    print(json.dumps(report, indent=2))
    return 1 if report["faults"] else 0


if __name__ == "__main__":
    sys.exit(main())
