"""The phases of LGC after its dense steps; `LGC.phase` returns the current phase.

The first replica, which trains the autoencoder, decides the next phase. Any replica may decide to
abandon the autoencoder. The replica broadcasts its decision in a step that it leads, and all
replicas change phase in the next step. No replica therefore waits for another between steps.
`coding.py` has the phase of most of a long job.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import tensorflow as tf

from tf_gradcomp import ops
from tf_gradcomp.compressors.base import Compressor, Reduced, StepInputs
from tf_gradcomp.compressors.lgc.autoencoder import Network
from tf_gradcomp.compressors.lgc.leader_selection import LeaderStep
from tf_gradcomp.compressors.lgc.settings import (
    ALL_REDUCE,
    CODING,
    COLLECTED,
    LATEST,
    LEARNING,
    PHASE,
    VECTOR_STEPS,
    VECTORS,
    WANTED,
    WEIGHTS,
    reset_if_incompatible,
)
from tf_gradcomp.compressors.requests import AllGather, Broadcast, Request
from tf_gradcomp.compressors.value_bits import gather_codes
from tf_gradcomp.ops.payload import LGC as LGC_PAYLOAD
from tf_gradcomp.policy import GradientSpec

if TYPE_CHECKING:
    from tf_gradcomp.compressors.lgc.method import LGC

_LARGEST = 1e6  # of a vector for the autoencoder; with its own scale, none is so large
_FALLBACK_BITS = 8


class Phase(Compressor, registered=False):
    """A phase; it has the settings and the state of `LGC`."""

    whole_setting = 0

    def __init__(self, lgc: LGC) -> None:
        super().__init__()
        self._lgc = lgc

    def get_config(self) -> dict[str, Any]:
        return {"of": repr(self._lgc)}

    def settings(self, specs: Sequence[GradientSpec]) -> list[int]:
        return list(self._lgc.layout(specs).entries)

    def _step(self, inputs: StepInputs) -> LeaderStep:
        return LeaderStep(inputs, self._lgc.layout(inputs.specs), self._lgc.order)

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


class Summing(Phase, registered=False):
    """Sums the entries that a leader chose; the first replica may announce the next phase."""

    name: ClassVar[str] = "lgc_summing"

    def reduce(self, inputs: StepInputs) -> Generator[Request, tf.Tensor, Reduced]:
        """Broadcasts the positions of the leader's largest entries, and sums these entries."""
        reset_if_incompatible(self._lgc, inputs.job_state)
        step = self._step(inputs)
        yield from _receive_weights_update(step)
        own = step.coded()
        sums = yield from step.sum(own)
        return step.end(sums, sums.extra, sums.finite, 4 * step.layout.coded_entries)


class Collecting(Phase, registered=False):
    """Gathers the entries, and keeps them for the training of the autoencoder."""

    name: ClassVar[str] = "lgc_collecting"

    def reduce(self, inputs: StepInputs) -> Generator[Request, tf.Tensor, Reduced]:
        """Broadcasts the positions of the leader's largest entries, and gathers these entries."""
        step = self._step(inputs)
        entries = step.layout.coded_entries
        yield from _receive_weights_update(step)
        own = step.coded()
        sums = yield from step.sum()
        if not entries:
            return step.end(sums, own, sums.finite, 0)
        header = self._header(inputs)
        body = tf.bitcast(own, tf.int32)
        payload = ops.payload_write(body, inputs.step, step.local_finite, **header)
        payloads = yield AllGather(payload, same_length=True)
        bodies, finite, _ = ops.payload_read(payloads, inputs.step, **header)
        of_all = tf.ensure_shape(tf.bitcast(bodies, tf.float32), [inputs.size, entries])
        exchanged = step.end(sums, sum_in_order(of_all), finite, 4 * entries)
        self._keep(of_all, step, exchanged.finite)
        return exchanged

    def _keep(self, all_coded: tf.Tensor, step: LeaderStep, finite: tf.Tensor) -> None:
        """Keeps a step's vectors, the leader's first, on the first replica; all count the step."""
        inputs, state = step.inputs, step.inputs.job_state
        room = state[VECTORS].shape[0]
        row_count = min(inputs.size, room)
        collected = state[COLLECTED].read_value()
        all_coded = tf.roll(all_coded, -step.leader, 0)
        scales = scales_of(all_coded)
        if self._lgc.pattern == ALL_REDUCE:  # one scale for all
            scales = tf.fill([inputs.size], scales[0])
        vectors = self._vectors(tf.math.divide_no_nan(all_coded, scales[:, tf.newaxis]))[:row_count]
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


class Switching(Phase, registered=False):
    """A step in which all replicas get the autoencoder's weights from the first replica."""

    name: ClassVar[str] = "lgc_switching"

    def reduce(self, inputs: StepInputs) -> Generator[Request, tf.Tensor, Reduced]:
        """Exchanges like `Summing`, and broadcasts the weights."""
        step, state = self._step(inputs), inputs.job_state
        yield from step.broadcast_choice()
        own = step.coded()
        sums = yield from step.sum(own)
        weights = tf.bitcast(state[WEIGHTS].read_value(), tf.int32)
        weights = yield Broadcast(weights, tf.constant(0))
        state[WEIGHTS].assign(tf.bitcast(weights, tf.float32))
        state[PHASE].assign(CODING)
        return step.end(sums, sums.extra, sums.finite, 4 * step.layout.coded_entries)


class Rounding(Phase, registered=False):
    """Gathers the entries in 8 bits, after training failed or the autoencoder was abandoned."""

    name: ClassVar[str] = "lgc_rounding"

    def reduce(self, inputs: StepInputs) -> Generator[Request, tf.Tensor, Reduced]:
        """Broadcasts the positions of the leader's entries, and gathers these in a few bits."""
        step = self._step(inputs)
        layout = step.layout
        yield from step.broadcast_choice()
        own = step.coded()
        sums = yield from step.sum()
        if not layout.coded:
            return step.end(sums, own, sums.finite, 0)
        counts = [layout.entries[place] for place in layout.coded]
        split = ops.ChunkSplit(
            whole=tf.zeros([0], tf.int32),
            coded=tf.range(sum(counts)),
            scale_indices=tf.repeat(tf.range(len(counts)), counts),
            counts=tf.constant(counts, tf.int64),
        )
        codes = yield from gather_codes(
            own, split, inputs, step.local_finite, _FALLBACK_BITS, self._header(inputs)
        )
        coded_bytes = sum(counts) * _FALLBACK_BITS / 8 + 4 * len(counts)
        return step.end(sums, codes.total, codes.finite, coded_bytes, own - codes.sent)


def _receive_weights_update(step: LeaderStep) -> Generator[Request, tf.Tensor, None]:
    """Broadcasts the leader's selection and, from the first replica, the next phase."""
    state = step.inputs.job_state

    def news(_chosen: tf.Tensor) -> tf.Tensor:
        wanted = tf.cast(state[WANTED].read_value(), tf.int32)
        return tf.concat([[wanted], tf.bitcast(state[LATEST].read_value(), tf.int32)], 0)

    received = yield from step.broadcast_choice(3, news)
    wanted, is_news = tf.cast(received[0], tf.int64), tf.equal(step.leader, 0)
    phase, learning = state[PHASE].read_value(), state[LEARNING].read_value()
    changes = tf.logical_and(is_news, wanted > 0)
    state[PHASE].assign(tf.where(changes, wanted, phase))
    state[LEARNING].assign(tf.where(is_news, tf.bitcast(received[1:], tf.float32), learning))


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
