"""The phases of LGC that follow its dense steps; `LGC.phase` says whose turn it is.

The first replica, where the autoencoder is trained, decides which phase comes next; that the
autoencoder is not to be used any longer, any replica. It tells the others in a step that it leads,
and all take it from the step after: so they change together, and none waits for another between
steps.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import re
from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any, ClassVar

import tensorflow as tf

from tf_gradcomp import ops
from tf_gradcomp.compressors.autoencoder import Architecture, Network
from tf_gradcomp.compressors.base import Compressor, Exchanged, ExchangeInputs, JobStateSpec
from tf_gradcomp.compressors.digests import digest_of_floats
from tf_gradcomp.compressors.led import Layout, LedStep
from tf_gradcomp.compressors.per_variable import PerVariable
from tf_gradcomp.compressors.value_bits import gather_codes, sum_shares
from tf_gradcomp.compressors.wishes import AllGather, Broadcast, Wish
from tf_gradcomp.ops.payload import LGC as LGC_PAYLOAD
from tf_gradcomp.policy import FIRST, LAST, VECTOR, GradientSpec

ALL_REDUCE, PARAMETER_SERVER = "all_reduce", "parameter_server"
FLOAT16, FLOAT32 = "float16", "float32"

# Names in the state of the job; all but `SHARE_ERROR` are equal on all replicas, or count on the
# first one alone.
MADE_FOR = "lgc_made_for"  # a digest of the settings that the state is for; 0: nothing yet
PHASE = "lgc_phase"
WANTED = "lgc_wanted"  # the phase that the first replica wants; 0: none
LATEST = "lgc_latest"  # float32 [2]: loss and relative error of the last step of training
LEARNING = "lgc_learning"  # the same, as the first replica told all of them last
COLLECTED = "lgc_collected"  # steps whose vectors were collected
VECTORS = "lgc_vectors"
VECTOR_STEPS = "lgc_vector_steps"  # by row of `VECTORS`: which collected step, from 1 on; 0: none
LEARNT = "lgc_learnt"  # the last collected step that the autoencoder was trained with
ERRORS = "lgc_errors"  # one plus the relative errors of the last of them; 0: none
WEIGHTS = "lgc_weights"
NORMS = "lgc_norms"  # `_norms` in the first step with the autoencoder that it led; 0: not known
DECODED = "lgc_decoded"  # a digest of what was decoded last
SHARE_ERROR = "lgc_share_error"  # of what this replica sent of its own entries

_OF_WHAT_WAS_LEARNT = (
    PHASE,
    WANTED,
    LATEST,
    LEARNING,
    COLLECTED,
    VECTOR_STEPS,
    LEARNT,
    ERRORS,
    NORMS,
    DECODED,
)

SUMMING, COLLECTING, SWITCHING, CODING, ROUNDING = range(5)  # the phases, in their order
KEPT_VECTORS = 256
KEPT_ERRORS = 20

_SMALLEST = 1024  # elements of a tensor whose entries are chosen
_LARGEST = 1e6  # of a vector for the autoencoder; with its own scale, none is so large
_FALLBACK_BITS = 8
_MOST_GROWTH = 3.0  # of the residuals while the autoencoder is in use (specification, 6.9)


@dataclasses.dataclass(frozen=True)
class Settings:
    """The settings of `LGC` that its phases need.

    Attributes:
        pattern: `ALL_REDUCE` or `PARAMETER_SERVER`.
        density: Which part of the entries is chosen, by variable.
        innovation: Which part of the coded entries each replica adds of its own.
        order: Of the coded entries; see `led.ORDERS`.
        latent_dtype: `FLOAT32` or `FLOAT16`.
        architecture: Of the autoencoder.
        config: All settings of `LGC`, which differ where those of replicas do.
    """

    pattern: str
    density: PerVariable[float]
    innovation: float
    order: str
    latent_dtype: str
    architecture: Architecture
    config: Mapping[str, Any]

    @property
    def innovations(self) -> bool:
        """Whether the autoencoder's output has a channel for them."""
        return self.pattern == PARAMETER_SERVER

    def phase(self, job_state: Mapping[str, tf.Variable]) -> tf.Tensor:
        """That of the job, int64 scalar: the first one where its state is for other settings."""
        return tf.where(self.is_made_for(job_state), job_state[PHASE].read_value(), SUMMING)

    def is_made_for(self, job_state: Mapping[str, tf.Variable]) -> tf.Tensor:
        """Whether the state of the job is that of an autoencoder with these settings, or new."""
        made_for = job_state[MADE_FOR].read_value()
        return tf.logical_or(tf.equal(made_for, self._digest), tf.equal(made_for, 0))

    def begin_anew_unless_made_for(self, job_state: Mapping[str, tf.Variable]) -> None:
        """Forgets what was learnt for other vectors, or by another autoencoder."""

        def forget() -> None:
            for name in _OF_WHAT_WAS_LEARNT:
                job_state[name].assign(tf.zeros_like(job_state[name]))

        tf.cond(self.is_made_for(job_state), lambda: None, forget)
        job_state[MADE_FOR].assign(self._digest)

    @functools.cached_property
    def _digest(self) -> int:
        sizes = (self.architecture.encoder, self.architecture.decoder, self.architecture.slope)
        text = repr((self.pattern, self.order, self.innovation, sizes))
        return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "little") + 1

    def layout(self, specs: Sequence[GradientSpec]) -> Layout:
        """How tensors are sent."""
        entries = tuple(self._entries(spec) for spec in specs)
        places = range(len(specs))
        led = [place for place in places if entries[place]]
        return Layout(
            whole=tuple(place for place in places if not entries[place]),
            coded=tuple(place for place in led if specs[place].end != LAST),
            plain=tuple(place for place in led if specs[place].end == LAST),
            entries=entries,
            place_words=tuple(
                ops.led_place_words(spec.elements, count)
                for spec, count in zip(specs, entries, strict=True)
            ),
        )

    def _entries(self, spec: GradientSpec) -> int:
        named = any(re.search(pattern, spec.path) for pattern in self.density.overrides)
        small = spec.elements < _SMALLEST or spec.kind == VECTOR
        density = self.density.of(spec)
        if density is None or ((small or spec.end == FIRST) and not named):
            return 0
        return max(1, math.ceil(density * spec.elements)) if spec.elements else 0

    def padded(self, entries: int) -> int:
        """The length of a vector of the autoencoder."""
        return self.architecture.padded(max(entries, 1))

    def latent_bytes(self, entries: int) -> int:
        """Of the latent of so many entries, in whole words."""
        floats = self.architecture.latents(entries)
        return 4 * floats if self.latent_dtype == FLOAT32 else 4 * -(-floats // 2)

    def added(self, entries: int) -> int:
        """How many of the coded entries are a replica's innovation."""
        return math.ceil(self.innovation * entries)

    def job_state(self, specs: Sequence[GradientSpec]) -> dict[str, JobStateSpec]:
        """What the phases keep for the whole job."""
        length = self.padded(self.layout(specs).coded_entries)
        parameters = self.architecture.parameters(self.innovations)
        return {
            MADE_FOR: JobStateSpec((), "int64"),
            PHASE: JobStateSpec((), "int64"),
            WANTED: JobStateSpec((), "int64"),
            LATEST: JobStateSpec((2,)),
            LEARNING: JobStateSpec((2,)),
            COLLECTED: JobStateSpec((), "int64"),
            VECTORS: JobStateSpec((KEPT_VECTORS, length)),
            VECTOR_STEPS: JobStateSpec((KEPT_VECTORS,), "int64"),
            LEARNT: JobStateSpec((), "int64"),
            ERRORS: JobStateSpec((KEPT_ERRORS,)),
            WEIGHTS: JobStateSpec((parameters,)),
            NORMS: JobStateSpec((len(specs),), of_gradients=True),
            DECODED: JobStateSpec((), "int64"),
            SHARE_ERROR: JobStateSpec(()),
        }


class _Phase(Compressor, registered=False):
    """A phase; it has the settings and the state of `LGC`."""

    delays_unless = 0

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self._of = settings

    def get_config(self) -> dict[str, Any]:
        """The settings of `LGC`."""
        return {**self._of.config}

    def settings(self, specs: Sequence[GradientSpec]) -> list[int]:
        """How many entries of each tensor are chosen; 0 if it is sent whole."""
        return list(self._of.layout(specs).entries)

    def _step(self, inputs: ExchangeInputs) -> LedStep:
        return LedStep(inputs, self._of.layout(inputs.specs), self._of.order)

    def _header(self, inputs: ExchangeInputs) -> dict[str, Any]:
        return {
            "settings": self.settings_in_force(inputs),
            "fingerprint": self.fingerprint(inputs.specs),
        }

    def _network(self, inputs: ExchangeInputs) -> Network:
        weights = inputs.job_state[WEIGHTS].read_value()
        return Network(self._of.architecture, weights, self._of.innovations)

    def _vectors(self, entries: tf.Tensor) -> tf.Tensor:
        """Entries over their scale as vectors for the autoencoder: [rows, n] to [rows, padded]."""
        count = entries.shape[1]
        bounded = tf.clip_by_value(entries, -_LARGEST, _LARGEST)
        return tf.pad(bounded, [[0, 0], [0, self._of.padded(count) - count]])


class Summing(_Phase, registered=False):
    """Sums the entries that a leader chose; the first replica may say what comes next."""

    name: ClassVar[str] = "lgc_summing"

    def exchange(self, inputs: ExchangeInputs) -> Generator[Wish, tf.Tensor, Exchanged]:
        """Broadcasts where the leader's largest entries are, and sums them."""
        self._of.begin_anew_unless_made_for(inputs.job_state)
        step = self._step(inputs)
        yield from _follow_news(step)
        own = step.coded()
        sums = yield from step.sum(own)
        return step.end(sums, sums.more, sums.finite, 4 * step.layout.coded_entries)


class Collecting(_Phase, registered=False):
    """Gathers the entries, and keeps them for the training of the autoencoder."""

    name: ClassVar[str] = "lgc_collecting"

    def exchange(self, inputs: ExchangeInputs) -> Generator[Wish, tf.Tensor, Exchanged]:
        """Broadcasts where the leader's largest entries are, and gathers them."""
        step = self._step(inputs)
        entries = step.layout.coded_entries
        yield from _follow_news(step)
        own = step.coded()
        sums = yield from step.sum()
        if not entries:
            return step.end(sums, own, sums.finite, 0)
        header = self._header(inputs)
        body = tf.bitcast(own, tf.int32)
        payload = ops.payload_write(
            body, inputs.step, step.own_finite, method=LGC_PAYLOAD, **header
        )
        payloads = yield AllGather(payload, same_length=True)
        bodies, finite = ops.payload_read(payloads, inputs.step, method=LGC_PAYLOAD, **header)
        of_all = tf.ensure_shape(tf.bitcast(bodies, tf.float32), [inputs.size, entries])
        exchanged = step.end(sums, _sum_in_order(of_all), finite, 4 * entries)
        self._keep(of_all, step, exchanged.finite)
        return exchanged

    def _keep(self, of_all: tf.Tensor, step: LedStep, finite: tf.Tensor) -> None:
        """Keeps the vectors of a step, the leader's first, on the first replica; all count it."""
        inputs, state = step.inputs, step.inputs.job_state
        kept = min(inputs.size, KEPT_VECTORS)
        number = state[COLLECTED].read_value()
        of_all = tf.roll(of_all, -step.leader, 0)
        scales = scales_of(of_all)
        if self._of.pattern == ALL_REDUCE:  # one scale for all
            scales = tf.fill([inputs.size], scales[0])
        vectors = self._vectors(tf.math.divide_no_nan(of_all, scales[:, tf.newaxis]))[:kept]
        unused = state[VECTORS].shape[1] - vectors.shape[1]  # by a step with some of the gradients
        rows = tf.cast(number % (KEPT_VECTORS // kept), tf.int32) * kept + tf.range(kept)

        def keep() -> None:
            padded = tf.pad(vectors, [[0, 0], [0, unused]])
            state[VECTORS].scatter_update(tf.IndexedSlices(padded, rows))
            steps = tf.fill([kept], number + 1)
            state[VECTOR_STEPS].scatter_update(tf.IndexedSlices(steps, rows))

        is_first = tf.equal(inputs.rank, 0)
        tf.cond(tf.logical_and(finite, is_first), keep, lambda: None)
        state[COLLECTED].assign(number + tf.cast(finite, tf.int64))


class Switching(_Phase, registered=False):
    """One step in which all replicas get the weights of the autoencoder from the first one."""

    name: ClassVar[str] = "lgc_switching"

    def exchange(self, inputs: ExchangeInputs) -> Generator[Wish, tf.Tensor, Exchanged]:
        """As in `Summing`, and broadcasts the weights."""
        step, state = self._step(inputs), inputs.job_state
        yield from step.follow()
        own = step.coded()
        sums = yield from step.sum(own)
        weights = tf.bitcast(state[WEIGHTS].read_value(), tf.int32)
        weights = yield Broadcast(weights, tf.constant(0))
        state[WEIGHTS].assign(tf.bitcast(weights, tf.float32))
        state[PHASE].assign(CODING)
        return step.end(sums, sums.more, sums.finite, 4 * step.layout.coded_entries)


class Coding(_Phase, registered=False):
    """Sends what the autoencoder makes of the entries."""

    name: ClassVar[str] = "lgc_coding"

    def settings_in_force(self, inputs: ExchangeInputs) -> tf.Tensor:
        """How many entries are chosen; and digests of the weights and of what was decoded last.

        So replicas that do not decode alike find out in the next step.
        """
        state = inputs.job_state
        digests = [digest_of_floats(state[WEIGHTS].read_value()), state[DECODED].read_value()]
        return tf.concat([super().settings_in_force(inputs), tf.stack(digests)], 0)

    def exchange(self, inputs: ExchangeInputs) -> Generator[Wish, tf.Tensor, Exchanged]:
        """Broadcasts where the leader's largest entries are, and sums or gathers their codes."""
        step = self._step(inputs)
        if not step.layout.coded_entries:
            yield from step.follow()
            nothing = step.coded()
            sums = yield from step.sum()
            return step.end(sums, nothing, sums.finite, 0)
        in_turn = self._all_reduce if self._of.pattern == ALL_REDUCE else self._parameter_server
        own, totals, shares, sums, finite, coded_bytes = yield from in_turn(step)
        exchanged = step.end(sums, totals, finite, coded_bytes, own - shares)
        decoded, state = digest_of_floats(totals), inputs.job_state
        error = tf.math.divide_no_nan(
            tf.reduce_sum(tf.square(_over_scale(own - shares, scale_of(own)))),
            tf.reduce_sum(tf.square(_over_scale(own, scale_of(own)))),
        )
        for name, value in ((DECODED, decoded), (SHARE_ERROR, error)):
            before = state[name].read_value()
            state[name].assign(tf.where(exchanged.finite, value, before))
        return exchanged

    def _follow(
        self, step: LedStep, words: int, more: Callable[[tf.Tensor], tf.Tensor]
    ) -> Generator[Wish, tf.Tensor, tf.Tensor]:
        """As `LedStep.follow`; and ends the phase where what the leader keeps has grown too much.

        Then the autoencoder misses so much of today's gradients that training would be lost.
        """
        state = step.inputs.job_state

        def with_growth(chosen: tf.Tensor) -> tf.Tensor:
            numbers, now = _numbers(step.inputs), _norms(step.inputs)
            before = tf.gather(state[NORMS].read_value(), numbers)
            before = tf.where(before > 0, before, now)
            state[NORMS].scatter_update(tf.IndexedSlices(before, numbers))
            grown = tf.norm(now) > _MOST_GROWTH * tf.norm(before)
            return tf.concat([[tf.cast(grown, tf.int32)], more(chosen)], 0)

        told = yield from step.follow(1 + words, with_growth)
        phase = state[PHASE].read_value()
        state[PHASE].assign(tf.where(told[0] > 0, tf.cast(ROUNDING, phase.dtype), phase))
        return told[1:]

    def _all_reduce(self, step: LedStep) -> Generator[Wish, tf.Tensor, Any]:
        """The latents of all replicas are averaged, with the leader's scale."""
        entries, size = step.layout.coded_entries, step.inputs.size
        network = self._network(step.inputs)
        summed = self._of.latent_dtype == FLOAT16

        def scales(chosen: tf.Tensor) -> tf.Tensor:
            told = [scale_of(chosen)]
            if summed:
                scaled = _over_scale(chosen, told[0])
                latent = network.encode(self._vectors(scaled[tf.newaxis]))
                told.append(tf.reduce_max(tf.abs(latent)))
            return tf.bitcast(tf.stack(told), tf.int32)

        told = tf.bitcast((yield from self._follow(step, 1 + summed, scales)), tf.float32)
        scale, own = told[0], step.coded()
        own_latent = network.encode(self._vectors(_over_scale(own, scale)[tf.newaxis]))
        flat = tf.reshape(own_latent, [self._of.architecture.latents(entries)])
        flat = tf.where(step.own_finite, flat, tf.zeros_like(flat))
        if summed:
            sums = yield from step.sum()
            of_each = tf.fill(tf.shape(flat), told[1])
            rounded = yield from sum_shares(flat, of_each, step.own_finite, size)
            flat, total = rounded.sent, rounded.total
            finite = tf.logical_and(sums.finite, rounded.finite)
        else:
            sums = yield from step.sum(flat)
            total, finite = sums.more, sums.finite
        both = tf.reshape(tf.concat([total / size, flat], 0), [2, *own_latent.shape[1:]])
        mean, share = tf.unstack(network.output(network.expand(both, frozen=True)) * scale)
        coded_bytes = flat.shape[0] * (2 if summed else 4)
        return own, mean[:entries] * size, share[:entries], sums, finite, coded_bytes

    def _parameter_server(self, step: LedStep) -> Generator[Wish, tf.Tensor, Any]:
        """The leader's latent for all, and each replica's innovation."""
        inputs, entries = step.inputs, step.layout.coded_entries
        size, count = inputs.size, self._of.added(entries)
        network, architecture = self._network(inputs), self._of.architecture

        def latent(chosen: tf.Tensor) -> tf.Tensor:
            scaled = _over_scale(chosen, scale_of(chosen))
            return self._as_words(network.encode(self._vectors(scaled[tf.newaxis])))

        latent_bytes = self._of.latent_bytes(entries)
        told = yield from self._follow(step, latent_bytes // 4, latent)
        own = step.coded()
        sums = yield from step.sum()
        scale = scale_of(own)
        _, places = tf.math.top_k(tf.abs(own), count)
        added = tf.gather(_over_scale(own, scale), places)
        floats = tf.bitcast(tf.concat([[scale], added], 0), tf.int32)
        header = self._header(inputs)
        payload = ops.payload_write(
            tf.concat([floats, places], 0),
            inputs.step,
            step.own_finite,
            method=LGC_PAYLOAD,
            **header,
        )
        payloads = yield AllGather(payload, same_length=True)
        bodies, finite = ops.payload_read(payloads, inputs.step, method=LGC_PAYLOAD, **header)
        bodies = tf.ensure_shape(bodies, [size, 1 + 2 * count])
        floats, places = tf.split(bodies, [1 + count, count], 1)
        floats = tf.bitcast(floats, tf.float32)
        rows = tf.repeat(tf.range(size), count)
        where = tf.stack([rows, tf.reshape(places, [-1])], 1)
        length = self._of.padded(entries)
        innovations = tf.scatter_nd(where, tf.reshape(floats[:, 1:], [-1]), [size, length])
        shape = [1, length // architecture.shortening, architecture.channels]
        expanded = network.expand(tf.reshape(self._from_words(told, entries), shape))
        of_all = network.output(expanded, innovations)[:, :entries] * floats[:, :1]
        share = tf.gather(of_all, inputs.rank)
        coded_bytes = latent_bytes / size + 8 * count
        return own, _sum_in_order(of_all), share, sums, finite, coded_bytes

    def _as_words(self, latent: tf.Tensor) -> tf.Tensor:
        flat = tf.reshape(latent, [-1])
        if self._of.latent_dtype == FLOAT32:
            return tf.bitcast(flat, tf.int32)
        bounded = tf.clip_by_value(flat, tf.float16.min, tf.float16.max)
        halves = tf.pad(tf.cast(bounded, tf.float16), [[0, tf.size(flat) % 2]])
        return tf.bitcast(tf.reshape(halves, [-1, 2]), tf.int32)

    def _from_words(self, words: tf.Tensor, entries: int) -> tf.Tensor:
        if self._of.latent_dtype == FLOAT32:
            return tf.bitcast(words, tf.float32)
        halves = tf.reshape(tf.bitcast(words, tf.float16), [-1])
        return tf.cast(halves[: self._of.architecture.latents(entries)], tf.float32)


class Rounding(_Phase, registered=False):
    """Gathers the entries in 8 bits, where no autoencoder could be trained, or it was given up."""

    name: ClassVar[str] = "lgc_rounding"

    def exchange(self, inputs: ExchangeInputs) -> Generator[Wish, tf.Tensor, Exchanged]:
        """Broadcasts where the leader's largest entries are, and gathers them in a few bits."""
        step = self._step(inputs)
        layout = step.layout
        yield from step.follow()
        own = step.coded()
        sums = yield from step.sum()
        if not layout.coded:
            return step.end(sums, own, sums.finite, 0)
        counts = [layout.entries[place] for place in layout.coded]
        split = ops.ChunkSplit(
            whole=tf.zeros([0], tf.int32),
            coded=tf.range(sum(counts)),
            scale_of=tf.repeat(tf.range(len(counts)), counts),
            counts=tf.constant(counts, tf.int64),
        )
        codes = yield from gather_codes(
            own, split, inputs, step.own_finite, _FALLBACK_BITS, self._header(inputs)
        )
        coded_bytes = sum(counts) * _FALLBACK_BITS / 8 + 4 * len(counts)
        return step.end(sums, codes.total, codes.finite, coded_bytes, own - codes.sent)


def _follow_news(step: LedStep) -> Generator[Wish, tf.Tensor, None]:
    """Has the leader choose; and if that is the first replica, takes what it wants to be next."""
    state = step.inputs.job_state

    def news(_chosen: tf.Tensor) -> tf.Tensor:
        wanted = tf.cast(state[WANTED].read_value(), tf.int32)
        return tf.concat([[wanted], tf.bitcast(state[LATEST].read_value(), tf.int32)], 0)

    told = yield from step.follow(3, news)
    wanted, is_news = tf.cast(told[0], tf.int64), tf.equal(step.leader, 0)
    phase, learning = state[PHASE].read_value(), state[LEARNING].read_value()
    changes = tf.logical_and(is_news, wanted > 0)
    state[PHASE].assign(tf.where(changes, wanted, phase))
    state[LEARNING].assign(tf.where(is_news, tf.bitcast(told[1:], tf.float32), learning))


def _norms(inputs: ExchangeInputs) -> tf.Tensor:
    """The Euclidean norms of a replica's residuals times the number of replicas: float32 [tensors].

    Gradients carry one over that number, so a job that goes on with another one can compare them.
    """
    residuals = [
        tf.raw_ops.ReadVariableOp(resource=residual, dtype=tf.float32)
        for residual in inputs.residuals
    ]
    return tf.stack([tf.norm(residual) for residual in residuals]) * inputs.size


def _numbers(inputs: ExchangeInputs) -> list[int]:
    """The places of the gradients of this step among all of the job."""
    return list(range(len(inputs.specs)) if inputs.numbers is None else inputs.numbers)


def scale_of(values: tf.Tensor) -> tf.Tensor:
    """The root mean square of a vector; 0 if that is not a positive number."""
    return scales_of(values[tf.newaxis])[0]


def scales_of(rows: tf.Tensor) -> tf.Tensor:
    """The root mean square of each row: float32 [rows]; 0 where that is not a positive number.

    It is computed of numbers of up to 1, so that it neither overflows nor vanishes, and a row times
    a power of two has that times the scale. What is decoded of zeros need not be zeros, and is by
    its scale.
    """
    most = tf.reduce_max(tf.abs(rows), 1)
    mean = tf.reduce_mean(tf.square(tf.math.divide_no_nan(rows, most[:, tf.newaxis])), 1)
    scales = most * tf.sqrt(mean)
    good = tf.logical_and(scales > 0, tf.math.is_finite(scales))
    return tf.where(good, scales, tf.zeros_like(scales))


def _over_scale(values: tf.Tensor, scale: tf.Tensor) -> tf.Tensor:
    return tf.math.divide_no_nan(values, scale)  # no values but zeros have a scale of 0


def _sum_in_order(rows: tf.Tensor) -> tf.Tensor:
    """The sum of rows, added in their order, as a reduction need not be."""
    return tf.gather(tf.cumsum(rows, 0), rows.shape[0] - 1)
