"""One NumPy oracle per method: the text of the paper as code, for tests and for reading."""
