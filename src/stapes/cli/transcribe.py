"""``stapes transcribe``: recordings in, text on stdout or files in a folder out."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from cyclopts import Group, Parameter

import stapes
from stapes.cli.background import Background
from stapes.cli.inputs import STDIN, Failure, expand, plan_outputs
from stapes.cli.interrupts import shielded
from stapes.cli.terminal import Terminal, display, to_json
from stapes.errors import AudioError, OutputError, StapesError, UsageError
from stapes.options import Backend, Precision, TranscribeOptions
from stapes.text.subtitles import (
    FORMATS,
    OutputFormat,
    SubtitleOptions,
    finite,
    format_timestamp,
    plain_line,
    render,
    write,
)
from stapes.transcript import Transcript

if TYPE_CHECKING:
    from stapes.recognizer import Recognizer


@dataclass(frozen=True, kw_only=True, slots=True)
class OutputOptions:
    """Where the words go."""

    output_format: Annotated[str | None, Parameter(alias="-f")] = None
    """txt, srt, vtt, tsv, json, several of them separated by commas, or all. Without -o one format is printed (txt
    unless you say); with -o files are written (all unless you say)."""

    output_dir: Annotated[Path | None, Parameter(alias="-o")] = None
    """Write files into this folder (made where missing), named after the recordings: talk.mp4 gives talk.srt."""

    skip_existing: bool = False
    """Leave out recordings whose files are all in the folder already: goes on after an interruption."""

    verbose: bool = False
    """Show the segments of each finished recording with their times."""

    json: bool = False
    """Print one JSON object in place of the text: transcripts, failures, skipped_existing, interrupted."""

    def __post_init__(self) -> None:
        self.formats()
        if self.skip_existing and self.output_dir is None:
            raise UsageError("--skip-existing needs -o DIR, the folder to look in")
        if self.output_dir is None and self.output_format is not None:
            if self.json:
                raise UsageError("--json takes stdout: give -o DIR for the files that -f asks for, or leave -f out")
            if len(self.formats()) > 1:
                raise UsageError(f"-f {self.output_format} is several formats: give -o DIR to write them as files")

    def formats(self) -> tuple[OutputFormat, ...]:
        """The formats to write, each once."""
        if self.output_format is None:
            return ("txt",) if self.output_dir is None else FORMATS
        names = [name.strip().lower() for name in self.output_format.split(",")]
        if unknown := [name for name in names if name not in (*FORMATS, "all")]:
            raise UsageError(f"-f {unknown[0]!r} is no output format: say {', '.join(FORMATS)} or all")
        return tuple(format for format in FORMATS if format in names or "all" in names)


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelOptions:
    """Which model runs where."""

    model: str | None = None
    """Name (`stapes models` lists them), folder, Hugging Face id or .pt file. Default: turbo on a GPU with 6 GB or
    more, else base, or what is installed."""

    device: str = "auto"
    """auto, cpu, cuda, a GPU by number (cuda:1), or several (cuda:0,cuda:1) that share a Whisper's work, a process
    for each. cuda means AMD GPUs too; rocm and hip are the same."""

    precision: Precision = "auto"
    """Number format that the model runs in; auto suits the device."""

    fp16: bool | None = None
    """openai/whisper's way to say it: True is --precision fp16, False is --precision fp32."""

    max_vram: str | None = None
    """Most GPU memory to use, such as 6GB."""

    backend: Backend = "auto"
    """What runs the model."""

    threads: int | None = None
    """CPU threads for the model. Default: all cores."""

    model_dir: str | None = None
    """Folder where models are looked for and downloaded to."""

    offline: bool = False
    """Never download; use what is on this machine."""

    adapter: str | None = None
    """Folder with a LoRA adapter of MODEL, as `stapes train whisper_lora` and peft write it. Named as MODEL itself it
    finds its base."""

    draft: str | None = None
    """A small Whisper with the same tokens that drafts the text, which MODEL then decides on: the same text, sooner.
    For one recording at a time; `stapes train distill` makes one."""

    draft_tokens: int = 5
    """Tokens drafted at a time."""

    def __post_init__(self) -> None:
        if self.threads is not None and self.threads < 1:
            raise UsageError(f"--threads is {self.threads}: it must be at least 1")
        if self.fp16 is not None and self.precision not in ("auto", self.effective_precision()):
            raise UsageError(f"--fp16 {self.fp16} contradicts --precision {self.precision}: give one of them")

    def effective_precision(self) -> Precision:
        """``precision`` with ``fp16`` taken into account."""
        if self.fp16 is None:
            return self.precision
        return "fp16" if self.fp16 else "fp32"

    def settings(self) -> dict[str, Any]:
        """What `stapes.load` takes, but for the model itself."""
        return {
            "device": self.device,
            "precision": self.effective_precision(),
            "backend": self.backend,
            "max_vram": self.max_vram,
            "threads": self.threads,
            "model_dir": self.model_dir,
            "offline": self.offline,
            "adapter": self.adapter,
            "draft": self.draft,
            "draft_tokens": self.draft_tokens,
        }

    def load(self, terminal: Terminal, *, language: str | None, task: str = "transcribe") -> Recognizer:
        """Load the model, showing how far it is."""
        with terminal.progress("bytes", "loading the model …") as loading:
            return stapes.load(self.model, task=task, language=language, progress=loading, **self.settings())


def _group(name: str, order: int) -> Parameter:
    """The fields of a dataclass as options of their own, under one heading of the help."""
    return Parameter(name="*", group=Group(name, sort_key=order))


_OUTPUT = OutputOptions()
_MODEL = ModelOptions()
_SUBTITLES = SubtitleOptions()
_OPTIONS = TranscribeOptions()


def transcribe(
    *inputs: Annotated[
        str,
        Parameter(
            name="INPUT",
            help=(
                "Files (anything with sound), folders (searched for audio and video), patterns such as 'talks/*.mp3', "
                "- for stdin, @list.txt for a list with one input a line."
            ),
        ),
    ],
    output: Annotated[OutputOptions, _group("Output", 1)] = _OUTPUT,
    model: Annotated[ModelOptions, _group("Model", 2)] = _MODEL,
    subtitles: Annotated[SubtitleOptions, _group("Subtitles (srt and vtt)", 3)] = _SUBTITLES,
    options: Annotated[TranscribeOptions, _group("Transcription", 4)] = _OPTIONS,
) -> int:
    """Write down what is said in recordings.

    For example:

        stapes transcribe talk.mp3                            print the text
        stapes transcribe video.mp4 -f srt -o .               subtitles: video.srt here
        stapes transcribe calls/ -o out --skip-existing       a folder, all formats
        stapes transcribe call.wav --channels separate        a speaker a channel
        stapes transcribe talk.mp3 -f json --word-timestamps  words with their times
        cat talk.ogg | stapes transcribe - --language de

    Progress and notes go to stderr: as words on a terminal, as JSON lines in a pipe or log.

    Exit code: 0 all done, 1 some inputs failed or were damaged, 2 wrong usage, 3 no usable device or model,
    130 interrupted.
    """
    if not inputs:
        raise UsageError("nothing to transcribe: name a file, such as `stapes transcribe talk.mp3`")
    if options.language is not None and model.model is None:  # a slip of the pen need not wait for the model
        from stapes.text.tokenizers import language_code

        language_code(options.language)
    recordings, failures = expand(inputs)
    if STDIN in recordings and sys.stdin is not None and sys.stdin.isatty():
        raise UsageError("- reads a recording from stdin, but nothing is piped in: name a file, or pipe one in")
    if output.output_dir is None and output.formats() != ("txt",) and len(recordings) > 1:
        raise UsageError(f"-f {output.output_format} of {len(recordings)} recordings: give -o DIR to write files")
    if subtitles.needs_words:
        options = replace(options, word_timestamps=True)

    terminal = Terminal()
    results = _Results(terminal, output, subtitles, recordings)
    for failure in failures:
        results.fail(*failure)
    waiting = results.waiting()
    if not waiting:
        return results.end()
    if output.output_dir is None and output.output_format not in (None, "txt") and terminal.out_is_terminal:
        terminal.note(f"printing {output.output_format}; use -o DIR to write files")

    work = Background(lambda: _run(terminal, waiting, model, options))
    try:
        for transcript in work:
            with shielded():
                results.take(transcript)
            if terminal.out_closed and output.output_dir is None:
                work.cancel()  # no one reads any more
                return 1
    except KeyboardInterrupt:
        work.cancel()
        terminal.end_progress()
        return results.interrupt()
    except StapesError as error:
        work.cancel()
        return results.abort(error)
    with shielded():
        return results.end()


def _run(
    terminal: Terminal, recordings: Sequence[str], model: ModelOptions, options: TranscribeOptions
) -> Generator[Transcript, None, None]:
    """Load the model and transcribe; runs in the background thread."""
    recognizer = model.load(terminal, language=options.language, task=options.task)
    try:
        if options.language is not None:
            recognizer.check_language(options.language)
        with terminal.progress("seconds", "reading …") as progress:
            yield from recognizer.transcribe_many(recordings, options, progress=progress)
    finally:
        recognizer.close()


class _Results:
    """Takes transcripts in the order they finish; writes files at once and prints in the order of the inputs."""

    def __init__(
        self, terminal: Terminal, output: OutputOptions, subtitles: SubtitleOptions, recordings: Sequence[str]
    ) -> None:
        self.terminal = terminal
        self.output = output
        self.subtitles = subtitles
        self.recordings = list(recordings)
        self.plan: dict[str, dict[str, Path]] = {}
        self.failures: list[Failure] = []
        self.skipped: list[str] = []
        self.finished: dict[str, dict[str, Any] | None] = {}
        """Recordings that are over: their JSON where --json asks for it and they have a transcript."""
        self.damaged = 0
        self._texts: dict[str, str] = {}
        self._printed = 0
        self._header = len(recordings) > 1
        if output.output_dir is not None:
            self.plan = plan_outputs(recordings, output.output_dir, output.formats())
            try:  # now, not after an hour of work
                output.output_dir.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise OutputError(
                    f"{output.output_dir}: cannot be made a folder ({error.strerror}); choose another one with -o"
                ) from error

    def waiting(self) -> list[str]:
        """The recordings to transcribe: without those that --skip-existing leaves out, and those that are not there.

        Looked at now, so that a misspelt name does not wait for a model to be loaded.
        """
        if self.output.skip_existing:
            self.skipped = [name for name, paths in self.plan.items() if all(map(Path.exists, paths.values()))]
            if self.skipped:
                self.terminal.note(f"{len(self.skipped)} of {len(self.recordings)} recordings are there already")
        from stapes.audio.sources import check_path

        over = set(self.skipped)
        self.recordings = [name for name in self.recordings if name not in over]
        for name in self.recordings:
            try:
                if name != STDIN:
                    check_path(name)
            except AudioError as error:
                self.fail(name, str(error))
        return [name for name in self.recordings if name not in self.finished]

    def take(self, transcript: Transcript) -> None:
        """Write, print and count one transcript."""
        path = transcript.path or ""
        if transcript.error is not None:
            self.fail(path, transcript.error)
            return
        try:
            for format, target in self.plan.get(path, {}).items():
                write(transcript, target, format, self.subtitles)  # pyright: ignore[reportArgumentType]
        except OutputError as error:
            self.fail(path, str(error))
            return
        for warning in transcript.warnings:
            self.terminal.warning(warning, path)
        if not any(segment.text.strip() for segment in transcript.segments):
            self.terminal.note(f"no words were heard in {display(path)}")
        if transcript.damaged:
            self.damaged += 1
            if not transcript.warnings:
                self.terminal.warning("part of the recording was lost", path)
        if self.output.verbose and transcript.drafted:
            rate = 100 * transcript.agreed / transcript.drafted
            self.terminal.note(f"{transcript.drafted:,} tokens were drafted, {rate:.0f} % of them accepted")
        if targets := list(self.plan.get(path, {}).values()):
            self.terminal.note(f"{path}: wrote {', '.join(map(str, targets))}")
        outputs = [str(target) for target in self.plan.get(path, {}).values()]
        entry = {"path": path, **transcript.to_dict(), "damaged": transcript.damaged, "outputs": outputs}
        self._over(path, self._text(transcript), entry if self.output.json else None)

    def fail(self, path: str, reason: str) -> None:
        """Name an input that gave no result."""
        self.failures.append(Failure(path, reason))
        self.terminal.failure(reason, path)
        self._over(path, "", None)

    def end(self) -> int:
        """Print what is left to print; the exit code."""
        for name in self.recordings:
            if name not in self.finished:
                self.fail(name, "the recogniser gave no result for it; please report this")
        self._report()
        return 1 if self.failures or self.damaged else 0

    def interrupt(self) -> int:
        """Say where things stand after Ctrl-C; the exit code."""
        self._print_rest()
        done = sum(name in self.finished for name in self.recordings)
        message = f"interrupted: {done} of {len(self.recordings)} recordings were finished"
        if self.output.output_dir is not None:
            message += "; the same command with --skip-existing goes on from there"
        self.terminal.note(message)
        self._report(interrupted=True)
        return 130

    def abort(self, error: StapesError) -> int:
        """Say what ended the whole run; the exit code."""
        self._print_rest()
        self.terminal.failure(str(error))
        self._report(error=str(error))
        return error.exit_code

    def _report(self, *, interrupted: bool = False, error: str | None = None) -> None:
        if not self.output.json:
            return
        order = [self.finished.get(name) for name in self.recordings]
        report = {
            "transcripts": [entry for entry in order if entry is not None],
            "failures": [failure._asdict() for failure in self.failures],
            "skipped_existing": self.skipped,
            "interrupted": interrupted,
            "error": error,
        }
        self.terminal.out(to_json(finite(report)) + "\n")

    def _text(self, transcript: Transcript) -> str:
        """What stdout gets for a transcript; with --verbose and stdout taken, stderr gets the segments at once."""
        format = None if self.output.json or self.output.output_dir is not None else self.output.formats()[0]
        text = ""
        if self.output.verbose:
            lines = [
                f"[{format_timestamp(segment.start)} --> {format_timestamp(segment.end)}] {line}"
                for segment in transcript.segments
                if (line := plain_line(segment))
            ]
            if self.output.json or format not in (None, "txt"):
                for line in lines:
                    self.terminal.verbose(line)
            else:
                text, format = "".join(f"{line}\n" for line in lines), None
        if format is not None:
            text = render(transcript, format, self.subtitles)
        header = self._header and not self.output.json and (self.output.verbose or self.output.output_dir is None)
        return f"==> {display(transcript.path or '')} <==\n{text}\n" if header else text

    def _over(self, path: str, text: str, entry: dict[str, Any] | None) -> None:
        """Count a recording and print those texts whose turn has come."""
        self.finished[path] = entry
        self._texts[path] = text
        while self._printed < len(self.recordings) and self.recordings[self._printed] in self._texts:
            self._print(self.recordings[self._printed])
            self._printed += 1

    def _print_rest(self) -> None:
        """Print what finished out of turn, for there will be no turns any more."""
        for name in self.recordings:
            if name in self._texts:
                self._print(name)

    def _print(self, name: str) -> None:
        if self._texts[name]:
            self.terminal.out(self._texts[name])
        del self._texts[name]
