"""``stapes align``: a recording and what is said in it; when each word is said."""

from __future__ import annotations

import sys
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NamedTuple

from cyclopts import Parameter

from stapes.cli.background import Background
from stapes.cli.inputs import STDIN, Failure, expand, plan_outputs
from stapes.cli.interrupts import shielded
from stapes.cli.terminal import Terminal, display, to_json
from stapes.cli.transcribe import ModelOptions, _group
from stapes.errors import OutputError, StapesError, UsageError
from stapes.options import Backend, Precision  # noqa: F401 (types of the inherited fields)
from stapes.text.subtitles import finite
from stapes.text.word_times import ALIGNMENT_FORMATS, EXTENSIONS, AlignmentFormat, render_alignment, write_alignment
from stapes.transcript import Transcript


@dataclass(frozen=True, kw_only=True, slots=True)
class AligningModel(ModelOptions):
    """Which model runs where."""

    model: str | None = None
    """A CTC model: its folder, or its Hugging Face id."""


_MODEL = AligningModel()


class _Pair(NamedTuple):
    """A recording and its text, or the file that the text is in."""

    recording: str
    text: str | Path


def align(
    audio: Annotated[
        str,
        Parameter(
            name="AUDIO",
            help=(
                "A recording. Without TEXT: recordings, as a file, a folder, a pattern such as 'talks/*.mp3' or "
                "@list.txt, each with its text beside it (talk.txt for talk.mp3)."
            ),
        ),
    ],
    text: Annotated[str | None, Parameter(name="TEXT", help="A file (UTF-8) with what is said, or the text.")] = None,
    /,
    *,
    texts: Path | None = None,
    language: str | None = None,
    open_ends: bool = False,
    channels: str = "mix",
    output_format: Annotated[str | None, Parameter(alias="-f")] = None,
    output_dir: Annotated[Path | None, Parameter(alias="-o")] = None,
    json: bool = False,
    model: Annotated[AligningModel, _group("Model", 2)] = _MODEL,
) -> int:
    """Find when each word of a known text is said, with a CTC model. However long the recording is.

    Words that the model cannot write (numbers, other scripts) and text in [square brackets], which is often not spoken,
    get the time that is left between their neighbours. A line of the text is a segment; a text of one line is cut into
    sentences. A text that is hardly what is said (less than 5 % a letter, in the geometric mean) is a warning.

    Examples:

        stapes align talk.mp3 talk.txt --model ./my-ctc-model -f textgrid -o .
        stapes align hello.wav "hello world" --model ./my-ctc-model
        stapes align interviews/ --model ./my-ctc-model -o out

    Exit code: 0 all done, 1 some pairs failed, 2 wrong usage, 3 no usable device or model, 130 interrupted.

    Parameters
    ----------
    texts:
        Folder of the texts, where they do not lie beside the recordings.
    language:
        Which of the model's languages, where it has several.
    open_ends:
        The recording may hold other speech before and after the text.
    channels:
        mix, or the number of the channel that is heard.
    output_format:
        ctm, json, textgrid, srt, vtt, several of them separated by commas, or all. Without -o one format is printed
        (ctm unless you say); with -o files are written (all unless you say).
    output_dir:
        Write files into this folder (made where missing), named after the recordings: talk.mp4 gives talk.TextGrid.
    json:
        Print one JSON object: transcripts with words, failures, interrupted.
    """
    formats = _formats(output_format, output_dir, json)
    if model.model is None:
        raise UsageError("no model is named: give --model, the folder of a CTC model")
    if text is not None and texts is not None:
        raise UsageError("TEXT and --texts both say where the text is: give one of them")
    pairs, failures = _pairs(audio, text, texts)
    if output_dir is None and not json and len(pairs) > 1 and formats != ("ctm",):
        raise UsageError(f"-f {output_format} of {len(pairs)} recordings: give -o DIR to write files")
    terminal = Terminal()
    results = _Results(terminal, formats, output_dir, json, [pair.recording for pair in pairs])
    for failure in failures:
        results.fail(*failure)
    if not pairs:
        return results.end()

    settings = {"language": language, "open_ends": open_ends, "channels": channels}
    work = Background(lambda: _run(terminal, pairs, model, settings))
    try:
        for transcript in work:
            with shielded():
                results.take(transcript)
    except KeyboardInterrupt:
        work.cancel()
        terminal.end_progress()
        return results.end(interrupted=True)
    except StapesError as error:
        work.cancel()
        return results.end(error=error)
    with shielded():
        return results.end()


def _formats(output_format: str | None, output_dir: Path | None, json: bool) -> tuple[AlignmentFormat, ...]:
    """The formats to write, each once."""
    if output_format is None:
        return ("ctm",) if output_dir is None else ALIGNMENT_FORMATS
    names = [name.strip().lower() for name in output_format.split(",")]
    if unknown := [name for name in names if name not in (*ALIGNMENT_FORMATS, "all")]:
        raise UsageError(f"-f {unknown[0]!r} is no output format: say {', '.join(ALIGNMENT_FORMATS)} or all")
    formats: tuple[AlignmentFormat, ...] = tuple(
        format for format in ALIGNMENT_FORMATS if format in names or "all" in names
    )
    if output_dir is None:
        if json:
            raise UsageError("--json takes stdout: give -o DIR for the files that -f asks for, or leave -f out")
        if len(formats) > 1:
            raise UsageError(f"-f {output_format} is several formats: give -o DIR to write them as files")
    return formats


def _pairs(audio: str, text: str | None, texts: Path | None) -> tuple[list[_Pair], list[Failure]]:
    """Recordings with their texts, and what has none."""
    if text is not None:
        if audio == STDIN and sys.stdin is not None and sys.stdin.isatty():
            raise UsageError("- reads a recording from stdin, but nothing is piped in: name a file, or pipe one in")
        if Path(audio).is_dir():
            raise UsageError(f"{audio} is a folder and TEXT is one text: name one recording, or give --texts DIR")
        return [_Pair(audio, _text_or_file(text))], []
    recordings, failures = expand([audio])
    pairs: list[_Pair] = []
    for name in recordings:
        if name == STDIN:
            raise UsageError("a recording from stdin has no text beside it: give TEXT")
        beside = Path(name).with_suffix(".txt")
        pairs.append(_Pair(name, beside if texts is None else texts / beside.name))
    return pairs, failures


def _text_or_file(text: str) -> str | Path:
    try:
        is_file = Path(text).is_file()
    except (OSError, ValueError):  # too long for a name
        is_file = False
    if not is_file and text.lower().endswith(".txt") and len(text.split()) == 1:
        raise UsageError(f"{text}: there is no such file; check the name of the text")
    return Path(text) if is_file else text


def _run(
    terminal: Terminal, pairs: Sequence[_Pair], model: ModelOptions, settings: dict[str, Any]
) -> Generator[Transcript, None, None]:
    """Load the model and align; runs in the background thread."""
    recognizer = model.load(terminal, language=settings["language"])
    try:
        with terminal.progress("seconds", "reading …") as progress:
            yield from recognizer.align_many(pairs, progress=progress, **settings)
    finally:
        recognizer.close()


class _Results:
    """Takes transcripts as they come, in the order of the pairs: writes, prints and counts them."""

    def __init__(
        self,
        terminal: Terminal,
        formats: Sequence[AlignmentFormat],
        folder: Path | None,
        json: bool,
        recordings: Sequence[str],
    ) -> None:
        self.terminal, self.formats, self.folder, self.json = terminal, formats, folder, json
        self.plan: dict[str, dict[str, Path]] = {}
        self.failures: list[Failure] = []
        self.transcripts: list[dict[str, Any]] = []
        self._left = list(recordings)
        self._damaged = 0
        if folder is not None:
            self.plan = plan_outputs(recordings, folder, [EXTENSIONS[format] for format in formats])
            try:  # now, not after an hour of work
                folder.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise OutputError(
                    f"{folder}: cannot be made a folder ({error.strerror}); choose another one with -o"
                ) from error

    def take(self, transcript: Transcript) -> None:
        """Write, print and count one transcript."""
        path = transcript.path or ""
        self._left.remove(path)
        if transcript.error is not None:
            self.fail(path, transcript.error)
            return
        outputs = self.plan.get(path, {})
        try:
            for format in self.formats if outputs else ():
                write_alignment(transcript, outputs[EXTENSIONS[format]], format)
        except OutputError as error:
            self.fail(path, str(error))
            return
        for warning in transcript.warnings:
            self.terminal.warning(warning, path)
        self._damaged += transcript.damaged
        written = [str(target) for target in outputs.values()]
        if written:
            self.terminal.note(f"{display(path)}: wrote {', '.join(map(display, written))}")
        if self.json:
            self.transcripts.append({"path": path, **transcript.to_dict(), "outputs": written})
        elif not written:
            self.terminal.out(render_alignment(transcript, self.formats[0]))

    def fail(self, path: str, reason: str) -> None:
        """Name a pair that gave no result."""
        self.failures.append(Failure(path, reason))
        self.terminal.failure(reason, path)

    def end(self, *, interrupted: bool = False, error: StapesError | None = None) -> int:
        """Say how it went; the exit code."""
        if interrupted:
            self.terminal.note(f"interrupted: {len(self._left)} recordings are left")
        if error is not None:
            self.terminal.failure(str(error))
        if self.json:
            report = {
                "transcripts": self.transcripts,
                "failures": [failure._asdict() for failure in self.failures],
                "interrupted": interrupted,
                "error": None if error is None else str(error),
            }
            self.terminal.out(to_json(finite(report)) + "\n")
        if interrupted:
            return 130
        return error.exit_code if error is not None else int(bool(self.failures or self._damaged))
