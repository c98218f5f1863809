"""The `gradcomp` command: its subcommands are modules of this package."""

from __future__ import annotations

import click

from tf_gradcomp import __version__
from tf_gradcomp.cli.advise import advise
from tf_gradcomp.cli.info import info
from tf_gradcomp.cli.methods import methods
from tf_gradcomp.cli.run import run
from tf_gradcomp.cli.simulate import simulate


@click.group(context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="gradcomp")
def main() -> None:
    """Gradient compression for data-parallel training with TensorFlow and Keras."""


main.add_command(run)
main.add_command(advise)
main.add_command(simulate)
main.add_command(methods)
main.add_command(info)

if __name__ == "__main__":
    main(prog_name="gradcomp")
