"""Many learners in one process, which train like a job of N workers."""

from tf_gradcomp.simulation.learners import Learners
from tf_gradcomp.simulation.task import Similarity, StepReport, Task

__all__ = ["Learners", "Similarity", "StepReport", "Task"]
