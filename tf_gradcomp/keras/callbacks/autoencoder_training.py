"""Trains LGC's autoencoder while a model is trained."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from tf_gradcomp.compressors.lgc.job_state import (
    ROUNDING,
    WEIGHTS,
    AutoencoderHook,
    AutoencoderState,
    TrainingStep,
    TrainingVectors,
)
from tf_gradcomp.exchange.exchange import GradientExchange
from tf_gradcomp.exchange.gradients import native
from tf_gradcomp.groups.group import outside_scope
from tf_gradcomp.keras.callbacks.shared import READERS, SAVERS, find_exchange, warn_if_behind
from tf_gradcomp.keras.common.autoencoder_model import Autoencoder
from tf_gradcomp.keras_version import keras, keras_private

_GAVE_UP = (
    "LGC: the residuals are three times as large as when the autoencoder came into use: it misses "
    "much of the current gradients. From now on, the entries that the leader chooses are sent in "
    "8 bits. Use more training_steps, a higher density, or ScaleCom with few value_bits."
)
_FELL_BACK = (
    "LGC: the autoencoder's relative error did not fall below guard=%s in %s training steps. From "
    "now on, the entries that the leader chooses are sent in 8 bits."
)
_OVERWRITTEN = (
    "LGC: training vectors of %s steps were overwritten before the autoencoder was trained with "
    "them; use fewer steps_per_execution, or call train after each step."
)
_LOG = tf.get_logger()


class AutoencoderTraining(keras.callbacks.Callback):
    """Trains the autoencoder of `gc.compressors.LGC` during a model's training.

    After each batch, it takes one training step for each exchange with new vectors, so it works
    with `steps_per_execution`. When `LGC` has trained for its `training_steps` and the error is
    below its `guard`, all replicas get the weights and use the autoencoder from the same step on.

    All workers should have this callback, because all log the same values; only the worker with the
    first replica trains. In your own training loop, call `train(exchange)` after each step. With
    another method, or with one replica, the callback does nothing.

    The logs, and thus the progress bar, `History` and `TensorBoard`, get:

    - `lgc_phase`: the phase of the next step. It is 1 while gradients are dense, 2 in training, 3
      with the autoencoder, and 4 if the entries are sent in 8 bits instead. Phase 4 has two causes:
      the guard, or residuals three times as large as at the switch to phase 3;
    - `autoencoder_loss`, `autoencoder_error`: loss and relative squared error in training, at the
      last step whose leader was the first replica, before the weights change;
    - `share_error`: in phase 3, the relative squared error of the sent part of this worker's own
      entries.

    Callbacks see the logs, and save the weights, in the order of their list: put this callback
    before callbacks that read logs or save the model. A warning says why phase 4 begins. If a job
    resumes from a checkpoint in the middle of training, the training optimizer starts from scratch.

    Args:
        optimizer: The autoencoder's optimizer: a name, a config or a Keras optimizer, which is
            copied.
        learning_rate: The learning rate, if `optimizer` is a name.

    Example:
        ```python
        model.compile(gc.CompressedOptimizer("adam", "lgc", gc.Policy.from_model(model)), ...)
        model.fit(dataset, callbacks=[gc.callbacks.AutoencoderTraining()])
        ```
    """

    def __init__(
        self,
        optimizer: str | Mapping[str, Any] | keras.optimizers.Optimizer = "adam",
        learning_rate: float = 1e-3,
    ) -> None:
        super().__init__()
        self._optimizer = _config_of(optimizer, learning_rate)
        self._exchange: GradientExchange | None = None
        self._trainer: _Trainer | None = None
        self._state: AutoencoderState | None = None
        self._warned: set[str] = set()

    def set_model(self, model: keras.Model) -> None:
        """Called by Keras; warns if a callback before this one will miss its logs or weights."""
        super().set_model(model)
        warn_if_behind(self, READERS, "see its logs")
        warn_if_behind(self, SAVERS, "save the weights of the same step")

    def on_train_begin(self, logs: dict[str, Any] | None = None) -> None:
        """Resets the callback, because other callbacks may restore a backup."""
        self._exchange = None
        self._trainer = None

    def on_train_batch_end(self, batch: int, logs: dict[str, Any] | None = None) -> None:
        """Trains, and adds to the batch's logs."""
        if self._exchange is None:  # the strategy's exchange exists from the first step on
            self._exchange = find_exchange(self.model)
        if self._exchange:
            self._add_to(logs, self.train(self._exchange))

    def on_epoch_end(self, epoch: int, logs: dict[str, Any] | None = None) -> None:
        """Adds to the epoch's logs."""
        if self._exchange and autoencoder_of(self._exchange):
            self._add_to(logs, self.measures(self._exchange))

    def train(self, exchange: GradientExchange) -> dict[str, float]:
        """Trains with all new vectors; called after each step, on all workers.

        Args:
            exchange: `optimizer.exchange`, or that of a simulation.

        Returns:
            The logged values; empty with another method, or one replica.
        """
        state = autoencoder_of(exchange)
        if state is None:
            return {}
        self._state = state
        state.ask_for_vectors()
        collected = state.new_vectors()
        if collected:
            self._learn(state, collected)
        fell_back = state.stage == ROUNDING
        if fell_back and state.was_in_use:
            self._warn_once(_GAVE_UP, only_if=state.trains)
        elif fell_back:
            limit = 2 * state.lgc.training_steps
            self._warn_once(_FELL_BACK, state.lgc.guard, limit, only_if=state.trains)
        return self.measures(exchange)

    def measures(self, exchange: GradientExchange) -> dict[str, float]:
        """Returns the measures to log; empty with another method or one replica."""
        state = autoencoder_of(exchange)
        if state is None:
            return {}
        return {"lgc_phase": _phase_index(state, exchange.exchanges), **state.errors}

    @property
    def autoencoder(self) -> Autoencoder | None:
        """A copy of the autoencoder with this process's weights; None before any exist.

        Until phase 3, only the process with the first replica has the current weights.
        """
        state = self._state
        if state is None:
            return None
        lgc, weights = state.lgc, state.weights
        return outside_scope(lambda: Autoencoder.of(lgc.architecture, lgc.innovations, weights))

    @property
    def last_vectors(self) -> np.ndarray | None:
        """Returns the training vectors of the last step that had some; None without any.

        Only the process with the first replica has vectors.
        """
        return self._state.last_vectors() if self._state else None

    def _learn(self, state: AutoencoderState, collected: Sequence[TrainingVectors]) -> None:
        first = collected[0].number
        if self._trainer is None or not self._trainer.follows(state, first):
            self._trainer = _Trainer(state, self._optimizer)
        missed = collected[-1].number - state.last_learned - len(collected)
        self._warn_once(_OVERWRITTEN, missed, only_if=missed > 0)
        state.learn(*self._trainer.learn(collected))

    def _add_to(self, logs: dict[str, Any] | None, measures: Mapping[str, float]) -> None:
        if logs is not None:
            logs.update(measures)

    def _warn_once(self, message: str, *values: Any, only_if: bool) -> None:
        if only_if and message not in self._warned:
            self._warned.add(message)
            _LOG.warning(message, *values)


class _Trainer:
    """Trains a separate Keras model in a thread, outside every strategy and dtype policy."""

    def __init__(self, state: AutoencoderState, optimizer: Mapping[str, Any]) -> None:
        self._lgc = state.lgc
        self._added = state.added
        self._job_state = state.job_state
        self._last = 0
        self._pool = concurrent.futures.ThreadPoolExecutor(1, "autoencoder")
        self._pool.submit(self._build, state.weights, optimizer).result()

    def follows(self, state: AutoencoderState, first: int) -> bool:
        """Whether the trainer has the job's state, but has not trained with vector `first`.

        Args:
            state: The state of the job's autoencoder.
            first: The number of the first vector to train with.
        """
        same = self._job_state[WEIGHTS] is state.job_state[WEIGHTS]
        return same and self._last == state.last_learned < first

    def learn(self, collected: Sequence[TrainingVectors]) -> tuple[np.ndarray, list[TrainingStep]]:
        """Takes a step for each of some vectors; returns all weights, and measures of each step."""
        self._last = collected[-1].number
        return self._pool.submit(self._learn, collected).result()

    def _build(self, weights: np.ndarray | None, optimizer: Mapping[str, Any]) -> None:
        lgc = self._lgc
        self._model = Autoencoder.of(lgc.architecture, lgc.innovations, weights)
        self._optimizer = keras.optimizers.deserialize(dict(optimizer))
        keras_private.build(self._optimizer, self._model.trainable_variables)
        self._step = tf.function(self._stepped, autograph=False, reduce_retracing=True)

    def _learn(self, collected: Sequence[TrainingVectors]) -> tuple[np.ndarray, list[TrainingStep]]:
        learnt = []
        for step, vectors in collected:
            loss, error = self._step(tf.constant(vectors))
            learnt.append(TrainingStep(step, float(loss), float(error)))
        return self._model.flat_weights(), learnt

    def _stepped(self, vectors: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        variables = self._model.trainable_variables
        with tf.GradientTape() as tape:
            if self._lgc.innovations:
                loss, error = self._leader_latent_loss(vectors)
            else:
                loss, error = self._mean_loss(vectors)
        gradients = tape.gradient(loss, [native(variable) for variable in variables])
        self._optimizer.apply_gradients(zip(gradients, variables, strict=True))
        return loss, error

    def _mean_loss(self, vectors: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Loss and relative error of the decoded mean of latents."""
        latents = self._model.encoder(vectors[:, :, tf.newaxis])
        decoded = self._model.decode(tf.reduce_mean(latents, 0, keepdims=True))[:, :, 0]
        mean = tf.reduce_mean(vectors, 0, keepdims=True)
        return tf.reduce_mean(tf.square(mean - decoded)), _relative(mean, decoded)

    def _leader_latent_loss(self, vectors: tf.Tensor) -> tuple[tf.Tensor, tf.Tensor]:
        """Loss and mean relative error, if the leader's latent is decoded for all replicas."""
        latent = self._model.encoder(vectors[:1, :, tf.newaxis])
        added = _innovations(vectors, self._added)
        decoded = self._model.decode(latent, added[:, :, tf.newaxis])[:, :, 0]
        return tf.reduce_mean(tf.square(vectors - decoded)), _relative(vectors, decoded)


def _innovations(vectors: tf.Tensor, count: int) -> tf.Tensor:
    """The largest entries of each row at their positions, and zeros elsewhere."""
    _, indices = tf.math.top_k(tf.abs(vectors), count)
    rows = tf.repeat(tf.range(tf.shape(vectors)[0]), count)
    where = tf.stack([rows, tf.reshape(indices, [-1])], 1)
    innovations = tf.gather_nd(vectors, where)
    return tf.scatter_nd(where, innovations, tf.shape(vectors))


def _relative(vectors: tf.Tensor, decoded: tf.Tensor) -> tf.Tensor:
    """The squared error of vectors over their squares, the mean over vectors that are not zeros.

    The error of vectors of zeros is 1, because zeros don't show whether anything can be decoded.
    """
    squares = tf.reduce_sum(tf.square(vectors), -1)
    errors = tf.math.divide_no_nan(tf.reduce_sum(tf.square(vectors - decoded), -1), squares)
    count = tf.math.count_nonzero(squares, dtype=tf.float32)
    return tf.where(count > 0, tf.math.divide_no_nan(tf.reduce_sum(errors), count), 1.0)


def _phase_index(state: AutoencoderState, exchanges: int) -> int:
    if state.in_use:
        return 3
    if state.stage == ROUNDING:
        return 4
    return 1 if exchanges < state.lgc.warmup_steps else 2


def _config_of(optimizer: Any, learning_rate: float) -> dict[str, Any]:
    if isinstance(optimizer, str):
        optimizer = {"class_name": optimizer, "config": {"learning_rate": learning_rate}}
    return outside_scope(lambda: keras.optimizers.serialize(keras.optimizers.get(optimizer)))


def autoencoder_of(exchange: GradientExchange) -> AutoencoderState | None:
    """Returns the autoencoder of an exchange; None with other methods, or a single replica."""
    hook = exchange.hooks.get(AutoencoderHook)
    if hook is None:
        return None
    return hook.state(exchange.replica().job_state(), exchange.group.processes.is_first)
