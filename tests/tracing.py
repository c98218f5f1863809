"""Has TensorFlow take less time to trace functions, by its private API."""

import os

import tensorflow as tf
from tensorflow.python.framework import ops

TENSORFLOW = "2.21."  # whose private API this is; other versions trace as for users
STACKS = "GRADCOMP_TESTS_STACKS"


def trace_faster():
    """Has ops not keep the stack of their creation, which takes a fifth of the time of a trace.

    An error of a graph shows this stack. To see it, set the variable `STACKS`.
    """
    if tf.__version__.startswith(TENSORFLOW) and STACKS not in os.environ:
        ops.tf_stack.extract_stack = lambda stacklevel=1: None
        ops.pywrap_tf_session.TF_SetOpStackTrace = lambda op, stack: None
