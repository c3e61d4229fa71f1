"""Comparing evaluations: what is counted, what is refused, and a page that is whole, safe and needs no network."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import random
import re
import tracemalloc
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import av
import made_results as made
import numpy as np
import pytest
import soundfile

from stapes.cli.main import main
from stapes.errors import UsageError
from stapes.evaluation import report, report_page, report_plots, report_tables
from stapes.evaluation.report_audio import Recordings, encode
from stapes.evaluation.report_counts import ResultCounts
from stapes.evaluation.report_words import WordErrors, align, difference
from stapes.evaluation.results import read_result
from stapes.evaluation.scoring import word_errors

HOSTILE = "</script><script>alert(1)</script>\"'><img src=x onerror=alert(2)> $x^2$ |`*_~ {{ 7*7 }} ]]> \x07\u2028"


class Page(HTMLParser):
    """What a browser would make of a page: its tags with their attributes, and its ids."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str]]] = []
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, {name: value or "" for name, value in attrs}))

    def values(self, *names: str) -> list[str]:
        return [attrs[name] for _, attrs in self.tags for name in names if name in attrs]


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    root = tmp_path_factory.mktemp("results")
    folders = made.three_systems(root)
    (root / "audio").mkdir()
    tone = 0.1 * np.sin(2 * np.pi * 300 * np.arange(16_000) / 16_000)
    for number in range(0, 200, 2):
        soundfile.write(root / "audio" / f"{number}.wav", tone, 16_000)
    return folders


@pytest.fixture(scope="module")
def comparison(folders: list[Path]) -> report.Comparison:
    return report.compare(folders)


@pytest.fixture(scope="module")
def html(comparison: report.Comparison) -> str:
    return report_page.render_html(comparison)


# What is counted


def test_rates_are_those_of_the_evaluations(comparison: report.Comparison, folders: list[Path]) -> None:
    (only,) = comparison.sets
    for system, folder in zip(only.systems, folders, strict=True):
        result = read_result(folder)
        assert system.wer.value == pytest.approx(result.wer.value)
        assert system.cer.value == pytest.approx(result.cer.value)
        assert (system.words, system.insertions) == (result.counts.words, result.counts.insertions)
        for breakdown in ("duration", "language"):
            assert sum(part.words for part in system.breakdown[breakdown].values()) == system.words
        confused = system.errors
        assert sum(confused.confusions.values()) == system.substitutions
        assert sum(confused.deleted.values()) == system.deletions
        assert sum(confused.inserted.values()) == system.insertions


def test_significance_is_paired_against_the_baseline(folders: list[Path]) -> None:
    (only,) = report.compare(folders, baseline="base-int8").sets
    base, int8, tiny = only.systems
    assert only.baseline is int8
    assert int8.significance is None
    assert base.significance is not None
    assert tiny.significance is not None
    assert not base.significance.significant
    assert tiny.significance.significant
    gap = tiny.significance.difference
    assert gap.low < gap.difference < gap.high
    assert gap.difference == pytest.approx((tiny.wer.value or 0) - (int8.wer.value or 0))
    assert tiny.significance.utterances == 200


def test_p_values_are_adjusted_for_the_number_of_comparisons(tmp_path: Path) -> None:
    spoken = made.utterances(120)
    folders = [
        made.write(tmp_path / str(n), spoken, quality=0.05 + 0.004 * n, seed=n, model={"name": f"m{n}"})
        for n in range(5)
    ]
    alone = {
        system.label: system.significance.p
        for folder in folders[1:]
        for system in report.compare([folders[0], folder]).sets[0].systems
        if system.significance
    }
    together = {s.label: s.significance.p for s in report.compare(folders).sets[0].systems if s.significance}
    assert together.keys() == alone.keys()
    assert all(together[label] >= p for label, p in alone.items())
    smallest = min(alone, key=alone.__getitem__)
    assert together[smallest] == pytest.approx(min(1.0, 4 * alone[smallest]))


def test_alignment_loses_no_word_and_counts_as_jiwer() -> None:
    draw = random.Random(0)
    for _ in range(200):
        reference = draw.choices("abcde", k=draw.randrange(1, 12))
        hypothesis = draw.choices("abcde", k=draw.randrange(0, 12))
        pieces = align(reference, hypothesis)
        assert " ".join(piece.reference for piece in pieces if piece.reference).split() == reference
        assert " ".join(piece.hypothesis for piece in pieces if piece.hypothesis).split() == hypothesis
        kinds = Counter(piece.kind for piece in pieces)
        counted = word_errors(" ".join(reference), " ".join(hypothesis))
        assert sum(counted[1:]) == kinds["substituted"] + kinds["deleted"] + kinds["inserted"]


def test_long_differences_are_folded_and_cut() -> None:
    right = " ".join(f"w{number}" for number in range(500))
    kinds = [piece.kind for piece in difference(f"{right} a {right}", f"{right} b {right}")]
    assert kinds == ["same", "gap", "same", "substituted", "same", "gap", "same"]
    everything_wrong = difference("a " * 9000, "b " * 9000)
    assert len(everything_wrong) < 300
    assert all(len(piece.reference) < 100 for piece in difference("x" * 100_000, "y"))


def test_worst_come_first_and_nothing_is_shown_twice(comparison: report.Comparison) -> None:
    (only,) = comparison.sets
    most = [max(each.errors for each in example.transcripts) for example in only.worst]
    assert len(most) == 12
    assert most == sorted(most, reverse=True)
    ids = [example.id for example in [*only.worst, *only.divided]]
    assert len(ids) == len(set(ids))


def test_counts_take_little_memory(tmp_path: Path) -> None:
    folder = made.write(tmp_path / "a", made.utterances(1500), fast=True)
    result = read_result(folder)
    tracemalloc.start()
    counts = ResultCounts(folder, result)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert len(counts.rows) == 1500
    assert peak / 1500 < 1000  # bytes an utterance: 100,000 of them take less than 100 MB


def test_counters_of_endless_different_words_stay_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("stapes.evaluation.report_words._MAX_DISTINCT", 100)
    errors = WordErrors()
    for number in range(2000):
        errors.add(f"often a{number}", f"said b{number}")
    assert len(errors.confusions) <= 101
    assert errors.confusions.most_common(1) == [(("often", "said"), 2000)]


# What is refused


def damage(folder: Path, change: str) -> None:
    """Spoil a result in one way."""
    result, lines = folder / "result.json", folder / "utterances.jsonl"
    match change:
        case "no result":
            result.unlink()
        case "no utterances":
            lines.unlink()
        case "cut result":
            result.write_text(result.read_text()[:200])
        case "cut line":
            lines.write_text(lines.read_text()[:-40])
        case "line lost":
            lines.write_text("".join(lines.read_text().splitlines(keepends=True)[1:]))
        case "line twice":
            lines.write_text(lines.read_text() + lines.read_text().splitlines()[0] + "\n")
        case "wrong type":
            value = json.loads(result.read_text())
            value["speed"] = "fast"
            result.write_text(json.dumps(value))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("no result", "has no result.json"),
        ("no utterances", "has no utterances.jsonl"),
        ("cut result", "damaged"),
        ("cut line", "line 40"),
        ("line lost", "not of one evaluation"),
        ("line twice", "comes twice"),
        ("wrong type", "'speed'"),
    ],
)
def test_damaged_results_are_named(tmp_path: Path, change: str, words: str) -> None:
    spoken = made.utterances(40)
    good, bad = (made.write(tmp_path / name, spoken) for name in ("good", "bad"))
    damage(bad, change)
    with pytest.raises(UsageError, match=re.escape(words)) as caught:
        report.compare([good, bad])
    assert "bad" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "words"),
    [({"corpus": {"sha256": "1" * 64}}, "different recordings"), ({"normalizer": "english"}, "different normalisers")],
)
def test_what_cannot_be_compared_is_refused_until_allowed(tmp_path: Path, changes: dict, words: str) -> None:
    spoken = made.utterances(40)
    a, b = made.write(tmp_path / "a", spoken), made.write(tmp_path / "b", spoken, **changes)
    with pytest.raises(UsageError, match=words) as caught:
        report.compare([a, b])
    assert "--allow-different" in str(caught.value)
    assert report.compare([a, b], allow_different=True).sets


def test_same_manifest_with_other_utterances_is_refused(tmp_path: Path) -> None:
    spoken = made.utterances(40)
    a, b = made.write(tmp_path / "a", spoken), made.write(tmp_path / "b", spoken[:30])
    with pytest.raises(UsageError, match="other utterances"):
        report.compare([a, b])


def test_rows_of_one_corpus_are_compared_over_what_all_have(tmp_path: Path) -> None:
    spoken = made.utterances(60)
    changed = [{**each, "reference": "other words"} if n == 30 else each for n, each in enumerate(spoken)]
    a = made.write(tmp_path / "a", spoken[:50])
    b = made.write(tmp_path / "b", changed[20:], seed=2, quality=0.3, corpus={"sha256": "1" * 64})
    (only,) = report.compare([a, b], allow_different=True).sets
    assert only.utterances == 29
    assert "29 utterances" in only.notes[0]
    assert only.systems[0].words == only.systems[1].words
    assert only.systems[1].significance is not None
    assert only.systems[1].significance.utterances == 29
    assert "29 utterances" in report_page.render_markdown(report.compare([a, b], allow_different=True))


def test_other_corpora_are_sets_of_their_own(tmp_path: Path) -> None:
    folders = [
        made.write(tmp_path / f"{model}-{corpus}", made.utterances(30, seed=place), model={"name": model},
                   corpus={"name": corpus, "sha256": str(place) * 64})
        for place, corpus in enumerate(["read", "telephone"]) for model in ("tiny", "base")
    ]  # fmt: skip
    found = report.compare(folders, allow_different=True, baseline=str(folders[1]))
    assert [each.corpus for each in found.sets] == ["read", "telephone"]
    assert [each.baseline.label for each in found.sets] == ["base", "base"]
    page = Page(report_page.render_html(found))
    ids = page.values("id")
    assert len(ids) == len(set(ids))


def test_nothing_spoken_and_one_result_alone_make_a_report(tmp_path: Path) -> None:
    silence = [{**each, "reference": ""} for each in made.utterances(5)]
    folders = [made.write(tmp_path / name, silence, hypotheses={0: "thank you"}, model={"name": name}) for name in "ab"]
    for given in (folders, folders[:1]):
        found = report.compare(given)
        assert found.sets[0].systems[0].wer.value is None
        assert "thank" in report_page.render_html(found)
        assert "thank" in report_page.render_markdown(found)


# Machines and the tables that the field quotes


def rows(table: report_tables.Table) -> list[dict[str, str]]:
    names = [column.name for column in table.columns]
    return [dict(zip(names, (cell.text for cell in row), strict=True)) for row in table.rows]


def test_speed_is_never_compared_between_machines(tmp_path: Path) -> None:
    spoken = made.utterances(30)
    gpu = {"fingerprint": "beef", "cpu": "Other CPU", "gpus": [{"name": "Some GPU", "memory_bytes": 16_000_000_000}]}
    folders = [
        made.write(tmp_path / "cpu", spoken, throughput=10.0, model={"device": "CPU"}),
        made.write(tmp_path / "gpu", spoken, throughput=400.0, model={"device": "cuda:0"}, machine=gpu),
    ]
    found = report.compare(folders)
    assert "never compared between" in found.notes[0]
    (table,) = report_tables.views(found.sets[0])
    assert table.title == "CPU and GPU"
    assert [row["Device"] for row in rows(table)] == ["CPU", "GPU"]
    assert [row["Speed"] for row in rows(table)] == ["1 ×", "–"]
    assert [row["Machine"] for row in rows(table)] == ["A", "B"]
    page = report_page.render_html(found)
    assert "Speed and accuracy on machine A" in page
    assert "Speed and accuracy on machine B" in page
    made.write(tmp_path / "gpu", spoken, throughput=400.0, model={"device": "cuda:0"})
    (table,) = report_tables.views(report.compare(folders).sets[0])
    assert [row["Speed"] for row in rows(table)] == ["1 ×", "40.0 ×"]


def test_machines_without_a_fingerprint_are_never_the_same(tmp_path: Path) -> None:
    spoken = made.utterances(10)
    folders = [made.write(tmp_path / name, spoken, machine={"cpu": None}) for name in "ab"]
    assert [system.machine for system in report.compare(folders).sets[0].systems] == ["A", "B"]


def test_objectives_and_precisions_have_their_tables(tmp_path: Path, comparison: report.Comparison) -> None:
    precisions = [each for each in report_tables.views(comparison.sets[0]) if each.title == "Precisions"]
    assert [row["Precision"] for row in rows(precisions[0])] == ["fp32", "int8"]
    spoken = made.utterances(20)
    folders = [
        made.write(tmp_path / kind, spoken, model={"name": kind, "training_cost": {"objective": kind, "hours": 6}})
        for kind in ("ctc", "attention", "hybrid")
    ]
    (table,) = report_tables.views(report.compare(folders).sets[0])
    assert table.title == "CTC, attention and hybrid"
    assert [row["Objective"] for row in rows(table)] == ["ctc", "attention", "hybrid"]
    assert "hours 6" in rows(table)[0]["Training cost"]


# The page


def test_page_needs_nothing_from_outside(html: str) -> None:
    page = Page(html)
    for address in page.values("src", "href", "srcset", "data", "poster", "action"):
        assert address.startswith(("data:", "#")), address[:80]
    assert not {"link", "iframe", "object", "embed", "base", "form"} & {tag for tag, _ in page.tags}
    assert "@import" not in html
    assert not re.search(r"url\((?!#)", html)
    assert len(html) < 10_000_000


def test_policy_lets_only_the_own_script_run(html: str) -> None:
    (script,) = re.findall(r"<script>(.*?)</script>", html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    (policy,) = [attrs["content"] for _, attrs in Page(html).tags if "http-equiv" in attrs]
    assert "default-src 'none'" in policy
    assert f"script-src 'sha256-{digest}'" in policy


def test_links_inside_the_page_lead_somewhere(html: str) -> None:
    page = Page(html)
    ids = page.values("id")
    assert len(ids) == len(set(ids))
    inside = [address[1:] for address in page.values("href") if address.startswith("#")]
    assert set(inside) <= set(ids)
    assert all(name in ids for name in re.findall(r"url\(#([^)]+)\)", html))


def test_tables_and_plots_speak_to_screen_readers(html: str) -> None:
    page = Page(html)
    headings = [attrs for tag, attrs in page.tags if tag == "th"]
    assert headings
    assert all(attrs.get("scope") in ("col", "row") for attrs in headings)
    plots = [attrs for _, attrs in page.tags if attrs.get("class") == "plot"]
    assert len(plots) >= 6
    assert all(re.search(r"tiny.*\d( %| GB|\.)", attrs["aria-label"]) for attrs in plots)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> report.Comparison:
    root = tmp_path_factory.mktemp("hostile")
    texts = dict.fromkeys(range(12), HOSTILE)
    spoken = made.utterances(40, texts=texts)
    for each in spoken:
        each.update(id=HOSTILE + each["id"], audio=HOSTILE, speaker=HOSTILE, language=HOSTILE + each["language"])
    for number, each in enumerate(spoken):
        each["language"] = HOSTILE if number % 2 else "en\ud800"
    folders = []
    for place in range(2):
        wrong = dict.fromkeys(range(3), HOSTILE[::-1])
        folders.append(
            made.write(
                root / f"r{place}", [{**each, "language": "en"} for each in spoken], hypotheses=wrong,
                failures={5: HOSTILE}, system=HOSTILE + str(place),
                model={"name": HOSTILE, "precision": HOSTILE, "device": HOSTILE, "training_cost": {HOSTILE: HOSTILE}},
                corpus={"name": HOSTILE, "manifest": HOSTILE}, options={HOSTILE: HOSTILE}, command=[HOSTILE],
                machine={"fingerprint": HOSTILE + str(place), HOSTILE: HOSTILE}, commit=HOSTILE, date=HOSTILE,
                stapes=HOSTILE, normalizer=HOSTILE,
            )
        )  # fmt: skip
        lines = (folders[-1] / "utterances.jsonl").read_text().splitlines()
        values = [json.loads(line) for line in lines]
        for number, value in enumerate(values):
            value["language"] = HOSTILE if number % 2 else "en\ud800"
        (folders[-1] / "utterances.jsonl").write_text("".join(json.dumps(value) + "\n" for value in values))
    return report.compare(folders)


def test_hostile_results_stay_text_in_html(hostile: report.Comparison, html: str) -> None:
    text = report_page.render_html(hostile)
    page = Page(text)
    assert {tag for tag, _ in page.tags} <= {tag for tag, _ in Page(html).tags} | {"p", "circle"}
    assert sum(tag == "script" for tag, _ in page.tags) == 1
    assert not any(tag in ("img", "image") for tag, _ in page.tags)
    assert not [name for _, attrs in page.tags for name in attrs if name.startswith("on")]
    assert "{{ 7*7 }}" in text  # shown, not run


def test_hostile_results_stay_text_in_markdown(hostile: report.Comparison) -> None:
    text = report_page.render_markdown(hostile)
    assert not re.search(r"(?<!\\)<", text)
    for block in re.findall(r"(?:^\|.*\n)+", text, re.MULTILINE):
        assert len({len(re.findall(r"(?<!\\)\|", line)) for line in block.splitlines()}) == 1


def test_hostile_results_can_be_written(hostile: report.Comparison, tmp_path: Path) -> None:
    report_page.write_html(hostile, tmp_path / "deep" / "r.html")
    report_page.write_markdown(hostile, tmp_path / "deep" / "r.md")
    assert sorted(path.name for path in (tmp_path / "deep").iterdir()) == ["r.html", "r.md"]


def test_markdown_holds_the_same_figures(comparison: report.Comparison) -> None:
    text = report_page.render_markdown(comparison)
    (only,) = comparison.sets
    for system in only.systems:
        assert report_tables.percent(system.wer.value) in text
        assert system.label in text
    assert "~~" in text
    assert only.worst[0].id in text


# Plots


def test_plots_are_xml_with_text_as_text(comparison: report.Comparison) -> None:
    section = report_page._section(comparison.sets[0], "s1", plots=True)
    plots = [plot for group in section.plots.values() for plot in group]
    assert {"s1-speed-A", "s1-duration", "s1-snr", "s1-language", "s1-errors", "s1-memory-host"} == {
        p.name for p in plots
    }
    for plot in plots:
        for svg in (plot.svg, plot.file):
            root = ElementTree.fromstring(svg)
            words = " ".join(root.itertext())
            assert "int8" in words
        assert "var(--" in plot.svg
        assert "var(--" not in plot.file  # a file of its own has no page around it
        assert len(plot.svg) < 60_000


def test_more_systems_than_looks_still_make_a_report(tmp_path: Path) -> None:
    spoken = made.utterances(12)
    folders = [made.write(tmp_path / str(n), spoken, seed=n, model={"name": f"model {n}"}) for n in range(9)]
    page = report_page.render_html(report.compare(folders, examples=2))
    assert page.count('scope="row"') >= 9


def test_names_beside_lines_do_not_overlap() -> None:
    draw = random.Random(0)
    for _ in range(200):
        heights = [draw.choice([0.06, 0.12]) for _ in range(draw.randrange(1, 8))]
        wanted = [draw.random() for _ in heights]
        boxes = sorted(zip(report_plots._apart(wanted, heights), heights, strict=True))
        edges = [(at - height / 2, at + height / 2) for at, height in boxes]
        assert all(high <= low + 1e-9 for (_, high), (low, _) in pairwise(edges))
        assert edges[0][0] >= -1e-9
        assert edges[-1][1] <= max(1.0, sum(heights)) + 1e-9


# Sound


def test_sound_inside_plays_and_is_small(comparison: report.Comparison) -> None:
    clips = [example.clip for example in [*comparison.sets[0].worst, *comparison.sets[0].divided]]
    held = [clip.uri for clip in clips if clip.uri]
    assert held
    assert any(clip.uri is None and "not on this machine" in clip.note for clip in clips)
    content = base64.b64decode(held[0].removeprefix("data:audio/mpeg;base64,"))
    with av.open(io.BytesIO(content)) as container:
        stream = container.streams.audio[0]
        assert (stream.rate, stream.channels) == (16_000, 1)
        samples = sum(frame.samples for frame in container.decode(stream))
    assert samples / 16_000 == pytest.approx(1.0, abs=0.2)
    assert len(content) < 5000


def test_long_sound_is_cut(tmp_path: Path) -> None:
    soundfile.write(tmp_path / "long.wav", np.zeros(16_000 * 45), 16_000)
    content, cut = encode(tmp_path / "long.wav")
    assert cut
    assert len(content) < 30 * 3000 * 1.1
    soundfile.write(tmp_path / "exact.wav", np.zeros(16_000 * 30), 16_000)
    assert not encode(tmp_path / "exact.wav")[1]


def test_sound_that_is_not_there_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "text.wav").write_text("no sound at all")
    (tmp_path / "folder").mkdir()
    soundfile.write(tmp_path / "good.wav", np.zeros(16_000), 16_000)
    recordings = Recordings([tmp_path], 4000)
    for name in ("-", "", "absent.wav", "text.wav", "folder", "http://127.0.0.1:9/x.wav", "a\0b", "x" * 5000):
        clip = recordings.clip(name)
        assert clip.uri is None
        assert clip.note
    assert recordings.clip("good.wav").uri
    assert "small" in recordings.clip("good.wav").note  # the budget is used up
    assert Recordings([tmp_path], 0).clip("good.wav").uri is None


# The command


def test_command_writes_both_files(folders: list[Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page, text = tmp_path / "r.html", tmp_path / "r.md"
    code = main(
        ["compare", *map(str, folders[:2]), "-o", str(page), "--markdown", str(text), "--json", "--examples", "1"]
    )
    assert code == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["html"] == str(page)
    assert page.read_text(encoding="utf-8").startswith("<!doctype html>")
    assert "# Speech recognition compared" in text.read_text(encoding="utf-8")
    base, int8 = figures["sets"][0]["systems"]
    assert base["against_baseline"] is None
    assert int8["against_baseline"]["utterances"] == 200
    assert int8["wer"]["value"] - base["wer"]["value"] == pytest.approx(int8["against_baseline"]["wer_difference"])


@pytest.mark.parametrize(
    "arguments",
    [[], ["--baseline", "nobody"], ["--examples", "-1"], ["--max-audio", "nan"], ["{0}", "{0}"], ["/nowhere"]],
)
def test_command_refuses_in_one_sentence(
    folders: list[Path], arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    given = [word.format(folders[0]) for word in arguments]
    given = [str(folders[0]), *given] if given[:1] and given[0].startswith("--") else given
    assert main(["compare", *given]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "Traceback" not in error
