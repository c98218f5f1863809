"""Reads the output of several workers, and shows it in one terminal or file."""

from __future__ import annotations

import codecs
import errno
import os
import re
import select
import shutil
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import TracebackType

import click
from rich.console import Console, Group
from rich.live import Live
from rich.text import Text

from tf_gradcomp.launch.quiet import Quiet
from tf_gradcomp.stall_reports import is_report

_COLOURS = ("cyan", "magenta", "green", "yellow", "blue", "bright_red")
_REDRAWS_PER_SECOND = 10
_NARROWEST = 40  # columns for a worker's output
_STDOUT, _STDERR = 1, 2
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


def discard_terminal_output() -> None:
    """Discards all further output, because the terminal was closed."""
    _discard_where(
        lambda fd: stat.S_ISCHR(os.fstat(fd).st_mode)
    )  # a closed terminal is no longer one


def discard_unread_output() -> None:
    """Discards output that would wait for a reader; also ends a write that already waits."""
    _discard_where(lambda fd: not select.select([], [fd], [], 0)[1])


def _discard_where(applies: Callable[[int], bool]) -> None:
    with open(os.devnull, "w") as nowhere:
        for stream, fd in ((sys.stdout, _STDOUT), (sys.stderr, _STDERR)):
            # If the stream was closed, its number may belong to another file.
            if stream is not None and applies(fd):
                os.dup2(nowhere.fileno(), fd)


@contextmanager
def _unless_closed() -> Iterator[None]:
    """Ignores a closed terminal, which SIGHUP also reports."""
    try:
        yield
    except OSError as error:
        if error.errno != errno.EIO:
            raise
        discard_terminal_output()


def echo(text: str, err: bool) -> None:
    """Prints a worker's output, in any characters, to stdout or stderr."""
    stream = sys.stderr if err else sys.stdout
    if stream is not None:  # otherwise it is closed
        click.echo(_encodable(text, stream.encoding), err=err)


def _encodable(text: str, encoding: str) -> str:
    """The text, with question marks for characters that the encoding lacks."""
    return text.encode(encoding, "replace").decode(encoding)


def table_width(workers: int) -> int:
    """Returns the width of a worker's tables that fits the terminal, after the worker's name."""
    return max(_NARROWEST, shutil.get_terminal_size().columns - len(_prefixes(workers)[0]))


def _prefixes(workers: int) -> list[str]:
    width = len(str(workers - 1))
    return [f"[worker {index:>{width}}] " for index in range(workers)]


class WorkerOutput:
    """Prints each worker's lines after its name.

    On a terminal, the progress bars stay at the bottom, one line for each worker with a bar.
    Elsewhere, or without `bars`, only the last state of each bar is printed. With `all_to_stderr`,
    stdout stays free for other output.
    """

    def __init__(
        self,
        workers: int,
        *,
        chief_only: bool = False,
        all_to_stderr: bool = False,
        bars: bool = True,
        quiet: bool = False,
    ) -> None:
        self._prefixes = _prefixes(workers)
        self._chief_only = chief_only
        self._all_to_stderr = all_to_stderr
        self._quiet = Quiet(workers) if quiet else None
        self._bars: dict[tuple[int, str], Text] = {}
        self._drawn = 0.0
        # rich's own refreshing would need a thread; here, each print redraws.
        self._live = Live(console=Console(stderr=all_to_stderr), auto_refresh=False, transient=True)
        self._terminal = bars and self._live.console.is_terminal

    def __enter__(self) -> WorkerOutput:
        if self._terminal:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.show_suppressed(all_ended=True)
        with _unless_closed():
            self._live.stop()

    def line(self, worker: int, stream: str, text: str) -> None:
        """Prints a line of a worker's output, to the same stream as the worker.

        A worker that is late does not say so itself, so no report of a worker that waits is hidden.
        """
        if self._hides(worker) and not is_report(text):
            return
        if self._quiet and stream == "stderr" and not self._quiet.shows(worker, text):
            return
        with _unless_closed():
            self._print(worker, stream, text)

    def stopping(self) -> None:
        """Records that the user stops the job."""
        if self._quiet:
            self._quiet.stopped = True

    def show_suppressed(self, *, all_ended: bool = False) -> None:
        """Prints suppressed lines that differ from the lines already shown."""
        for worker, text in self._quiet.due(all_ended=all_ended) if self._quiet else ():
            with _unless_closed():
                if worker is None:
                    echo(f"gradcomp: {text}", err=True)
                else:
                    self._print(worker, "stderr", text)

    def _print(self, worker: int, stream: str, text: str) -> None:
        to_stderr = stream == "stderr" or self._all_to_stderr
        if not self._terminal or (to_stderr and not sys.stderr.isatty()):
            echo(self._prefixes[worker] + text, to_stderr)
            return
        if self._bars.pop((worker, stream), None) is not None:
            self._draw()
        self._live.console.print(self._styled(worker, text), soft_wrap=True)

    def progress(self, worker: int, stream: str, text: str) -> None:
        """Shows the state of a worker's progress bar."""
        if self._hides(worker) or not self._terminal:
            return
        bar = self._styled(worker, text)
        bar.no_wrap = True
        bar.overflow = "ellipsis"
        self._bars[worker, stream] = bar
        now = time.monotonic()
        if now - self._drawn >= 1 / _REDRAWS_PER_SECOND:
            self._drawn = now
            with _unless_closed():
                self._draw()

    def _draw(self) -> None:
        bars = [self._bars[source] for source in sorted(self._bars)]
        self._live.update(Group(*bars), refresh=True)

    def _hides(self, worker: int) -> bool:
        return self._chief_only and worker != 0

    def _styled(self, worker: int, text: str) -> Text:
        colour = _COLOURS[worker % len(_COLOURS)]
        text = _encodable(text, self._live.console.encoding)
        return Text(self._prefixes[worker], style=colour).append(
            Text.from_ansi(text, style="default")
        )
