"""Draws different random numbers on each replica from shared seeds and states.

A generator's state stays equal on all replicas, as a checkpoint needs. A replica mixes its index
into the seed when it draws. The index of the first replica is 0, which changes nothing, so a job
of one replica draws what a program without a strategy draws.
"""

from __future__ import annotations

import contextlib
import contextvars
import weakref
from collections.abc import Iterator
from typing import Any

import tensorflow as tf

from tf_gradcomp.private import tensorflow as tf_private
from tf_gradcomp.private.patching import patch

_STRIDE = 0x9E3779B1  # keeps the seeds of replicas apart from the small seeds that programs choose
_pipeline: contextvars.ContextVar[int | None]
_pipeline = contextvars.ContextVar("pipeline", default=None)
_draw_numbers: weakref.WeakSet[tf.Graph] = weakref.WeakSet()  # outside of replicas
_generators_of_data: weakref.WeakSet[Any] = weakref.WeakSet()  # which draw in such graphs
_simulated: contextvars.ContextVar[tf.Tensor | None]
_simulated = contextvars.ContextVar("simulated", default=None)


def _drawing_index() -> int:
    """The index among all replicas of the replica that draws.

    In the functions of data that a worker builds by itself, it is the worker's index. Numbers that
    are drawn while the data are built stay equal, because they may determine each worker's part.
    """
    context = tf.distribute.get_replica_context()
    if context is None or context.num_replicas_in_sync == 1:
        if tf.executing_eagerly():
            return 0
        _draw_numbers.add(tf.compat.v1.get_default_graph())
        return _pipeline.get() or 0
    index = tf.get_static_value(context.replica_id_in_sync_group)
    return 0 if index is None else int(index)  # unknown while tracing on TPUs alone


@contextlib.contextmanager
def building_pipeline(index: int) -> Iterator[None]:
    """Within this context, a worker builds data that no other worker reads.

    `index` is the worker's index among those that build data.
    """
    token = _pipeline.set(index)
    try:
        yield
    finally:
        _pipeline.reset(token)


def builds_pipeline() -> bool:
    """Whether a worker builds data that no other worker reads."""
    return _pipeline.get() is not None


@contextlib.contextmanager
def keeping_states_of_data() -> Iterator[None]:
    """Within this context, data may be read without an effect on the numbers of later reads."""
    states = [(generator.state, generator.state.numpy()) for generator in _generators_of_data]
    try:
        yield
    finally:
        for state, value in states:
            state.assign(value)


@contextlib.contextmanager
def drawing_as(replica: tf.Tensor) -> Iterator[None]:
    """Within this context, layers draw the numbers of the replica with this index."""
    token = _simulated.set(replica)
    try:
        yield
    finally:
        _simulated.reset(token)


def local_state_seed(state: tf.Tensor, generator: Any) -> tf.Tensor:
    """The seed that a replica draws with, from the two integers that all replicas have."""
    simulated = _simulated.get()
    index = _drawing_index() if simulated is None else tf.cast(simulated, state.dtype)
    if tf.compat.v1.get_default_graph() in _draw_numbers:
        _generators_of_data.add(generator)
    if isinstance(index, int) and index == 0:
        return state
    return state + index * tf.constant([_STRIDE, 0], state.dtype)


@patch(
    tf_private.SEEDS_OF_OP,
    why="Once a program sets a seed, tf.random draws the same numbers on all workers.",
    test="test_local_op_seeds",
)
def local_op_seeds(original: Any, op_seed: int | None) -> tuple[int | None, int | None]:
    """The two seeds of an op in a replica, from those that all replicas have; None if unseeded."""
    graph_seed, op_seed = original(op_seed)
    index = _drawing_index()
    if not index or op_seed is None:
        return graph_seed, op_seed
    return graph_seed, (op_seed + index * _STRIDE) % (2**31 - 1)
