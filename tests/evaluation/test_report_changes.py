"""Before and after: what was mended, what was forgotten, and where."""

from __future__ import annotations

from pathlib import Path

import made_results
import numpy as np

from stapes.evaluation import report, report_page
from stapes.evaluation.report_changes import find_changes


def test_what_was_forgotten_is_told_apart_from_what_was_mended() -> None:
    before, after = np.array([4, 0, 1, 2]), np.array([1, 2, 1, 2])
    words = np.array([10, 10, 10, 10])
    found = find_changes(before, after, words, ["en", "de", "en", None], ["a", "b", "c", None])
    by_name = {each.where: each for each in found}
    everything = by_name["all"]
    assert (everything.before, everything.after, everything.mended, everything.new) == (7, 6, 3, 2)
    assert everything.after - everything.before == everything.new - everything.mended
    assert (by_name["language en"].mended, by_name["language en"].new, by_name["language en"].utterances) == (3, 0, 2)
    assert (by_name["language de"].mended, by_name["language de"].new) == (0, 2)
    assert list(by_name)[-2:] == ["speaker b", "speaker a"]  # who lost comes first; who stayed is not shown


def test_the_report_shows_it(tmp_path: Path) -> None:
    spoken = made_results.utterances(60)
    good = made_results.write(tmp_path / "good", spoken, quality=0.02, model={"name": "tuned"})
    bad = made_results.write(tmp_path / "bad", spoken, quality=0.2)
    comparison = report.compare([bad, good], audio_bytes=0)
    base, tuned = comparison.sets[0].systems
    assert not base.changes
    (everything, *rest) = tuned.changes
    assert everything.before == base.substitutions + base.deletions + base.insertions
    assert everything.after == tuned.substitutions + tuned.deletions + tuned.insertions
    languages = [each for each in rest if each.where.startswith("language ")]
    assert sum(each.mended for each in languages) == everything.mended
    assert "Before and after" in report_page.render_markdown(comparison)
    assert "Before and after" not in report_page.render_markdown(report.compare([bad], audio_bytes=0))
