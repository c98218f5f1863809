"""Environment variables that change the behaviour of an unchanged program."""

PREFIX = "GRADCOMP_"
COMPRESSOR = "GRADCOMP_COMPRESSOR"  # the method that replaces the program's own method, as text
MALLOC = "GRADCOMP_MALLOC"  # whether `gradcomp run` tunes its workers' malloc: tuned or default
RESTARTS = "GRADCOMP_RESTARTS"  # `gradcomp run --max-restarts`: how often the job was restarted
HEARTBEAT_TIMEOUT = "GRADCOMP_HEARTBEAT_TIMEOUT"  # seconds, after which a silent worker is lost
STALL_AFTER = "GRADCOMP_STALL_AFTER"  # seconds in a collective, after which a worker reports
START_TIMEOUT = "GRADCOMP_START_TIMEOUT"  # seconds in which all workers must have started
