"""``stapes lm build``: n-gram language models for CTC recognition, from text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

from cyclopts import App, Parameter

from stapes.cli.terminal import Terminal, display, to_json
from stapes.errors import ModelError, UsageError

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from stapes.decoding.ngram_estimate import Estimate

app = App(
    name="lm",
    help_format="markdown",
    help="Language models for CTC recognition.\n\nExample: stapes lm build sentences.txt -o words.arpa",
)


@app.command(name="build", usage="Usage: stapes lm build [OPTIONS] TEXT…")
def build(
    *texts: Annotated[
        str, Parameter(name="TEXT", help="Text files with a sentence a line, plain or gzip-compressed; - is stdin.")
    ],
    output: Annotated[Path, Parameter(alias="-o")],
    order: int = 4,
    prune: str = "0",
    min_count: int = 1,
    model: Path | None = None,
    language: str | None = None,
    units: Literal["words", "tokens"] = "words",
    json: bool = False,
) -> int:
    """Estimate an n-gram language model by modified Kneser–Ney smoothing and write it as ARPA.

    A recogniser meets only words as it would write them itself: give its folder as --model, or bring the text into
    the same form (case, no punctuation) beforehand.

    Examples:

        stapes lm build sentences.txt -o words.arpa --model ./my-ctc-model
        stapes lm build a.txt.gz b.txt.gz -o words.arpa.gz --order 3 --prune 0,0,1
        stapes lm build sentences.txt -o letters.arpa --model ./my-ctc-model --units tokens --order 8

    Parameters
    ----------
    output:
        The ARPA file; compressed where the name ends in .gz.
    order:
        Words in the longest n-grams.
    prune:
        Leave out n-grams seen this often or less, for orders 1, 2, …; the last number holds for all higher orders.
    min_count:
        Words seen less often are the unknown word.
    model:
        Folder of a CTC model: the text is rewritten with its characters.
    language:
        Which of the model's vocabularies, where it has several.
    units:
        n-grams of words, or of the model's own tokens (letters or parts of words).
    json:
        Print what was built as JSON.
    """
    if not texts:
        raise UsageError("no text is given: name text files, or - for stdin")
    if units == "tokens" and model is None:
        raise UsageError("--units tokens needs --model, the folder of the model whose tokens they are")
    if language is not None and model is None:
        raise UsageError("--language needs --model, whose vocabulary it chooses")
    limits = _numbers(prune)
    from stapes.decoding.ngram_estimate import estimate, read_lines, write_arpa

    paths = [sys.stdin.buffer if text == "-" else Path(text) for text in texts]
    terminal = Terminal()
    with terminal.progress("bytes", "reading text") as reporter:
        for path in paths:
            if isinstance(path, Path) and path.exists():
                reporter.add_total(path.stat().st_size)
        lines = read_lines(paths, reporter.advance)
        found = estimate(_sentences(lines, model, language, units), order, prune=limits, min_count=min_count)
    for level in found.fallbacks:
        terminal.note(f"the text is too small or too regular to estimate discounts of {level}-grams: 0.5, 1, 1.5 taken")
    write_arpa(found, output)
    if json:
        terminal.out(to_json(_as_json(found, output)) + "\n")
    else:
        counts = ", ".join(f"{len(ngrams.rows):,} {n}-grams" for n, ngrams in enumerate(found.orders, 1))
        terminal.out(
            f"{display(str(output))}: {counts}, from {found.tokens:,} words in {found.sentences:,} sentences\n"
        )
    return 0


def _numbers(text: str) -> list[int]:
    try:
        return [int(part) for part in text.split(",")]
    except ValueError:
        raise UsageError(f"--prune is {text!r}: give whole numbers separated by commas, such as 0,0,1") from None


def _sentences(
    lines: Iterable[str], model: Path | None, language: str | None, units: Literal["words", "tokens"]
) -> Iterable[Sequence[str]]:
    if model is None:
        return (line.split() for line in lines)
    from stapes.decoding.spelling import as_written
    from stapes.text.ctc_tokenizer import CTCTokenizer

    if not model.is_dir():
        raise ModelError(f"{model} is no folder: give the folder of a CTC model, with its vocab.json")
    return as_written(lines, CTCTokenizer.from_folder(model, language), units)


def _as_json(found: Estimate, output: Path) -> dict[str, Any]:
    return {
        "output": str(output),
        "order": len(found.orders),
        "ngrams": [len(ngrams.rows) for ngrams in found.orders],
        "discounts": [list(each) for each in found.discounts],
        "sentences": found.sentences,
        "words": found.tokens,
    }
