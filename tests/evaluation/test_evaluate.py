"""Evaluations: counted as jiwer counts, streamed, continued where they broke off, refused where they differ."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from itertools import islice
from pathlib import Path

import jiwer
import numpy as np
import pytest
import soundfile
from fake_peer import FakePeer, answers_for, rows

from stapes.devices import machine
from stapes.errors import StapesError, UsageError
from stapes.evaluation.corpora import Corpus, Row
from stapes.evaluation.evaluate import Evaluation, evaluate
from stapes.evaluation.peers import samples
from stapes.evaluation.results import read_result, read_utterances
from stapes.options import TranscribeOptions

MODEL = {"name": "fake"}


def corpus_of(count: int, **how: object) -> Corpus:
    return Corpus("made", "made.jsonl", rows(count, **how))  # type: ignore[arg-type]


def begin(folder: Path, corpus: Corpus, normalizer: str = "none", **options: object) -> Evaluation:
    return Evaluation(folder, corpus, MODEL, TranscribeOptions(**options), normalizer=normalizer)  # type: ignore[arg-type]


def test_counts_are_those_of_jiwer_by_hand_and_failures_are_all_deleted(tmp_path: Path) -> None:
    corpus = corpus_of(200)
    answers = answers_for(corpus, failing=(0, 5))
    evaluation = begin(tmp_path, corpus, "english")
    result = evaluate(evaluation, lambda: FakePeer(answers))
    utterances = list(read_utterances(tmp_path))
    assert sorted(each.id for each in utterances) == sorted(row.id for row in corpus.rows)
    by_hand = jiwer.process_words(
        [each.normalized_reference for each in utterances], [each.normalized_hypothesis for each in utterances]
    )
    counts = result.counts
    assert (counts.hits, counts.substitutions, counts.deletions, counts.insertions) == (
        by_hand.hits,
        by_hand.substitutions,
        by_hand.deletions,
        by_hand.insertions,
    )
    assert result.wer.value == pytest.approx(by_hand.wer)
    assert result.failed == 2
    failed = [each for each in utterances if each.error]
    assert all(each.hypothesis == "" and each.deletions == each.words and each.latency is None for each in failed)
    assert sorted(path for path, _ in evaluation.failures) == sorted(corpus.rows[i].audio for i in (0, 5))
    assert read_result(tmp_path) == result
    spoken_to = {key: group.words for key, group in result.breakdown["speaker"].items()}
    assert sum(spoken_to.values()) == counts.words
    assert list(result.breakdown["duration"]) == ["< 2 s", "2–5 s", "5–10 s", "10–20 s", "20–30 s", "≥ 30 s"]
    silence = [each for each in utterances if not each.normalized_reference]
    minutes = sum(each.duration for each in silence) / 60
    assert result.hallucination.silence_insertions_per_minute == pytest.approx(
        sum(each.insertions for each in silence) / minutes
    )


def test_a_broken_off_run_goes_on_and_ends_as_an_unbroken_one(tmp_path: Path) -> None:
    corpus = corpus_of(60)
    answers = answers_for(corpus, failing=(3,))
    whole = evaluate(begin(tmp_path / "whole", corpus), lambda: FakePeer(answers))

    first = begin(tmp_path / "parts", corpus)
    for output in islice(first.outputs(lambda: FakePeer(answers)), 25):
        first.take(output)
    first.pause()
    with (tmp_path / "parts/utterances.jsonl").open("a") as file:
        file.write('{"id": "utterance-5", "aud')  # as a killed process leaves it
    peer = FakePeer(answers)
    second = begin(tmp_path / "parts", corpus)
    assert len(second.waiting) == 35
    parts = evaluate(second, lambda: peer)
    assert len(peer.heard) == 35
    assert (parts.counts, parts.wer, parts.cer, parts.failed) == (whole.counts, whole.wer, whole.cer, whole.failed)
    assert parts.speed.audio_seconds == pytest.approx(whole.speed.audio_seconds)
    finished = begin(tmp_path / "parts", corpus)
    assert finished.waiting == []
    assert [path for path, _ in finished.failures] == [corpus.rows[3].audio]


def test_another_model_corpus_option_or_normaliser_is_refused_by_name(tmp_path: Path) -> None:
    corpus = corpus_of(20)
    evaluate(begin(tmp_path, corpus), lambda: FakePeer(answers_for(corpus)))
    options = TranscribeOptions()
    for difference, attempt in {
        "options.beam_size was 1, now 5": lambda: begin(tmp_path, corpus, beam_size=5),
        "normalizer was none, now basic": lambda: begin(tmp_path, corpus, "basic"),
        "corpus was": lambda: begin(tmp_path, corpus_of(21)),
        "model.name was fake, now other": lambda: Evaluation(
            tmp_path, corpus, {"name": "other"}, options, normalizer="none"
        ),
    }.items():
        with pytest.raises(UsageError, match=difference):
            attempt()


def test_what_never_began_does_not_stand_in_the_way(tmp_path: Path) -> None:
    corpus = corpus_of(10)
    mistaken = begin(tmp_path, corpus, "basic")
    mistaken.pause()
    evaluate(begin(tmp_path, corpus), lambda: FakePeer(answers_for(corpus)))


def test_other_weights_under_the_same_name_are_refused(tmp_path: Path) -> None:
    corpus = corpus_of(20)
    first = begin(tmp_path, corpus)
    for output in islice(first.outputs(lambda: FakePeer(answers_for(corpus))), 5):
        first.take(output)
    first.pause()
    other = FakePeer(answers_for(corpus))
    other.facts = replace(other.facts, precision="int8")
    second = begin(tmp_path, corpus)
    with pytest.raises(UsageError, match="precision was fp32, now int8"):
        list(second.outputs(lambda: other))


def test_damaged_folders_are_named(tmp_path: Path) -> None:
    corpus = corpus_of(10)
    evaluate(begin(tmp_path, corpus), lambda: FakePeer(answers_for(corpus)))
    lines = (tmp_path / "utterances.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "utterances.jsonl").write_text("".join([*lines[:3], "rubbish\n", *lines[3:]]))
    with pytest.raises(UsageError, match=r"utterances\.jsonl, line 4 is no JSON"):
        begin(tmp_path, corpus)
    (tmp_path / "result.json").write_text(
        (tmp_path / "result.json").read_text().replace('"failed": 0', '"failed": "x"')
    )
    with pytest.raises(UsageError, match="'failed' is 'x'"):
        read_result(tmp_path)
    (tmp_path / "run.json").write_text("{")
    with pytest.raises(UsageError, match=r"run\.json is damaged"):
        begin(tmp_path, corpus)


def test_each_language_is_told_once_and_one_given_counts_for_all(tmp_path: Path) -> None:
    corpus = corpus_of(30, languages=("en", "de", "xx"))
    peer = FakePeer(answers_for(corpus))
    evaluation = begin(tmp_path / "a", corpus, "auto")
    result = evaluate(evaluation, lambda: peer)
    assert peer.calls == ["en", "de", None]
    assert evaluation.notes == ["xx is no language of Whisper: detected instead"]
    assert result.normalizer_by_language == {"de": "basic", "en": "english", "xx": "basic"}
    given = FakePeer(answers_for(corpus))
    result = evaluate(begin(tmp_path / "b", corpus, "auto", language="German"), lambda: given)
    assert given.calls == ["de"]
    assert list(result.breakdown["language"]) == ["de"]


def test_parts_of_recordings_are_heard_alone_and_leave_nothing_behind(tmp_path: Path) -> None:
    tones = [np.full(16_000, 0.1 * (1 + i), np.float32) for i in range(3)]
    soundfile.write(tmp_path / "long.wav", np.concatenate(tones), 16_000, subtype="FLOAT")
    made = [
        Row(id=f"{i}", audio=str(tmp_path / "long.wav"), text=f"{i + 1}", duration=1.0, start=float(i), end=i + 1.0)
        for i in range(3)
    ]

    class Listener(FakePeer):
        def _answer(self, path: str) -> tuple[str, str | StapesError]:
            heard = samples(path)
            assert len(heard) == 16_000
            return path, f"{10 * heard.mean():.0f}"

    result = evaluate(begin(tmp_path / "out", Corpus("c", "c", made)), lambda: Listener({}))
    assert result.wer.value == 0.0
    assert not (tmp_path / "out/.parts").exists()


def test_signal_to_noise_ratios_are_estimated_where_unknown(tmp_path: Path) -> None:
    random_ = np.random.default_rng(0)
    sound = random_.normal(size=32_000) * np.repeat([0.001, 0.1], 16_000)
    soundfile.write(tmp_path / "a.wav", sound, 16_000, subtype="FLOAT")
    made = [
        Row(id="estimated", audio=str(tmp_path / "a.wav"), text="x"),
        Row(id="known", audio=str(tmp_path / "a.wav"), text="x", snr_db=3.0),
        Row(id="missing", audio="/nowhere.wav", text="x"),
    ]
    corpus = Corpus("c", "c", made)
    evaluation = Evaluation(tmp_path / "out", corpus, MODEL, TranscribeOptions(), normalizer="none", measure_snr=True)
    result = evaluate(evaluation, lambda: FakePeer({row.audio: "x" for row in made}))
    found = {each.id: each for each in read_utterances(tmp_path / "out")}
    assert found["estimated"].snr_db == pytest.approx(40, abs=1)
    assert found["estimated"].duration == pytest.approx(2.0)
    assert (found["known"].snr_db, found["missing"].snr_db) == (3.0, None)
    assert found["missing"].error is not None
    assert list(result.breakdown["snr"]) == ["0–5 dB", "≥ 30 dB"]


def test_a_hundred_thousand_utterances_need_little_memory(tmp_path: Path) -> None:
    machine.reset_peak_memory()
    before = machine.peak_rss_bytes()
    corpus = corpus_of(100_000, speakers=2_000)
    answers = answers_for(corpus, rate=0.02)
    began = time.perf_counter()
    result = evaluate(begin(tmp_path, corpus), lambda: FakePeer(answers))
    assert time.perf_counter() - began < 120
    assert result.corpus.utterances == 100_000
    assert result.wer.method == "bootstrap by speaker"
    peak = machine.peak_rss_bytes()
    if before is None or peak is None:
        pytest.skip("this system does not tell a process's peak memory")
    assert peak < 2e9
    assert peak - before < 500e6


def test_lines_are_whole_at_every_moment(tmp_path: Path) -> None:
    corpus = corpus_of(40)
    evaluation = begin(tmp_path, corpus)
    for count, output in enumerate(evaluation.outputs(lambda: FakePeer(answers_for(corpus))), 1):
        evaluation.take(output)
        lines = (tmp_path / "utterances.jsonl").read_text().split("\n")
        assert lines.pop() == ""
        assert len([json.loads(line) for line in lines]) == count
