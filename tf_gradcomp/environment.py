"""Environment variables by which a user changes what an unchanged program does."""

COMPRESSOR = "GRADCOMP_COMPRESSOR"  # the method in place of the program's own, as text
MALLOC = "GRADCOMP_MALLOC"  # whether `gradcomp run` tunes its workers' malloc: tuned or default
