"""A job with a real recogniser behind it gives what the recogniser gives."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from recordings import pcm16, signal, wav

import ctc_models
from stapes.audio.decode import open_audio, read_audio
from stapes.audio.vad import VoiceActivityDetector
from stapes.bulk import read
from stapes.bulk.decoders import LocalDecoders, Source, Speech
from stapes.bulk.inputs import Item
from stapes.cli.main import main


def test_rows_are_what_transcribing_gives(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    model, folder = tmp_path / "model", tmp_path / "in"
    ctc_models.save(model)
    folder.mkdir()
    for number in range(5):
        (folder / f"{number}.wav").write_bytes(wav(pcm16(ctc_models.babble(2.5, seed=number))))
    words = ["bulk", str(folder), str(tmp_path / "out"), "--model", str(model), "--device", "cpu", "--no-vad"]
    assert main([*words, "--workers", "1", "--threads", "1", "--shard-files", "2", "--json"]) == 0
    result = json.loads(capfd.readouterr().out)
    assert (result["state"], result["files_done"], result["shards_done"]) == ("finished", 5, 3)
    with ctc_models.load(model) as recognizer:
        for row in read(tmp_path / "out"):
            alone = recognizer.transcribe(row["audio"], vad=False).to_dict()
            assert row["text"] == alone["text"]
            assert row["text"]
            assert [(s["start"], s["end"], s["text"]) for s in row["segments"]] == [
                (s["start"], s["end"], s["text"]) for s in alone["segments"]
            ]
    assert main(["bulk", "status", str(tmp_path / "out")]) == 0
    assert "finished: 3 of 3 shards, 5 of 5 recordings" in capfd.readouterr().out
    assert main(["bulk", "verify", str(tmp_path / "out"), "--json"]) == 0
    assert json.loads(capfd.readouterr().out) == {"checked": 3, "damaged": []}


def test_speech_found_beside_the_decoder_is_speech_found_here(tmp_path: Path) -> None:
    model, file = tmp_path / "model", tmp_path / "voice.wav"
    ctc_models.save(model)
    file.write_bytes(wav(pcm16(signal(25.0))))
    request = {"audio": str(file), "start": 0.0, "end": None, "channels": "mix", "max_seconds": None, "expected": 25.0}
    decoders = LocalDecoders(1, patience=120.0, speech=True)
    try:
        source = Source("voice", Item("voice", str(file), 25.0), request, decoders)
        with open_audio(source) as stream:
            samples = np.concatenate(list(stream), axis=1)
            there = stream.speech.probabilities([stream.speech.state()], list(samples), final=True)[0]
        detector = VoiceActivityDetector()
        here = detector.probabilities([detector.state()], list(read_audio(file)), final=True)[0]
        assert there.shape == here.shape
        np.testing.assert_allclose(there, here, atol=1e-4)

        with ctc_models.load(model) as recognizer:
            found, expected = recognizer.transcribe(source), recognizer.transcribe(str(file))
    finally:
        decoders.close()
    assert (found.text, found.duration) == (expected.text, expected.duration)
    assert found.skipped == expected.skipped
    assert source.outcome.recording == [16_000, 1, 25.0]


def test_probabilities_are_handed_out_with_their_samples() -> None:
    """However samples are cut up, a frame's probability comes when its last sample does, and all of them come."""
    speech, given = Speech(), []
    for number in range(4):
        speech.add(np.full((2, 100), number, np.float32))
    for samples in (100, 412, 51_200, 100_000, 50_000):
        given.append(speech.probabilities([None, None], [np.zeros(samples)] * 2)[1])
    assert [len(each) for each in given] == [0, 1, 100, 195, 97]
    rest = speech.probabilities([None, None], [np.zeros(0)] * 2, final=True)
    assert [len(each) for each in rest] == [7, 7]
    np.testing.assert_array_equal(np.concatenate([*given, rest[1]]), np.repeat(np.arange(4), 100))
