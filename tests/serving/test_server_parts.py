"""The server's parts by themselves: settings, keys, turns, gathering, messages."""

from __future__ import annotations

import asyncio
import json
import socket
import threading
import time
from contextlib import nullcontext, suppress
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stapes.checkpoints.sizes import published_config
from stapes.cli.main import app as command_line
from stapes.cli.serve import app as serve_app
from stapes.errors import ModelError, StapesError, UsageError
from stapes.inference import whisper_family
from stapes.options import TranscribeOptions
from stapes.serving import wire
from stapes.serving.access import Client, Keys, Origins, digest, new_key
from stapes.serving.app import create_app
from stapes.serving.failures import ApiError
from stapes.serving.limits import Limits
from stapes.serving.metrics import _Lookups
from stapes.serving.parameters import read_parameters
from stapes.serving.served import Served
from stapes.serving.settings import LimitSettings, ModelSettings, NetworkSettings, ServerSettings
from stapes.serving.uploads import Spool
from stapes.serving.watched import Gate

SERVED = Served(["base", "tiny.en"], ["ours=tiny.en"])


# Settings.


def parsed(*words: str) -> tuple[NetworkSettings, ModelSettings, LimitSettings]:
    _, bound, _ = serve_app.parse_args(list(words), exit_on_error=False, print_error=False)
    found = bound.arguments
    return (
        found.get("network", NetworkSettings()),
        found.get("models", ModelSettings()),
        found.get("limits", LimitSettings()),
    )


def test_flags_go_before_variables_and_variables_before_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stapes.toml").write_text('[serve]\nport = 1\nmax_batch = 2\nmodel = ["a", "b"]\njobs-per-key = 3\n')
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("STAPES_MAX_BATCH", "4")
    monkeypatch.setenv("STAPES_HOST", "localhost")
    network, models, limits = parsed("--host", "127.0.0.2")
    assert (network.host, network.port, models.max_batch) == ("127.0.0.2", 1, 4)
    assert models.model == ("a", "b")
    assert limits.jobs_per_key == 3


def test_serve_is_a_command() -> None:
    assert "serve" in command_line


@pytest.mark.parametrize(
    "change",
    [
        {"port": 70000}, {"max_batch": 0}, {"max_wait_ms": -1}, {"max_upload": "lots"}, {"alias": ("a",)},
        {"device": "cuda:0,"}, {"allow_origin": ("example.org",)}, {"max_queue": 0}, {"canary_seconds": 0},
    ],
)  # fmt: skip
def test_settings_that_make_no_sense_are_refused(change: dict[str, Any]) -> None:
    (name,) = change
    kinds = (NetworkSettings, ModelSettings, LimitSettings)
    kind = next(kind for kind in kinds if name in {each.name for each in fields(kind)})
    with pytest.raises(UsageError, match=f"--{name.replace('_', '-')}"):
        kind(**change)


def test_other_machines_need_a_key_unless_said_otherwise(tmp_path: Path) -> None:
    """whisper-asr-webservice listened to everybody at 0.0.0.0; here that has to be said."""
    models, limits = ModelSettings(model=("tiny.en",)), LimitSettings(spool_dir=tmp_path)
    for host in ("0.0.0.0", "::", "192.0.2.1", "example.org"):
        with pytest.raises(UsageError, match="without keys"):
            create_app(ServerSettings(network=NetworkSettings(host=host), models=models, limits=limits))
    assert not list(tmp_path.iterdir())
    assert NetworkSettings().is_local
    create_app(ServerSettings(network=NetworkSettings(host="::"), models=models, limits=limits, keys="k"))
    create_app(ServerSettings(network=NetworkSettings(host="::", no_auth=True), models=models, limits=limits))


# Access.


def test_keys_are_kept_as_digests(tmp_path: Path) -> None:
    key = new_key()
    file = tmp_path / "keys"
    file.write_text(f"# ours\nsha256:{digest(key)}  # laptop\n")
    keys = Keys.read(file, "plain, other")
    assert key not in repr(vars(keys))
    assert keys.client(key).label == digest(key)[:8]
    assert {keys.client(each).has_key for each in ("plain", "other")} == {True}
    for wrong in (None, "", "sk", key[:-1], digest(key)):
        with pytest.raises(ApiError) as caught:
            keys.client(wrong)
        assert caught.value.status == 401
    for content in ("", "plain-key\n", "sha256:123\n"):
        file.write_text(content)
        with pytest.raises(UsageError):
            Keys.read(file)


@pytest.mark.parametrize(
    ("origin", "host", "allowed"),
    [
        ("http://localhost:8000", "localhost:8000", True),
        ("http://127.0.0.1:8000", "127.0.0.1:8000", True),
        ("http://[::1]:8000", "[::1]:8000", True),
        ("https://mine.example", "mine.example", True),  # allowed by name
        ("http://localhost:3000", "localhost:8000", False),
        ("http://evil.example", "evil.example", False),
        ("http://localhost.evil.example", "localhost.evil.example", False),
        ("null", "localhost", False),
        ("http://mine.example.evil", "localhost", False),
    ],
)
def test_origins(origin: str, host: str, allowed: bool) -> None:
    expected = nullcontext() if allowed else pytest.raises(ApiError, match="origin")
    with expected:
        Origins(["https://mine.example"]).check({"origin": origin, "host": host})


# Parameters.


def test_every_option_is_a_field_or_refused_with_the_reason() -> None:
    for each in fields(TranscribeOptions):
        default = getattr(TranscribeOptions(), each.name)
        sent = {each.name: ["none" if default is None else str(default)]}
        if each.name in ("lm", "task", "batch_size"):
            with pytest.raises(ApiError) as caught:
                read_parameters(sent, "transcribe", SERVED)
            assert caught.value.param == each.name
        else:
            assert getattr(read_parameters(sent, "transcribe", SERVED).options, each.name) == default


@given(
    st.dictionaries(
        st.one_of(
            st.text(max_size=20),
            st.sampled_from(["model", "temperature", "stream", "include[]", "chunking_strategy[type]", "languages[]"]),
        ),
        st.lists(st.text(max_size=20), min_size=1, max_size=3),
        max_size=4,
    )
)
@settings(max_examples=200, deadline=None)
def test_any_form_is_understood_or_refused(sent: dict[str, list[str]]) -> None:
    with suppress(ApiError):  # nothing else is ever raised
        read_parameters(sent, "transcribe", SERVED)


def test_names_of_models() -> None:
    assert SERVED.resolve("whisper-1") == SERVED.resolve("base") == "base"
    assert SERVED.resolve("ours") == "tiny.en"
    with pytest.raises(ApiError):
        SERVED.resolve("small")
    with pytest.raises(UsageError):
        Served(["base"], ["ours=small"])


def test_an_adapter_is_the_first_models_unless_it_says_whose(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("one", "a=b", "none")]
    for folder in folders:
        folder.mkdir()
    for folder in folders[:2]:
        (folder / "adapter_config.json").write_text("{}")
    one, odd, none = map(str, folders)
    both = Served(["base", "tiny.en"], adapters=[f"tiny.en={one}", odd])
    assert both.adapters == {"tiny.en": one, "base": odd}
    assert Served([one], adapters=[f"one={odd}"]).adapters == {one: odd}  # by the name that clients say
    for adapter, error in ((f"small={one}", UsageError), (none, ModelError), ("base=nowhere", ModelError)):
        with pytest.raises(error, match="--adapter"):
            Served(["base"], adapters=[adapter])
    with pytest.raises(UsageError, match="--model"):
        Served(["base"], adapters=[one, f"base={odd}"])


def test_every_kind_of_error_has_a_status_and_openais_shape() -> None:
    for kind in StapesError.__subclasses__():
        error = ApiError.of(kind("what and how"))
        assert 400 <= error.status < 600
        assert set(error.body()["error"]) == {"message", "type", "param", "code"}
    assert ApiError(429, "x", retry_after=0.2).headers() == {"retry-after": "1"}


def test_watching_a_whisper_does_not_build_its_network_again(monkeypatch: pytest.MonkeyPatch) -> None:
    checkpoint: Any = SimpleNamespace(config=published_config("tiny.en"), suppress_tokens=())
    family = whisper_family.WhisperFamily("tiny.en", checkpoint, tokenizer=None, engine=None)  # type: ignore[arg-type]
    count = family.parameters
    monkeypatch.setattr(whisper_family, "Whisper", None)  # engines tell it twice a second
    assert family.parameters == count > 37e6


# Turns.


def test_turns_of_one_class_never_wait_for_the_other() -> None:
    async def scene() -> None:
        limits = Limits(LimitSettings(max_queue_seconds=0.2, jobs_per_key=2, max_queue=3), slots=1)
        order: list[str] = []
        release = asyncio.Event()

        async def work(priority: Any, name: str) -> None:
            async with limits.turn(priority, time.monotonic()):
                order.append(name)
                if priority == "bulk":
                    await release.wait()

        first = asyncio.create_task(work("bulk", "long"))
        await asyncio.sleep(0)
        second = asyncio.create_task(work("bulk", "second"))
        await asyncio.sleep(0)
        assert limits.waiting["bulk"] == 1
        await work("interactive", "short")  # although a long one is at work and another waits
        assert order == ["long", "short"]
        with pytest.raises(ApiError, match="handed back") as caught:
            await second  # it has waited too long
        assert (caught.value.status, caught.value.code) == (503, "queue_timeout")
        third = asyncio.create_task(work("bulk", "third"))
        fourth = asyncio.create_task(work("bulk", "fourth"))
        await asyncio.sleep(0)
        third.cancel()
        release.set()
        await asyncio.gather(first, fourth)
        assert order == ["long", "short", "fourth"]
        assert sum(limits.at_work.values()) == sum(limits.waiting.values()) == 0

        key, local = Client("a", has_key=True), Client("local")
        with limits.admitted(key), limits.admitted(key):
            with pytest.raises(ApiError, match="This key has 2"), limits.admitted(key):
                pass
            with limits.admitted(local), pytest.raises(ApiError, match="queue is full"), limits.admitted(local):
                pass
        limits.closing = True
        with pytest.raises(ApiError, match="stopped"), limits.admitted(key):
            pass

    asyncio.run(scene())


def test_the_gate_never_keeps_an_idle_device_waiting() -> None:
    gate = Gate(batch=3, seconds=0.3)

    def passes(priority: str) -> float:
        began = time.monotonic()
        with gate.passed(priority):
            return time.monotonic() - began

    assert passes("interactive") < 0.1  # nothing is at work
    with gate.passed("bulk"):
        assert passes("interactive") < 0.1  # nothing of its class is
    with gate.passed("interactive"):
        assert 0.25 < passes("interactive") < 1  # at most so long
        took: list[float] = []
        threads = [threading.Thread(target=lambda: took.append(passes("interactive"))) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert max(took) < 0.25  # together they are a batch
    busy = gate.passed("interactive")
    busy.__enter__()
    waiting = threading.Thread(target=lambda: took.append(passes("interactive")))
    waiting.start()
    time.sleep(0.05)
    busy.__exit__(None, None, None)  # the device is idle now
    waiting.join()
    assert took[-1] < 0.25


# Messages and files.


def test_messages_of_any_size_arrive_in_order() -> None:
    ours, theirs = socket.socketpair()
    sent = [({"n": n, "text": "ü" * n, "nan": float("nan")}, bytes(n * 1000)) for n in range(40)]
    far = wire.Wire(theirs)

    async def scene() -> None:
        reader, writer = await asyncio.open_connection(sock=ours)
        for message, payload in sent:
            far.post(message, payload)
        for message, payload in sent:
            received = await wire.read(reader)
            assert received == (json.loads(json.dumps({**message, "nan": None})), payload)
        writer.write(wire.pack({"back": 1}, b"x"))
        assert await asyncio.to_thread(far.receive) == ({"back": 1}, b"x")
        writer.close()
        assert await asyncio.to_thread(far.receive) is None

    asyncio.run(scene())


def test_what_a_killed_server_left_is_removed(tmp_path: Path) -> None:
    (tmp_path / "stapes-spool-4194305-abc").mkdir()  # no process has so high a number
    (tmp_path / "stapes-spool-4194305-abc" / "1.upload").write_bytes(b"someone's voice")
    (tmp_path / "stapes-spool-1-abc").mkdir()
    spool = Spool(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(["stapes-spool-1-abc", spool.path.name])
    with spool.new() as place:
        place.upload.write_bytes(b"x")
    assert not list(spool.path.iterdir())
    spool.close()
    assert not spool.path.exists()


def test_live_sessions_are_counted() -> None:
    limits = Limits(LimitSettings(), slots=1)
    services: Any = SimpleNamespace(limits=limits, decoders=SimpleNamespace(killed=0), engines=SimpleNamespace(all=[]))

    def counted() -> float:
        families = {family.name: family for family in _Lookups(services).collect()}
        return families["stapes_live_sessions"].samples[0].value

    assert counted() == 0
    with limits.session(), limits.session():
        assert counted() == 2
    assert counted() == 0
