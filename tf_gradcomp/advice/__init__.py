"""Whether compression pays: times the job's collectives and the methods, and adds them up."""

# Of measuring mode. Here, for the command line knows them and does not load TensorFlow.
VARIABLE = "GRADCOMP_ADVISE"  # the file that the chief writes its advice to, as text or as .json
STEPS_BEFORE, STEPS = 3, 10  # the first trace and open connections; the others are measured
