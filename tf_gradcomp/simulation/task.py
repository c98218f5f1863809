"""What learners train, the checks of it, and what they report of a step."""

from __future__ import annotations

import dataclasses
import functools
import importlib.util
import inspect
import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import tensorflow as tf

from tf_gradcomp import compressors
from tf_gradcomp.exchange import sparse
from tf_gradcomp.exchange.replica import ReplicaStep
from tf_gradcomp.exchange.step import Observe
from tf_gradcomp.keras.callbacks.shared import find_exchange
from tf_gradcomp.keras.local.gossip import Gossip, settings_of
from tf_gradcomp.keras.local.local_steps import LocalSteps
from tf_gradcomp.keras_version import keras


@dataclasses.dataclass(frozen=True)
class Task:
    """A task that learners train.

    Attributes:
        model: Built, and compiled with a loss and a plain Keras optimizer.
        batches: Pairs of inputs and labels for all learners; gone through in each epoch.
        steps_per_epoch: The number of batches.
        validation_data: As for `model.evaluate`: a dataset, or a pair of arrays.
    """

    model: keras.Model
    batches: Iterable[tuple[Any, Any]]
    steps_per_epoch: int
    validation_data: Any = None


@dataclasses.dataclass(frozen=True)
class Similarity:
    """Measures of one step; NaN where there is nothing to measure.

    Attributes:
        union_density: The share of entries that at least one learner sent.
        cosine_distance: 1 - cosine between the residuals of two learners, the mean over all pairs.
        hamming_distance: d / k (ScaleCom, Lemma 1): the share of the k entries sent, of each
            variable, that are not among the k largest of all learners' residuals plus gradients.

    Source:
        Chen et al., "ScaleCom", NeurIPS 2020, https://arxiv.org/abs/2104.11125
    """

    union_density: float
    cosine_distance: float
    hamming_distance: float


@dataclasses.dataclass(frozen=True)
class StepReport:
    """Measures of one step; bytes are one learner's, as the mean over all learners.

    Attributes:
        loss: The mean over the batch.
        finite: Whether the step was taken. With several learners, a step is skipped if any
            learner's gradient is not finite.
        payload_bytes: The bytes of a learner's payload.
        sent_bytes: The bytes that a learner would send in a ring of workers, including the bytes
            that it forwards for others.
        dense_bytes: The bytes of a learner's gradients as float32.
        residual_norm: The Euclidean norm of a learner's residuals.
        similarity: The similarity of the learners, if it was requested.
    """

    loss: float
    finite: bool
    payload_bytes: float
    sent_bytes: float
    dense_bytes: int
    residual_norm: float
    similarity: Similarity | None = None


def load(program: str, batch_size: int | None = None) -> functools.partial[Task]:
    """Returns the function that creates a program's task, with its batch size.

    The program is `FILE.py:FUNCTION`; without a function, it is `simulation_task`.
    """
    path, _, name = program.partition(":")
    name = name or "simulation_task"
    file = Path(path).resolve()
    if not file.is_file():
        raise ValueError(f"{path!r} is not a file; expected FILE.py or FILE.py:FUNCTION.")
    missing_function = ValueError(
        f"{path!r} has no function {name!r}; expected a function that takes batch_size and seed, "
        "and returns a gc.simulation.Task."
    )
    if name not in file.read_text():  # before the import, which may train
        raise missing_function
    # A name that no import can use.
    spec = importlib.util.spec_from_file_location(f"simulated program {file}", file)
    if spec is None or spec.loader is None:
        raise ValueError(f"{path!r} is not a Python program.")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look for it
    sys.path.insert(0, str(file.parent))  # as Python does for a program
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise missing_function
    parameters = inspect.signature(function).parameters
    takes_keywords = any(
        parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()
    )
    missing = [parameter for parameter in ("batch_size", "seed") if parameter not in parameters]
    if missing and not takes_keywords:
        raise ValueError(
            f"{name} of {path!r} takes no {' and no '.join(missing)}; expected a function of "
            "batch_size and seed that returns a gc.simulation.Task."
        )
    argument = parameters.get("batch_size")
    if batch_size is None and argument is not None and isinstance(argument.default, int):
        batch_size = argument.default
    if batch_size is None:
        raise ValueError(
            f"{name} of {path!r} has no default batch size: pass --batch-size, or give its "
            "argument batch_size a default."
        )
    return functools.partial(function, batch_size=batch_size)


def check_model(model: keras.Model) -> None:
    """Refuses a model that learners cannot train."""
    if tf.distribute.has_strategy():
        raise ValueError("Learners: leave the strategy's scope; all learners are in this process.")
    if not model.built or getattr(model, "optimizer", None) is None:
        raise ValueError(
            "Learners: the model must be built, and compiled with a loss and an optimizer, before "
            "you pass it; call model.build and model.compile."
        )
    if type(model).train_step is not keras.Model.train_step:
        raise ValueError(
            f"Learners: {type(model).__name__} has its own train_step, which learners would not "
            "call; override the model's compute_loss instead."
        )
    if find_exchange(model) is not None:
        raise ValueError(
            "Learners: the model's optimizer is already compressed; compile the model with the "
            "inner optimizer, and give the compressor to Learners."
        )
    optimizer = model.optimizer
    scales = isinstance(optimizer, keras.mixed_precision.LossScaleOptimizer)
    keras_3_settings = ("loss_scale_factor", "gradient_accumulation_steps")
    if scales or any(getattr(optimizer, setting, None) for setting in keras_3_settings):
        raise ValueError(
            "Learners: the model's optimizer scales losses or accumulates gradients, but learners "
            "do neither. Use a plain optimizer. Under mixed_float16, where Keras scales losses "
            "itself, use another policy, or with Keras 3 model.compile(..., "
            "auto_scale_loss=False)."
        )


def checked_method(
    compressor: compressors.Compressor | compressors.Auto,
) -> compressors.Compressor:
    """Returns a compressor; refuses one that chooses its method by the network."""
    if isinstance(compressor, compressors.Auto):
        raise ValueError(
            f"Learners: {compressor.name!r} chooses by the network, but a simulation has no "
            "network; name a method, such as 'adacomp'."
        )
    return compressor


def checked_local_steps(local_steps: Any) -> LocalSteps | None:
    """Returns the settings of local steps; refuses gossip."""
    settings = settings_of(local_steps)
    if isinstance(settings, Gossip):
        raise ValueError("Learners: gossip is not simulated; train with it in a job.")
    return settings


def pair_of(batch: Any) -> tuple[Any, Any]:
    """Returns the inputs and labels of a batch; lists of numbers as arrays."""
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise ValueError(
            "Learners: a batch must be a pair of inputs and labels; sample weights are not "
            f"supported, and a model's own loss takes labels. Received {type(batch).__name__} of "
            f"{len(batch) if hasattr(batch, '__len__') else 'no length'}."
        )
    return _array(batch[0]), _array(batch[1])


def _array(values: Any) -> Any:
    """Returns lists of numbers as an array, and other values unchanged."""
    if isinstance(values, (list, tuple)) and all(
        isinstance(leaf, (int, float, np.number)) for leaf in tf.nest.flatten(values)
    ):
        return np.asarray(values)
    return values


def shares(x: Any, y: Any, learners: int) -> list[tuple[Any, Any]]:
    """Returns each learner's equal share of a batch."""
    x, y = _array(x), _array(y)
    if any(part is None for part in tf.nest.flatten((x, y))):
        raise ValueError("Learners: expected inputs and labels; received None for one of them.")
    sizes = [len(part) for part in tf.nest.flatten((x, y))]
    size = sizes[0]
    if len(set(sizes)) > 1:
        raise ValueError(
            "Learners: all inputs and labels of a batch must have as many rows; received "
            f"{', '.join(map(str, sizes))}."
        )
    if size % learners or not size:
        raise ValueError(
            f"Learners: a batch of {size} cannot be divided equally among {learners} learners; "
            "use a batch size that is a multiple, and drop_remainder=True."
        )
    share_size = size // learners
    return [
        tf.nest.map_structure(
            lambda a, i=i: tf.convert_to_tensor(a[i * share_size : (i + 1) * share_size]), (x, y)
        )
        for i in range(learners)
    ]


class Comparison:
    """Compares learners in one step, which may have several exchanges, each of some variables."""

    def __init__(self, residuals: Sequence[Sequence[tf.Variable]]) -> None:
        self._all_residuals = residuals
        self._indices: list[int] = []
        self._targets: list[tf.Tensor] = []

    def observe(self, exchanged: Sequence[int]) -> Observe:
        """Returns the observer of a step of some gradients; records what learners could send."""

        def note(positions: Sequence[int], steps: list[ReplicaStep]) -> list[ReplicaStep]:
            steps = [dataclasses.replace(s, inputs=s.inputs.preconditioned()) for s in steps]
            indices = [exchanged[position] for position in positions]
            tensors = [step.inputs.gradients for step in steps]
            tensors += [residuals for residuals in self._residuals(indices) if residuals]
            self._indices += indices
            self._targets += [
                tf.add_n([tf.cast(part, tf.float32) for part in parts])
                for parts in zip(*tensors, strict=True)
            ]
            return steps

        return note

    def measure(self, gradients: Sequence[Any]) -> Similarity:
        """Returns the measures, given the sums of all gradients."""
        if not self._targets:
            return Similarity(math.nan, math.nan, math.nan)
        reduced = [sparse.dense(gradients[index]) for index in self._indices]
        return Similarity(
            union_density(reduced),
            mean_cosine_distance(self._residuals(self._indices)),
            hamming_distance(reduced, self._targets),
        )

    def _residuals(self, indices: Sequence[int]) -> list[list[tf.Variable]]:
        """Returns each learner's residuals of some gradients."""
        return [
            [residuals[i] for i in indices] if residuals else []
            for residuals in self._all_residuals
        ]


def union_density(reduced: Sequence[tf.Tensor]) -> float:
    """The share of entries that are not zero in reduced gradients."""
    sent = sum(int(tf.math.count_nonzero(tensor)) for tensor in reduced)
    return sent / max(1, sum(int(tf.size(tensor)) for tensor in reduced))


def mean_cosine_distance(residuals: Sequence[Sequence[tf.Variable]]) -> float:
    """Returns the mean over all pairs of learners; NaN without pairs, or by a zero residual."""
    learners = len(residuals)
    if learners < 2 or not residuals[0]:
        return float("nan")
    # The sum of unit vectors has all pairs in its square.
    norms = [tf.linalg.global_norm(local) for local in residuals]
    total = 0.0
    for same_variable in zip(*residuals, strict=True):
        units = [residual / norm for residual, norm in zip(same_variable, norms, strict=True)]
        total += float(tf.reduce_sum(tf.square(tf.add_n(units))))
    return 1 - (total - learners) / (learners * (learners - 1))


def hamming_distance(reduced: Sequence[tf.Tensor], wanted: Sequence[tf.Tensor]) -> float:
    """Returns the share of the sent entries that are not among the largest entries."""
    sent = missed = 0
    for gradient, target in zip(reduced, wanted, strict=True):
        is_sent = tf.reshape(tf.not_equal(gradient, 0), [-1])
        count = int(tf.math.count_nonzero(is_sent))
        _, largest = tf.math.top_k(tf.abs(tf.reshape(target, [-1])), count)
        sent += count
        missed += count - int(tf.math.count_nonzero(tf.gather(is_sent, largest)))
    return missed / sent if sent else float("nan")
