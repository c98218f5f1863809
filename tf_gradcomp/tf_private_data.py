"""Private API of TensorFlow: data, and how distributed datasets read it."""

from __future__ import annotations

import functools
import itertools
import threading
import weakref
from collections.abc import Callable
from typing import Any

import tensorflow as tf
from tensorflow.python.distribute import input_lib as _input_lib
from tensorflow.python.ops import script_ops as _script_ops

from tf_gradcomp.replacements import in_place_of
from tf_gradcomp.tf_private import in_loop_or_eager, in_multi_worker_mode

# Datasets of files, which TensorFlow divides among the workers.
_READERS = (
    tf.data.TFRecordDataset,
    tf.data.TextLineDataset,
    tf.data.FixedLengthRecordDataset,
)


def drop_iterators_in_background(applies: Callable[[tf.distribute.Strategy], bool]) -> None:
    """Lets distributed iterators end in a thread when they are dropped, if a strategy `applies`.

    TensorFlow wakes the thread that tunes an iterator a moment before it marks this as cancelled. A
    thread that checks immediately would sleep for about the iterator's lifetime, up to a minute,
    and Keras would wait for this thread between two epochs.
    """
    for class_ in (_input_lib.DistributedDataset, _input_lib.DistributedDatasetsFromFunction):
        original = class_.__iter__

        def hooked(self: Any, original: Any = original) -> Any:
            iterator = original(self)
            if tf.executing_eagerly() and applies(self._strategy):
                weakref.finalize(iterator, _drop_in_background, iterator._iterators).atexit = False
            return iterator

        class_.__iter__ = functools.wraps(original)(hooked)


def _drop_in_background(owned: list[Any]) -> None:
    """Empties a list that an object still holds just before it is deleted."""
    taken = list(owned)
    owned.clear()
    if threading.main_thread().is_alive():  # otherwise no thread can be started any more
        threading.Thread(target=taken.clear).start()


def begin_steps_with_own_data(applies: Callable[[tf.distribute.Strategy], bool]) -> None:
    """Has a worker that has data begin its step at once, where a strategy `applies`.

    Before each step, iterators sum over all workers how many replicas have data. The sum only has
    to be known on a worker that has none.
    """
    original = _input_lib._calculate_replicas_with_values

    @in_place_of(original)
    def hooked(
        strategy: tf.distribute.Strategy, input_workers: Any, optional_list: Any
    ) -> tf.Tensor:
        of_all = original(strategy, input_workers, optional_list)
        if in_loop_or_eager() or not (applies(strategy) and in_multi_worker_mode(strategy)):
            return of_all
        with tf.device(input_workers.worker_devices[0]):
            has_values = [tf.cast(one.has_value(), tf.int64) for one in optional_list[0]]
            own = tf.add_n(has_values)
        return tf.cond(own > 0, lambda: own, lambda: of_all)

    _input_lib._calculate_replicas_with_values = hooked


def on_returned_by_python(replace: Callable[[Any], Any]) -> None:
    """Makes TensorFlow use `replace(value)` for each array or tensor that Python returns to it.

    `tf.numpy_function`, `tf.py_function`, `Dataset.from_generator` and Keras' data adapters call
    such code, all through one registry. No public API sees what all of it returns.
    """
    class_ = _script_ops.FuncRegistry
    original = class_.__call__

    @in_place_of(original)
    def hooked(self: Any, token: Any, device: Any, args: Any) -> Any:
        returned = original(self, token, device, args)
        if isinstance(returned, list):
            return [replace(value) for value in returned]
        return replace(returned)

    class_.__call__ = hooked


def undistributed(distributed: Any) -> tf.data.Dataset | None:
    """Returns the source of a distributed dataset, if known; no public API has it."""
    return getattr(distributed, "_original_dataset", None)


def shared_by_workers(distributed: Any) -> tf.data.Dataset | None:
    """Returns the dataset that is divided among the workers; None if workers may differ.

    Where workers take turns at files, that is the dataset of the files' names. No public API lists
    the files that a dataset reads.
    """
    dataset = undistributed(distributed)
    return None if dataset is None else _shared(dataset)


def divides_rows(dataset: tf.data.Dataset) -> bool:
    """Returns whether each worker would read all of a dataset, and take its part of the rows."""
    return _shared(dataset) is dataset


def _shared(dataset: Any) -> tf.data.Dataset | None:
    policies = tf.data.experimental.AutoShardPolicy
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if policy == policies.DATA:
        return dataset
    if policy not in (policies.AUTO, policies.FILE):
        return None
    names = _names_of_files(dataset)
    return dataset if names is None and policy == policies.AUTO else names


def record_constructors() -> None:
    """Lets `built_again` build each dataset again; a dataset does not know its constructor."""
    class_: Any = tf.data.Dataset

    def new(cls: type, *args: Any, **kwargs: Any) -> Any:
        dataset: Any = object.__new__(cls)
        if _holds_dataset((args, kwargs)):  # the arrays of other datasets must not stay in memory
            dataset.gradcomp_arguments = args, kwargs
        return dataset

    class_.__new__ = new


def _holds_dataset(value: Any) -> bool:
    if isinstance(value, (tuple, list, dict)):
        values = value.values() if isinstance(value, dict) else value
        return any(map(_holds_dataset, itertools.islice(values, 1000)))  # may be rows
    return isinstance(value, tf.data.Dataset)


def built_again(dataset: Any, draws: Callable[[tf.Graph], bool]) -> tf.data.Dataset:
    """Traces the functions of a dataset again, from the first whose graph `draws` numbers.

    No public API changes the seeds in a dataset's functions.
    """
    if not hasattr(dataset, "gradcomp_arguments"):
        return dataset
    inputs = dataset._inputs()
    again = {id(one): built_again(one, draws) for one in inputs}
    is_same = all(again[id(one)] is one for one in inputs)
    if is_same and not any(draws(each.function.graph) for each in dataset._functions()):
        return dataset
    args, kwargs = tf.nest.map_structure(
        lambda value: again.get(id(value), value), dataset.gradcomp_arguments
    )
    return type(dataset)(*args, **kwargs)


def _names_of_files(dataset: Any) -> tf.data.Dataset | None:
    if isinstance(dataset, _READERS):
        return dataset._filenames
    inputs = dataset._inputs()
    if any(map(_reads_files, dataset._functions())):
        return inputs[0]
    found = map(_names_of_files, inputs)
    return next((names for names in found if names is not None), None)


def _reads_files(function: Any) -> bool:
    graph = function.function.graph.as_graph_def()
    nodes = itertools.chain(graph.node, *(each.node_def for each in graph.library.function))
    return any(
        node.op.startswith(tuple(class_.__name__[:-2] for class_ in _READERS)) for node in nodes
    )
