"""Private API of TensorFlow: checkpoints, and the service through which workers send messages."""

from __future__ import annotations

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator
from typing import Any

import tensorflow as tf
from tensorflow.python.checkpoint import checkpoint as _checkpoint
from tensorflow.python.checkpoint import checkpoint_management as _checkpoint_management
from tensorflow.python.checkpoint import tensor_callable as _tensor_callable
from tensorflow.python.eager import context as _context
from tensorflow.python.saved_model import save as _saved_model
from tensorflow.python.trackable import base as _trackable

from tf_gradcomp.replacements import in_place_of

_Note = Callable[[bool], None]
_WriteCheckpoint = Callable[[Any, str, Any, Callable[[str, Any], Any], _Note], None]
_leaves_files = False  # whether checkpoints' files are left to another worker


def save_as(
    variable: tf.Variable, read: Callable[[], tf.Tensor], restore: Callable[[tf.Tensor], Any]
) -> None:
    """Makes `tf.train.Checkpoint` save the result of `read`, and pass restored values to `restore`.

    Variables of strategies use the same methods; no public API offers them to other objects. An
    asynchronous checkpoint saves copies of variables instead, and is refused.
    """
    key = _trackable.VARIABLE_VALUE_KEY

    def serialize() -> dict[str, Any]:
        return {key: _tensor_callable.Callable(read, variable.dtype, variable.device)}

    def refuse(**_: Any) -> None:
        raise ValueError(
            "An asynchronous checkpoint would hold only this process's own state; save without "
            "tf.train.CheckpointOptions(experimental_enable_async_checkpoint=True)."
        )

    variable._serialize_to_tensors = serialize
    variable._copy_trackable_to_cpu = refuse
    variable._restore_from_tensors = lambda tensors: restore(tensors[key])


@contextlib.contextmanager
def coordinating(heartbeat_timeout: float) -> Iterator[None]:
    """Within this context, connecting workers set the seconds after which a silent worker is lost.

    TensorFlow has no public setting for this time; its default is 10 seconds.
    """
    context = _context.context()
    context.configure_coordination_service = functools.partial(
        context.configure_coordination_service,
        heartbeat_timeout_in_ms=round(1000 * heartbeat_timeout),
    )
    try:
        yield
    finally:
        del context.configure_coordination_service


def announce(key: str, value: str) -> None:
    """Publishes a value for all workers by the coordination service; each key only once.

    Unlike a collective, this does not wait for other workers. No public API reaches the service.
    """
    _context.context().set_config_key_value(key, value)


def withdraw(key: str) -> None:
    """Removes the value announced under a key, so that another value can be announced."""
    _context.context().delete_config_key_value(key)


def announced(key: str, seconds: float) -> str | None:
    """Returns the value announced under a key; None if there is none within some seconds."""
    try:
        return _context.context().get_config_key_value(key, max(1, int(1000 * seconds)))
    except tf.errors.DeadlineExceededError:
        return None
    except tf.errors.UnavailableError as error:
        raise ConnectionError("The chief of this job has ended.") from error


def reach_barrier(name: str, seconds: float) -> bool:
    """Waits until all workers call this with the same name; returns False if some do not in time.

    All workers get the same answer, even workers that arrive too late. The job continues.
    """
    try:
        _context.context().wait_at_barrier(name, int(1000 * seconds))
    except tf.errors.OpError:
        return False
    return True


def on_checkpoint_write(write: _WriteCheckpoint) -> None:
    """Has `write(checkpoint, path, options, original, note)` called where a checkpoint is written.

    Checkpoints are written by `tf.train.Checkpoint` and `CheckpointManager`. `write` writes the
    files by `original(path, options)`, or leaves them to another worker. Then it calls
    `note(wrote)`, which updates TensorFlow's own records of the checkpoint.
    """
    class_ = _checkpoint.Checkpoint
    original = class_._write

    @in_place_of(original)
    def hooked(self: Any, file_prefix: Any, options: Any = None) -> Any:
        if not isinstance(file_prefix, str) or not tf.executing_eagerly():
            return original(self, file_prefix, options)
        options = copy.copy(options) or tf.train.CheckpointOptions()
        callbacks = options.experimental_write_callbacks or []
        if not options.experimental_enable_async_checkpoint:
            options.experimental_write_callbacks = None

        def note(wrote: bool) -> None:
            global _leaves_files
            if wrote and options.experimental_enable_async_checkpoint:
                return  # TensorFlow does so later
            _leaves_files = not wrote
            try:
                _checkpoint._execute_callbacks(callbacks, file_prefix)
            finally:
                _leaves_files = False

        write(self, file_prefix, options, functools.partial(original, self), note)
        return file_prefix

    class_._write = hooked
    for name in ("update_checkpoint_state_internal", "_delete_file_if_exists"):
        setattr(_checkpoint_management, name, _unless_shared(getattr(_checkpoint_management, name)))


def on_saved_model(save: Callable[[Any, str, Callable[[str], Any]], Any]) -> None:
    """Has `save(object, path, original)` called where a SavedModel is written.

    `original(path)` is TensorFlow's function. `tf.saved_model.save` and Keras' `model.export` call
    it. An import may reload the public module, so this patch is below it.
    """
    original = _saved_model.save_and_return_nodes

    @in_place_of(original)
    def hooked(obj: Any, export_dir: str, *args: Any, **kwargs: Any) -> Any:
        return save(obj, export_dir, lambda path: original(obj, path, *args, **kwargs))

    _saved_model.save_and_return_nodes = hooked


def _unless_shared(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> None:
        if not _leaves_files:
            original(*args, **kwargs)

    return hooked
