"""Changes to recordings: what they claim to change, they change by that much, and nothing else."""

from __future__ import annotations

import numpy as np
import pytest
import soundfile
from made_corpora import RATE, tone, write

from shared_data import DATA
from stapes.data.augment import (
    AudioFiles,
    WaveformAugment,
    add_noise,
    add_room,
    change_speed,
    change_tempo,
    shift_pitch,
)
from stapes.data.options import AugmentOptions
from stapes.data.seeds import generator
from stapes.errors import UsageError


def pitch(samples: np.ndarray) -> float:
    """Hz of the strongest partial."""
    spectrum = np.abs(np.fft.rfft(samples * np.hanning(len(samples))))
    return float(spectrum.argmax() * RATE / len(samples))


def decibels(signal: np.ndarray, noise: np.ndarray) -> float:
    return 10 * np.log10(np.mean(np.square(signal, dtype=np.float64)) / np.mean(np.square(noise, dtype=np.float64)))


@pytest.mark.parametrize("factor", [0.8, 0.9, 1.1, 1.25])
def test_speed_moves_length_and_pitch_tempo_moves_length_alone(factor):
    samples = tone(2.0, 440)
    faster, shorter = change_speed(samples, factor), change_tempo(samples, factor)
    assert len(faster) == len(shorter) == round(len(samples) / factor)
    assert pitch(faster) == pytest.approx(440 * factor, rel=0.01)
    assert pitch(shorter) == pytest.approx(440, rel=0.01)
    assert decibels(faster, samples) == pytest.approx(0, abs=0.3)
    assert decibels(shorter, samples) == pytest.approx(0, abs=0.5)


@pytest.mark.parametrize("semitones", [-3.0, 2.0])
def test_pitch_moves_alone(semitones):
    samples = tone(2.0, 440)
    shifted = shift_pitch(samples, semitones)
    assert len(shifted) == len(samples)
    assert pitch(shifted) == pytest.approx(440 * 2 ** (semitones / 12), rel=0.01)


@pytest.mark.parametrize("snr_db", [-5.0, 0.0, 12.0, 30.0])
def test_noise_is_at_the_ratio_asked_for(snr_db):
    random = np.random.default_rng(0)
    samples, noise = tone(1.0), (0.01 * random.standard_normal(RATE)).astype(np.float32)
    noisy = add_noise(samples, noise, snr_db)
    assert decibels(samples, noisy - samples) == pytest.approx(snr_db, abs=0.02)
    silence = np.zeros(RATE, np.float32)
    np.testing.assert_array_equal(add_noise(silence, noise, snr_db), silence)
    np.testing.assert_array_equal(add_noise(samples, silence, snr_db), samples)


def test_a_room_keeps_time_and_power_and_is_a_convolution():
    random = np.random.default_rng(1)
    samples = (0.1 * random.standard_normal(RATE)).astype(np.float32)
    response = np.zeros(4000, np.float32)
    response[100], response[1100] = 1.0, 0.5  # the direct sound late in the file, and an echo 1000 samples after it
    wet = add_room(samples, response)
    assert decibels(wet, samples) == pytest.approx(0, abs=0.01)
    expected = samples + 0.5 * np.concatenate([np.zeros(1000, np.float32), samples[:-1000]])
    np.testing.assert_allclose(wet, expected * (np.std(wet) / np.std(expected)), atol=1e-4)


def test_all_chance_comes_from_the_generator(tmp_path):
    for number in range(3):
        write(tmp_path / "noise" / f"{number}.wav", 1.0 + number, 700 + 50 * number)
    write(tmp_path / "room.wav", 0.1)
    options = AugmentOptions(
        noises=(str(tmp_path / "noise"),), rooms=(str(tmp_path / "room.wav"),), room_probability=0.5,
        pitch_probability=0.3, tempo_probability=0.5,
    )  # fmt: skip
    samples = tone(1.5)
    first, second = WaveformAugment(options), WaveformAugment(options)
    second(samples, 1.0, generator(99))  # what came before has no influence
    results = []
    for key in range(12):
        a, b = first(samples, 0.9, generator(key)), second(samples, 0.9, generator(key))
        np.testing.assert_array_equal(a, b)
        assert a.dtype == np.float32
        assert np.abs(a).max() <= 1.0
        assert len(a) == round(len(samples) / 0.9)
        results.append(a)
    assert len({result.tobytes() for result in results}) == 12


def test_probabilities_hold_and_options_do_not_disturb_each_other(tmp_path):
    write(tmp_path / "noise.wav", 3.0, 900)
    samples = tone(0.3)
    quiet = AugmentOptions(speeds=(1.0,), gain_probability=0.5, gain_db=(-6, -6))
    noisy = AugmentOptions(
        speeds=(1.0,), gain_probability=0.5, gain_db=(-6, -6), noises=(str(tmp_path),), noise_probability=0.5
    )
    one, two = WaveformAugment(quiet), WaveformAugment(noisy)
    gained = [decibels(one(samples, 1.0, generator(key)), samples) < -3 for key in range(400)]
    assert 150 < sum(gained) < 250
    both = [two(samples, 1.0, generator(key)) for key in range(400)]
    alone = [one(samples, 1.0, generator(key)) for key in range(400)]
    unchanged = sum(np.array_equal(a, b) for a, b in zip(both, alone, strict=True))
    assert 150 < unchanged < 250  # where no noise was added, the gain is the one it was


def test_excerpts_of_short_long_and_many_channelled_files(tmp_path):
    soundfile.write(tmp_path / "two.wav", np.stack([tone(0.5, 300), tone(0.5, 500)], 1), RATE, subtype="FLOAT")
    files = AudioFiles([tmp_path])
    short = files.excerpt(2 * RATE, 0.0, 0.3, 0.9)
    assert len(short) == 2 * RATE
    np.testing.assert_array_equal(short[: RATE // 2], short[RATE // 2 : RATE])
    assert pitch(files.excerpt(4000, 0.0, 0.3, 0.9)) == pytest.approx(500, abs=5)
    assert pitch(files.excerpt(4000, 0.0, 0.3, 0.0)) == pytest.approx(300, abs=5)
    for where in (0.0, 0.5, 0.999999):
        assert len(files.excerpt(RATE // 2, 0.0, where, 0.0)) == RATE // 2


def test_what_makes_no_sense_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    cases = [
        (AugmentOptions(noise_probability=1.5), "noise_probability"),
        (AugmentOptions(snr_db=(20.0, 5.0)), "lower end first"),
        (AugmentOptions(speeds=(0.4,), tempo_probability=0.1), "tempo of 0.4"),
        (AugmentOptions(pitch_semitones=(0, 13), pitch_probability=0.1), "12 semitones"),
        (AugmentOptions(noises=(str(tmp_path / "nowhere*"),)), "no audio there"),
        (AugmentOptions(rooms=(str(tmp_path / "empty"),)), "no audio there"),
    ]
    for options, words in cases:
        with pytest.raises(UsageError, match=words):
            WaveformAugment(options)


@pytest.mark.data
def test_real_noises_and_rooms():
    folder = DATA / "noise-rir"
    rooms, noises = (f"{folder}/*rir*.flac", f"{folder}/lh_*.flac"), (f"{folder}/sc_*.flac", f"{folder}/sb_noise*.flac")
    options = AugmentOptions(
        rooms=rooms, noises=noises, room_probability=1, noise_probability=1, gain_probability=0, snr_db=(10, 10)
    )
    augment = WaveformAugment(options)
    samples = tone(2.0)
    for key in range(30):
        changed = augment(samples, 1.0, generator(key))
        assert len(changed) == len(samples)
        assert np.isfinite(changed).all()
        assert -1.5 < decibels(changed, samples) < 2.5  # the room keeps the power, noise of a tenth adds 0.4 dB
