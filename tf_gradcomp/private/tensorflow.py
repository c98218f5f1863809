"""Private API of TensorFlow: strategies and their collectives, data, and checkpoints."""

from __future__ import annotations

import contextlib
import functools
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import tensorflow as tf
from tensorflow.python.checkpoint import checkpoint as _checkpoint
from tensorflow.python.checkpoint import tensor_callable as _tensor_callable
from tensorflow.python.distribute import collective_all_reduce_strategy as _collective_strategy
from tensorflow.python.distribute import cross_device_ops as _cross_device_ops
from tensorflow.python.distribute import cross_device_utils as _cross_device_utils
from tensorflow.python.distribute import mirrored_strategy as _mirrored_strategy
from tensorflow.python.eager import context as _context
from tensorflow.python.ops import control_flow_util as _control_flow_util
from tensorflow.python.trackable import base as _trackable

# Functions that `patch` replaces. No public function is called in all cases, or knows as much.
WRITE_CHECKPOINT = "tensorflow.python.checkpoint.checkpoint.Checkpoint._write"
SAVE_MODEL = "tensorflow.python.saved_model.save.save_and_return_nodes"
CALL_PYTHON = "tensorflow.python.ops.script_ops.FuncRegistry.__call__"
COUNT_REPLICAS_WITH_DATA = "tensorflow.python.distribute.input_lib._calculate_replicas_with_values"
SEEDS_OF_OP = "tensorflow.python.framework.random_seed.get_seed"

_HOST_GROUP_KEY = 1_000_000  # far from the keys that strategies count up from 1
_WORKERS_GROUP_KEY = 2_000_000  # likewise
_MEANS_GROUP_KEY = 3_000_000  # likewise
_FIRST_COUNTED_KEY = 1_000_000_000  # likewise
# Datasets of files, which TensorFlow divides among the workers.
_READERS = (
    tf.data.TFRecordDataset,
    tf.data.TextLineDataset,
    tf.data.FixedLengthRecordDataset,
)
_Launchers = weakref.WeakKeyDictionary[tf.distribute.Strategy, Any]
_host_launchers: _Launchers = weakref.WeakKeyDictionary()
_worker_launchers: _Launchers = weakref.WeakKeyDictionary()
_means_launchers: _Launchers = weakref.WeakKeyDictionary()


class ForwardingOps(tf.distribute.CrossDeviceOps):
    """Cross-device ops that forward every reduction to TensorFlow's own.

    A subclass takes over some reductions. TensorFlow also calls the three private members.

    Attributes:
        forward_to: The ops in whose place `install` put these. Under a strategy that got these
            from the program, `tf.distribute.ReductionToOneDevice`: TensorFlow's collectives within
            one process fail in the first call of a function that creates variables.
    """

    def __init__(self) -> None:
        super().__init__()
        self.forward_to: Any = tf.distribute.ReductionToOneDevice()

    def reduce(
        self, reduce_op: Any, per_replica_value: Any, destinations: Any, options: Any = None
    ) -> Any:
        """Reduces one value; see `tf.distribute.CrossDeviceOps`."""
        return self.forward_to.reduce(reduce_op, per_replica_value, destinations, options)

    def batch_reduce(
        self, reduce_op: Any, value_destination_pairs: Sequence[Any], options: Any = None
    ) -> Any:
        """Reduces several values; see `tf.distribute.CrossDeviceOps`."""
        return self.forward_to.batch_reduce(reduce_op, value_destination_pairs, options)

    @property
    def _num_between_graph_workers(self) -> Any:
        return self.forward_to._num_between_graph_workers

    def _gather(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward_to._gather(*args, **kwargs)

    def _all_reduce(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward_to._all_reduce(*args, **kwargs)


def install(strategy: tf.distribute.Strategy, ops: ForwardingOps) -> None:
    """Sets a strategy's cross-device ops, for which its constructor has no argument."""
    ops.forward_to = strategy.extended._cross_device_ops
    strategy.extended._cross_device_ops = ops


def installed_ops(strategy: tf.distribute.Strategy) -> Any:
    """The cross-device ops with which a strategy reduces; None for strategies without any."""
    return getattr(strategy.extended, "_cross_device_ops", None)


def cross_device_ops(strategy: tf.distribute.Strategy) -> Any:
    """The ops of TensorFlow that reduce under a strategy; None for strategies without any."""
    ops = installed_ops(strategy)
    return ops.forward_to if isinstance(ops, ForwardingOps) else ops


def is_collective(strategy: tf.distribute.Strategy) -> bool:
    """Whether the strategy's replicas communicate by TensorFlow's collectives."""
    return isinstance(cross_device_ops(strategy), _cross_device_ops.CollectiveAllReduce)


def local_replica_id(context: tf.distribute.ReplicaContext) -> int:
    """The replica's number within its process; `replica_id_in_sync_group` is a tensor."""
    return context._replica_id


def rank(strategy: tf.distribute.Strategy, local_replica: int) -> int:
    """A local replica's number among all; publicly it is known in a replica context only.

    There is none where an all-reduce runs eagerly.
    """
    return strategy.extended._get_replica_id_in_sync_group(local_replica)


def launcher(strategy: tf.distribute.Strategy, local_replica: int) -> Any:
    """The object that launches the collectives of one local replica.

    The public `ReplicaContext.all_gather` transposes, splits and concatenates its result.
    """
    return cross_device_ops(strategy)._launchers[local_replica]


def launcher_of_workers(strategy: tf.distribute.Strategy) -> Any:
    """The object that launches collectives of the first replicas of all workers.

    No public API has groups of some replicas only.
    """
    device = strategy.extended.worker_devices[0]
    return _launcher_once(_worker_launchers, strategy, device, _WORKERS_GROUP_KEY)


def _launcher_of_means(strategy: tf.distribute.Strategy) -> Any:
    return _launcher_once(_means_launchers, strategy, _host(strategy), _MEANS_GROUP_KEY)


def timeout_seconds(strategy: tf.distribute.Strategy) -> float:
    """The time limit of the strategy's collectives, or 0; no public API returns it."""
    return strategy.extended._communication_options.timeout_seconds or 0


def _launcher_of_host(strategy: tf.distribute.Strategy) -> Any:
    return _launcher_once(_host_launchers, strategy, _host(strategy), _HOST_GROUP_KEY)


def _host(strategy: tf.distribute.Strategy) -> str:
    """The host of this worker, by a name that TensorFlow does not confuse with its first GPU."""
    worker = tf.DeviceSpec.from_string(strategy.extended._worker_device)
    return worker.replace(device_type="CPU", device_index=0).to_string()


def sum_over_workers(strategy: tf.distribute.Strategy, values: tf.Tensor) -> tf.Tensor:
    """The sum of a host tensor over the workers, in a separate group.

    The collectives of `Strategy.reduce` wait for the gradients' collectives, one after another.
    """
    return _launcher_of_means(strategy).all_reduce(values)


def _launcher_once(
    known: _Launchers, strategy: tf.distribute.Strategy, device: str, group_key: int
) -> Any:
    """The launcher of a group of one device on each worker; each strategy has one."""
    if strategy not in known:
        extended = strategy.extended
        keys = _cross_device_utils.CollectiveKeys(group_key_start=group_key)
        known[strategy] = _cross_device_utils.CollectiveReplicaLauncher(
            keys.get_group_key([device]),
            extended._num_workers,
            keys,
            device,
            extended._communication_options,
        )
    return known[strategy]


def all_gather_of(launcher_: Any) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns the function that all-gathers values of one shape along axis 0, by one collective.

    The values have elements, so the function needs no `exchange_no_empty_tensors`.
    """
    return functools.partial(type(launcher_)._all_gather, launcher_, options=None)


def all_reduce_of(launcher_: Any) -> Callable[[tf.Tensor], tf.Tensor]:
    """Returns the function that sums values with elements over the replicas, by one collective.

    The public `ReplicaContext.all_reduce` goes through the cross-device ops.
    """
    return functools.partial(type(launcher_).all_reduce, launcher_)


def launch_broadcast(launcher_: Any, value: tf.Tensor, is_root: tf.Tensor) -> tf.Tensor:
    """Broadcasts the value of the replica whose `is_root` is true.

    No public API broadcasts in a replica, and none lets the root change from step to step.
    """
    group = {
        "group_size": launcher_._group_size,
        "group_key": launcher_._group_key,
        "instance_key": launcher_._next_instance_key(),
        "communication_hint": launcher_._options.implementation.value.lower(),
        "timeout_seconds": launcher_._options.timeout_seconds or 0,
    }
    with tf.device(launcher_._device):
        return tf.cond(
            is_root,
            lambda: tf.raw_ops.CollectiveBcastSendV2(input=value, **group),
            lambda: tf.raw_ops.CollectiveBcastRecvV2(T=value.dtype, shape=tf.shape(value), **group),
        )


def allow_collectives_in_loops(strategy: tf.distribute.Strategy) -> None:
    """Allows the strategy's collectives in loops and branches of a `tf.function`.

    TensorFlow feeds a key to each collective when the outermost function is called. A single key
    for all iterations of a loop fails if their lengths differ, and if a function is called from a
    branch within a loop, as in Keras' `steps_per_execution`. There, a counter on each replica gives
    the keys.
    """
    counters: dict[tuple[int, str], tf.Variable] = {}
    launchers = _launchers_of_steps(strategy)
    if in_multi_worker_mode(strategy):
        launchers += [launcher_of_workers(strategy), _launcher_of_means(strategy)]
    for launcher_ in launchers:
        group = (launcher_._group_key, launcher_._device)
        if group not in counters:
            with tf.device("CPU:0"):
                counters[group] = tf.Variable(_FIRST_COUNTED_KEY, trainable=False)
        launcher_._next_instance_key = functools.partial(
            _next_instance_key, counters[group], launcher_._next_instance_key
        )


def on_initial_values(
    strategy: tf.distribute.Strategy,
    chief_value: Callable[[tf.Tensor, Callable[[tf.Tensor], tf.Tensor]], tf.Tensor],
) -> None:
    """Calls `chief_value(value, broadcast)` for each variable's initial value.

    `chief_value` returns the chief's value. TensorFlow's own function calls `broadcast`, which
    takes few dtypes. No public API sees a value earlier.
    """
    extended = strategy.extended
    original = extended._get_variable_creator_initial_value

    def hooked(replica_id: int, device: str, primary_var: Any, **kwargs: Any) -> Any:
        if replica_id != 0 or not in_multi_worker_mode(strategy):
            return original(replica_id, device, primary_var, **kwargs)

        def broadcast(value: tf.Tensor) -> tf.Tensor:
            arguments = {**kwargs, "initial_value": value, "dtype": value.dtype}
            return original(replica_id, device, primary_var, **arguments)()

        def initial_value() -> tf.Tensor:
            initial = kwargs["initial_value"]
            with tf.device(device):
                value = initial() if callable(initial) else initial
                if isinstance(value, _trackable.CheckpointInitialValue):
                    value = value.wrapped_value
                return chief_value(tf.convert_to_tensor(value, kwargs.get("dtype")), broadcast)

        return initial_value

    extended._get_variable_creator_initial_value = hooked


def broadcast_no_empty_variables(strategy: tf.distribute.Strategy) -> None:
    """Creates empty variables locally on each worker.

    TensorFlow broadcasts the first worker's initial values. A value without elements may also have
    no memory (as `np.zeros(0)`), and the first worker dies of SIGSEGV.
    """
    on_initial_values(strategy, _broadcast_unless_empty)


@contextlib.contextmanager
def broadcasting_no_variables(strategy: tf.distribute.Strategy) -> Iterator[None]:
    """Within this context, each worker keeps its own initial values of variables.

    Keys must be equal on all workers. TensorFlow broadcasts each value from the first worker, by a
    collective for each variable, and no public argument prevents it.
    """
    extended = strategy.extended
    broadcasting = extended._get_variable_creator_initial_value
    extended._get_variable_creator_initial_value = functools.partial(
        _mirrored_strategy.MirroredExtended._get_variable_creator_initial_value, extended
    )
    try:
        yield
    finally:
        extended._get_variable_creator_initial_value = broadcasting


def _broadcast_unless_empty(
    value: tf.Tensor, broadcast: Callable[[tf.Tensor], tf.Tensor]
) -> tf.Tensor:
    return value if value.shape.num_elements() == 0 else broadcast(value)


def exchange_no_empty_tensors(strategy: tf.distribute.Strategy) -> None:
    """Makes `Strategy.reduce` and `gather` accept empty tensors.

    TensorFlow's collectives read memory that such tensors may not have, and the process dies.
    """
    for launcher_ in _launchers_of_steps(strategy):
        launcher_.all_reduce = functools.partial(_reduce_unless_empty, launcher_.all_reduce)
        launcher_._all_gather = functools.partial(
            _gather_unless_empty, launcher_._all_gather, launcher_._group_size
        )


def _launchers_of_steps(strategy: tf.distribute.Strategy) -> list[Any]:
    extended = strategy.extended
    all_ops = (cross_device_ops(strategy), extended._host_cross_device_ops)
    return [launcher_ for ops in all_ops for launcher_ in ops._launchers]


def _reduce_unless_empty(reduce: Callable[..., Any], value: Any, *args: Any, **kwargs: Any) -> Any:
    return value if value.shape.num_elements() == 0 else reduce(value, *args, **kwargs)


def _gather_unless_empty(
    gather: Callable[..., Any], replicas: int, value: Any, options: Any
) -> Any:
    """Gathers a tensor that may be empty in some steps, with a number that is removed again."""
    value = tf.convert_to_tensor(value)
    if value.shape.num_elements():
        return gather(value, options)
    shape = tf.shape(value)
    empty = tf.cast(tf.equal(tf.size(value), 0), tf.int32)
    rows = gather(tf.pad(tf.reshape(value, [-1]), [[0, empty]]), options)
    full_shape = tf.concat([shape[:1] * replicas, shape[1:]], 0)
    return tf.reshape(rows[: tf.reduce_prod(full_shape)], full_shape)


def on_collectives(
    strategy: tf.distribute.Strategy, call: Callable[[Sequence[tf.Tensor]], None]
) -> None:
    """Calls `call(tensors)` at the begin and end of each of TensorFlow's collectives.

    The tensors are the inputs and the outputs of the collective. If a worker has several replicas,
    only the collectives of its first replica count. No public API sees collectives.
    """
    all_ops = (cross_device_ops(strategy), strategy.extended._host_cross_device_ops)
    launchers = [ops._launchers[0] for ops in all_ops]
    for launcher_ in [*launchers, _launcher_of_means(strategy), _launcher_of_host(strategy)]:
        for name in ("all_reduce", "_all_gather"):
            setattr(launcher_, name, functools.partial(_calling, call, getattr(launcher_, name)))


def _calling(
    call: Callable[[Sequence[Any]], None], collective: Any, value: Any, *args: Any, **kwargs: Any
) -> Any:
    call([value])
    result = collective(value, *args, **kwargs)
    call([result])
    return result


def in_loop_or_eager() -> bool:
    """Whether code runs eagerly or is traced in a loop or branch of a function.

    There, the order of collectives that don't wait for each other may differ among workers.
    """
    graph = tf.compat.v1.get_default_graph()
    return tf.executing_eagerly() or _within_control_flow(graph)


def _next_instance_key(counter: tf.Variable, fed_key: Callable[[], Any]) -> Any:
    if _within_control_flow(tf.compat.v1.get_default_graph()):
        return counter.assign_add(1, read_value=True)
    return fed_key()


def _within_control_flow(graph: Any) -> bool:
    while graph is not None:
        if getattr(graph, "is_control_flow_graph", False):
            return True
        graph = getattr(graph, "outer_graph", None)
    return False


def host_all_gather(strategy: tf.distribute.Strategy, value: tf.Tensor) -> tf.Tensor:
    """All-gathers a host tensor of one shape over the workers, eagerly, in a separate group.

    The public `Strategy.gather` traces a new function at each call, which is too slow for each
    variable. It also shares its group with the strategy's collectives, so workers that disagree on
    the next collective would hang instead of raising an error.
    """
    return _launcher_of_host(strategy)._all_gather(value, None)


def use_logical_cpus(replicas: int) -> None:
    """Splits the CPU into logical devices, one per replica of later strategies.

    `MultiWorkerMirroredStrategy` itself takes only one CPU device. Must be called before TensorFlow
    is initialized.
    """
    cpu = tf.config.list_physical_devices("CPU")[0]
    logical = [tf.config.LogicalDeviceConfiguration() for _ in range(replicas)]
    tf.config.set_logical_device_configuration(cpu, logical)

    def local_devices(
        _self: Any, _resolver: Any, worker_device: str
    ) -> tuple[tuple[str, ...], str]:
        return tuple(f"{worker_device}/device:CPU:{i}" for i in range(replicas)), "CPU"

    _collective_strategy.CollectiveAllReduceExtended._initialize_local_devices = local_devices


def in_multi_worker_mode(strategy: tf.distribute.Strategy) -> bool:
    """Whether the strategy spans several workers; public API knows only replicas."""
    return strategy.extended._in_multi_worker_mode()


@contextlib.contextmanager
def counting_replicas(replicas: int) -> Iterator[None]:
    """Within this context, a program without a strategy sees a number of replicas.

    Keras divides losses that are means by this number; no public API sets it.
    """
    class_ = type(tf.distribute.get_strategy().extended)
    original = class_._num_replicas_in_sync
    class_._num_replicas_in_sync = replicas
    try:
        yield
    finally:
        class_._num_replicas_in_sync = original


def is_running() -> bool:
    """Whether TensorFlow has started its runtime, after which no workers can connect.

    The public functions that would tell start the runtime themselves.
    """
    return _context.context()._context_handle is not None


def anonymous_name() -> str:
    """A name for a resource that is not shared by name, and is freed with its last handle.

    TensorFlow names its own variables so. With a public name, a resource is shared and stays.
    """
    return _context.anonymous_name()


def in_xla() -> bool:
    """Whether XLA, which has no kernel for our ops, compiles the traced code."""
    graph = tf.compat.v1.get_default_graph()
    return _control_flow_util.GraphOrParentsInXlaContext(graph)


def end_in_background(iterator: Any) -> None:
    """Lets a distributed iterator end in a thread when it is dropped.

    TensorFlow wakes the thread that tunes an iterator a moment before it marks this as cancelled. A
    thread that checks immediately would sleep for about the iterator's lifetime, up to a minute,
    and Keras would wait for this thread between two epochs.
    """
    weakref.finalize(iterator, _end_in_background, iterator._iterators).atexit = False


def _end_in_background(owned: list[Any]) -> None:
    """Empties a list that an object still holds just before it is deleted."""
    taken = list(owned)
    owned.clear()
    if threading.main_thread().is_alive():  # otherwise no thread can be started any more
        threading.Thread(target=taken.clear).start()


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


def _shared(dataset: Any) -> tf.data.Dataset | None:
    policies = tf.data.experimental.AutoShardPolicy
    policy = dataset.options().experimental_distribute.auto_shard_policy
    if policy == policies.DATA:
        return dataset
    if policy not in (policies.AUTO, policies.FILE):
        return None
    names = _names_of_files(dataset)
    return dataset if names is None and policy == policies.AUTO else names


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
    nodes = itertools.chain(graph.node, *(function.node_def for function in graph.library.function))
    return any(
        node.op.startswith(tuple(class_.__name__[:-2] for class_ in _READERS)) for node in nodes
    )


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


def call_after_write(options: tf.train.CheckpointOptions, path: str) -> None:
    """Calls the functions that a checkpoint's options ask for after a write to a path.

    TensorFlow calls them itself, with the path that it writes to.
    """
    _checkpoint._execute_callbacks(options.experimental_write_callbacks or [], path)
