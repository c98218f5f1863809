"""Hooks into Keras that work for Keras 3 and Keras 2."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import inspect
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_gradcomp.keras.common.version import keras
from tf_gradcomp.replacements import ChangedFunctionError, check_replacement

_callbacks: contextvars.ContextVar[Sequence[keras.callbacks.Callback]]
_callbacks = contextvars.ContextVar("callbacks", default=())


@contextlib.contextmanager
def with_methods(optimizer: Any, **methods: Callable[..., Any]) -> Iterator[None]:
    """Within this context, an optimizer has other methods, which take no `self`.

    The settings are attributes of the object. Keras' own way to set attributes would track them.
    """
    attributes = vars(optimizer)
    before = {name: attributes[name] for name in methods if name in attributes}
    attributes.update(methods)
    try:
        yield
    finally:
        for name in methods:
            del attributes[name]
        attributes.update(before)


def replace(owner: Any, name: str, by: Callable[..., Any]) -> None:
    """Has `by(original, ...)` called in place of a function, with the arguments of the function.

    `by` is no lambda if the function is called in a traced step: AutoGraph cannot convert these.
    The parameters of `by` must be those of the function, or end with `*args` and `**kwargs`.
    """
    original = getattr(owner, name)
    check_replacement(original, by, more=1)

    @functools.wraps(original)
    def hooked(*args: Any, **kwargs: Any) -> Any:
        return by(original, *args, **kwargs)

    setattr(owner, name, hooked)


def replace_method(class_: type, name: str, by: Callable[..., Any]) -> None:
    """Replaces a method by `by`, which gets the arguments of the method and `original`.

    AutoGraph does not convert `by`. Unlike `replace`, this adds no frame to a step.
    """
    original = getattr(class_, name)
    _, *theirs = inspect.signature(original).parameters
    _, *ours, _ = inspect.signature(by).parameters
    if theirs != ours:
        raise ChangedFunctionError(f"its parameters are {', '.join(theirs)}")
    setattr(class_, name, _Method(tf.autograph.experimental.do_not_convert(by), original))


class _Method:
    """A method that calls a function with `original`, by no frame of its own."""

    def __init__(self, function: Callable[..., Any], original: Callable[..., Any]) -> None:
        self._function, self._original = function, original

    def __get__(self, instance: Any, owner: type) -> Callable[..., Any]:
        bound = () if instance is None else (instance,)
        call: Any = functools.partial(self._function, *bound, original=self._original)
        call.__wrapped__ = self._original  # has the signature
        return call


def after_init(class_: type, then: Callable[[Any, Mapping[str, Any]], None]) -> None:
    """Has `then(object, keyword arguments)` called for each new object of a class."""

    def hooked(original: Callable[..., None], self: Any, *args: Any, **kwargs: Any) -> None:
        original(self, *args, **kwargs)
        then(self, kwargs)

    replace(class_, "__init__", hooked)


def on_outputs_of_steps(trainer: Any, auto: str, reduce: Callable[..., Any]) -> None:
    """Has `reduce(strategy, outputs, original)` called for the outputs of a step.

    `trainer` is the module of Keras with its private `reduce_per_replica`, and `auto` the reduction
    that Keras uses for "auto".
    """

    def hooked(original: Any, values: Any, strategy: Any, reduction: str) -> Any:
        as_keras = functools.partial(original, values, strategy, reduction)
        return reduce(strategy, values, as_keras) if reduction in ("auto", auto) else as_keras()

    replace(trainer, "reduce_per_replica", hooked)


def on_train_function(check: Callable[[Any], None], after_first: Callable[[Any], None]) -> None:
    """Has `check(model)` called before `fit` makes the function of a step.

    `after_first(model)` is called when this function has run for the first time.
    """

    def hooked(original: Any, self: Any, *args: Any, **kwargs: Any) -> Any:
        check(self)
        before = getattr(self, "train_function", None)
        made = original(self, *args, **kwargs)
        function = self.train_function
        if function is before:
            return made

        def first(*data: Any) -> Any:
            self.train_function = function
            logs = function(*data)
            after_first(self)
            return logs

        self.train_function = first
        return None if made is None else first

    replace(keras.Model, "make_train_function", hooked)


def record_callbacks_of_fit() -> None:
    """Lets `callbacks_of_fit` find the list of a callback, which Keras does not offer."""

    def hooked(original: Any, self: Any, model: keras.Model) -> None:
        token = _callbacks.set(self.callbacks)
        try:
            original(self, model)
        finally:
            _callbacks.reset(token)

    replace(keras.callbacks.CallbackList, "set_model", hooked)


def callbacks_of_fit() -> Sequence[keras.callbacks.Callback]:
    """Called by a callback in `set_model`: all callbacks of this `fit`, in order, if known."""
    return _callbacks.get()


def on_train_begin(
    before: Callable[[Sequence[keras.callbacks.Callback]], None],
    after: Callable[[Sequence[keras.callbacks.Callback]], None] | None = None,
) -> None:
    """Has functions called with all callbacks of `fit`, before and after all of them begin."""

    def hooked(original: Any, self: Any, logs: Mapping[str, Any] | None = None) -> None:
        before(self.callbacks)
        original(self, logs)
        if after is not None:
            after(self.callbacks)

    replace(keras.callbacks.CallbackList, "on_train_begin", hooked)


def on_epochs(
    begin: Callable[[keras.Model], None],
    end: Callable[[keras.Model], None],
    begun: Callable[[keras.Model], None],
    read: Callable[[keras.Model], None] | None = None,
) -> None:
    """Has functions called with the model around the callbacks of an epoch.

    `begin` and `end` are called before any callback, and `begun` when all have begun the epoch.
    `read` is called before the model is evaluated or predicts. A callback would have to be in the
    program's list on all workers.
    """

    def first(call: Any, original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        if isinstance(self.model, keras.Model):
            call(self.model)
        original(self, *args, **kwargs)

    def around(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
        first(begin, original, self, *args, **kwargs)
        if isinstance(self.model, keras.Model):
            begun(self.model)

    replace(keras.callbacks.CallbackList, "on_epoch_begin", around)
    replace(keras.callbacks.CallbackList, "on_epoch_end", functools.partial(first, end))
    for name in ("on_test_begin", "on_predict_begin") if read else ():
        replace(keras.callbacks.CallbackList, name, functools.partial(first, read))


def on_logs(path_of: Callable[..., str]) -> None:
    """Has `TensorBoard` and `CSVLogger` write where `path_of(callback, path)` says.

    `CSVLogger` also passes `os.devnull`, the path to return if this worker must not write.
    """

    def of_board(original: Any, self: Any, model: Any) -> None:
        self.log_dir = path_of(self, self.log_dir)
        original(self, model)

    def of_table(original: Any, self: Any, logs: Mapping[str, Any] | None = None) -> None:
        self.filename = path_of(self, self.filename, os.devnull)
        original(self, logs)

    replace(keras.callbacks.TensorBoard, "set_model", of_board)
    replace(keras.callbacks.CSVLogger, "on_train_begin", of_table)
