"""Predicts whether compression pays, from times of the job's collectives and of the methods."""

# Settings of measuring mode. The command line reads these names without loading TensorFlow.
VARIABLE = "GRADCOMP_ADVISE"  # the file in which the chief writes its advice, as text or as .json
STEPS_BEFORE, STEPS = 3, 10  # the first trace and open connections; the others are measured
