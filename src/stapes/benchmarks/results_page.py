"""RESULTS.md, from the results that are committed: every figure with its command, commit and hardware.

The same results give the same page, byte for byte. What has not been run is a blank that says so; nothing is ever
estimated, and no figure of one machine is divided by one of another.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from stapes.benchmarks import published
from stapes.benchmarks.records import BenchResult, CaseRow, Spread, Weights, read_bench
from stapes.benchmarks.results_adapt import adapted_section
from stapes.benchmarks.results_objectives import HEADER as OBJECTIVES_HEADER
from stapes.benchmarks.results_objectives import objective_rows
from stapes.benchmarks.results_pretrain import pretraining_part
from stapes.benchmarks.results_serve import HEADER as SERVED_HEADER
from stapes.benchmarks.results_serve import served_rows
from stapes.benchmarks.results_stream import HEADER, live_rows
from stapes.benchmarks.results_train import HEADER as TRAIN_HEADER
from stapes.benchmarks.results_train import train_rows

BLANK = "*not measured yet*"
LENGTHS = ((30.0, "30 s"), (300.0, "5 min"), (3600.0, "1 h"))

MADE_BY = "Made by `make results`"
"""By this a page is known to be ours."""

_INTRO = f"""# Results

{MADE_BY} from the files in `results/`; do not edit. Every figure of ours is the median of its rounds
(lowest–highest in brackets), measured with models loaded and warm, systems in turn within one run, and names its run,
**R1**, **R2** …: command, commit, weights and hardware are [below](#runs). Ratios are medians of the rounds' own
ratios, of one machine in one run. {BLANK} means what it says: nobody has run it there. To fill a blank, run the
command beside it (`--random-weights medium` in place of `--model medium` needs no download), then
`stapes bench submit`.

Rows in italics are others' figures, for orientation; each footnote says where from, and how far it was verified.
"""


class Footnotes:
    """Numbered in the order of use; the same text has one number."""

    def __init__(self) -> None:
        self._texts: list[str] = []

    def __call__(self, text: str) -> str:
        if text not in self._texts:
            self._texts.append(text)
        return f"[^{self._texts.index(text) + 1}]"

    def lines(self) -> list[str]:
        """The notes themselves."""
        return [f"[^{number}]: {text}" for number, text in enumerate(self._texts, 1)]


Labelled = tuple[str, BenchResult]


def load_results(folder: Path) -> list[tuple[str, BenchResult]]:
    """(file name, result) of every run in ``folder`` that counts, by name. Trial runs do not. Raises UsageError."""
    found = [(path.name, read_bench(path)) for path in sorted(folder.glob("*.json"))]
    return [(name, result) for name, result in found if not result.is_trial]


def render(results: Sequence[tuple[str, BenchResult]]) -> str:
    """The page."""
    note = Footnotes()
    labelled = [(f"R{number}", result) for number, (_, result) in enumerate(results, 1)]
    parts = [
        _INTRO,
        "## Whisper on CPU and GPU\n\nSeconds to transcribe a recording; fewer is better.\n",
        _whisper(labelled, note),
        "## Windows per second\n\nMLPerf's Whisper recipe: windows of at most 30 s in the host's memory → text, "
        "greedy; more is better. Tokens are those that the decoder writes, prompt and end not counted. MFU is model "
        "operations ÷ the data sheet's dense peak; the encoder is set against a large matrix product, a decoder step "
        "against a large copy of the same run.\n",
        _mlperf(labelled, note),
        "One clip of 10 s alone, 30 tokens, from samples to text:\n",
        _latency(labelled),
        "## wav2vec 2.0 by platform\n",
        _wav2vec2(labelled, note),
        "Recordings in the host's memory → text, in batches; more is better. MFU is model operations ÷ the data "
        "sheet's dense peak; the network alone is set against a large matrix product of the same run.\n",
        _ctc(labelled),
        "Training steps, of noise of one length: fine-tuning with CTC (its convolutions frozen) and pre-training. The "
        "operations of the convolutions are in the MFU.\n",
        table(TRAIN_HEADER, train_rows(labelled, _model, _device, _faster, BLANK), right=6),
        "## CTC and attention\n\nWhat each costs to train, and how well it hears then: means over the seeds "
        "(lowest–highest). Hours are of one training on a GPU that it shared with others.\n",
        table(OBJECTIVES_HEADER, objective_rows(labelled, note, _device, BLANK), right=6),
        "## Pre-training\n\nwav2vec 2.0 from audio alone, then fine-tuned, beside its twin from nothing: as many steps "
        "on the same hours, each with the learning rate that is best on dev. With a strict loss of 4.615, which is "
        "ln(1 + negatives), nothing is known. Minutes are of a GPU that several trainings may have shared.\n",
        pretraining_part(labelled, _files(results), _device, table, BLANK),
        adapted_section(labelled, _device, table, BLANK),
        "## Beside other systems\n\nThe same recording, model, number format and threads. WER says whether the faster "
        "one also wrote what was said.\n",
        _peers(labelled),
        "## Live\n\nClients that speak recordings at the pace of speech, all at once; median / 95th percentile.\n",
        _live(labelled),
        "## Served\n\nThe HTTP server under load: clients that send the next recording when the last was answered, or "
        "requests at random times. Fixed batches wait until all of a batch have ended.\n",
        _served(labelled),
        "## Between GPUs\n\nAll-reduce, every sum checked: the time of the smallest one, and the most that a link "
        "carried (bus bandwidth as nccl-tests define it).\n",
        _allreduce(labelled),
        "## Runs\n",
        _runs(results),
    ]
    return "\n".join(parts) + "\n" + "\n".join(note.lines()) + "\n"


def table(header: Sequence[str], rows: Iterable[Sequence[str]], right: int = 0) -> str:
    """A Markdown table whose last ``right`` columns are aligned to the right."""
    align = ["---"] * (len(header) - right) + ["---:"] * right
    lines = [header, align, *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def seconds(value: float) -> str:
    """Three significant figures."""
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}" if value >= 10 else f"{value:.2f}"


def spread(value: Spread, shown: Callable[[float], str] = seconds) -> str:
    """Median and range."""
    return f"{shown(value.median)} ({shown(value.low)}–{shown(value.high)})"


def _whisper(results: Sequence[Labelled], note: Footnotes) -> str:
    header = ["hardware", "model", "precision, batch", "run", *(name for _, name in LENGTHS)]
    rows: list[list[str]] = []
    ours = _whisper_rows(results)
    for each in published.WHISPER:
        times = ["–" if value is None else f"*{value:g}*" for value in each.seconds]
        rows.append([f"*{each.hardware}*{note(each.source)}", f"*{each.model}*", "*not told*", "*published*", *times])
        if each.device and not any(each.device in device for device, _ in ours):
            command = (
                f"`stapes bench transcribe --model medium --devices {'cpu' if 'Xeon' in each.hardware else 'cuda,cpu'}`"
            )
            rows.append([f"{each.hardware}, stapes", "medium", command, BLANK, BLANK, BLANK, BLANK])
    for wanted in published.WANTED:
        if not any(wanted in device for device, _ in ours):
            command = "`stapes bench transcribe --model medium --devices cuda,cpu`"
            rows.append([f"{wanted}, stapes", "medium", command, BLANK, BLANK, BLANK, BLANK])
    return table(header, rows + [row for _, row in ours], right=3)


def _whisper_rows(results: Sequence[Labelled]) -> list[tuple[str, list[str]]]:
    """(device, row) of every model, device, precision and batch size that was timed."""
    groups: dict[tuple[Any, ...], dict[float, CaseRow]] = {}
    for label, result in results:
        if result.name != "transcribe" or _is_wav2vec2(result):
            continue
        for row in result.rows:
            case = row.case
            key = (_device(result, case), _model(result), f"{case['precision']}, {case['batch_size']}", label)
            groups.setdefault(key, {})[case["audio_seconds"]] = row
    out = []
    for (device, model, how, label), rows in sorted(groups.items(), key=lambda item: (item[0][1], item[0])):
        times = [spread(rows[length].ours.wall_seconds) if length in rows else BLANK for length, _ in LENGTHS]
        out.append((device, [f"{device}, stapes", model, how, label, *times]))
    return out


def _wav2vec2(results: Sequence[Labelled], note: Footnotes) -> str:
    header = ["model", "hardware", "run", "WER, %", "real-time factor"]
    rows: list[list[str]] = []
    ours: list[tuple[str, str, list[str]]] = []
    for label, result in results:
        if _is_wav2vec2(result) and result.name != "train":
            for row in result.rows:
                if row.case.get("work", "equal") != "equal":  # one row a run: of `stapes bench ctc` that of one length
                    continue
                device, length = _device(result, row.case), row.case.get("audio_seconds") or row.case["sound_seconds"]
                factor = spread(row.ours.wall_seconds, lambda value, length=length: f"{value / length:.2g}")
                wer = _percent(row.ours.figures.get("wer"))
                ours.append((result.weights.name, device, [_model(result), f"{device}, stapes", label, wer, factor]))
    for each in published.WAV2VEC2:
        figures = [f"*{100 * each.wer:.1f}*", f"*{each.real_time_factor:.2f}*"]
        rows.append([f"*{each.model}*", f"*{each.hardware}*{note(each.source)}", "*published*", *figures])
        for platform in (each.hardware, "CPU"):
            part = each.device if platform != "CPU" else ""
            measured = [
                row for model, device, row in ours if each.model in model and (part in device if part else True)
            ]
            command = f"`stapes bench ctc --random-weights {each.model}`"
            rows += measured or [[each.model, f"{platform}, stapes", command, BLANK, BLANK]]
    return table(header, _once(rows), right=2)


def _ctc(results: Sequence[Labelled]) -> str:
    header = ["hardware", "model", "precision", "recordings", "run", "× real time", "MFU, %", "network, % of product"]
    header += ["× as fast as"]
    rows: list[list[str]] = []
    ours: set[tuple[str, str]] = set()
    for label, result in results:
        for row in result.rows if result.name == "ctc" else []:
            case, figures, times = row.case, row.ours.figures, row.ours.wall_seconds
            ours.add((_device(result, case), result.weights.name))
            rate = lambda value, sound=case["sound_seconds"]: f"{sound / value:.0f}"  # noqa: E731
            rows.append(
                [
                    f"{_device(result, case)}, stapes",
                    _model(result),
                    case["precision"],
                    _recordings(row),
                    label,
                    # The longest time is the lowest rate.
                    f"{rate(times.median)} ({rate(times.high)}–{rate(times.low)})",
                    _percent(figures.get("mfu")),
                    _percent(figures.get("network_of_product")),
                    _faster(row),
                ]
            )
    for part, model in published.CTC_WANTED:
        if not any(part in device and model == name for device, name in ours):
            command = f"`stapes bench ctc --random-weights {model} --precision bf16 --mix --peer transformers`"
            rows.append([f"{part}, stapes", model, "bf16", command, *[BLANK] * 5])
    return table(header, rows, right=4)


def _recordings(row: CaseRow) -> str:
    """What a batch is, and how it becomes text."""
    case = row.case
    if case["work"] == "mix":
        return f"{case['batch'] * case['seconds']:g} s of mixed lengths"
    lengths = f"{case['batch']} × {case['seconds']:g} s"
    if case["work"] == "equal":
        return lengths
    return f"{lengths}, beam {case['beam']}" + (", language model" if case["language_model"] else "")


def _peers(results: Sequence[Labelled]) -> str:
    header = [
        "hardware",
        "model",
        "precision, batch",
        "length",
        "run",
        "system",
        "seconds",
        "WER, %",
        "stapes is … × as fast",
    ]
    rows = []
    for label, result in results:
        for row in result.rows:
            case = row.case
            if not row.ratios or "audio_seconds" not in case:
                continue
            length = next((name for value, name in LENGTHS if value == case.get("audio_seconds")), None)
            where = [
                _device(result, case),
                _model(result),
                f"{case.get('precision')}, {case.get('batch_size')}",
                length or f"{case.get('audio_seconds'):g} s",
                label,
            ]
            ratios = {ratio.place: spread(ratio.times_as_fast, lambda value: f"{value:.2f}") for ratio in row.ratios}
            for place, system in enumerate(row.systems):
                name = " ".join(filter(None, [system.system, system.version, system.options and f"({system.options})"]))
                if system.precision != case.get("precision"):
                    name += f", {system.precision}"
                figures = [spread(system.wall_seconds), _percent(system.figures.get("wer")), ratios.get(place, "")]
                rows.append([*(where if place == 0 else [""] * len(where)), name, *figures])
    if not rows:
        return f"{BLANK}: `stapes bench transcribe --peer faster-whisper --peer transformers`\n"
    return table(header, rows, right=3)


def _mlperf(results: Sequence[Labelled], note: Footnotes) -> str:
    header = ["hardware", "model", "precision, slots", "run", "windows/s", "× real time", "tokens/s", "MFU, %"]
    header += ["encoder, % of product", "step, % of copy", "memory, GB", "× as fast as the peer"]
    rows: list[list[str]] = []
    for each in published.MLPERF:
        where = [f"*{each.hardware}*{note(each.source)}", f"*{each.model}*", f"*{each.how}*", "*published*"]
        rows.append([*where, f"*{each.windows_per_second:g}*", *["–"] * 7])
    ours = _mlperf_rows(results, "windows")
    keys = {(_device(result, row.case), result.weights.name, _mlperf_precision(row)) for _, result, row in ours}
    for part, model, precision, option in published.MLPERF_WANTED:
        if not any(part in device and [model, precision] == rest for device, *rest in keys):
            command = f"stapes bench mlperf --random-weights {model} --precision bf16{option} --peer transformers"
            rows.append([f"{part}, stapes", model, f"{precision}: `{command}`", *[BLANK] * 9])
    return table(header, rows + [_mlperf_line(*each) for each in ours], right=8)


def _mlperf_rows(results: Sequence[Labelled], work: str) -> list[tuple[str, BenchResult, CaseRow]]:
    return [
        (label, result, row)
        for label, result in results
        if result.name == "mlperf"
        for row in result.rows
        if row.case.get("work") == work
    ]


def _mlperf_precision(row: CaseRow) -> str:
    """Of the weights, and of the cache where it is another."""
    precision, cache = row.case["precision"], row.case["cache"]
    return precision if cache == precision else f"{precision}, {cache} cache"


def _mlperf_line(label: str, result: BenchResult, row: CaseRow) -> list[str]:
    case, figures, times = row.case, row.ours.figures, row.ours.wall_seconds
    reserved = figures.get("reserved_bytes")
    return [
        f"{_device(result, case)}, stapes",
        _model(result),
        f"{_mlperf_precision(row)}, {case['slots']}",
        label,
        # The longest time is the lowest rate.
        f"{case['windows'] / times.median:.1f} ({case['windows'] / times.high:.1f}–{case['windows'] / times.low:.1f})",
        f"{case['sound_seconds'] / times.median:.0f}",
        f"{figures.get('tokens_per_second') or 0.0:.0f}",
        *(_percent(figures.get(name)) for name in ("mfu", "encoder_of_product", "step_of_copy")),
        "–" if reserved is None else f"{reserved / 1e9:.1f}",
        _faster(row),
    ]


def _faster(row: CaseRow) -> str:
    ratios = (f"{spread(each.times_as_fast, lambda value: f'{value:.2f}')}, {each.peer}" for each in row.ratios)
    return "; ".join(ratios) or "–"


def _latency(results: Sequence[Labelled]) -> str:
    header = ["hardware", "model", "precision", "run", "milliseconds", "× as fast as the peer"]
    rows = [
        [
            f"{_device(result, row.case)}, stapes",
            _model(result),
            _mlperf_precision(row),
            label,
            spread(row.ours.wall_seconds, lambda value: f"{1e3 * value:.1f}"),
            _faster(row),
        ]
        for label, result, row in _mlperf_rows(results, "latency")
    ]
    command = "stapes bench mlperf --random-weights large-v3 --precision bf16 --peer transformers --latency"
    return table(header, rows, right=2) if rows else f"{BLANK}: `{command}`\n"


def _live(results: Sequence[Labelled]) -> str:
    rows = live_rows(results, _model, _device)
    return table(HEADER, rows, right=6) if rows else f"{BLANK}: `stapes bench stream`\n"


def _served(results: Sequence[Labelled]) -> str:
    rows = served_rows(results, _model, _device)
    command = "stapes bench serve --model base --batching dynamic,fixed:8,single --beside 40"
    return table(SERVED_HEADER, rows, right=6) if rows else f"{BLANK}: `{command}`\n"


def _allreduce(results: Sequence[Labelled]) -> str:
    header = ["hardware", "ranks, library", "run", "smallest, µs", "most, GB/s", "at"]
    rows = []
    for label, result in results:
        measured = [row for row in result.rows if result.name == "allreduce"]
        if not measured:
            continue
        first, best = measured[0], max(measured, key=lambda row: row.ours.figures.get("bus_gb_s") or 0.0)
        wrong = sum(row.ours.figures.get("wrong_elements") or 0.0 for row in measured)
        latency = spread(first.ours.wall_seconds, lambda value: f"{1e6 * value:.1f}")
        bandwidth = f"{best.ours.figures.get('bus_gb_s') or 0.0:.1f}"
        how = f"{first.case['ranks']}, {first.ours.options}"
        if wrong:
            bandwidth += ", **wrong sums**"
        rows.append([_device(result, first.case), how, label, latency, bandwidth, f"{best.case['bytes']:,} B"])
    return table(header, rows, right=3) if rows else f"{BLANK}: `stapes bench allreduce`\n"


def _runs(results: Sequence[tuple[str, BenchResult]]) -> str:
    if not results:
        return f"{BLANK}\n"
    parts = []
    for number, (name, result) in enumerate(results, 1):
        facts, weights = result.machine, result.weights
        gpus = ", ".join(gpu["name"] for gpu in facts.get("gpus") or []) or "none"
        memory = facts.get("memory_bytes")
        versions = ", ".join(f"{package} {version}" for package, version in (facts.get("versions") or {}).items())
        heard = f"; heard: {result.audio.get('corpus')}" if result.audio else ""
        origin = (
            "no weights"
            if weights.kind == "none"
            else f"{_random(weights)}: for timing only"
            if weights.kind == "random"
            else f"real weights, sha256 `{(weights.sha256 or 'unknown')[:16]}`"
        )
        lines = [
            f"### R{number}: {result.name}, {weights.name}\n",
            f"- `{shlex.join(result.command)}`",
            f"- {result.date[:10]}, stapes {result.stapes}, commit `{(result.commit or 'unknown')[:13]}`"
            + (" with changes" if (result.commit or "").endswith("+") else ""),
            f"- {weights.name}: {origin}{heard}, {len(result.rows)} cases of "
            f"{len(result.rows[0].ours.wall_seconds.rounds) if result.rows else 0} rounds",
            f"- {_cpu(facts)}, {facts.get('cores')} cores, "
            + (f"{memory / 2**30:.0f} GiB" if memory else "memory unknown")
            + f"; GPUs: {gpus}; {facts.get('os')}, Python {facts.get('python')}, {versions}"
            + (f", ROCm {facts['rocm']}" if facts.get("rocm") else "")
            + (f", CUDA {facts['cuda']}" if facts.get("cuda") else "")
            + f"; machine {result.fingerprint}, load {result.load_average} at the start",
            f"- [{name}](results/{name})",
            *(f"- note: {note}" for note in result.notes),
        ]
        parts.append("\n".join(lines) + "\n")
    return "\n".join(parts)


def _model(result: BenchResult) -> str:
    weights = result.weights
    return weights.name if weights.kind == "real" else f"{weights.name}, {_random(weights)}"


def _random(weights: Weights) -> str:
    return "random weights" + ("" if weights.tokens is None else f", {weights.tokens} tokens a window")


def _device(result: BenchResult, case: dict[str, Any]) -> str:
    """The GPU; for the CPU its model and how many threads it was given."""
    if case.get("device") != "cpu":
        return str(case.get("device_name"))
    return f"{_cpu(result.machine)}, {case.get('threads')} threads"


def _cpu(facts: dict[str, Any]) -> str:
    name = facts.get("cpu") or "CPU"
    return f"{name} ({facts['instructions']})" if facts.get("instructions") else name


def _is_wav2vec2(result: BenchResult) -> bool:
    return "wav2vec2" in result.weights.name


def _files(results: Sequence[tuple[str, BenchResult]]) -> dict[str, str]:
    return {f"R{number}": name for number, (name, _) in enumerate(results, 1)}


def _percent(value: float | None) -> str:
    return "–" if value is None else f"{100 * value:.2f}"


def _once(rows: list[list[str]]) -> list[list[str]]:
    return [row for place, row in enumerate(rows) if row not in rows[:place]]
