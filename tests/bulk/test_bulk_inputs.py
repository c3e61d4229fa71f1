"""What there is to transcribe, and the plan of it."""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stapes.bulk.inputs import Item, list_inputs
from stapes.bulk.plan import Plan, _Seen, has_plan, make_plan
from stapes.errors import UsageError


def names(*inputs: object) -> list[str]:
    return [item.audio for item in list_inputs([str(each) for each in inputs])]


def touch(*paths: Path) -> None:
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"\0" * 1000)


def test_folders_are_listed_in_order_without_hidden_files_and_other_things(tmp_path: Path) -> None:
    touch(*(tmp_path / name for name in ("b/2.mp3", "b/1.WAV", "a/x.opus", "c.txt", ".hidden/y.wav", "a/.z.wav")))
    assert names(tmp_path) == [str(tmp_path / name) for name in ("a/x.opus", "b/1.WAV", "b/2.mp3")]
    (tmp_path / "list.txt").write_text(f"# a list\n{tmp_path}/b\n\n{tmp_path}/a/*.opus\n")
    assert names(f"@{tmp_path}/list.txt") == [str(tmp_path / name) for name in ("b/1.WAV", "b/2.mp3", "a/x.opus")]
    assert names(tmp_path / "c.txt") == [str(tmp_path / "c.txt")]  # named itself: tried
    for wrong in (tmp_path / "gone", tmp_path / "none*.wav", tmp_path / ".hidden" / "deep"):
        with pytest.raises(UsageError, match=r"gone|none|deep"):
            names(wrong)


def test_manifests_of_all_kinds_say_the_same(tmp_path: Path) -> None:
    rows = [
        {"audio": "x/1.wav", "duration": 2.5, "lang": "de", "text": "eins", "speaker": "s"},
        {"audio": "https://example.org/2.mp3", "duration": 4.0},
    ]
    (tmp_path / "m.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    with gzip.open(tmp_path / "m.jsonl.gz", "wt") as file:
        file.write((tmp_path / "m.jsonl").read_text())
    table = "audio\tduration\tlang\ttext\tspeaker\nx/1.wav\t2.5\tde\teins\ts\nhttps://example.org/2.mp3\t4\t\t\t\n"
    (tmp_path / "m.tsv").write_text(table)
    (tmp_path / "m.csv").write_text(table.replace("\t", ","))
    expected = [
        Item("x/1.wav", f"{tmp_path}/x/1.wav", 2.5, language="de", text="eins", speaker="s"),
        Item("https://example.org/2.mp3", "https://example.org/2.mp3", 4.0),
    ]
    for name in ("m.jsonl", "m.jsonl.gz", "m.tsv", "m.csv"):
        assert list(list_inputs([str(tmp_path / name)])) == expected


def test_lhotses_cuts_are_parts_of_recordings(tmp_path: Path) -> None:
    cut = {
        "id": "c1",
        "start": 3.0,
        "duration": 2.0,
        "channel": 0,
        "recording": {"sources": [{"type": "file", "channels": [0], "source": "/data/long.flac"}]},
        "supervisions": [{"text": "wort", "language": "de", "speaker": "s"}],
    }
    (tmp_path / "cuts.jsonl").write_text(json.dumps(cut) + "\n")
    (item,) = list_inputs([str(tmp_path / "cuts.jsonl")])
    assert item == Item("c1", "/data/long.flac", 2.0, 3.0, 5.0, None, "de", "wort", "s")


@pytest.mark.parametrize(
    ("content", "said"),
    [("", "empty"), ("{}\n", "line 1 has no 'audio'"), ("no json\n", "line 1 is no JSON"),
     ('{"audio": "a"}\n{"audio": "b", "duration": "x"}\n', "line 2: 'duration'")],
)  # fmt: skip
def test_a_wrong_manifest_is_told_by_its_line(tmp_path: Path, content: str, said: str) -> None:
    (tmp_path / "m.jsonl").write_text(content)
    with pytest.raises(UsageError, match=said):
        names(tmp_path / "m.jsonl")


def test_urls_are_listed_and_read_through_fsspec(tmp_path: Path) -> None:
    fsspec = pytest.importorskip("fsspec")
    files = fsspec.filesystem("memory")
    for name in ("/bulk/b/2.wav", "/bulk/a/1.wav", "/bulk/notes.txt"):
        files.pipe(name, b"\0" * 32_000)
    files.pipe("/bulk/m.jsonl", b'{"audio": "a/1.wav"}\n')
    try:
        found = list(list_inputs(["memory://bulk"]))
        assert [item.audio for item in found] == ["memory:///bulk/a/1.wav", "memory:///bulk/b/2.wav"]
        assert found[0].seconds == 1.0
        assert names("memory://bulk/*/2.wav") == ["memory:///bulk/b/2.wav"]
        assert names("memory://bulk/m.jsonl") == ["memory://bulk/a/1.wav"]
        with pytest.raises(UsageError, match=r"needs another package|cannot be opened"):
            names("nosuchscheme://x/y")
    finally:
        files.rm("/bulk", recursive=True)


def items(count: int, seconds: float = 10.0) -> Iterator[Item]:
    return (Item(f"{n}.wav", f"/d/{n}.wav", seconds) for n in range(count))


def test_shards_are_balanced_and_read_one_by_one(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    made = [Item(f"{n}", f"/d/{n}.wav", float(s)) for n, s in enumerate(rng.lognormal(2, 1, 3000))]
    plan = make_plan(tmp_path, lambda: made, ["in"], shard_seconds=600, shard_files=10_000)
    assert [item for shard in reversed(range(len(plan))) for item in reversed(plan.items(shard))] == made[::-1]
    longest = max(item.seconds for item in made)
    assert (plan.seconds[:-1] > 600 - longest).all()
    assert (plan.seconds <= max(600, longest)).all()
    assert plan.seconds.sum() == pytest.approx(sum(item.seconds for item in made))


def test_what_is_listed_twice_is_planned_once_and_added_later_only_if_new(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, lambda: [*items(10), *items(12)], ["in"], shard_seconds=1e9, shard_files=5)
    assert (int(plan.files.sum()), plan.repeated) == (12, 10)
    before = [plan.items(shard) for shard in range(len(plan))]
    again = make_plan(tmp_path, lambda: items(99), ["in"], shard_seconds=1e9, shard_files=5)
    assert int(again.files.sum()) == 12
    more = make_plan(tmp_path, lambda: items(20), ["in", "too"], shard_seconds=1e9, shard_files=5, add=True)
    assert [more.items(shard) for shard in range(len(plan))] == before
    assert sorted(int(item.id[:-4]) for shard in range(len(more)) for item in more.items(shard)) == list(range(20))
    assert Plan(tmp_path).inputs == ["in", "too"]


def test_listing_that_breaks_off_leaves_no_plan_and_the_next_attempt_none_of_it(tmp_path: Path) -> None:
    def broken() -> Iterator[Item]:
        yield from items(70_000)
        raise UsageError("the manifest ends here")

    with pytest.raises(UsageError, match="ends here"):
        make_plan(tmp_path, broken, ["in"], shard_seconds=1e9, shard_files=100)
    assert not has_plan(tmp_path)
    plan = make_plan(tmp_path, lambda: items(3), ["in"], shard_seconds=1e9, shard_files=100)
    assert [item.id for item in plan.items(0)] == ["0.wav", "1.wav", "2.wav"]


@settings(max_examples=30, deadline=None)
@given(st.lists(st.lists(st.integers(0, 60).map(str), max_size=30), max_size=12))
def test_seen_knows_what_has_come(batches: list[list[str]]) -> None:
    seen, known = _Seen(), set()
    for batch in batches:
        expected = []
        for name in batch:
            expected.append(name not in known)
            known.add(name)
        assert seen.new(batch).tolist() == expected
