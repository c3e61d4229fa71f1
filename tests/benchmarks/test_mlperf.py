"""MLPerf's recipe: what is heard, the loop that keeps slots full, limits that are computed, and the command."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from stapes import loading
from stapes.benchmarks import mlperf, random_weights, transcribe
from stapes.benchmarks.engine_loop import Written, greedy_request, transcribe_windows
from stapes.benchmarks.mlperf_windows import noise_windows, pack, packed_windows
from stapes.benchmarks.random_weights import load_random, random_tokenizer, without_judgement
from stapes.benchmarks.records import read_bench
from stapes.benchmarks.roofline import decoder_operations, encoder_operations, memory_operations, step_bytes
from stapes.benchmarks.transformers_peer import TransformersPeer
from stapes.cli.main import main
from stapes.errors import DeviceError, ModelError, UsageError
from stapes.inference.engine import DecodeRequest, DecodeResult
from stapes.inference.gpu_whisper import GpuWhisperEngine
from stapes.inference.torch_whisper import TorchWhisperEngine
from stapes.models.whisper import Whisper, WhisperConfig
from stapes.options import TranscribeOptions

SMALL = WhisperConfig(
    mel_bins=80, vocab_size=51865, width=64, encoder_layers=2, encoder_heads=2, decoder_layers=3, decoder_heads=2
)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every published size is a small one."""
    for module in (random_weights, transcribe):
        monkeypatch.setattr(module, "published_config", lambda name: SMALL)


class Slots:
    """An engine whose windows say in their first sample how many tokens they take; it checks what it is told."""

    steps_per_look = 4

    def __init__(self, slots: int, batch: int) -> None:
        self.slots, self.batch = slots, batch
        self.left: dict[int, int] = {}
        self.late: list[int] = []
        self.waiting = 0
        self.idle_steps = 0

    def free_slots(self, request: DecodeRequest) -> int:
        return self.slots - len(self.left)

    def encode(self, windows: Sequence[np.ndarray]) -> list[int]:
        self.waiting -= len(windows)
        assert len(windows) <= self.batch
        return [int(window[0]) for window in windows]

    def admit(self, requests: Sequence[DecodeRequest], encoded: Sequence[int]) -> list[int]:
        assert len(requests) == len(encoded)
        self.left |= {tokens: tokens for tokens in encoded}  # every window has another number of tokens
        assert len(self.left) <= self.slots
        return list(encoded)

    def step(self, count: int) -> None:
        self.idle_steps += self.waiting >= self.batch and self.slots - len(self.left) >= self.batch
        for slot in self.left:
            self.left[slot] -= count

    def harvest(self) -> list[tuple[int, DecodeResult]]:
        ended, self.late = self.late, [slot for slot, left in self.left.items() if left <= 0 and slot not in self.late]
        return [(slot, DecodeResult([slot], 0.0, 0.0, 0.0, False)) for slot in ended if slot in self.left]

    def release(self, slot: int) -> None:
        del self.left[slot]


@pytest.mark.parametrize(("slots", "batch", "count"), [(1, 1, 3), (8, 3, 50), (8, 8, 7), (5, 2, 11)])
def test_slots_are_kept_full_and_every_text_comes_back_in_its_place(slots: int, batch: int, count: int) -> None:
    lengths = np.random.default_rng(0).permutation(count) + 1
    engine: Any = Slots(slots, batch)
    engine.waiting = count
    tokenizer: Any = type("Numbers", (), {"decode": staticmethod(lambda tokens: f" {tokens[0]}")})
    request = DecodeRequest(prompt=(1,), sot_index=0, timestamps=False)
    windows = [np.array([length], dtype=np.float32) for length in lengths]
    written = transcribe_windows(engine, tokenizer, windows, request, batch)
    assert [each.text for each in written] == [str(length) for length in lengths]
    assert not engine.left
    assert engine.idle_steps <= slots // batch  # as they are filled one batch after another


@pytest.mark.parametrize("engine_class", [TorchWhisperEngine, GpuWhisperEngine])
def test_random_weights_write_as_many_text_tokens_as_asked_on_every_engine(
    small: None, monkeypatch: pytest.MonkeyPatch, engine_class: type[TorchWhisperEngine]
) -> None:
    monkeypatch.setattr(loading, "TorchWhisperEngine", engine_class)
    monkeypatch.setattr(loading, "is_worth_packing", lambda device, dtype: False)
    model = load_random("tiny", tokens=9, device="cpu", batch_size=3)
    assert type(model.engine) is engine_class
    request = greedy_request(model.tokenizer, "en", SMALL.vocab_size, endless=True)
    windows = noise_windows(5).pcm
    written = transcribe_windows(model.engine, model.tokenizer, windows, request, 2)
    assert [each.tokens for each in written] == [9] * 5
    transcript = model.transcribe(
        np.concatenate(windows[:2]), without_judgement(TranscribeOptions(language="en", vad=False)), sample_rate=16_000
    )
    assert [len(segment.tokens) for segment in transcript.segments] == [9, 9]
    assert all(token < model.tokenizer.eot for segment in transcript.segments for token in segment.tokens)


def test_recordings_are_packed_back_to_back_as_long_as_they_fit() -> None:
    generator = np.random.default_rng(1)
    recordings = [
        (np.full(generator.integers(1, 480_001), number, dtype=np.float32), f" word{number} ") for number in range(40)
    ]
    windows = list(pack(recordings))
    assert all(len(pcm) <= 480_000 for pcm, _ in windows)
    assert np.array_equal(np.concatenate([pcm for pcm, _ in windows]), np.concatenate([pcm for pcm, _ in recordings]))
    assert " ".join(text for _, text in windows).split() == [f"word{number}" for number in range(40)]
    for (pcm, text), (_, following) in pairwise(windows):
        first = int(following.split()[0].removeprefix("word"))
        assert len(pcm) + len(recordings[first][0]) > 480_000  # one more would not have fitted
        assert len(text.split()) == len(np.unique(pcm))


def test_what_is_too_long_is_left_out_and_said(tmp_path: Path) -> None:
    lines = []
    for number, length in enumerate([2.0, 31.0, 1.5]):
        soundfile.write(tmp_path / f"{number}.wav", np.zeros(round(16_000 * length)), 16_000)
        lines.append(json.dumps({"audio": f"{number}.wav", "text": f"word{number}", "duration": length}))
    manifest = tmp_path / "clips.jsonl"
    manifest.write_text("\n".join(lines) + "\n")
    windows = packed_windows(str(manifest), "en")
    assert windows.texts == ["word0 word2"]
    assert windows.seconds == 3.5
    assert "1 recordings longer than 30 s" in windows.notes[0]
    assert len(windows.first(3).pcm) == 3
    manifest.write_text(lines[1] + "\n")
    with pytest.raises(UsageError, match="longer than 30 s"):
        packed_windows(str(manifest), "en")


@torch.inference_mode()
def test_operations_are_those_that_pytorch_counts() -> None:
    network = Whisper(SMALL).eval()
    mel = torch.zeros(1, SMALL.mel_bins, 3000)
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        states = network.encoder(mel)
    assert counter.get_total_flops() == encoder_operations(SMALL)
    with FlopCounterMode(display=False) as counter:
        memory = network.decoder.memory(states)
    assert counter.get_total_flops() == memory_operations(SMALL)

    prompt, tokens = 4, 6
    head = SMALL.width // SMALL.decoder_heads
    shape = (1, SMALL.decoder_heads, SMALL.text_context, head)
    cache = [(torch.zeros(shape), torch.zeros(shape)) for _ in range(SMALL.decoder_layers)]
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        for position in range(prompt + tokens - 1):
            mask = torch.ones(1, 1, 1, position + 1, dtype=torch.bool)
            states, _ = network.decoder(
                torch.zeros(1, 1, dtype=torch.int64), torch.tensor([[position]]), cache, memory, mask
            )
            if position >= prompt - 1:
                network.decoder.logits(states[:, 0])
    assert counter.get_total_flops() == decoder_operations(SMALL, prompt, tokens)


def test_a_step_reads_every_matrix_once_and_all_keys_and_values_of_every_window() -> None:
    decoder = Whisper(SMALL).decoder
    matrices = sum(
        parameter.numel()
        for name, parameter in decoder.named_parameters()
        if parameter.dim() == 2
        and not name.startswith("positions")
        and "cross_attention.key" not in name
        and "cross_attention.value" not in name
    )
    found = step_bytes(SMALL, 7, 20, weight_bytes=2, cache_bytes=2, memory_bytes=2)
    assert found.weights == 2 * matrices
    assert found.memory == 7 * 3 * 2 * 1500 * 64 * 2
    assert found.cache == 7 * 3 * 2 * 20 * 64 * 2
    assert found.total == found.weights + found.memory + found.cache
    in_bytes = step_bytes(SMALL, 7, 20, weight_bytes=2, cache_bytes=2, memory_bytes=1)
    assert found.memory / 2 < in_bytes.memory < 0.51 * found.memory


class Crowded(TransformersPeer):
    """A peer that takes a moment a batch, and has room for so many windows at a time; for more when we make way."""

    def __init__(self, room: int) -> None:
        self.device, self.room = torch.device("cpu"), room

    def transcribe(self, windows: Sequence[np.ndarray], batch: int, tokens: int, *, exact: bool) -> list[Written]:
        if batch > self.room:
            raise torch.OutOfMemoryError("no room")
        time.sleep(0.01)
        return []


def test_the_peer_runs_at_its_best_size_of_those_that_fit_and_asks_us_once_to_make_way() -> None:
    peer, asked = Crowded(4), []

    def make_room() -> bool:
        asked.append(peer.room)
        peer.room = 8
        return len(asked) == 1

    def best(count: int, sizes: Sequence[int]) -> int:
        windows = noise_windows(count).pcm
        return peer.best_batch(windows, sizes, 5, exact=True, make_room=make_room, log=lambda line: None)

    assert best(16, [16, 2, 8, 4]) == 8
    assert asked == [4, 8]
    assert best(3, [2, 64]) == 3  # there are no more windows
    with pytest.raises(ModelError, match="--peer-batches"):
        best(16, [16])


WORDS = ["bench", "mlperf", "--random-weights", "tiny", "--device", "cpu", "--windows", "4", "--tokens", "5"]


def test_the_command_measures_ours_and_the_peer_on_the_same_work(
    small: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("transformers")
    more = ["--rounds", "2", "--slots", "2", "--latency", "--peer", "transformers", "--peer-batches", "2,4"]
    assert main([*WORDS, *more, "-o", str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    (path,) = tmp_path.glob("*.json")
    result = read_bench(path)
    assert json.loads(path.read_text()) == printed
    assert not result.is_trial
    assert (result.name, result.weights.kind, result.weights.tokens) == ("mlperf", "random", 5)
    windows, latency = result.rows
    assert windows.case["windows"] == 4
    assert windows.case["sound_seconds"] == 120.0
    assert [system.system for system in windows.systems] == ["stapes", "transformers"]
    assert [system.figures["tokens"] for system in windows.systems] == [20.0, 20.0]
    figures = windows.ours.figures
    seconds = windows.ours.wall_seconds.median
    assert figures["windows_per_second"] == pytest.approx(4 / seconds)
    assert figures["tokens_per_second"] == pytest.approx(20 / seconds)
    for name in ("encoder_of_product", "step_of_copy", "encoder_seconds", "step_seconds", "copy_bytes_per_second"):
        assert (figures[name] or 0) > 0
    assert figures["mfu"] is None  # no data sheet is known of a CPU
    assert len(windows.ratios[0].times_as_fast.rounds) == 2
    assert [system.figures["tokens"] for system in latency.systems] == [30.0, 30.0]
    assert latency.case["sound_seconds"] == 10.0
    assert "decoder step of 2 windows" in path.with_suffix(".log").read_text()


def test_what_was_measured_before_a_failure_is_kept_and_text_is_printed(
    small: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*WORDS, "--quick", "--slots", "2", "-o", str(tmp_path / "whole")]) == 0
    printed = capsys.readouterr().out
    for part in ("windows/s", "tokens/s written (prompt and end not counted)", "of a matrix product", "of a copy"):
        assert part in printed

    def broken(*_: object) -> None:
        raise DeviceError("the GPU is gone")

    monkeypatch.setattr(mlperf.MlperfRun, "_latency", broken)
    assert main([*WORDS, "--rounds", "1", "--slots", "2", "--latency", "-o", str(tmp_path / "part")]) == 3
    (path,) = (tmp_path / "part").glob("*.json")
    result = read_bench(path)
    assert [row.case["work"] for row in result.rows] == ["windows"]
    assert "ended early, cases are missing: the GPU is gone" in result.notes


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--model", "base"], "give one of the two"),
        (["--peer", "kaldi"], "only transformers"),
        (["--peer-batches", "many"], "--peer-batches has 'many'"),
        (["--rounds", "0"], "--rounds is 0"),
        (["--slots", "0"], "--slots is 0"),
        (["--tokens", "441"], "--tokens is 441"),
        (["--slots", "2", "--step-slots", "3"], "--step-slots is 3"),
        (["--int8-cache"], "choose a GPU"),
        (["--manifest", "nowhere.jsonl"], "no such manifest"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_sentence(
    small: None, tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = WORDS if "--tokens" not in words else WORDS[:-2]
    assert main([*given, *words, "-o", str(tmp_path / "out")]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_texts_of_random_tokenizers_are_of_text_tokens_only() -> None:
    tokenizer = random_tokenizer(SMALL)
    request = greedy_request(tokenizer, "en", SMALL.vocab_size, endless=True)
    assert set(range(tokenizer.eot, SMALL.vocab_size)) <= set(request.suppressed)
    assert tokenizer.eot not in greedy_request(tokenizer, "en", SMALL.vocab_size, endless=False).suppressed
