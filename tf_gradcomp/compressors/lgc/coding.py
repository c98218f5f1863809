"""LGC's last phase: sends the autoencoder's codes of the entries, while they are good enough."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any, ClassVar

import tensorflow as tf

from tf_gradcomp import ops
from tf_gradcomp.compressors.aggregation import digest_of_floats
from tf_gradcomp.compressors.base import Reduced, StepInputs
from tf_gradcomp.compressors.lgc.leader_selection import LeaderStep
from tf_gradcomp.compressors.lgc.phases import Phase, over_scale, scale_of, sum_in_order
from tf_gradcomp.compressors.lgc.settings import (
    ALL_REDUCE,
    DECODED,
    FLOAT16,
    FLOAT32,
    NORMS,
    PHASE,
    ROUNDING,
    SHARE_ERROR,
    WEIGHTS,
)
from tf_gradcomp.compressors.requests import AllGather, Request
from tf_gradcomp.compressors.value_bits import sum_shares

_MOST_GROWTH = 3.0  # of the residuals while the autoencoder is in use (specification, 6.9)


class Coding(Phase, registered=False):
    """Sends the autoencoder's codes of the entries."""

    name: ClassVar[str] = "lgc_coding"

    def settings_in_force(self, inputs: StepInputs) -> tf.Tensor:
        """Returns the numbers of chosen entries, and digests of the weights and the last decoding.

        Replicas compare these settings, so they notice in the next step if they have decoded
        differently.
        """
        state = inputs.job_state
        digests = [digest_of_floats(state[WEIGHTS].read_value()), state[DECODED].read_value()]
        return tf.concat([super().settings_in_force(inputs), tf.stack(digests)], 0)

    def reduce(self, inputs: StepInputs) -> Generator[Request, tf.Tensor, Reduced]:
        """Broadcasts the positions of the leader's entries, and sums or gathers their codes."""
        step = self._step(inputs)
        if not step.layout.coded_entries:
            yield from step.broadcast_choice()
            nothing = step.coded()
            sums = yield from step.sum()
            return step.end(sums, nothing, sums.finite, 0)
        in_turn = self._all_reduce if self._lgc.pattern == ALL_REDUCE else self._parameter_server
        own, totals, shares, sums, finite, coded_bytes = yield from in_turn(step)
        exchanged = step.end(sums, totals, finite, coded_bytes, own - shares)
        decoded, state = digest_of_floats(totals), inputs.job_state
        error = tf.math.divide_no_nan(
            tf.reduce_sum(tf.square(over_scale(own - shares, scale_of(own)))),
            tf.reduce_sum(tf.square(over_scale(own, scale_of(own)))),
        )
        for name, value in ((DECODED, decoded), (SHARE_ERROR, error)):
            before = state[name].read_value()
            state[name].assign(tf.where(exchanged.finite, value, before))
        return exchanged

    def _broadcast_choice(
        self, step: LeaderStep, words: int, make_words: Callable[[tf.Tensor], tf.Tensor]
    ) -> Generator[Request, tf.Tensor, tf.Tensor]:
        """Broadcasts the choice; ends the phase once the leader's residuals have grown too much.

        The autoencoder then misses so much of the current gradients that training would fail.
        """
        state = step.inputs.job_state

        def with_growth(chosen: tf.Tensor) -> tf.Tensor:
            now = _norms(step.inputs)
            grown = tf.norm(now) > _MOST_GROWTH * tf.norm(self._norms_before(step.inputs, now))
            return tf.concat([[tf.cast(grown, tf.int32)], make_words(chosen)], 0)

        received = yield from step.broadcast_choice(1 + words, with_growth)
        phase = state[PHASE].read_value()
        state[PHASE].assign(tf.where(received[0] > 0, tf.cast(ROUNDING, phase.dtype), phase))
        return received[1:]

    def _norms_before(self, inputs: StepInputs, now: tf.Tensor) -> tf.Tensor:
        """Returns the residuals' norms in the first step that had this replica as leader.

        A resumed job may have lost them. Its first norms then count, and it may give the
        autoencoder up early.
        """
        norms, indices = inputs.job_state[NORMS], _indices(inputs)
        before = tf.gather(norms.read_value(), indices)
        before = tf.where(before > 0, before, now)
        norms.scatter_update(tf.IndexedSlices(before, indices))
        return before

    def _all_reduce(self, step: LeaderStep) -> Generator[Request, tf.Tensor, Any]:
        """The latents of all replicas are averaged, with the leader's scale."""
        entries, size = step.layout.coded_entries, step.inputs.size
        network = self._network(step.inputs)
        summed = self._lgc.latent_dtype == FLOAT16

        def scales(chosen: tf.Tensor) -> tf.Tensor:
            scales = [scale_of(chosen)]
            if summed:
                scaled = over_scale(chosen, scales[0])
                latent = network.encode(self._vectors(scaled[tf.newaxis]))
                scales.append(tf.reduce_max(tf.abs(latent)))
            return tf.bitcast(tf.stack(scales), tf.int32)

        received = tf.bitcast(
            (yield from self._broadcast_choice(step, 1 + summed, scales)), tf.float32
        )
        scale, coded = received[0], step.coded()
        local_latent = network.encode(self._vectors(over_scale(coded, scale)[tf.newaxis]))
        flat = tf.reshape(local_latent, [self._lgc.architecture.latents(entries)])
        flat = tf.where(step.local_finite, flat, tf.zeros_like(flat))
        if summed:
            sums = yield from step.sum()
            latent_scales = tf.fill(tf.shape(flat), received[1])
            rounded = yield from sum_shares(flat, latent_scales, step.local_finite, size)
            flat, total = rounded.sent, rounded.total
            finite = tf.logical_and(sums.finite, rounded.finite)
        else:
            sums = yield from step.sum(flat)
            total, finite = sums.extra, sums.finite
        latents = tf.reshape(tf.concat([total / size, flat], 0), [2, *local_latent.shape[1:]])
        mean, share = tf.unstack(network.output(network.expand(latents, frozen=True)) * scale)
        coded_bytes = flat.shape[0] * (2 if summed else 4)
        return coded, mean[:entries] * size, share[:entries], sums, finite, coded_bytes

    def _parameter_server(self, step: LeaderStep) -> Generator[Request, tf.Tensor, Any]:
        """The leader's latent for all, and each replica's innovation."""
        inputs, entries = step.inputs, step.layout.coded_entries
        size, count = inputs.size, step.layout.added
        network, architecture = self._network(inputs), self._lgc.architecture

        def latent(chosen: tf.Tensor) -> tf.Tensor:
            scaled = over_scale(chosen, scale_of(chosen))
            return self._as_words(network.encode(self._vectors(scaled[tf.newaxis])))

        floats = self._lgc.architecture.latents(entries)
        halved = self._lgc.latent_dtype != FLOAT32
        latent_bytes = 4 * (-(-floats // 2) if halved else floats)  # in whole words
        received = yield from self._broadcast_choice(step, latent_bytes // 4, latent)
        coded = step.coded()
        sums = yield from step.sum()
        scale = scale_of(coded)
        _, indices = tf.math.top_k(tf.abs(coded), count)
        added = tf.gather(over_scale(coded, scale), indices)
        floats = tf.bitcast(tf.concat([[scale], added], 0), tf.int32)
        header = self._header(inputs)
        payload = ops.payload_write(
            tf.concat([floats, indices], 0),
            inputs.step,
            step.local_finite,
            **header,
        )
        payloads = yield AllGather(payload, same_length=True)
        bodies, finite, _ = ops.payload_read(payloads, inputs.step, **header)
        bodies = tf.ensure_shape(bodies, [size, 1 + 2 * count])
        floats, indices = tf.split(bodies, [1 + count, count], 1)
        floats = tf.bitcast(floats, tf.float32)
        rows = tf.repeat(tf.range(size), count)
        where = tf.stack([rows, tf.reshape(indices, [-1])], 1)
        length = architecture.padded(entries)
        innovations = tf.scatter_nd(where, tf.reshape(floats[:, 1:], [-1]), [size, length])
        shape = [1, length // architecture.shortening, architecture.channels]
        expanded = network.expand(tf.reshape(self._from_words(received, entries), shape))
        decoded = network.output(expanded, innovations)[:, :entries] * floats[:, :1]
        share = tf.gather(decoded, inputs.rank)
        coded_bytes = latent_bytes / size + 8 * count
        return coded, sum_in_order(decoded), share, sums, finite, coded_bytes

    def _as_words(self, latent: tf.Tensor) -> tf.Tensor:
        flat = tf.reshape(latent, [-1])
        if self._lgc.latent_dtype == FLOAT32:
            return tf.bitcast(flat, tf.int32)
        bounded = tf.clip_by_value(flat, tf.float16.min, tf.float16.max)
        halves = tf.pad(tf.cast(bounded, tf.float16), [[0, tf.size(flat) % 2]])
        return tf.bitcast(tf.reshape(halves, [-1, 2]), tf.int32)

    def _from_words(self, words: tf.Tensor, entries: int) -> tf.Tensor:
        if self._lgc.latent_dtype == FLOAT32:
            return tf.bitcast(words, tf.float32)
        halves = tf.reshape(tf.bitcast(words, tf.float16), [-1])
        return tf.cast(halves[: self._lgc.architecture.latents(entries)], tf.float32)


def _norms(inputs: StepInputs) -> tf.Tensor:
    """The Euclidean norms of a replica's residuals times the number of replicas: float32 [tensors].

    Gradients are divided by this number, so a job that resumes with another number can compare
    norms.
    """
    residuals = [
        tf.raw_ops.ReadVariableOp(resource=residual, dtype=tf.float32)
        for residual in inputs.residuals
    ]
    return tf.stack([tf.norm(residual) for residual in residuals]) * inputs.size


def _indices(inputs: StepInputs) -> list[int]:
    """The places of this step's gradients among all gradients of the job."""
    return list(range(len(inputs.specs)) if inputs.indices is None else inputs.indices)
