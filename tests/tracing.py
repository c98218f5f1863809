"""Has TensorFlow take less time to trace functions, by its private API."""

import functools
import os

import tensorflow as tf
from tensorflow.python.data.ops import dataset_ops
from tensorflow.python.data.ops import multi_device_iterator_ops as iterators
from tensorflow.python.eager import context
from tensorflow.python.framework import ops
from tensorflow.python.ops import gen_dataset_ops

TENSORFLOW = "2.21."  # whose private API this is; other versions trace as for users
STACKS = "GRADCOMP_TESTS_STACKS"
FUNCTIONS = ("_init", "_next", "_finalize")


def trace_faster():
    if tf.__version__.startswith(TENSORFLOW):
        share_functions_of_iterators()
        if STACKS not in os.environ:
            keep_no_stacks()


def keep_no_stacks():
    """Has ops not keep the stack of their creation, which takes a fifth of the time of a trace.

    An error of a graph shows this stack. To see it, set the variable `STACKS`.
    """
    ops.tf_stack.extract_stack = lambda stacklevel=1: None
    ops.pywrap_tf_session.TF_SetOpStackTrace = lambda op, stack: None


def share_functions_of_iterators():
    """Has iterators of distributed datasets share the functions by which devices read them.

    TensorFlow traces these six functions for each iterator, so once in each epoch of `fit`. That
    takes half of the time of a short epoch. The functions of two iterators over elements of the
    same form differ only in the tensors that they capture.
    """
    class_ = iterators._PerDeviceGenerator
    original = class_.__init__
    shared = {}

    @functools.wraps(original)
    def hooked(self, shard, resource, incarnation, source, element_spec, iterator_is_anonymous):
        arguments = (shard, resource, incarnation, source, element_spec)
        if not tf.executing_eagerly():
            return original(self, *arguments, iterator_is_anonymous=iterator_is_anonymous)
        device = context.context().device_name
        key = (shard, source.numpy(), repr(element_spec), iterator_is_anonymous, device)
        captures = {"resource": resource, "incarnation": incarnation, "source": source}
        if key not in shared:
            original(self, *arguments, iterator_is_anonymous=iterator_is_anonymous)
            shared[key] = {name: _traced(self, name, captures) for name in FUNCTIONS}
            return None
        captures["handle"] = gen_dataset_ops.multi_device_iterator_to_string_handle(resource)
        self._element_spec = element_spec
        self._name = f"device_generator_{shard}"
        arguments, functions = [], {}
        for name, (function, captured) in shared[key].items():
            arguments.append([captures[each] for each in captured])
            function.set_external_captures(arguments[-1][: len(function.captured_inputs)])
            functions[f"{name[1:]}_func"] = function
            setattr(self, f"{name}_func", function)
            setattr(self, f"{name}_captured_args", arguments[-1])
        _, (_, of_next), _ = shared[key].values()
        self._incarnation_id_index = of_next.index("incarnation")
        dataset = gen_dataset_ops.generator_dataset(*arguments, **functions, **self._flat_structure)
        return dataset_ops.DatasetV2.__init__(self, dataset)

    class_.__init__ = hooked


def _traced(dataset, name, captures):
    """Returns a function of a dataset, and the names of the tensors that it captures."""
    names = [
        next((name for name, tensor in captures.items() if tensor is captured), "handle")
        for captured in getattr(dataset, f"{name}_captured_args")
    ]
    return getattr(dataset, f"{name}_func"), names
