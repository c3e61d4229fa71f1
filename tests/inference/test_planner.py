"""A plan fits its budget, is the best that does, and says what would."""

from __future__ import annotations

import re
from dataclasses import astuple

import pytest
import torch

from stapes.checkpoints.catalog import KNOWN
from stapes.checkpoints.sizes import published_config
from stapes.errors import UsageError
from stapes.inference.planner import Plan, count, memory_rows, plan, workspace_bytes
from stapes.models.whisper import Whisper

MB = 10**6
HALF = torch.float16


def fits(name: str, megabytes: int, precision: str = "auto", **options) -> Plan:
    found = plan(published_config(name), megabytes * MB, precision, **options)  # type: ignore[arg-type]
    assert found.parts.total == sum(astuple(found.parts)) <= megabytes * MB
    return found


def test_medium_in_4_bits_fits_in_800_mb_and_large_v3_in_8_bits_in_2500() -> None:
    assert fits("medium", 800, "int4").slots == 1
    assert fits("large-v3", 2500, "int8").slots >= 1


@pytest.mark.parametrize("name", ["tiny", "base", "medium", "large-v3", "turbo"])
@pytest.mark.parametrize(
    ("precision", "least", "most"), [("fp32", 4, 4), ("fp16", 2, 2), ("int8", 1.03, 1.1), ("int4", 0.56, 1.0)]
)
def test_weights_take_what_their_number_says(name: str, precision: str, least: float, most: float) -> None:
    config = published_config(name)
    dtype = torch.float32 if precision == "fp32" else HALF
    parts = count(config, precision, dtype, False, 1, 1)  # type: ignore[arg-type]
    with torch.device("meta"):
        weights = sum(parameter.numel() for parameter in Whisper(config).parameters())
    # Convolutions and positions stay; in small models much has 8 bits at least.
    assert least * weights <= parts.weights <= most * weights


def test_caches_of_large_v3_are_what_can_be_computed_by_hand() -> None:
    config = published_config("large-v3")
    parts = count(config, "fp16", HALF, False, 8, 1)
    assert parts.cross_cache == 9 * 2 * 32 * 1500 * 1280 * 2
    assert parts.self_cache == 8 * 2 * 32 * 448 * 1280 * 2
    narrow = count(config, "fp16", HALF, True, 8, 1)
    assert narrow.cross_cache == 9 * 2 * 32 * 1280 * (1500 + 4)
    assert count(config, "fp16", HALF, False, 8, 1, candidates=5).self_cache == (8 + 5) * parts.self_cache // 8
    assert [memory_rows(slots) for slots in (1, 2, 48)] == [1, 3, 49]


@pytest.mark.parametrize("budget", [200, 400, 800, 1500, 3000, 6000, 12_000, 80_000])
@pytest.mark.parametrize("name", ["base", "medium", "large-v3"])
def test_one_more_window_would_not_fit(name: str, budget: int) -> None:
    config = published_config(name)
    try:
        found = fits(name, budget, slots=500)
    except UsageError:
        assert count(config, "int4", HALF, True, 1, 1).total > budget * MB
        return
    more = count(config, found.precision, HALF, found.has_int8_cache, found.slots + 1, found.encoder_batch)
    assert more.total > budget * MB or found.slots == 500
    assert found.encoder_batch == 1 or found.encoder_batch <= found.slots // 2


def test_more_memory_never_makes_a_plan_less_exact() -> None:
    order = {"int4": 0, "int8": 1, "fp16": 2}
    plans = [fits("large-v3", budget) for budget in range(1600, 9000, 200)]
    ranks = [(order[each.precision], not each.has_int8_cache) for each in plans]
    assert ranks == sorted(ranks)
    assert {each.precision for each in plans} == set(order)


def test_a_fixed_precision_is_kept() -> None:
    for precision in ("fp32", "fp16", "bf16", "int8", "int4"):
        assert fits("base", 2000, precision).precision == precision
    assert fits("base", 2000, "fp32").dtype == torch.float32
    assert fits("base", 2000, "int8", dtypes=(torch.bfloat16,)).dtype == torch.bfloat16
    assert fits("base", 80_000, slots=5).slots == 5


@pytest.mark.parametrize(("name", "precision"), [("medium", "auto"), ("large-v3", "fp16"), ("tiny", "int8")])
def test_the_least_budget_that_is_named_works_and_less_does_not(name: str, precision: str) -> None:
    with pytest.raises(UsageError, match=r"100 MB of GPU memory are too little .* --max-vram") as error:
        fits(name, 100, precision)
    found = re.search(r"the least that works is ([\d,]+) MB, with --precision (\w+)", str(error.value))
    assert found is not None
    least = int(found[1].replace(",", ""))
    assert fits(name, least, found[2]).slots == 1
    assert fits(name, least, precision).precision == found[2]
    with pytest.raises(UsageError, match=found[1]):
        fits(name, least - 1, precision)


def test_a_precision_that_the_device_lacks_is_refused() -> None:
    with pytest.raises(UsageError, match="--precision bf16: this device does not compute in it; use --precision fp16"):
        fits("base", 2000, "bf16", dtypes=(torch.float16, torch.float32))


def test_the_reason_names_what_was_chosen_and_what_was_passed_over() -> None:
    assert fits("medium", 760, "auto").reason == (
        "4-bit weights, 8-bit cross-attention cache, 1 window at once, 1 encoded together: 757 MB of 760 MB "
        "(weights 464 MB, caches 118 MB); more exact weights would leave room for no windows"
    )
    assert fits("base", 8000).reason.startswith("fp16 weights, float16 cross-attention cache, 64 windows at once, 8 ")
    assert "more exact" not in fits("base", 8000).reason


def test_what_a_device_takes_for_itself_is_counted() -> None:
    assert workspace_bytes("cuda", "sm_86") < workspace_bytes("cuda", "sm_90") < workspace_bytes("rocm", "gfx1100")
    config = published_config("medium")
    small, large = (count(config, "fp16", HALF, False, 1, 1, workspace=size * MB).total for size in (0, 100))
    assert 100 * MB <= large - small <= 110 * MB
    scores = count(config, "fp16", HALF, False, 1, 1, has_fused_attention=False).activations
    assert scores - count(config, "fp16", HALF, False, 1, 1).activations >= 16 * 1500**2 * 4


@pytest.mark.parametrize("name", KNOWN)
def test_every_published_model_has_a_plan(name: str) -> None:
    assert fits(name, 80_000).slots == 64
