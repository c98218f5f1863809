"""Whether compression pays: times the job's collectives and the methods, and adds them up."""
