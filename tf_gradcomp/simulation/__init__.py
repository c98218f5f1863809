"""Many learners in one process: what a job of N workers would do, without the workers."""

from tf_gradcomp.simulation.learners import Learners
from tf_gradcomp.simulation.similarity import Similarity, StepReport
from tf_gradcomp.simulation.task import Task

__all__ = ["Learners", "Similarity", "StepReport", "Task"]
