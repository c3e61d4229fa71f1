"""How systems are timed, what they hear, and networks without weights."""

from __future__ import annotations

import json
import wave
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import soundfile

import clips
from stapes.benchmarks import rounds
from stapes.benchmarks.audio import Recording, find_clips, join
from stapes.benchmarks.random_weights import load_random, random_tokenizer, without_judgement
from stapes.benchmarks.records import Weights, read_bench
from stapes.benchmarks.rounds import Case, Contender, measure
from stapes.benchmarks.run import Run
from stapes.benchmarks.transcribe import TranscribeBench
from stapes.checkpoints.catalog import KNOWN
from stapes.checkpoints.onnx_folder import WEIGHTS, OnnxFolder
from stapes.checkpoints.sizes import published_config
from stapes.cli.bench_run import measure as keep_what_was_measured
from stapes.cli.main import main
from stapes.cli.terminal import Terminal
from stapes.errors import DeviceError, UsageError
from stapes.evaluation.corpora import Corpus, Row
from stapes.evaluation.peers import samples
from stapes.models.whisper import Whisper
from stapes.options import TranscribeOptions


def test_systems_run_in_turn_each_round_the_other_way_round_and_ratios_are_of_pairs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = [0.0]
    order = []
    seconds = {"stapes": iter([1.0, 4.0, 2.0]), "peer": iter([3.0, 4.0, 8.0])}
    monkeypatch.setattr(rounds.time, "perf_counter", lambda: clock[0])

    def run(name: str) -> Callable[[], str]:
        def work() -> str:
            order.append(name)
            clock[0] += next(seconds[name])
            return "text"

        return work

    contenders = [
        Contender(system=name, run=run(name), judge=lambda text: {"words": float(len(text))}) for name in seconds
    ]
    row = measure(Case({}, lambda: contenders), 3, lambda line: None)
    assert order == ["stapes", "peer", "peer", "stapes", "stapes", "peer"]
    assert row.ours.wall_seconds.rounds == [1.0, 4.0, 2.0]
    assert row.ours.wall_seconds.median == 2.0
    (ratio,) = row.ratios
    assert ratio.times_as_fast.rounds == [3.0, 1.0, 4.0]  # and not 4.0 / 2.0, the medians' own
    assert (ratio.times_as_fast.low, ratio.times_as_fast.median, ratio.times_as_fast.high) == (1.0, 3.0, 4.0)
    assert row.ours.figures["words"] == 4.0


def noise(folder: Path, *lengths: float) -> Corpus:
    rows = []
    for number, length in enumerate(lengths):
        path = folder / f"{number}.wav"
        soundfile.write(path, np.random.default_rng(number).normal(0, 0.1, round(16_000 * length)), 16_000)
        rows.append(Row(id=str(number), audio=str(path), text=f"word{number}", duration=length))
    return Corpus("noise", "noise", rows)


@pytest.mark.parametrize("seconds", [3.0, 10.0, 31.7])
def test_joined_recordings_have_exactly_the_length_asked_for_and_whole_clips(tmp_path: Path, seconds: float) -> None:
    corpus = noise(tmp_path, 2.0, 7.0, 1.5)
    recording = join(corpus, seconds, tmp_path / "joined.wav")
    with wave.open(str(recording.path)) as file:
        assert file.getnframes() == round(seconds * 16_000)
    sound = samples(str(recording.path))
    lengths = {row.text: row.duration or 0.0 for row in corpus.rows}
    spoken = sum(lengths[word] for word in recording.text.split())
    assert np.count_nonzero(sound) / 16_000 == pytest.approx(spoken, abs=0.01)
    assert seconds - spoken - 0.5 * len(recording.text.split()) < 2.0  # no clip more would have fitted


def test_a_recording_shorter_than_every_clip_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="fits into 1 s"):
        join(noise(tmp_path, 2.0), 1.0, tmp_path / "joined.wav")


def test_without_a_corpus_the_clips_of_the_pip_package_are_used(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clips.clips_folder()  # skips where it is not installed
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("STAPES_DATA", raising=False)
    found = find_clips()
    assert found.name == "pytest-audioeval"
    assert all(row.text and row.duration for row in found.rows)


@pytest.mark.parametrize("name", KNOWN)
def test_published_sizes_have_the_published_number_of_parameters(name: str) -> None:
    import torch

    with torch.device("meta"):
        parameters = sum(parameter.numel() for parameter in Whisper(published_config(name)).parameters())
    assert parameters == pytest.approx(KNOWN[name].parameters, rel=0.02)
    tokenizer = random_tokenizer(published_config(name))
    assert len(tokenizer.language_ids) == (KNOWN[name].languages if KNOWN[name].languages > 1 else 0)
    assert tokenizer.timestamp_begin + 1501 == published_config(name).vocab_size


def test_random_weights_write_as_many_tokens_as_asked_in_every_window(tmp_path: Path) -> None:
    recording = join(find_clips(), 40.0, tmp_path / "joined.wav")
    recognizer = load_random("tiny.en", tokens=7, device="cpu", batch_size=4)
    transcript = recognizer.transcribe(recording.path, without_judgement(TranscribeOptions()))
    assert len(transcript.segments) >= 2
    assert [len(segment.tokens) for segment in transcript.segments] == [7] * len(transcript.segments)
    with pytest.raises(UsageError, match="--tokens"):
        load_random("tiny.en", tokens=500)
    with pytest.raises(UsageError, match="published"):
        load_random("huge", tokens=5)


def test_the_command_measures_writes_result_and_log_and_marks_trials(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    find_clips()
    words = ["bench", "transcribe", "--random-weights", "tiny.en", "--tokens", "3", "--devices", "cpu", "--quick"]
    assert main([*words, "--batch-sizes", "2,4", "-o", str(tmp_path), "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    (path,) = tmp_path.glob("*.json")
    result = read_bench(path)
    assert json.loads(path.read_text()) == printed
    assert result.is_trial
    assert result.weights.kind == "random"
    assert [row.case["batch_size"] for row in result.rows] == [2, 4]
    assert all(row.ours.wall_seconds.low > 0 and row.ours.figures["words"] for row in result.rows)
    assert str(tmp_path) not in path.read_text()
    log = path.with_suffix(".log").read_text()
    assert log.count("round 2") == 2


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--lengths", "soon"], "--lengths has 'soon'"),
        (["--lengths", "0.1s"], "--lengths has '0.1s'"),
        (["--batch-sizes", "0"], "--batch-sizes has '0'"),
        (["--rounds", "0"], "--rounds is 0"),
        (["--peer", "kaldi"], "there is no such peer"),
        (["--random-weights", "base", "--peer", "transformers"], "only our own network"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_sentence(
    tmp_path: Path, words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    manifest = Path(noise(tmp_path, 2.0).rows[0].audio).with_name("clips.jsonl")
    manifest.write_text(json.dumps({"audio": "0.wav", "text": "word", "duration": 2.0}) + "\n")
    asked = {"--lengths": "5s", "--corpus": str(manifest), "-o": str(tmp_path / "out")}
    given = [word for pair in asked.items() if pair[0] not in words for word in pair]
    assert main(["bench", "transcribe", *given, *words]) == 2
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_what_was_measured_before_a_failure_is_kept(tmp_path: Path) -> None:
    def broken() -> list[Contender]:
        raise DeviceError("out of memory")

    cases = [Case({"batch_size": 8}, lambda: [Contender(system="stapes", run=str)]), Case({"batch_size": 99}, broken)]
    weights = Weights(name="base", kind="real")
    run = Run("transcribe", cases, rounds=2, weights=weights, audio={}, command=["stapes", "bench"])
    with pytest.raises(DeviceError):
        keep_what_was_measured(run, tmp_path, Terminal())
    (path,) = tmp_path.glob("*.json")
    result = read_bench(path)
    assert [row.case for row in result.rows] == [{"batch_size": 8}]
    assert "ended early, cases are missing: out of memory" in result.notes


def test_an_exported_model_is_measured_as_what_it_is(tmp_path: Path) -> None:
    OnnxFolder(kind="whisper", graphs={}, scheme="int8").write(tmp_path)
    (tmp_path / WEIGHTS).touch()
    nothing = Recording(tmp_path, 1.0, "")
    bench = TranscribeBench(model=str(tmp_path), recordings=[nothing], warm_up=nothing, options=TranscribeOptions())
    (case,) = bench.cases()
    assert case.facts["precision"] == "int8"
