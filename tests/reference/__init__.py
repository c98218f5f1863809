"""A NumPy oracle for each method: the text of the paper as code, for tests and for reading."""
