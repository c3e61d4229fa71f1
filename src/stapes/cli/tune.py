"""``stapes tune MODEL``: the fastest products and convolutions for this GPU, kept and used from then on."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from cyclopts import Parameter

from stapes.cli.terminal import Terminal, to_json
from stapes.errors import AudioError
from stapes.options import Precision

if TYPE_CHECKING:
    from stapes.diagnostics.tune import TuneResult


def tune(
    model: Annotated[str, Parameter(name="MODEL")],
    /,
    *,
    device: str = "auto",
    precision: Precision = "auto",
    batch_size: int | None = None,
    audio: tuple[str, ...] = (),
    rounds: int = 5,
    keep: bool = False,
    model_dir: str | None = None,
    offline: bool = False,
    json: bool = False,
) -> int:
    """Tune this GPU for a model: matrix products (TunableOp) and, on AMD, convolutions (MIOpen).

    Records what the model really computes, tries all that the libraries offer for it, times the model before and
    after, and keeps what is faster; loading a model uses it from then on, for this GPU and these versions of PyTorch
    and ROCm. Takes minutes. On the CPU there is nothing to tune, and NVIDIA has one choice for each product.

    For example:

        stapes tune base
        stapes tune large-v3 --precision bf16 --batch-size 16 --audio talk.mp3

    Parameters
    ----------
    model:
        Name, folder, Hugging Face id or .pt file.
    device:
        auto, cuda (AMD too), cuda:1.
    precision:
        The number format that the model will be used in.
    batch_size:
        Windows decoded together, as you will use it. Default: what `transcribe` takes.
    audio:
        A recording to work on, again for more. Default: made-up sound.
    rounds:
        How often the model is timed before and after.
    keep:
        Keep the result even where it is no faster.
    model_dir:
        Folder where models are looked for and downloaded to.
    offline:
        Never download.
    json:
        Print the result as one JSON object.
    """
    from stapes.diagnostics import tune as tuning

    for name in audio:
        if not Path(name).is_file():
            raise AudioError(f"{name} does not exist: name a recording for --audio, or leave it out")
    terminal = Terminal()
    settings = tuning.TuneSettings(
        model=model,
        device=device,
        precision=precision,
        batch_size=batch_size,
        audio=tuple(str(Path(name).resolve()) for name in audio),
        rounds=rounds,
        keep=keep,
        model_dir=model_dir,
        offline=offline,
    )
    result = tuning.tune(settings, log=terminal.note)
    if json:
        terminal.out(to_json(tuning.as_json(result)) + "\n")
    else:
        terminal.out(_in_words(result))
    return 0


def _in_words(result: TuneResult) -> str:
    from statistics import median

    lines = [f"{result.model} on {result.device}"]
    if result.times_as_fast is not None:
        lines.append(
            f"  before {median(result.before):.3f} s ({min(result.before):.3f}–{max(result.before):.3f}), "
            f"after {median(result.after):.3f} s ({min(result.after):.3f}–{max(result.after):.3f}): "
            f"{result.times_as_fast:.3f} × as fast"
        )
        lines.append(f"  {result.gemms} products, for {result.changed} of them another solution than the default")
    if result.folder:
        lines.append(f"  kept in {result.folder}")
    return "".join(f"{line}\n" for line in [*lines, *(f"  {note}" for note in result.notes)])
