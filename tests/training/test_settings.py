"""Settings: every one has a doc, TOML and --set reach all of them, and nothing else is accepted."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from stapes.errors import UsageError
from stapes.training.config import TrainConfig, changes
from stapes.training.recipes import RECIPES, recipe
from stapes.training.settings import apply_assignment, apply_mapping, apply_toml, docs, to_mapping, to_toml


def sections(config: object) -> list[object]:
    inner = [getattr(config, field.name) for field in dataclasses.fields(config)]  # pyright: ignore[reportArgumentType]
    return [config, *(each for value in inner if dataclasses.is_dataclass(value) for each in sections(value))]


def test_every_setting_has_a_doc() -> None:
    for section in sections(TrainConfig()):
        described = docs(type(section))
        for field in dataclasses.fields(section):  # pyright: ignore[reportArgumentType]
            if not dataclasses.is_dataclass(getattr(section, field.name)):
                assert len(described.get(field.name, "")) > 10, f"{type(section).__name__}.{field.name}"


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_survives_its_own_toml(name: str, tmp_path: Path) -> None:
    config = recipe(name)
    path = tmp_path / "run.toml"
    path.write_text(to_toml(config), encoding="utf-8")
    again = apply_toml(TrainConfig(recipe=name), path)
    # What is none cannot be said in TOML; recipes differ from the default only in what can.
    assert changes(config, again) == []
    assert changes(config, apply_mapping(TrainConfig(), to_mapping(config), "test")) == []


@pytest.mark.parametrize("name", RECIPES)
def test_every_recipe_makes_sense_once_it_has_data(name: str) -> None:
    config = recipe(name)
    config.data.train = ["train.jsonl"]
    config.check()


def test_wav2vec2_drops_what_its_authors_drop() -> None:
    model = recipe("wav2vec2").model
    assert (model.dropout, model.head_dropout, model.mlp_dropout, model.layer_drop) == (0.0, 0.0, 0.1, 0.1)
    assert recipe("adapter").model.mlp_dropout == recipe("adapter").model.dropout > 0


@pytest.mark.parametrize(
    ("text", "section", "name", "value"),
    [
        ("optimizer.peak_lr=1e-4", "optimizer", "peak_lr", 1e-4),
        ("optimizer.peak-lr = 2", "optimizer", "peak_lr", 2.0),
        ("run.steps=1000", "run", "steps", 1000),
        ("run.steps=none", "run", "steps", None),
        ("run.compile=true", "run", "compile", True),
        ("model.init=tiny.en", "model", "init", "tiny.en"),
        ('model.init="./a b"', "model", "init", "./a b"),
        ("data.train=a.jsonl", "data", "train", ["a.jsonl"]),
        ('data.train=["a.jsonl", "b.jsonl"]', "data", "train", ["a.jsonl", "b.jsonl"]),
        ("augment.speeds=0.9,1,1.1", "augment", "speeds", (0.9, 1.0, 1.1)),
        ("augment.speeds=0.9", "augment", "speeds", (0.9,)),
        ("augment.noises=a/b,c", "augment", "noises", ("a/b", "c")),
        ("model.subsampling=8", "model", "subsampling", 8),
        ("optimizer.lr_scales.encoder=0.1", "optimizer", "lr_scales", {"encoder": 0.1}),
        ("objective.kind=hybrid", "objective", "kind", "hybrid"),
    ],
)
def test_assignments(text: str, section: str, name: str, value: object) -> None:
    before = TrainConfig()
    before.run.steps = 7
    changed = apply_assignment(before, text)
    assert getattr(getattr(changed, section), name) == value
    assert changes(before, changed) == [f"{section}.{name}"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("optimizer.peek_lr=1", "did you mean optimizer.peak_lr"),
        ("optimiser.peak_lr=1", "did you mean optimizer"),
        ("optimizer.peak_lr", "write section.name=value"),
        ("optimizer.peak_lr.x=1", "no parts"),
        ("optimizer=1", "has parts"),
        ("run.steps=1.5", "whole number"),
        ("run.steps=yes", "whole number"),
        ("run.compile=1", "true or false"),
        ("model.subsampling=3", "2, 4, 8"),
        ("objective.kind=rnnt", "ctc, attention, hybrid"),
        ("data.train=1", "give text"),
    ],
)
def test_what_is_refused(text: str, said: str) -> None:
    with pytest.raises(UsageError, match=said):
        apply_assignment(TrainConfig(), text)


def test_toml_with_an_unknown_name_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    path.write_text("[optimizer]\npeek_lr = 1e-4\n")
    with pytest.raises(UsageError, match=r"run\.toml.*did you mean optimizer\.peak_lr"):
        apply_toml(TrainConfig(), path)
    path.write_text("[optimizer\n")
    with pytest.raises(UsageError, match="is not TOML"):
        apply_toml(TrainConfig(), path)
    with pytest.raises(UsageError, match="cannot be read"):
        apply_toml(TrainConfig(), tmp_path / "absent.toml")


def test_the_nearest_recipe_is_named() -> None:
    assert recipe("whisper-ctc").recipe == "whisper_ctc"
    with pytest.raises(UsageError, match="did you mean hybrid"):
        recipe("hibrid")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("optimizer.peak_lr=-1", "optimizer.peak_lr is -1"),
        ("model.dropout=1.5", "model.dropout"),
        ("model.heads=5", "multiple of model.heads"),
        ("run.epochs=none", "run.steps or run.epochs"),
        ("optimizer.lr_scales.encoder=-1", "optimizer.lr_scales"),
        ("checkpoint.average=3", "average compares on dev"),
    ],
)
def test_values_out_of_range_are_refused(text: str, said: str) -> None:
    config = recipe("ctc")
    config.data.train = ["train.jsonl"]
    with pytest.raises(UsageError, match=said):
        apply_assignment(config, text).check()
