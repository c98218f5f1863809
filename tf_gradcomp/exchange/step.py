"""One step of an exchange, for one replica of a job or for several in lockstep."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from tf_gradcomp.adam.handover import not_begun, since_after, updates_after
from tf_gradcomp.compressors.base import Reduced, StepInputs
from tf_gradcomp.compressors.stages import has_stages, run_stage
from tf_gradcomp.exchange import sparse
from tf_gradcomp.exchange.gradients import Gradients, all_finite
from tf_gradcomp.exchange.replica import Replica, ReplicaStep
from tf_gradcomp.exchange.setup import Setup
from tf_gradcomp.exchange.state import state_on_op_device
from tf_gradcomp.groups import metadata
from tf_gradcomp.groups.communicator import Communicator, RequestStream, Sent, communicate

Observe: TypeAlias = Callable[[Sequence[int], list[ReplicaStep]], list[ReplicaStep]]


class StepResult(NamedTuple):
    """The result of a step."""

    # The gradients summed over the replicas, in the dtypes and forms in which the first of these
    # replicas had its own.
    gradients: list[tf.Tensor | tf.IndexedSlices]
    # bool scalar, equal on all replicas; if it is false, the step must be skipped.
    finite: tf.Tensor
    sent: list[Sent]  # the bytes that each of these replicas sent


def take_step(
    setup: Setup,
    communicators: Sequence[Communicator],
    numbers: Sequence[int],
    gradients: Sequence[Gradients],
    updates: tf.Tensor | None = None,
    observe: Observe | None = None,
) -> StepResult:
    """Takes replicas through one step: the calling replica, or all replicas of a lockstep group.

    Args:
        setup: The parts of the exchange.
        communicators: The communicators of the replicas.
        numbers: The places, in the setup, of the gradients of this step.
        gradients: Each replica's gradients.
        updates: The number of updates that the inner optimizer has made, if gradients are divided.
        observe: Takes the places of dense gradients and the steps of all replicas, before the
            compressor runs, and returns the steps.
    """
    replicas = [Replica(setup, numbers, one.local_replica, one) for one in communicators]
    places = range(len(numbers))
    slices = [i for i in places if setup.stays_sparse(numbers[i], gradients[0][i])]
    dense = [i for i in places if i not in slices]
    finite = tf.constant(True)

    added = [one.add_residuals(slices, own) for one, own in zip(replicas, gradients, strict=True)]
    gradients, left = [own for own, _ in added], [rest for _, rest in added]
    sums: list[Any] = list(gradients[0])
    sent = [Sent.nothing() for _ in replicas]
    if slices:
        sent = _sum_slices(replicas, slices, gradients, sums)
        finite = all_finite([sums[place] for place in slices])
    if dense:
        with contextlib.ExitStack() as on_host:
            steps = _replica_steps(on_host, replicas, dense, gradients, finite, updates)
            if observe:
                steps = observe(dense, steps)
            if has_stages(setup.compressor):
                results, more = run_stage(
                    setup.compressor,
                    steps[0].inputs,
                    lambda method: communicate(
                        [step.reduce_by(method) for step in steps], communicators
                    ),
                )
            else:
                streams = [step.reduce_by(setup.compressor) for step in steps]
                results, more = communicate(streams, communicators)
        finite = _restore(dense, gradients[0], results[0].reduced, results[0].touched, sums)
        sent = [one.plus(other) for one, other in zip(sent, more, strict=True)]
        for replica, result, own_sent in zip(replicas, results, more, strict=True):
            replica.set_fact(setup.variables.delayed, result.delayed, dense)
            replica.count(dense, own_sent, result.reduced.tensor_bytes)
            if setup.preconditioner and updates is not None:
                _note_beginnings(replica, dense, result.begins, finite, updates)

    for replica, rest in zip(replicas, left, strict=True):
        replica.count_exchange(finite)
        replica.write_residuals(slices, dense, finite, rest)
    with tf.control_dependencies([finite]):  # not earlier: see `CheckedStrategy.run`
        setup.variables.step.assign_add(1)
    count_skip(setup.variables.skipped_steps, finite)
    return StepResult(sums, finite, sent)


def count_skip(skipped_steps: tf.Variable, finite: tf.Tensor) -> None:
    """Counts a step that is skipped because its gradients are not `finite`."""
    skipped_steps.assign_add(tf.cast(tf.logical_not(finite), tf.int64))


def _sum_slices(
    replicas: Sequence[Replica],
    places: Sequence[int],
    gradients: Sequence[Gradients],
    sums: list[Any],
) -> list[Sent]:
    """Sums slices without the compressor; puts the sums at their places."""
    setup, numbers = replicas[0].setup, replicas[0].numbers
    large = [place for place in places if setup.is_large(numbers[place])]
    if not setup.group.is_collective:
        large = []  # a choice would need collectives in a branch
    small = [place for place in places if place not in large]
    sent = [Sent.nothing() for _ in replicas]
    for some in [*([place] for place in large), small]:
        if some:
            more = _sum_some_slices(replicas, some, gradients, sums, choose=some != small)
            sent = [one.plus(other) for one, other in zip(sent, more, strict=True)]
    return sent


def _sum_some_slices(
    replicas: Sequence[Replica],
    places: Sequence[int],
    gradients: Sequence[Gradients],
    sums: list[Any],
    *,
    choose: bool,
) -> list[Sent]:
    """Sums the slices of some tables; a single table may be summed whole if that sends less."""
    setup, size = replicas[0].setup, replicas[0].setup.group.size
    communicators = [replica.communicator for replica in replicas]
    given = [[own[place] for place in places] for own in gradients]
    specs = [setup.specs[replicas[0].numbers[place]] for place in places]
    step = replicas[0].local(setup.variables.step).read_value()
    fingerprint = setup.compressor.fingerprint(specs)
    dtype = setup.compressor.slices_dtype or tf.float32
    word = metadata.tag_word(fingerprint, step)

    def gather() -> Any:
        sums = [sparse.sum_slices(own, size, word, dtype) for own in given]
        return communicate(list(map(RequestStream, sums)), communicators)

    def whole() -> Any:
        sums = [sparse.sum_whole(own[0], dtype) for own in given]
        return communicate(list(map(RequestStream, sums)), communicators)

    if choose:
        rows, tag = specs[0].shape[0], metadata.tag(fingerprint, step, tf.float32, size)
        votes = [sparse.prefer_dense(own[0], rows, size, tag) for own in given]
        prefer, voted = communicate(list(map(RequestStream, votes)), communicators)
        ends, sent = tf.cond(prefer[0], whole, gather)
        sent = [one.plus(more) for one, more in zip(sent, voted, strict=True)]
    else:
        ends, sent = gather()
    for replica, (_, tensor_bytes), of_one in zip(replicas, ends, sent, strict=True):
        replica.count(places, of_one, tensor_bytes)
    for place, total in zip(places, ends[0][0], strict=True):
        sums[place] = total
    return sent


def _replica_steps(
    on_host: contextlib.ExitStack,
    replicas: Sequence[Replica],
    places: Sequence[int],
    gradients: Sequence[Gradients],
    finite: tf.Tensor,
    updates: tf.Tensor | None,
) -> list[ReplicaStep]:
    """Returns the inputs of the compressor for each replica, with its state on the host."""
    setup = replicas[0].setup
    steps = []
    for replica, own in zip(replicas, gradients, strict=True):
        handles = on_host.enter_context(state_on_op_device(replica.state(places), setup.on_gpu))
        given = [own[place] for place in places]
        steps.append(_replica_step(replica, places, given, handles, finite, updates))
        if setup.variables.ahead:
            replica.communicator.ahead = replica.local(setup.variables.ahead.words)
    return steps


def _replica_step(
    replica: Replica,
    places: Sequence[int],
    gradients: Gradients,
    handles: dict[str, list[tf.Tensor]],
    finite: tf.Tensor,
    updates: tf.Tensor | None,
) -> ReplicaStep:
    """Returns a replica's inputs to the exchange of dense gradients."""
    setup, communicator = replica.setup, replica.communicator
    moments, not_yet = None, None
    if setup.preconditioner and updates is not None:
        since = replica.fact(setup.variables.facts.moments_since, places)
        not_yet = not_begun(updates, since)
        moments = setup.preconditioner.second_moments(
            handles, updates_after(updates, since), communicator.size, gradients
        )
    numbers = [replica.numbers[place] for place in places]
    inputs = StepInputs(
        [setup.specs[number] for number in numbers],
        gradients,
        handles,
        replica.local(setup.variables.step).read_value(),
        finite,
        communicator.rank,
        communicator.size,
        moments,
        job_state=replica.job_state(),
        indices=numbers,
    )
    return ReplicaStep.new(
        inputs,
        residuals_wait=replica.residuals_wait(places),
        residual_scale=replica.residual_scale,
        unseen=not_yet,
    )


def _restore(
    places: Sequence[int],
    gradients: Gradients,
    reduced: Reduced,
    touched: Sequence[tf.Tensor | None],
    sums: list[Any],
) -> tf.Tensor:
    """Puts sums at their places, in the dtypes and forms of a replica's own gradients.

    Returns whether to take the step: not if a sum overflows float16.
    """
    halves = []
    for place, total, rows in zip(places, reduced.gradients, touched, strict=True):
        sums[place] = sparse.as_given(gradients[place], total, rows)
        if sums[place].dtype == tf.float16:
            halves.append(sums[place])
    finite = reduced.finite
    return tf.logical_and(finite, all_finite(halves)) if halves else finite


def _note_beginnings(
    replica: Replica,
    places: Sequence[int],
    begins: tf.Tensor,
    finite: tf.Tensor,
    updates: tf.Tensor,
) -> None:
    """Records after a step which gradients have no second moments yet."""
    fact = replica.setup.variables.facts.moments_since
    since = replica.fact(fact, places)
    replica.set_fact(fact, since_after(updates, since, begins, finite), places)
