"""Many learners in one process: what a job of N workers would do, without the workers."""

from tf_gradcomp.simulation.learners import Learners
from tf_gradcomp.simulation.similarity import Similarity
from tf_gradcomp.simulation.step_report import StepReport
from tf_gradcomp.simulation.task import Task

__all__ = ["Learners", "Similarity", "StepReport", "Task"]
