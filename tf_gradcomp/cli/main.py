"""The `gradcomp` command: its subcommands are modules of this package."""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import Any

import click

from tf_gradcomp import __version__
from tf_gradcomp.cli.advise import advise
from tf_gradcomp.cli.info import info
from tf_gradcomp.cli.methods import methods
from tf_gradcomp.cli.run import run
from tf_gradcomp.cli.simulate import simulate

_UNWRITABLE = (errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


@contextlib.contextmanager
def _writing_output() -> Iterator[None]:
    """Flushes stdout at the end; ends the command with one line if that or a write has failed."""
    try:
        try:
            yield
        finally:
            if sys.stdout is not None and not sys.stdout.closed:
                sys.stdout.flush()
    except OSError as error:
        if error.errno not in _UNWRITABLE or error.filename is not None:
            raise
        with open(os.devnull, "w") as nowhere:  # for the rest, which Python writes at its end
            os.dup2(nowhere.fileno(), 1)
        raise click.ClickException(f"Cannot write the output: {error.strerror}.") from None


class Commands(click.Group):
    """Commands that end with one line on stderr if their output cannot be written."""

    def make_context(self, *args: Any, **kwargs: Any) -> click.Context:
        """Reads the command line, and prints the help or the version."""
        with _writing_output():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: click.Context) -> Any:
        """Runs a command."""
        with _writing_output():
            return super().invoke(ctx)


@click.group(
    cls=Commands,
    context_settings={"help_option_names": ["-h", "--help"]},
    epilog="Start here: gradcomp run -n 2 train.py. Each command has its own --help.",
)
@click.version_option(__version__, prog_name="gradcomp")
def main() -> None:
    """Gradient compression for data-parallel training with TensorFlow and Keras."""


main.add_command(run)
main.add_command(advise)
main.add_command(simulate)
main.add_command(methods)
main.add_command(info)
