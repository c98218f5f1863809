"""`python -m tf_gradcomp.cli` is the `gradcomp` command."""

from tf_gradcomp.cli.main import main

main(prog_name="gradcomp")
