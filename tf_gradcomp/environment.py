"""Environment variables by which a user changes what an unchanged program does."""

COMPRESSOR = "GRADCOMP_COMPRESSOR"  # the method in place of the program's own, as text
