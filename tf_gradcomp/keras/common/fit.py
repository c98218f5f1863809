"""Replaces `fit`, `evaluate` and `predict`, which call this package before and after callbacks."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import os
import types
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import tensorflow as tf

from tf_gradcomp.advice import measuring
from tf_gradcomp.exchange.setup import report_no_effect
from tf_gradcomp.keras.common import equality, files
from tf_gradcomp.keras.common.files import warn_if_backups_are_gone, warn_if_nothing_is_saved
from tf_gradcomp.keras.common.wrappers import wrappers_of
from tf_gradcomp.keras_version import IS_KERAS_2, KERAS, keras, keras_module
from tf_gradcomp.private.patching import patch
from tf_gradcomp.strategy.compressed_all_reduce import compressed_all_reduce
from tf_gradcomp.strategy.strategy import MultiWorkerMirroredStrategy, check_trains_with_others

_callbacks: contextvars.ContextVar[Sequence[keras.callbacks.Callback]]
_callbacks = contextvars.ContextVar("callbacks", default=())


def callbacks_of_fit() -> Sequence[keras.callbacks.Callback]:
    """Called by a callback in `set_model`: all callbacks of this `fit`, in order, if known."""
    return _callbacks.get()


def _with_users_frames(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorates a method so that errors show the program's frames, as Keras' own filter does.

    Without the filter, which a program can turn off, they show all frames.
    """

    @functools.wraps(function)
    def filtered(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return function(original, self, *args, **kwargs)
        except (ValueError, TypeError) as error:
            if not _filters_tracebacks():
                raise
            frames = _frames_of_program(error.__traceback__)
            raise error.with_traceback(frames) from error.__cause__

    return filtered


def _filters_tracebacks() -> bool:
    if IS_KERAS_2:
        return bool(tf.debugging.is_traceback_filtering_enabled())
    return bool(keras.config.is_traceback_filtering_enabled())


def _frames_of_program(traceback: types.TracebackType | None) -> types.TracebackType | None:
    """Returns a traceback without the frames of this package, of Keras and of its helpers."""
    if traceback is None:
        return None
    following = _frames_of_program(traceback.tb_next)
    if traceback.tb_frame.f_code.co_filename.startswith(_HIDDEN):
        return following
    return types.TracebackType(
        following, traceback.tb_frame, traceback.tb_lasti, traceback.tb_lineno
    )


_HIDDEN = (
    f"{Path(__file__).parents[2]}{os.sep}",
    f"{os.path.dirname(keras.__file__)}{os.sep}",
    contextlib.__file__,
)


@patch(
    f"{KERAS}.Model.fit",
    why="Workers check their data, compare their models, and collect state for the chief's files.",
    test="test_fit",
    essential=True,
)
@_with_users_frames
def fit(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls Keras' `fit` with this package's callbacks around the program's own."""
    _check_trains(self)
    _check_can_be_measured(self)
    call = _bound(original, self, args, kwargs)
    given = call.arguments
    callbacks = given["callbacks"]
    warn_if_nothing_is_saved(_flat(callbacks))
    if not _is_ours(self):
        return original(*call.args, **call.kwargs)
    with contextlib.ExitStack() as stack:
        reading = stack.enter_context(keras_module("training").reading(self, given))
        if not isinstance(callbacks, keras.callbacks.CallbackList):
            given["callbacks"] = [*_flat(callbacks), *_default_callbacks(callbacks, given)]
        stack.enter_context(_inserted(self, given, reading))
        for callback in callbacks_of_fit():
            if isinstance(callback, keras.callbacks.TensorBoard):
                callback.log_dir = files.log_path(callback, callback.log_dir)
            elif isinstance(callback, keras.callbacks.CSVLogger):
                callback.filename = files.log_path(callback, callback.filename, os.devnull)
        return original(*call.args, **call.kwargs)


@_with_users_frames
def _evaluate(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
    """Calls Keras' `evaluate` or `predict` with this package's callback before the program's."""
    if not _is_ours(self):
        return original(self, *args, **kwargs)
    call = _bound(original, self, args, kwargs)
    with contextlib.ExitStack() as stack:
        reading = stack.enter_context(keras_module("training").reading(self, call.arguments))
        if not _is_within_fit(call.arguments["callbacks"]):
            stack.enter_context(_inserted(self, call.arguments, reading))
        return original(*call.args, **call.kwargs)


for _name in ("evaluate", "predict"):
    patch(
        f"{KERAS}.Model.{_name}",
        why="Workers check their data, and local steps end before a model is read.",
        test=f"test_{_name}",
        essential=True,
    )(_evaluate)


def _check_can_be_measured(model: keras.Model) -> None:
    """Refuses a program for `gradcomp advise` before it trains to its end without a measurement."""
    if measuring.is_on() and not any(wrappers_of(model)):
        raise ValueError(
            "gradcomp advise measures the exchanges of a gc.CompressedOptimizer, and this model's "
            "optimizer is not wrapped: compile it with optimizer=gc.CompressedOptimizer(...)."
        )


def _check_trains(model: keras.Model) -> None:
    """Refuses a model that each worker would train alone."""
    strategy = model.distribute_strategy
    check_trains_with_others(strategy)
    if compressed_all_reduce(strategy) is None and not any(wrappers_of(model)):
        report_no_effect()


def _is_ours(model: keras.Model) -> bool:
    return isinstance(model.distribute_strategy, MultiWorkerMirroredStrategy) or any(
        wrappers_of(model)
    )


def _bound(original: Any, model: Any, args: Any, kwargs: Any) -> inspect.BoundArguments:
    call = inspect.signature(original).bind(model, *args, **kwargs)
    call.apply_defaults()
    return call


def _flat(callbacks: Any) -> list[keras.callbacks.Callback]:
    if isinstance(callbacks, keras.callbacks.CallbackList):
        return list(callbacks.callbacks)
    return tf.nest.flatten(callbacks) if callbacks else []


def _default_callbacks(callbacks: Any, given: dict[str, Any]) -> Iterator[keras.callbacks.Callback]:
    """Keras' own callbacks, which it would add later, so that other callbacks know of them."""
    known = tuple(type(callback) for callback in _flat(callbacks))
    if not any(issubclass(class_, keras.callbacks.History) for class_ in known):
        yield keras.callbacks.History()
    if given["verbose"] != 0 and keras.callbacks.ProgbarLogger not in known:
        bar = keras.callbacks.ProgbarLogger(*(["steps"] if IS_KERAS_2 else []))
        bar.async_safe = True  # Keras does not wait for its own bar either
        yield bar


@contextlib.contextmanager
def _inserted(model: Any, given: dict[str, Any], reading: Any) -> Iterator[None]:
    """Within this context, the program's callbacks are between those of this package."""
    callbacks = given["callbacks"]
    programs = _flat(callbacks)
    first, last = _First(reading), _Last()
    if isinstance(callbacks, keras.callbacks.CallbackList):
        for callback in (first, last):
            callback.set_model(model)
            callback.set_params(callbacks.params)
        callbacks.callbacks[:] = [first, *programs, last]
    else:
        given["callbacks"] = [first, *programs, last]
    token = _callbacks.set([first, *programs, last])
    try:
        with contextlib.ExitStack() as stack:
            for callback in programs:
                stack.enter_context(keras_module("files").adapted(callback, model))
            yield
    finally:
        _callbacks.reset(token)
        if isinstance(callbacks, keras.callbacks.CallbackList):
            callbacks.callbacks[:] = programs


def _is_within_fit(callbacks: Any) -> bool:
    return any(isinstance(callback, _First) for callback in _flat(callbacks))


class _First(keras.callbacks.Callback):
    """Comes before all callbacks of the program.

    Args:
        reading: Is told of each step; None if nothing needs to know.
    """

    async_safe = True

    def __init__(self, reading: Any) -> None:
        super().__init__()
        self._reading = reading
        self._is_compared = False

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        files.release(self.model)

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        files.collect_at_epoch_end(self.model)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        # Keras may call the end of a step in another thread.
        if batch > 0 and not self._is_compared:
            self._is_compared = True
            equality.compare_first_step(self.model)
        self._begin("train")

    def on_test_begin(self, logs: Any = None) -> None:
        files.synchronize(self.model)

    def on_predict_begin(self, logs: Any = None) -> None:
        files.synchronize(self.model)

    def on_test_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._begin("test")

    def on_predict_batch_begin(self, batch: int, logs: Any = None) -> None:
        self._begin("test")

    def _begin(self, kind: str) -> None:
        if self._reading is not None:
            self._reading.begin_steps(kind, self.model)


class _Last(keras.callbacks.Callback):
    """Comes after all callbacks of the program."""

    async_safe = True

    def on_train_begin(self, logs: Any = None) -> None:
        if IS_KERAS_2:  # Keras 3's backups tell themselves
            warn_if_backups_are_gone(callbacks_of_fit())

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        equality.compare_settings(self.model)
