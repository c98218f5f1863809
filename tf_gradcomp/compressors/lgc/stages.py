"""The stages of LGC after its dense steps; `LGC.stage` returns the current stage.

The first replica, which trains the autoencoder, decides the next stage. Any replica may decide to
abandon the autoencoder. The replica broadcasts its decision in a step that it leads, and all
replicas change stage in the next step. No replica therefore waits for another between steps.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from tf_gradcomp import ops
from tf_gradcomp.compressors.aggregation import digest_of_floats
from tf_gradcomp.compressors.base import Compressor, Reduced, StepInputs
from tf_gradcomp.compressors.lgc.autoencoder import Network
from tf_gradcomp.compressors.lgc.job_state import (
    ALL_REDUCE,
    CODING,
    COLLECTED,
    DECODED,
    FLOAT16,
    FLOAT32,
    LATEST,
    LEARNING,
    NORMS,
    ROUNDING,
    SHARE_ERROR,
    STAGE,
    VECTOR_STEPS,
    VECTORS,
    WANTED,
    WEIGHTS,
    Settings,
)
from tf_gradcomp.compressors.lgc.leader_step import LeaderStep
from tf_gradcomp.compressors.requests import AllGather, Broadcast, Request
from tf_gradcomp.compressors.value_bits import gather_codes, sum_shares
from tf_gradcomp.ops.payload import LGC as LGC_PAYLOAD
from tf_gradcomp.policy import GradientSpec

_LARGEST = 1e6  # of a vector for the autoencoder; with its own scale, none is so large
_FALLBACK_BITS = 8
_MOST_GROWTH = 3.0  # of the residuals while the autoencoder is in use (specification, 6.9)


class Stage(Compressor, registered=False):
    """A stage; it has the settings and the state of `LGC`."""

    whole_setting = 0

    def __init__(self, lgc: Settings) -> None:
        super().__init__()
        self._lgc = lgc

    def get_config(self) -> dict[str, Any]:
        return {"of": repr(self._lgc)}

    def settings(self, specs: Sequence[GradientSpec]) -> list[int]:
        return list(self._lgc.layout(specs).entries)

    def _step(self, inputs: StepInputs) -> LeaderStep:
        return LeaderStep(inputs, self._lgc.layout(inputs.specs))

    def _header(self, inputs: StepInputs) -> dict[str, Any]:
        return {
            "method": LGC_PAYLOAD,
            "settings": self.settings_in_force(inputs),
            "fingerprint": self.fingerprint(inputs.specs),
        }

    def _network(self, inputs: StepInputs) -> Network:
        weights = inputs.job_state[WEIGHTS].read_value()
        return Network(self._lgc.architecture, weights, self._lgc.innovations)

    def _vectors(self, entries: tf.Tensor) -> tf.Tensor:
        """Entries over their scale, as vectors for the autoencoder: [rows, n] to [rows, padded]."""
        count = entries.shape[1]
        bounded = tf.clip_by_value(entries, -_LARGEST, _LARGEST)
        return tf.pad(bounded, [[0, 0], [0, self._lgc.architecture.padded(count) - count]])


class Summing(Stage, registered=False):
    """Sums the entries that a leader chose; the first replica may announce the next stage."""

    name: ClassVar[str] = "lgc_summing"

    def reduce(self, inputs: StepInputs) -> Generator[Request, tf.Tensor, Reduced]:
        """Broadcasts the positions of the leader's largest entries, and sums these entries."""
        self._lgc.reset_if_incompatible(inputs.job_state)
        step = self._step(inputs)
        yield from _receive_news(step)
        values = step.coded()
        sums = yield from step.sum(values)
        return step.end(sums, sums.extra, sums.finite, 4 * step.layout.coded_entries)


class Collecting(Stage, registered=False):
    """Gathers the entries, and keeps them for the training of the autoencoder."""

    name: ClassVar[str] = "lgc_collecting"

    def reduce(self, inputs: StepInputs) -> Generator[Request, tf.Tensor, Reduced]:
        """Broadcasts the positions of the leader's largest entries, and gathers these entries."""
        step = self._step(inputs)
        entries = step.layout.coded_entries
        yield from _receive_news(step)
        values = step.coded()
        sums = yield from step.sum()
        if not entries:
            return step.end(sums, values, sums.finite, 0)
        header = self._header(inputs)
        body = tf.bitcast(values, tf.int32)
        payload = ops.payload_write(body, inputs.step, step.local_finite, **header)
        payloads = yield AllGather(payload, same_length=True)
        bodies, finite, _ = ops.payload_read(payloads, inputs.step, **header)
        gathered = tf.ensure_shape(tf.bitcast(bodies, tf.float32), [inputs.size, entries])
        exchanged = step.end(sums, sum_in_order(gathered), finite, 4 * entries)
        self._keep(gathered, step, exchanged.finite)
        return exchanged

    def _keep(self, gathered: tf.Tensor, step: LeaderStep, finite: tf.Tensor) -> None:
        """Keeps a step's vectors, the leader's first, on the first replica; all count the step."""
        inputs, state = step.inputs, step.inputs.job_state
        room = state[VECTORS].shape[0]
        row_count = min(inputs.size, room)
        collected = state[COLLECTED].read_value()
        gathered = tf.roll(gathered, -step.leader, 0)
        scales = scales_of(gathered)
        if self._lgc.pattern == ALL_REDUCE:  # one scale for all
            scales = tf.fill([inputs.size], scales[0])
        vectors = self._vectors(tf.math.divide_no_nan(gathered, scales[:, tf.newaxis]))[:row_count]
        unused = state[VECTORS].shape[1] - vectors.shape[1]  # by a step with some of the gradients
        rows = tf.cast(collected % (room // row_count), tf.int32) * row_count + tf.range(row_count)

        def keep() -> None:
            padded = tf.pad(vectors, [[0, 0], [0, unused]])
            state[VECTORS].scatter_update(tf.IndexedSlices(padded, rows))
            steps = tf.fill([row_count], collected + 1)
            state[VECTOR_STEPS].scatter_update(tf.IndexedSlices(steps, rows))

        is_first = tf.equal(inputs.rank, 0)
        tf.cond(tf.logical_and(finite, is_first), keep, lambda: None)
        state[COLLECTED].assign(collected + tf.cast(finite, tf.int64))


class Switching(Stage, registered=False):
    """A step in which all replicas get the autoencoder's weights from the first replica."""

    name: ClassVar[str] = "lgc_switching"

    def reduce(self, inputs: StepInputs) -> Generator[Request, tf.Tensor, Reduced]:
        """Exchanges like `Summing`, and broadcasts the weights."""
        step, state = self._step(inputs), inputs.job_state
        yield from step.broadcast_choice()
        values = step.coded()
        sums = yield from step.sum(values)
        weights = tf.bitcast(state[WEIGHTS].read_value(), tf.int32)
        weights = yield Broadcast(weights, tf.constant(0))
        state[WEIGHTS].assign(tf.bitcast(weights, tf.float32))
        state[STAGE].assign(CODING)
        return step.end(sums, sums.extra, sums.finite, 4 * step.layout.coded_entries)


class Coding(Stage, registered=False):
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
        reduce_coded = (
            self._all_reduce if self._lgc.pattern == ALL_REDUCE else self._parameter_server
        )
        values, totals, shares, sums, finite, coded_bytes = yield from reduce_coded(step)
        exchanged = step.end(sums, totals, finite, coded_bytes, values - shares)
        decoded, state = digest_of_floats(totals), inputs.job_state
        error = tf.math.divide_no_nan(
            tf.reduce_sum(tf.square(over_scale(values - shares, scale_of(values)))),
            tf.reduce_sum(tf.square(over_scale(values, scale_of(values)))),
        )
        for name, value in ((DECODED, decoded), (SHARE_ERROR, error)):
            before = state[name].read_value()
            state[name].assign(tf.where(exchanged.finite, value, before))
        return exchanged

    def _broadcast_choice(
        self, step: LeaderStep, extra_words: int, make_extra: Callable[[tf.Tensor], tf.Tensor]
    ) -> Generator[Request, tf.Tensor, tf.Tensor]:
        """Broadcasts the leader's selection; ends the stage once its residuals have grown too much.

        The autoencoder then misses so much of the current gradients that training would fail.
        """
        state = step.inputs.job_state

        def with_growth(chosen: tf.Tensor) -> tf.Tensor:
            now = _norms(step.inputs)
            grown = tf.norm(now) > _MOST_GROWTH * tf.norm(self._norms_before(step.inputs, now))
            return tf.concat([[tf.cast(grown, tf.int32)], make_extra(chosen)], 0)

        words = yield from step.broadcast_choice(1 + extra_words, with_growth)
        stage = state[STAGE].read_value()
        state[STAGE].assign(tf.where(words[0] > 0, tf.cast(ROUNDING, stage.dtype), stage))
        return words[1:]

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

        def make_scales(chosen: tf.Tensor) -> tf.Tensor:
            scales = [scale_of(chosen)]
            if summed:
                scaled = over_scale(chosen, scales[0])
                latent = network.encode(self._vectors(scaled[tf.newaxis]))
                scales.append(tf.reduce_max(tf.abs(latent)))
            return tf.bitcast(tf.stack(scales), tf.int32)

        words = yield from self._broadcast_choice(step, 1 + summed, make_scales)
        scales = tf.bitcast(words, tf.float32)
        scale, values = scales[0], step.coded()
        local_latent = network.encode(self._vectors(over_scale(values, scale)[tf.newaxis]))
        flat = tf.reshape(local_latent, [self._lgc.architecture.latents(entries)])
        flat = tf.where(step.local_finite, flat, tf.zeros_like(flat))
        if summed:
            sums = yield from step.sum()
            largest = tf.fill(tf.shape(flat), scales[1])
            rounded = yield from sum_shares(flat, largest, step.local_finite, size)
            flat, total = rounded.sent, rounded.total
            finite = tf.logical_and(sums.finite, rounded.finite)
        else:
            sums = yield from step.sum(flat)
            total, finite = sums.extra, sums.finite
        latents = tf.reshape(tf.concat([total / size, flat], 0), [2, *local_latent.shape[1:]])
        mean, share = tf.unstack(network.output(network.expand(latents, frozen=True)) * scale)
        coded_bytes = flat.shape[0] * (2 if summed else 4)
        return values, mean[:entries] * size, share[:entries], sums, finite, coded_bytes

    def _parameter_server(self, step: LeaderStep) -> Generator[Request, tf.Tensor, Any]:
        """The leader's latent for all, and each replica's innovation."""
        inputs, entries = step.inputs, step.layout.coded_entries
        size, count = inputs.size, step.layout.added
        network, architecture = self._network(inputs), self._lgc.architecture

        def make_latent(chosen: tf.Tensor) -> tf.Tensor:
            scaled = over_scale(chosen, scale_of(chosen))
            return self._as_words(network.encode(self._vectors(scaled[tf.newaxis])))

        floats = self._lgc.architecture.latents(entries)
        halved = self._lgc.latent_dtype != FLOAT32
        latent_bytes = 4 * (-(-floats // 2) if halved else floats)  # in whole words
        words = yield from self._broadcast_choice(step, latent_bytes // 4, make_latent)
        values = step.coded()
        sums = yield from step.sum()
        scale = scale_of(values)
        _, positions = tf.math.top_k(tf.abs(values), count)
        added = tf.gather(over_scale(values, scale), positions)
        floats = tf.bitcast(tf.concat([[scale], added], 0), tf.int32)
        header = self._header(inputs)
        payload = ops.payload_write(
            tf.concat([floats, positions], 0),
            inputs.step,
            step.local_finite,
            **header,
        )
        payloads = yield AllGather(payload, same_length=True)
        bodies, finite, _ = ops.payload_read(payloads, inputs.step, **header)
        bodies = tf.ensure_shape(bodies, [size, 1 + 2 * count])
        floats, positions = tf.split(bodies, [1 + count, count], 1)
        floats = tf.bitcast(floats, tf.float32)
        rows = tf.repeat(tf.range(size), count)
        where = tf.stack([rows, tf.reshape(positions, [-1])], 1)
        length = architecture.padded(entries)
        innovations = tf.scatter_nd(where, tf.reshape(floats[:, 1:], [-1]), [size, length])
        shape = [1, length // architecture.shortening, architecture.channels]
        expanded = network.expand(tf.reshape(self._from_words(words, entries), shape))
        gathered = network.output(expanded, innovations)[:, :entries] * floats[:, :1]
        share = tf.gather(gathered, inputs.rank)
        coded_bytes = latent_bytes / size + 8 * count
        return values, sum_in_order(gathered), share, sums, finite, coded_bytes

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


class Rounding(Stage, registered=False):
    """Gathers the entries in 8 bits, after training failed or the autoencoder was abandoned."""

    name: ClassVar[str] = "lgc_rounding"

    def reduce(self, inputs: StepInputs) -> Generator[Request, tf.Tensor, Reduced]:
        """Broadcasts the positions of the leader's entries, and gathers these in a few bits."""
        step = self._step(inputs)
        layout = step.layout
        yield from step.broadcast_choice()
        values = step.coded()
        sums = yield from step.sum()
        if not layout.coded:
            return step.end(sums, values, sums.finite, 0)
        counts = [layout.entries[index] for index in layout.coded]
        split = ops.ChunkSplit(
            whole=tf.zeros([0], tf.int32),
            coded=tf.range(sum(counts)),
            scale_indices=tf.repeat(tf.range(len(counts)), counts),
            counts=tf.constant(counts, tf.int64),
        )
        codes = yield from gather_codes(
            values, split, inputs, step.local_finite, _FALLBACK_BITS, self._header(inputs)
        )
        coded_bytes = sum(counts) * _FALLBACK_BITS / 8 + 4 * len(counts)
        return step.end(sums, codes.total, codes.finite, coded_bytes, values - codes.sent)


def _receive_news(step: LeaderStep) -> Generator[Request, tf.Tensor, None]:
    """Lets the leader choose entries; if it is the first replica, takes its next stage."""
    state = step.inputs.job_state

    def news(_chosen: tf.Tensor) -> tf.Tensor:
        wanted = tf.cast(state[WANTED].read_value(), tf.int32)
        return tf.concat([[wanted], tf.bitcast(state[LATEST].read_value(), tf.int32)], 0)

    words = yield from step.broadcast_choice(3, news)
    wanted, is_news = tf.cast(words[0], tf.int64), tf.equal(step.leader, 0)
    stage, learning = state[STAGE].read_value(), state[LEARNING].read_value()
    changes = tf.logical_and(is_news, wanted > 0)
    state[STAGE].assign(tf.where(changes, wanted, stage))
    state[LEARNING].assign(tf.where(is_news, tf.bitcast(words[1:], tf.float32), learning))


def scale_of(values: tf.Tensor) -> tf.Tensor:
    """The root mean square of a vector; 0 if that is not a positive number."""
    return scales_of(values[tf.newaxis])[0]


def scales_of(rows: tf.Tensor) -> tf.Tensor:
    """The root mean square of each row: float32 [rows]; 0 if it is not a positive number.

    The scale is computed from numbers of up to 1, so that it neither overflows nor vanishes. A row
    times a power of two has a scale times the same power. The decoding of zeros need not be zeros,
    but the scale makes it zeros.
    """
    most = tf.reduce_max(tf.abs(rows), 1)
    mean = tf.reduce_mean(tf.square(tf.math.divide_no_nan(rows, most[:, tf.newaxis])), 1)
    scales = most * tf.sqrt(mean)
    good = tf.logical_and(scales > 0, tf.math.is_finite(scales))
    return tf.where(good, scales, tf.zeros_like(scales))


def over_scale(values: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    """Values over their scale, which is 0 for zeros alone."""
    return tf.math.divide_no_nan(values, scale)


def sum_in_order(rows: tf.Tensor) -> tf.Tensor:
    """The sum of rows, added in order, which a reduction does not guarantee."""
    return tf.gather(tf.cumsum(rows, 0), rows.shape[0] - 1)


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
    """The indices of this step's gradients among all gradients of the job."""
    return list(range(len(inputs.specs)) if inputs.indices is None else inputs.indices)
