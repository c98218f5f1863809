"""Predicts whether compression pays, from times of the job's collectives and of the methods."""

# Settings of measuring mode. They are here because the command line reads them without TensorFlow.
VARIABLE = "GRADCOMP_ADVISE"  # the file that the chief writes its advice to, as text or as .json
STEPS_BEFORE, STEPS = 3, 10  # the first trace and open connections; the others are measured
