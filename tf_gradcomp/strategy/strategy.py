"""`gc.MultiWorkerMirroredStrategy`, the same for either Keras."""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import tensorflow as tf

from tf_gradcomp import compressors
from tf_gradcomp.chief import is_chief, task_in, task_of
from tf_gradcomp.exchange import setup
from tf_gradcomp.exchange.exchange import GradientExchange
from tf_gradcomp.exchange.saving import reads_locally
from tf_gradcomp.groups import agreement, bitcast, rendezvous, stalls
from tf_gradcomp.groups.agreement import GradientAgreement
from tf_gradcomp.groups.current import check_not_of_horovod
from tf_gradcomp.groups.means import PeriodicReduce, means_over_replicas
from tf_gradcomp.groups.stalls import CoordinationStore, Progress, Watchdog
from tf_gradcomp.groups.strategy_group import StrategyGroup
from tf_gradcomp.keras_version import install_patches, keras, keras_private
from tf_gradcomp.policy import LayerPolicy
from tf_gradcomp.private import tensorflow as tf_private
from tf_gradcomp.strategy import random_numbers, shuffles
from tf_gradcomp.strategy.compressed_all_reduce import CompressedAllReduce
from tf_gradcomp.strategy.saves import Saves
from tf_gradcomp.strategy.variables import CheckedScope, CheckedVariables
from tf_gradcomp.tf_config import read_tf_config

_DEFAULT_OPTIONS = tf.distribute.experimental.CommunicationOptions()
_TOO_LATE = (
    "MultiWorkerMirroredStrategy: TensorFlow is already running, and connects its workers only at "
    "the start; create the strategy at the top of the program, before any dataset, tensor or model."
)
_strategies: weakref.WeakSet[MultiWorkerMirroredStrategy] = weakref.WeakSet()
# The strategy of several workers. TensorFlow connects them only once in a process.
_worker_strategies: list[MultiWorkerMirroredStrategy] = []


def _kind_of(device: str) -> str:
    """CPU or GPU: TensorFlow's collectives need the same device type on all workers."""
    return str(tf.DeviceSpec.from_string(device).device_type)


class MultiWorkerMirroredStrategy(tf.distribute.MultiWorkerMirroredStrategy):
    """TensorFlow's strategy, with checks, and with compressed gradients if asked to.

    Keras 3 runs under this strategy, but not under TensorFlow's own (keras-team/keras#20585); Keras
    2 runs under both. Workers that were started with different versions, settings or models end
    with an error that says what differs.

    Pass no compressor if the model uses `CompressedOptimizer`. With a compressor, the gradients of
    all other optimizers and training loops are compressed; see `CompressedAllReduce`.

    In a job of several workers, a process has one strategy: a second one with equal settings is the
    first. If the program sets no seed, all workers shuffle data in the same random order: the
    chief draws a seed for the shuffles of `tf.data` and of arrays in Keras 3's `fit`.

    Args:
        cluster_resolver: As for TensorFlow's strategy; by default TF_CONFIG is read.
        communication_options: As for TensorFlow's strategy.
        compressor: A name, a config or a compressor: see `gc.compressors.get`.
        policy: Which variables get which settings, for `compressor`.
        two_level: Whether the replicas (GPUs) of a worker first sum their gradients, and the
            workers exchange these sums, compressed by `compressor` or by `CompressedOptimizer`. If
            not, each replica exchanges with all other replicas.
        heartbeat_timeout: The number of seconds after which TensorFlow considers a silent worker
            lost, and ends the other workers; at least 1. The default is the value of the
            environment variable GRADCOMP_HEARTBEAT_TIMEOUT, or 60. A worker reports twice in this
            time, so it may pause for half of this time. All workers must have the same number.
        stall_after: The number of seconds in one collective after which a worker logs which workers
            have not arrived; at least 1, or 0 for never. The default is the value of the
            environment variable GRADCOMP_STALL_AFTER, or 30. All workers must have the same number.
        compare_variables: Whether `fit` compares after its first step and after each epoch what
            must be equal on all workers: weights, variables of optimizers, and settings such as
            learning rates. A difference is an error that names it. The comparison takes
            milliseconds.

    Raises:
        TypeError: If `policy` is no `gc.Policy`.
        ValueError: If TF_CONFIG, `compressor`, `heartbeat_timeout` or `stall_after` is not valid,
            `policy` is given without `compressor`, or the process has a strategy with other
            settings already.
        RuntimeError: If TensorFlow is already running, with several workers.
        TimeoutError: If a worker has not started within the number of seconds in the environment
            variable GRADCOMP_START_TIMEOUT, or within an hour.
        WorkersDisagreeError: If workers have different versions or settings.
    """

    group: StrategyGroup  # all replicas
    saves: Saves
    progress: Progress | None  # if this worker logs for whom it waits
    # The exchanges of optimizers that took local steps in the latest call of `run`.
    periodic_reduce: list[PeriodicReduce]
    gradient_agreement: GradientAgreement  # if nothing is compressed
    compare_variables: bool
    agreed_variables: Callable[[], contextlib.AbstractContextManager[None]]

    _settings: Mapping[str, Any]
    _outputs: Sequence[Any] = ()  # of the latest step of a model
    _means: Sequence[tf.Tensor] = ()  # of the outputs, once Keras has asked for one of them

    def __new__(cls, *_: Any, **__: Any) -> Any:
        """Returns the strategy of the job if there is one; `__init__` then compares settings."""
        return _worker_strategies[0] if _worker_strategies else super().__new__(cls)

    def __deepcopy__(self, _: Any) -> MultiWorkerMirroredStrategy:
        """Returns this strategy, because a copy would use the keys of its collectives."""
        return self

    def __init__(
        self,
        cluster_resolver: tf.distribute.cluster_resolver.ClusterResolver | None = None,
        communication_options: tf.distribute.experimental.CommunicationOptions | None = None,
        compressor: str
        | Mapping[str, Any]
        | compressors.Compressor
        | compressors.Auto
        | None = None,
        policy: LayerPolicy | None = None,
        *,
        two_level: bool = True,
        heartbeat_timeout: float | None = None,
        stall_after: float | None = None,
        compare_variables: bool = True,
    ) -> None:
        install_patches()
        if isinstance(cluster_resolver, str | Mapping | compressors.Compressor):
            raise TypeError(
                "MultiWorkerMirroredStrategy: the first argument is a cluster resolver; received "
                f"{cluster_resolver!r}. Pass a compressor by its name: compressor=..."
            )
        heartbeat_timeout = stalls.heartbeat_timeout(heartbeat_timeout)
        stall_after = stalls.stall_after(stall_after)
        if cluster_resolver is None and read_tf_config() is None:
            check_not_of_horovod()
        ops: CompressedAllReduce | None = None
        if compressor is not None:
            ops = CompressedAllReduce(compressor, policy)
        elif policy is not None:
            raise ValueError(
                "MultiWorkerMirroredStrategy: a policy needs a compressor, such as "
                "compressor=gc.compressors.AdaComp()."
            )
        task = task_in(cluster_resolver)
        settings: dict[str, Any] = {
            "cluster": task,
            "communication_options": vars(communication_options or _DEFAULT_OPTIONS),
            "compressor": repr(ops and ops.compressor),
            "policy": policy and policy.get_config(),
            "two_level": two_level,
            "heartbeat_timeout": heartbeat_timeout,
            "stall_after": stall_after,
            "compare_variables": compare_variables,
        }
        if self in _worker_strategies:
            _check_equal(self._settings, settings)
            return
        self._settings, self._ops = settings, ops
        if task is not None:
            if task.num_workers > 1 and tf_private.is_running():
                raise RuntimeError(_TOO_LATE)  # before the others wait for this worker
            rendezvous.warn_of_proxy(task)
            rendezvous.wait_for_workers(task, stalls.start_timeout())
        try:
            with tf_private.coordinating(heartbeat_timeout):
                super().__init__(cluster_resolver, communication_options)
        except RuntimeError as error:
            if "program startup" not in str(error):
                raise
            raise RuntimeError(_TOO_LATE) from error
        self._two_level = two_level
        self.compare_variables = compare_variables
        if ops is not None:
            tf_private.install(self, ops)
        tf_private.allow_collectives_in_loops(self)
        tf_private.exchange_no_empty_tensors(self)
        self.group = StrategyGroup(self)
        self.progress = self._watched_progress(stall_after, heartbeat_timeout)
        self._variables = CheckedVariables(self.group)
        self.agreed_variables = self._variables.agreed
        self._started = False
        _strategies.add(self)
        self._known: dict[int, tf.Tensor] = {}
        self.periodic_reduce = []
        self.saves = Saves(self.group)
        self.gradient_agreement = GradientAgreement(self.group.processes.agree)
        self.group.processes.agree(
            {
                **agreement.package_versions(),
                **setup.fact(),
                "replicas in a worker": len(self.extended.worker_devices),
                "kind of device": _kind_of(self.extended.worker_devices[0]),
                "compressor of the strategy": repr(self.compressor),
                "two_level": two_level,
                "heartbeat_timeout": heartbeat_timeout,
                "stall_after": stall_after,
                "compare_variables": compare_variables,
            }
        )
        if self.group.processes.size > 1:
            shuffles.share_seed(self.group.processes)
            _worker_strategies.append(self)

    def _watched_progress(self, seconds: float, heartbeat_timeout: float) -> Progress | None:
        """Returns the progress of this worker, and has it watched."""
        task = task_of(self)
        if seconds == 0 or self.group.processes.size == 1 or task is None or task.rank is None:
            return None
        progress = Progress()
        tf_private.on_collectives(self, progress.count_event)
        addresses = task.worker_addresses
        names = [f"Worker {rank} ({address})" for rank, address in enumerate(addresses)]
        store = CoordinationStore(addresses, heartbeat_timeout)
        Watchdog(progress, task.rank, names, seconds, store).start()
        return progress

    @property
    def compressor(self) -> compressors.Compressor | compressors.Auto | None:
        """Returns the compressor of gradients; None if the strategy does not compress."""
        return self._ops.compressor if self._ops else None

    @property
    def two_level(self) -> bool:
        """Whether the replicas of a host sum their gradients before the exchange."""
        return self._two_level

    def gradient_exchange(self, variables: Sequence[Any]) -> GradientExchange:
        """The exchange of the gradients of `variables`, with its residuals.

        The exchange is built at the first step, or by this call. A checkpoint saves and restores
        it: `tf.train.Checkpoint(model=model, exchange=strategy.gradient_exchange(variables))`.

        Args:
            variables: The variables that one optimizer or training loop trains.

        Raises:
            ValueError: If the strategy has no compressor.
        """
        with self.scope():
            return self._compressed().gradient_exchange(variables)

    @property
    def reduce_gradients(self) -> Callable[..., list[tf.Tensor | tf.IndexedSlices | None]]:
        """Returns the function that sums gradients in a training loop.

        See `gc.CompressedAllReduce.reduce_gradients`.

        Raises:
            ValueError: If the strategy has no compressor.
        """
        return self._compressed().reduce_gradients

    def check_model_outside(self) -> None:
        """Refuses to train a model that was created outside the scope.

        A chief may do so once it has trained with the other workers: see
        `check_not_single_by_mistake`.
        """
        if self.group.processes.size > 1 and not (self._started and is_chief()):
            raise ValueError(
                "The model was created outside the scope of gc.MultiWorkerMirroredStrategy, so "
                f"each of its {self.group.processes.size} workers would train the model alone; "
                "create and compile the model inside `with strategy.scope():`. To train it alone "
                "on purpose, create it in the scope of tf.distribute.OneDeviceStrategy('CPU:0')."
            )

    def _compressed(self) -> CompressedAllReduce:
        if self._ops is None:
            raise ValueError(
                "The strategy has no compressor; pass one: "
                "gc.MultiWorkerMirroredStrategy(compressor=gc.compressors.AdaComp())."
            )
        return self._ops

    def run(self, fn: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Runs `fn` as TensorFlow does; the first time, no worker may still create variables.

        In a graph, no op of `fn` runs before its arguments exist. At the end of the data, an
        iterator ends the step with an error; TensorFlow alone would already have counted the step
        and decayed weights.
        """
        self._check_before_start("running the first step")
        self._started = True
        self.periodic_reduce = []
        if self.progress:
            self.progress.count_step((args, kwargs))
        is_step = isinstance(getattr(fn, "__self__", None), keras.Model)
        if not tf_private.in_loop_or_eager() and not hasattr(fn, "python_function"):
            fn = _after_its_arguments(fn)
        with keras_private.lending_generator():
            outputs = super().run(fn, *args, **kwargs)
        self._outputs = tf.nest.flatten(outputs) if is_step else ()
        self._means = ()
        return outputs

    def distribute_datasets_from_function(
        self,
        dataset_fn: Callable[[tf.distribute.InputContext], tf.data.Dataset],
        options: tf.distribute.InputOptions | None = None,
    ) -> Any:
        """Builds each worker's data as TensorFlow does; their functions draw separate numbers."""

        def build(context: tf.distribute.InputContext) -> tf.data.Dataset:
            with random_numbers.building_pipeline(context.input_pipeline_id):
                return dataset_fn(context)

        return super().distribute_datasets_from_function(build, options)

    def scope(self) -> Any:
        """TensorFlow's scope, in which workers also check that they create equal variables."""
        return CheckedScope(super().scope(), self._variables)

    def reduce(self, reduce_op: Any, value: Any, axis: int | None = None) -> Any:
        """Reduces like TensorFlow, and also values that TensorFlow refuses.

        Within `reusing`, it returns the given results. Scalars have no axis to reduce. A nested
        structure is reduced leaf by leaf. Within `reading_locally`, variables are reduced only over
        this worker's replicas, and a nested structure is this worker's own.

        Keras 3 asks for the mean of each output of a step over an axis (keras-team/keras#20585).
        Here it gets means over the replicas, which share one collective. With local steps, the
        means belong to the latest step with an exchange, because a collective in each step would
        make workers wait for each other in each step.
        """
        if id(value) in self._known:
            return self._known[id(value)]
        index = next((i for i, output in enumerate(self._outputs) if output is value), None)
        if index is not None and axis == 0 and self.num_replicas_in_sync > 1:
            if not self._means:
                self._means = means_over_replicas(self, self._outputs, self.periodic_reduce)
            return self._means[index]
        is_local_read = reads_locally(self)
        if is_local_read and isinstance(value, tf.Variable):
            return self._local_variable_value(reduce_op, value)
        if tf.nest.is_nested(value) and not isinstance(value, tf.distribute.DistributedValues):
            if is_local_read and axis is None:
                return tf.nest.map_structure(self._local_part, value)
            return tf.nest.map_structure(lambda leaf: self.reduce(reduce_op, leaf, axis), value)
        if axis is not None and _rank(self, value) == 0:
            axis = None
        self._check_before_start("reducing a value")
        return super().reduce(reduce_op, value, axis)

    def gather(self, value: Any, axis: int) -> tf.Tensor:
        """Gathers like TensorFlow, and also dtypes that its collectives lack.

        TensorFlow gathers by a `tf.function`, even where `tf.config.run_functions_eagerly` has made
        others run eagerly.
        """
        dtype = tf.convert_to_tensor(self._local_part(value)).dtype
        with _functions_as_graphs():
            gather = functools.partial(super().gather, axis=axis)
            return bitcast.gathered(value, dtype, gather)

    @contextlib.contextmanager
    def reusing(self, values: Sequence[Any], reduced: Sequence[tf.Tensor]) -> Iterator[None]:
        """Within this context, `reduce` returns the earlier result for each of these values.

        Variables with separate values on replicas are reduced whenever they are read across
        replicas.
        """
        self._known = {id(value): to for value, to in zip(values, reduced, strict=True)}
        try:
            yield
        finally:
            self._known = {}

    def _local_variable_value(self, reduce_op: Any, variable: Any) -> tf.Tensor:
        parts = [part.read_value() for part in self.experimental_local_results(variable)]
        total = tf.add_n(parts)
        mean = tf.distribute.ReduceOp(str(getattr(reduce_op, "value", reduce_op)).upper())
        return total / len(parts) if mean is tf.distribute.ReduceOp.MEAN else total

    def _check_before_start(self, doing: str) -> None:
        if not self._started:
            with tf.init_scope():
                self.group.processes.agree({"next action": doing})

    def _local_part(self, leaf: Any) -> Any:
        return self.experimental_local_results(leaf)[0]


def _check_equal(first: Mapping[str, Any], second: Mapping[str, Any]) -> None:
    """Raises if a second strategy of the job has other settings."""
    differences = [name for name in first if first[name] != second[name]]
    if differences:
        raise ValueError(
            "MultiWorkerMirroredStrategy: this process has a strategy already, with another "
            f"{', '.join(differences)}; use it again. TensorFlow connects the workers once in a "
            "process. For a model with another method, pass the compressor to "
            "gc.CompressedOptimizer."
        )


def _after_its_arguments(fn: Callable[..., Any]) -> Callable[..., Any]:
    autograph = tf.__internal__.autograph
    fn = autograph.tf_convert(fn, autograph.control_status_ctx(), convert_by_default=False)

    @tf.autograph.experimental.do_not_convert
    def waiting(*args: Any, **kwargs: Any) -> Any:
        arguments = tf.nest.flatten((args, kwargs), expand_composites=True)
        with tf.control_dependencies(
            [argument for argument in arguments if isinstance(argument, tf.Tensor)]
        ):
            return fn(*args, **kwargs)

    return waiting


def has_strategy() -> bool:
    """Whether the program has created this package's strategy."""
    return bool(_strategies)


def strategy_of_workers() -> MultiWorkerMirroredStrategy | None:
    """Returns the strategy that makes this process one of several workers, if any."""
    return next(iter(_worker_strategies), None)


def check_trains_with_others(strategy: tf.distribute.Strategy) -> None:
    """Raises for a model created outside the scope of the program's strategy."""
    if strategy is tf.distribute.get_strategy() and not tf.distribute.has_strategy():
        for known in _strategies:
            known.check_model_outside()


@contextlib.contextmanager
def _functions_as_graphs() -> Iterator[None]:
    """Within this context, functions are traced even if TensorFlow is set to run them eagerly."""
    eagerly = tf.config.functions_run_eagerly()
    if not eagerly:
        yield
        return
    tf.config.run_functions_eagerly(False)
    try:
        yield
    finally:
        tf.config.run_functions_eagerly(True)


def _rank(strategy: tf.distribute.Strategy, value: Any) -> int | None:
    local = strategy.experimental_local_results(value)[0]
    return local.shape.rank if hasattr(local, "shape") else tf.convert_to_tensor(local).shape.rank
