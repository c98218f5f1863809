"""One step of an exchange, for one replica of a job or for several in lockstep."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import tensorflow as tf

from tf_gradcomp.adam.handover import is_unstarted, next_start_step, updates_after
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
    indices: Sequence[int],
    gradients: Sequence[Gradients],
    updates: tf.Tensor | None = None,
    observe: Observe | None = None,
) -> StepResult:
    """Runs one step: of the calling replica, or of all replicas of a lockstep group.

    Args:
        setup: The parts of the exchange.
        communicators: The communicators of the replicas.
        indices: Indices, in the setup, of this step's gradients.
        gradients: Each replica's gradients.
        updates: The number of updates that the inner optimizer has made, if gradients are divided.
        observe: Called with the positions of dense gradients and all replicas' steps before the
            compressor runs, and returns the steps.
    """
    replicas = [
        Replica(setup, indices, communicator.local_replica, communicator)
        for communicator in communicators
    ]
    positions = range(len(indices))
    slices = [i for i in positions if setup.stays_sparse(indices[i], gradients[0][i])]
    dense = [i for i in positions if i not in slices]
    finite = tf.constant(True)

    added = [
        replica.add_residuals(slices, replica_gradients)
        for replica, replica_gradients in zip(replicas, gradients, strict=True)
    ]
    gradients = [replica_gradients for replica_gradients, _ in added]
    new_residuals = [remaining for _, remaining in added]
    sums: list[Any] = list(gradients[0])
    sent = [Sent.nothing() for _ in replicas]
    if slices:
        sent = _sum_slices(replicas, slices, gradients, sums)
        finite = all_finite([sums[position] for position in slices])
    if dense:
        with contextlib.ExitStack() as on_host:
            steps = _replica_steps(on_host, replicas, dense, gradients, finite, updates)
            if observe:
                steps = observe(dense, steps)
            if has_stages(setup.compressor):
                results, sent_by_method = run_stage(
                    setup.compressor,
                    steps[0].inputs,
                    lambda method: communicate(
                        [step.reduce_by(method) for step in steps], communicators
                    ),
                )
            else:
                streams = [step.reduce_by(setup.compressor) for step in steps]
                results, sent_by_method = communicate(streams, communicators)
        finite = _restore(dense, gradients[0], results[0].reduced, results[0].touched, sums)
        sent = [
            total.plus(dense_sent) for total, dense_sent in zip(sent, sent_by_method, strict=True)
        ]
        for replica, result, method_sent in zip(replicas, results, sent_by_method, strict=True):
            replica.set_fact(setup.variables.delayed, result.delayed, dense)
            replica.count(dense, method_sent, result.reduced.tensor_bytes)
            if setup.preconditioner and updates is not None:
                _note_beginnings(replica, dense, result.begins, finite, updates)

    for replica, replica_residuals in zip(replicas, new_residuals, strict=True):
        replica.count_exchange(finite)
        replica.write_residuals(slices, dense, finite, replica_residuals)
    with tf.control_dependencies([finite]):  # not earlier: see `MultiWorkerMirroredStrategy.run`
        setup.variables.step.assign_add(1)
    count_skip(setup.variables.skipped_steps, finite)
    return StepResult(sums, finite, sent)


def count_skip(skipped_steps: tf.Variable, finite: tf.Tensor) -> None:
    """Counts a step that is skipped because its gradients are not `finite`."""
    skipped_steps.assign_add(tf.cast(tf.logical_not(finite), tf.int64))


def _sum_slices(
    replicas: Sequence[Replica],
    positions: Sequence[int],
    gradients: Sequence[Gradients],
    sums: list[Any],
) -> list[Sent]:
    """Sums slices without the compressor; puts the sums at their positions."""
    setup, indices = replicas[0].setup, replicas[0].indices
    large = [position for position in positions if setup.is_large(indices[position])]
    if not setup.group.is_collective:
        large = []  # a choice would need collectives in a branch
    small = [position for position in positions if position not in large]
    sent = [Sent.nothing() for _ in replicas]
    for group in [*([position] for position in large), small]:
        if group:
            sent_for_group = _sum_some_slices(
                replicas, group, gradients, sums, choose=group != small
            )
            sent = [
                total.plus(group_sent)
                for total, group_sent in zip(sent, sent_for_group, strict=True)
            ]
    return sent


def _sum_some_slices(
    replicas: Sequence[Replica],
    positions: Sequence[int],
    gradients: Sequence[Gradients],
    sums: list[Any],
    *,
    choose: bool,
) -> list[Sent]:
    """Sums the slices of some tables; a single table may be summed whole if that sends less."""
    setup, size = replicas[0].setup, replicas[0].setup.group.size
    communicators = [replica.communicator for replica in replicas]
    slices_by_replica = [
        [replica_gradients[position] for position in positions] for replica_gradients in gradients
    ]
    specs = [setup.specs[replicas[0].indices[position]] for position in positions]
    step = replicas[0].local(setup.variables.step).read_value()
    fingerprint = setup.compressor.fingerprint(specs)
    dtype = setup.compressor.slices_dtype or tf.float32
    word = metadata.tag_word(fingerprint, step)

    def gather() -> Any:
        sums = [sparse.sum_slices(slices, size, word, dtype) for slices in slices_by_replica]
        return communicate(list(map(RequestStream, sums)), communicators)

    def sum_table() -> Any:
        sums = [sparse.sum_whole(slices[0], dtype) for slices in slices_by_replica]
        return communicate(list(map(RequestStream, sums)), communicators)

    if choose:
        rows, tag = specs[0].shape[0], metadata.tag(fingerprint, step, tf.float32, size)
        votes = [sparse.prefer_dense(slices[0], rows, size, tag) for slices in slices_by_replica]
        prefer, sent_for_votes = communicate(list(map(RequestStream, votes)), communicators)
        ends, sent = tf.cond(prefer[0], sum_table, gather)
        sent = [
            slices_sent.plus(vote_sent)
            for slices_sent, vote_sent in zip(sent, sent_for_votes, strict=True)
        ]
    else:
        ends, sent = gather()
    for replica, (_, tensor_bytes), replica_sent in zip(replicas, ends, sent, strict=True):
        replica.count(positions, replica_sent, tensor_bytes)
    for position, total in zip(positions, ends[0][0], strict=True):
        sums[position] = total
    return sent


def _replica_steps(
    on_host: contextlib.ExitStack,
    replicas: Sequence[Replica],
    positions: Sequence[int],
    gradients: Sequence[Gradients],
    finite: tf.Tensor,
    updates: tf.Tensor | None,
) -> list[ReplicaStep]:
    """Returns the inputs of the compressor for each replica, with its state on the host."""
    setup = replicas[0].setup
    steps = []
    for replica, replica_gradients in zip(replicas, gradients, strict=True):
        handles = on_host.enter_context(state_on_op_device(replica.state(positions), setup.on_gpu))
        selected = [replica_gradients[position] for position in positions]
        steps.append(_replica_step(replica, positions, selected, handles, finite, updates))
        if setup.variables.ahead:
            replica.communicator.ahead = replica.local(setup.variables.ahead.words)
    return steps


def _replica_step(
    replica: Replica,
    positions: Sequence[int],
    gradients: Gradients,
    handles: dict[str, list[tf.Tensor]],
    finite: tf.Tensor,
    updates: tf.Tensor | None,
) -> ReplicaStep:
    """Returns a replica's inputs to the exchange of dense gradients."""
    setup, communicator = replica.setup, replica.communicator
    moments, unseen = None, None
    if setup.preconditioner and updates is not None:
        since = replica.fact(setup.variables.facts.moments_since, positions)
        unseen = is_unstarted(updates, since)
        moments = setup.preconditioner.second_moments(
            handles, updates_after(updates, since), communicator.size, gradients
        )
    indices = [replica.indices[position] for position in positions]
    inputs = StepInputs(
        [setup.specs[index] for index in indices],
        gradients,
        handles,
        replica.local(setup.variables.step).read_value(),
        finite,
        communicator.rank,
        communicator.size,
        moments,
        job_state=replica.job_state(),
        indices=indices,
    )
    return ReplicaStep.new(
        inputs,
        residuals_wait=replica.has_residuals(positions),
        residual_scale=replica.residual_scale,
        unseen=unseen,
    )


def _restore(
    positions: Sequence[int],
    gradients: Gradients,
    reduced: Reduced,
    touched: Sequence[tf.Tensor | None],
    sums: list[Any],
) -> tf.Tensor:
    """Stores the sums in the dtype and form of the local gradients.

    Returns whether to take the step: not if a sum overflows float16.
    """
    halves = []
    for position, total, rows in zip(positions, reduced.gradients, touched, strict=True):
        sums[position] = sparse.like_gradient(gradients[position], total, rows)
        if sums[position].dtype == tf.float16:
            halves.append(sums[position])
    finite = reduced.finite
    return tf.logical_and(finite, all_finite(halves)) if halves else finite


def _note_beginnings(
    replica: Replica,
    positions: Sequence[int],
    begins: tf.Tensor,
    finite: tf.Tensor,
    updates: tf.Tensor,
) -> None:
    """Records after a step which gradients have no second moments yet."""
    fact = replica.setup.variables.facts.moments_since
    since = replica.fact(fact, positions)
    replica.set_fact(fact, next_start_step(updates, since, begins, finite), positions)
