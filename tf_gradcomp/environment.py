"""Environment variables that change the behaviour of an unchanged program."""

PREFIX = "GRADCOMP_"
COMPRESSOR = "GRADCOMP_COMPRESSOR"  # the method that replaces the program's own method, as text
MALLOC = "GRADCOMP_MALLOC"  # whether `gradcomp run` tunes its workers' malloc: tuned or default
SAVES = "GRADCOMP_SAVES"  # `gradcomp run --max-restarts`: a file that grows with each save
SAVED = "GRADCOMP_SAVED"  # set in a restarted job that has saved before
# `gradcomp run --min-workers`: a file; once it exists, workers end before their next epoch
REGROUP = "GRADCOMP_REGROUP"
REGROUPED = 75  # the exit code of workers that have ended for this reason
HEARTBEAT_TIMEOUT = "GRADCOMP_HEARTBEAT_TIMEOUT"  # seconds, after which a silent worker is lost
STALL_AFTER = "GRADCOMP_STALL_AFTER"  # seconds in a collective, after which a worker reports
START_TIMEOUT = "GRADCOMP_START_TIMEOUT"  # seconds in which all workers must have started
