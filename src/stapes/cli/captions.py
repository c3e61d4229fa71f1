"""Live captions: committed words stand, provisional ones are dim and change in place on a terminal."""

from __future__ import annotations

import shutil
from typing import TYPE_CHECKING

from stapes.cli.terminal import Terminal, display, to_json

if TYPE_CHECKING:
    from stapes.inference.live_events import Event

_DIM, _PLAIN, _CLEAR = "\x1b[2m", "\x1b[0m", "\r\x1b[2K"


class Captions:
    """Prints events as they come: on a terminal, in a pipe (committed words only), or as JSON lines."""

    def __init__(self, terminal: Terminal, *, json: bool) -> None:
        self._terminal, self._json = terminal, json
        self._row = ""  # committed words of the last row
        self._shown = False  # something stands in it

    def show(self, event: Event) -> None:
        """Print what has happened."""
        from stapes.inference.live_events import Committed, Failed, Final, Partial, event_to_dict

        if self._json:
            self._terminal.out(to_json(event_to_dict(event)) + "\n")
            return
        match event:
            case Committed():
                self._commit(event.text)
            case Partial():
                self._provide(event.text)
            case Final(ends_turn=True):
                self._end_row()
            case Failed():
                self._end_row()
                self._terminal.warning(event.message)
            case _:
                pass

    def end(self) -> None:
        """Leave the cursor at the beginning of a row."""
        self._end_row()

    def _commit(self, text: str) -> None:
        text = display(text)
        if not self._terminal.out_is_terminal:
            self._terminal.out(text if self._row else text.lstrip())
            self._row += text
            return
        full: list[str] = []
        row = self._row
        for word in _words(text):
            if row and _width(row) + _width(word) > self._columns():
                full.append(row)
                row = ""
            row += word if row else word.lstrip()
        self._terminal.out(_CLEAR + "".join(f"{done}\n" for done in full) + row)
        self._row, self._shown = row, True

    def _provide(self, text: str) -> None:
        if not self._terminal.out_is_terminal:
            return
        room = self._columns() - _width(self._row)
        shown = _first(display(text if self._row else text.lstrip()), room)
        self._terminal.out(f"{_CLEAR}{self._row}{_DIM}{shown}{_PLAIN}")
        self._shown = True

    def _end_row(self) -> None:
        if self._terminal.out_is_terminal and self._shown:
            self._terminal.out(f"{_CLEAR}{self._row}\n" if self._row else _CLEAR)
        elif self._row:
            self._terminal.out("\n")
        self._row, self._shown = "", False

    @staticmethod
    def _columns() -> int:
        return max(20, shutil.get_terminal_size().columns - 1)


def _words(text: str) -> list[str]:
    """Words with the space before each; text without spaces is cut anywhere."""
    words: list[str] = []
    for character in text:
        if character == " " or not words or _width(character) > 1:
            words.append(character)
        else:
            words[-1] += character
    return words


def _width(text: str) -> int:
    from rich.cells import cell_len

    return cell_len(text)


def _first(text: str, columns: int) -> str:
    """As much of the text as fits."""
    while text and _width(text) > columns:
        text = text[: max(0, len(text) - max(1, (_width(text) - columns) // 2))]
    return text
