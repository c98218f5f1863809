"""Turns the bytes of a worker's pipe into lines that can be mixed with other workers' lines."""

from __future__ import annotations

import codecs
import re

# A program that never ends its line must not fill the memory.
_LONGEST_LINE = 1 << 16
_BACKSPACES = re.compile("\b+")
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]")


class LineReader:
    """Collects lines from chunks of output, as a terminal would show them.

    A progress bar redraws its line by carriage returns or backspaces. Only the last state of such a
    line counts: `feed` returns it once the line ends, and `progress` returns it until then.
    """

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._open = ""

    @property
    def progress(self) -> str:
        """The text of the line that is being redrawn; empty if no line is."""
        if "\r" in self._open or "\b" in self._open:
            return visible(self._open)
        return ""

    def feed(self, chunk: bytes) -> list[str]:
        """Takes the next chunk of output and returns the lines that it completes."""
        *complete, self._open = (self._open + self._decoder.decode(chunk)).split("\n")
        self._forget_old_states()
        if len(self._open) > _LONGEST_LINE:
            complete.append(self._open)
            self._open = ""
        return [visible(line) for line in complete]

    def close(self) -> list[str]:
        """Returns the line that the end of the output has cut off, if there is one."""
        line = visible(self._open + self._decoder.decode(b"", final=True))
        self._open = ""
        return [line] if line else []

    def _forget_old_states(self) -> None:
        # The end of the chunk may cut off the newest state, so the state before the newest is
        # returned.
        drawn, redrawn, newest = self._open.rpartition("\r")
        if redrawn:
            self._open = f"{visible(drawn)}\r{newest}"


def visible(line: str) -> str:
    """Returns a line with carriage returns and backspaces as a terminal shows it."""
    for state in reversed(line.split("\r")):
        shown = _overwrite(state)
        if without_escapes(shown).strip():
            return shown
    return ""


def without_escapes(text: str) -> str:
    """Returns the text without its terminal escape codes (colours, bold)."""
    return _ESCAPES.sub("", text)


def _overwrite(state: str) -> str:
    """Applies backspaces: they move back over the text, which later text overwrites."""
    if "\b" not in state:
        return state
    shown = ""
    position = 0
    for text, moves in zip(
        _BACKSPACES.split(state), [*_BACKSPACES.findall(state), ""], strict=True
    ):
        shown = shown[:position] + text + shown[position + len(text) :]
        position = max(0, position + len(text) - len(moves))
    return shown
