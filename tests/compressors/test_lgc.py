"""LGC: its phases, its autoencoder in plain TensorFlow, and the figures of its specification."""

import json

import numpy as np
import pytest
import tensorflow as tf

from tests.bounds import assert_close, rounding
from tests.compressors.lockstep import Lockstep, assert_equal_bits
from tests.reference import lgc
from tests.reference.leader import leader
from tf_gradcomp import compressors
from tf_gradcomp.compressors import LGC
from tf_gradcomp.compressors.base import RESIDUAL, StepInputs
from tf_gradcomp.compressors.lgc.autoencoder import Architecture, Network
from tf_gradcomp.compressors.lgc.job_state import (
    CODING,
    COLLECTED,
    COLLECTING,
    DECODED,
    NORMS,
    ROUNDING,
    STAGE,
    SUMMING,
    SWITCHING,
    VECTOR_STEPS,
    VECTORS,
    WANTED,
    WEIGHTS,
)
from tf_gradcomp.policy import GradientSpec

PATTERNS = ["all_reduce", "parameter_server"]
SPECS = [
    GradientSpec("first/kernel", (60, 20), "float32", "dense", end="first"),
    GradientSpec("a/kernel", (40, 30), "float32", "dense"),
    GradientSpec("a/bias", (30,), "float32", "vector"),
    GradientSpec("b/kernel", (3, 3, 12, 12), "float32", "convolution"),
    GradientSpec("last/kernel", (60, 30), "float32", "dense", end="last"),
]
CODED = [1, 3]
IDENTITY = {"encoder": [], "decoder": [], "weights": np.array([1, 0], np.float32)}
every_pattern = pytest.mark.parametrize("pattern", PATTERNS)


def gradients(seed, size=3):
    generator = np.random.default_rng(seed)
    return [
        [generator.laplace(size=spec.shape).astype(np.float32) for spec in SPECS]
        for _ in range(size)
    ]


def weights_of(compressor, seed=5):
    """Random weights that neither blow up nor vanish from layer to layer."""
    shapes = compressor.architecture.shapes(compressor.innovations)
    generator = np.random.default_rng(seed)
    parts = [
        generator.normal(size=shape) / np.sqrt(np.prod(shape[:-1]) if len(shape) > 1 else 100)
        for shape in shapes
    ]
    return [part.astype(np.float32) for part in parts]


def flat(parts):
    return np.concatenate([part.reshape(-1) for part in parts])


def in_phase(phase, compressor, size=3, weights=None):
    """Replicas in a phase, with weights of the autoencoder."""
    lockstep = Lockstep(compressor, SPECS, size)
    for job_state in lockstep.job_state:
        job_state[STAGE].assign(phase)
        job_state[WEIGHTS].assign(flat(weights or weights_of(compressor)))
    return lockstep


def rounded(before, given):
    """Returns how much of residuals and gradients rounding may lose: each is added and shared."""
    most = sum(
        max(np.abs(array).max(initial=0) for array in arrays)
        for arrays in (*(state[RESIDUAL] for state in before), *given)
    )
    return rounding(most, terms=4)


def lost(before, given, outcome):
    """Returns the largest part of residuals and gradients that is neither reduced nor kept."""
    missed = []
    for index, reduced in enumerate(outcome.reduced[0]):
        had = sum(state[RESIDUAL][index].astype(np.float64) for state in before)
        had += sum(tensors[index].astype(np.float64) for tensors in given)
        kept = sum(tensors[index].astype(np.float64) for tensors in outcome.residuals)
        missed.append(np.abs(reduced + kept - had).max())
    return max(missed)


# The autoencoder.


def test_parameters_and_lengths_equal_the_specification():
    paper = Architecture()
    output = (33, 34)
    assert [paper.parameters(innovations) for innovations in (False, True)] == [216_677, 216_678]
    shapes = paper.shapes(False)
    encoder = sum(int(np.prod(shape)) for shape in shapes[: 2 * len(paper.encoder)])
    assert encoder == 172_996
    assert paper.parameters(False) - encoder == 43_681
    assert paper.parameters(False) - encoder - output[0] == 43_648
    assert [paper.padded(entries) for entries in (1, 16, 1000, 23_475)] == [16, 16, 1008, 23_488]
    assert [paper.latents(entries) for entries in (16, 1000, 23_475)] == [4, 252, 5872]


@pytest.mark.parametrize("length", [16, 1008, 23_488])
def test_vectors_are_coded_and_decoded_to_their_length(length):
    network = Network(Architecture(), tf.zeros([216_677]), False)
    latents = network.encode(tf.ones([1, length]))
    assert latents.shape == (1, length // 16, 4)
    assert network.output(network.expand(latents)).shape == (1, length)


@pytest.mark.parametrize("slope", [0.01, 1.0])
def test_it_computes_what_the_reference_does(slope):
    compressor = LGC("parameter_server", autoencoder={"slope": slope})
    parts = weights_of(compressor)
    network = Network(compressor.architecture, tf.constant(flat(parts)), True)
    sizes = (compressor.architecture.encoder, compressor.architecture.decoder)
    reference = lgc.Network(sizes, parts, slope)
    vectors = np.random.default_rng(1).normal(size=(2, 48)).astype(np.float32)
    latents = network.encode(vectors).numpy()
    np.testing.assert_allclose(latents[1], reference.encode(vectors[1]), rtol=1e-4, atol=1e-5)
    added = np.random.default_rng(2).normal(size=48).astype(np.float32)
    decoded = network.output(network.expand(latents[:1]), added[np.newaxis])[0]
    expected = reference.decode(latents[0], added)
    np.testing.assert_allclose(decoded, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("dtype", "error"), [(np.float64, 1e-16), (np.float32, 6e-8)])
def test_with_frozen_slopes_shares_average_to_what_is_decoded(dtype, error):
    compressor = LGC()
    parts = [part.astype(dtype) for part in weights_of(compressor)]
    sizes = (compressor.architecture.encoder, compressor.architecture.decoder)
    network = lgc.Network(sizes, parts)
    latents = np.random.default_rng(0).normal(size=(4, 3, 4)).astype(dtype)
    mean = latents.mean(0)
    decoded = network.decode(mean)
    shares = np.stack([network.share(mean, latent) for latent in latents])
    largest = np.abs(shares).max()
    np.testing.assert_allclose(shares.mean(0), decoded, rtol=0, atol=4 * error * largest)
    local = np.stack([network.decode(latent) for latent in latents]).mean(0)
    assert np.abs(local - decoded).max() > 1e-3 * largest
    if dtype == np.float32:
        native = Network(compressor.architecture, tf.constant(flat(parts)), False)
        rows = tf.concat([mean[np.newaxis], latents], 0)
        both = native.output(native.expand(rows, frozen=True)).numpy()
        plain = native.output(native.expand(mean[np.newaxis])).numpy()
        np.testing.assert_allclose(both[:1], plain, rtol=0, atol=1e-6 * largest)
        np.testing.assert_allclose(both[1:], shares, rtol=0, atol=1e-5 * largest)


# The algorithm, in NumPy and float64.


def run(step, steps=20, size=3, elements=400, count=40):
    """Returns the sums of gradients, of sent values and of residuals, for a step of the
    reference."""
    generator = np.random.default_rng(3)
    residuals, given, sent = np.zeros((size, elements)), np.zeros(elements), np.zeros(elements)
    for index in range(steps):
        fresh = generator.normal(size=(size, elements)) / size
        values, leads = residuals + fresh, leader(index, size)
        indices = lgc.top_k_by_leader(values, leads, [count], [elements])
        outcome = step(values, indices, leads)
        residuals, given, sent = outcome.residuals, given + fresh.sum(0), sent + outcome.total
    return given, sent, residuals.sum(0)


def some_coder(innovations):
    compressor = LGC(PATTERNS[innovations])
    parts = [part.astype(np.float64) for part in weights_of(compressor)]
    architecture = compressor.architecture
    return lgc.Network((architecture.encoder, architecture.decoder), parts).coder()


@pytest.mark.parametrize("way", [*PATTERNS, "dropping"])
def test_nothing_is_lost_but_by_the_rule_that_drops_what_the_coder_misses(way):
    coder = some_coder(way == "parameter_server")
    steps = {
        "all_reduce": lambda *arguments: lgc.all_reduce(*arguments, coder),
        "parameter_server": lambda *arguments: lgc.parameter_server(*arguments, coder, 4),
        "dropping": lambda *arguments: lgc.dropping(*arguments, coder),
    }
    given, sent, kept = run(steps[way])
    gap = np.abs(given - sent - kept).max() / np.abs(given).max()
    assert (gap > 0.01) if way == "dropping" else (gap < 1e-12)


def test_an_identity_is_top_k_by_a_leader():
    sums = run(lambda values, indices, leads: lgc.sum_entries(values, indices))
    coded = run(lambda *arguments: lgc.all_reduce(*arguments, lgc.identity()))
    for expected, actual in zip(sums, coded, strict=True):
        assert_close(actual, expected, terms=50, dtype="float64")


# The compressor.


def as_reference(values, compressor, leads, parts, pattern):
    """Encodes the coded tensors by the reference; values by replica, flat."""
    entries = compressor.layout(SPECS).entries
    sizes = [SPECS[index].elements for index in CODED]
    rows = np.stack([np.concatenate([value[index] for index in CODED]) for value in values])
    indices = lgc.top_k_by_leader(rows, leads, [entries[index] for index in CODED], sizes)
    architecture = compressor.architecture
    coder = lgc.Network((architecture.encoder, architecture.decoder), parts).coder()
    if pattern == "all_reduce":
        return lgc.all_reduce(rows, indices, leads, coder)
    added = compressor.layout(SPECS).added
    return lgc.parameter_server(rows, indices, leads, coder, added)


@every_pattern
def test_it_equals_the_reference_and_loses_nothing(pattern):
    compressor = LGC(pattern, density=0.1, warmup_steps=0, innovation=0.05)
    parts = weights_of(compressor)
    lockstep = in_phase(CODING, compressor, weights=parts)
    for step in range(3):
        step_gradients, before = gradients(step), lockstep.state
        values = [
            [
                (kept + new).reshape(-1)
                for kept, new in zip(state[RESIDUAL], replica_gradients, strict=True)
            ]
            for state, replica_gradients in zip(before, step_gradients, strict=True)
        ]
        expected = as_reference(values, compressor, leader(step, 3), parts, pattern)
        outcome = lockstep.step(step_gradients)
        assert lost(before, step_gradients, outcome) < rounded(before, step_gradients)
        largest = np.abs(expected.total).max()
        total = np.concatenate([outcome.reduced[0][index].reshape(-1) for index in CODED])
        np.testing.assert_allclose(total, expected.total, rtol=0, atol=2e-5 * largest)
        for replica, residuals in enumerate(outcome.residuals):
            kept = np.concatenate([residuals[index].reshape(-1) for index in CODED])
            np.testing.assert_allclose(kept, expected.residuals[replica], rtol=0, atol=1e-4)
        for index, reduced in enumerate(outcome.reduced[0]):
            assert_equal_bits(reduced, outcome.reduced[1][index])
        # The first layer and small variables are summed whole; the last layer sends the leader's
        # entries.
        for index in (0, 2):
            assert not any(residuals[index].any() for residuals in outcome.residuals)
        assert np.count_nonzero(outcome.reduced[0][4]) == 180


@every_pattern
@pytest.mark.parametrize(
    ("phase", "latent_dtype"),
    [
        *((phase, "float32") for phase in (SUMMING, COLLECTING, SWITCHING, CODING, ROUNDING)),
        (CODING, "float16"),
    ],
)
def test_no_phase_loses_anything_and_each_skips_a_bad_step(pattern, latent_dtype, phase):
    compressor = LGC(pattern, density=0.1, warmup_steps=0, latent_dtype=latent_dtype)
    lockstep = in_phase(phase, compressor)
    for step in range(2):
        before, step_gradients = lockstep.state, gradients(step)
        outcome = lockstep.step(step_gradients)
        assert outcome.finite == [True] * 3
        assert lost(before, step_gradients, outcome) < rounded(before, step_gradients)
        headers = [
            payload - tensors.sum()
            for payload, tensors in zip(outcome.payload_bytes, outcome.tensor_bytes, strict=True)
        ]
        once = 4 * compressor.job_state(SPECS)[WEIGHTS].shape[0] // 3
        switched = once if phase == SWITCHING and step == 0 else 0
        assert all(0 < header - switched <= 70 for header in headers)
    before, step_gradients = lockstep.state, gradients(2)
    step_gradients[1][3][0, 0, 0, 0] = np.inf  # not the leader's
    outcome = lockstep.step(step_gradients)
    assert outcome.finite == [False] * 3
    assert not any(reduced.any() for reduced in outcome.reduced[0])
    for replica, (state, residuals) in enumerate(zip(before, outcome.residuals, strict=True)):
        for had, new, has in zip(state[RESIDUAL], step_gradients[replica], residuals, strict=True):
            assert_equal_bits(has, had if replica == 1 else had + new)
    step_gradients = gradients(3)
    step_gradients[0][1][0, 0] = np.nan  # the leader's
    before = lockstep.state
    assert lockstep.step(step_gradients).finite == [False] * 3
    after = lockstep.step(gradients(4))
    assert after.finite == [True] * 3
    assert all(np.isfinite(reduced).all() for reduced in after.reduced[0])


def test_an_autoencoder_that_changes_nothing_sends_what_the_leaders_top_k_does():
    compressor = LGC(density=0.1, warmup_steps=0, autoencoder=IDENTITY)
    assert compressor.architecture.parameters(False) == 2
    coding, summing = (
        in_phase(phase, compressor, weights=[compressor.architecture.weights])
        for phase in (CODING, SUMMING)
    )
    for step in range(4):
        coded, summed = (lockstep.step(gradients(step)) for lockstep in (coding, summing))
        for first, second in zip(coded.reduced[0], summed.reduced[0], strict=True):
            np.testing.assert_allclose(first, second, rtol=1e-5, atol=1e-5)


@every_pattern
@pytest.mark.parametrize("exponent", [-100, -3, 60])
def test_gradients_times_a_power_of_two_give_that_times_the_sum(pattern, exponent):
    compressor = LGC(pattern, density=0.1, warmup_steps=0)
    plain, scaled = (in_phase(CODING, compressor) for _ in range(2))
    for step in range(2):
        step_gradients = gradients(step)
        factor = np.float32(2.0**exponent)
        expected = plain.step(step_gradients).reduced[0]
        actual = scaled.step(
            [[factor * g for g in replica_gradients] for replica_gradients in step_gradients]
        ).reduced[0]
        for first, second in zip(actual, expected, strict=True):
            np.testing.assert_array_equal(first, factor * second)


@every_pattern
@pytest.mark.parametrize("zero", [0, 1])  # the leader, and another replica
def test_the_decoding_of_zeros_is_zeros(pattern, zero):
    """An autoencoder makes something of zeros, and it would be far more than small gradients."""
    compressor = LGC(pattern, density=0.1, warmup_steps=0)
    lockstep = in_phase(CODING, compressor)
    small = [
        [np.float32(1e-4) * g for g in replica_gradients] for replica_gradients in gradients(0)
    ]
    small[zero] = [np.zeros_like(g) for g in small[zero]]
    outcome = lockstep.step(small)
    assert outcome.finite == [True] * 3
    empty = in_phase(CODING, compressor).state
    assert lost(empty, small, outcome) < rounded(empty, small)
    largest = max(np.abs(g).max() for replica_gradients in small for g in replica_gradients)
    for index in CODED:
        assert np.abs(outcome.reduced[0][index]).max() < 30 * largest
    if zero == 0 or pattern == "parameter_server":  # by its own scale, or the leader's
        for index in CODED:
            assert not np.any(lockstep.state[zero][RESIDUAL][index])


def test_the_first_replica_changes_all_phases_when_it_leads_a_step():
    compressor = LGC(density=0.1, warmup_steps=0)
    lockstep = in_phase(SUMMING, compressor)
    phases = lambda: [int(state[STAGE]) for state in lockstep.job_state]  # noqa: E731
    first, second = [step for step in range(1, 10) if leader(step, 3) == 0][:2]
    lockstep.step(gradients(0))
    lockstep.job_state[0][WANTED].assign(COLLECTING)
    lockstep.job_state[1][WANTED].assign(ROUNDING)  # which does not count
    for step in range(1, first + 1):
        assert phases() == [SUMMING] * 3
        lockstep.step(gradients(step))
    assert phases() == [COLLECTING] * 3
    lockstep.job_state[0][WANTED].assign(SWITCHING)
    weights = flat(weights_of(compressor, seed=7))
    lockstep.job_state[0][WEIGHTS].assign(weights)
    for step in range(first + 1, second + 1):
        assert phases() == [COLLECTING] * 3
        lockstep.step(gradients(step))
    assert phases() == [SWITCHING] * 3
    lockstep.step(gradients(second + 1))
    assert phases() == [CODING] * 3
    for state in lockstep.job_state:
        assert_equal_bits(state[WEIGHTS].numpy(), weights)


@every_pattern
@pytest.mark.parametrize(("share", "phase"), [(0.34, CODING), (0.33, ROUNDING)])
def test_a_leader_whose_residuals_are_three_times_as_large_gives_the_autoencoder_up(
    pattern, share, phase
):
    """All replicas do, from the next step on; residuals of others than the leader don't count."""
    compressor = LGC(pattern, density=0.1, warmup_steps=0)
    lockstep = in_phase(CODING, compressor)
    norms = [state[NORMS] for state in lockstep.job_state]
    first, second = [step for step in range(12) if leader(step, 3) == 1][:2]
    for step in range(second + 2):
        phases = {int(state[STAGE]) for state in lockstep.job_state}
        assert phases == {CODING if step <= second else phase}
        local = [3 * np.linalg.norm(residual) for residual in lockstep.state[1][RESIDUAL]]
        if step == second:  # as if its residuals had been so much smaller in the first one
            norms[1].assign(np.array(local, np.float32) * np.float32(share))
        before, step_gradients = lockstep.state, gradients(step)
        assert lost(before, step_gradients, lockstep.step(step_gradients)) < rounded(
            before, step_gradients
        )
        if step == first:
            np.testing.assert_allclose(norms[1], local, rtol=1e-5)


@every_pattern
def test_training_vectors_are_collected_of_finite_steps(pattern):
    compressor = LGC(pattern, density=0.1, warmup_steps=0)
    lockstep = in_phase(COLLECTING, compressor)
    lockstep.step(gradients(0))
    bad = gradients(1)
    bad[2][0][0, 0] = np.nan
    lockstep.step(bad)
    before, step_gradients = lockstep.state, gradients(2)
    lockstep.step(step_gradients)
    first, *others = lockstep.job_state
    assert [int(state[COLLECTED]) for state in lockstep.job_state] == [2, 2, 2]
    np.testing.assert_array_equal(first[VECTOR_STEPS].numpy()[:7], [1, 1, 1, 2, 2, 2, 0])
    assert not any(state[VECTORS].numpy().any() for state in others)
    rows = np.stack(
        [
            np.concatenate([(s[RESIDUAL][p] + g[p]).reshape(-1) for p in CODED])
            for s, g in zip(before, step_gradients, strict=True)
        ]
    )
    sizes = [SPECS[index].elements for index in CODED]
    indices = lgc.top_k_by_leader(rows, 2, [120, 130], sizes)
    chosen = rows[:, indices]
    shared = pattern == "all_reduce"
    scales = [lgc.scale(chosen[2] if shared else vector) for vector in chosen]
    leader_first = np.roll(chosen / np.array(scales)[:, np.newaxis], -2, axis=0)
    expected = np.pad(leader_first, ((0, 0), (0, 6)))
    np.testing.assert_allclose(first[VECTORS].numpy()[3:6], expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("what", [WEIGHTS, DECODED])
def test_replicas_that_decode_differently_differ_in_what_travels_with_their_next_sum(what):
    """`ReplicaStep` compares this digest in each step."""
    compressor = LGC(density=0.1, warmup_steps=0)
    lockstep = in_phase(CODING, compressor, size=2)
    lockstep.step(gradients(0, 2))
    first, second = lockstep.job_state
    in_force = compressor.stages[CODING].settings_in_force

    def settings(job_state):
        return in_force(inputs_with(job_state)).numpy().tolist()

    assert settings(first) == settings(second)
    value = np.array(second[what].numpy())
    value.flat[0] = np.nextafter(value.flat[0], 9) if what == WEIGHTS else value.flat[0] + 1
    second[what].assign(value)
    assert settings(first) != settings(second)


def inputs_with(job_state):
    return StepInputs(
        SPECS,
        [tf.zeros(spec.shape) for spec in SPECS],
        {},
        tf.constant(0, tf.int64),
        tf.constant(True),
        0,
        2,
        job_state=job_state,
    )


def test_a_step_with_some_of_the_gradients_is_coded_and_collected():
    compressor = LGC(density=0.1, warmup_steps=0)
    few = Lockstep(compressor, SPECS[:3], 2)
    for phase in (COLLECTING, CODING):
        for job_state, all_of_it in zip(
            few.job_state, in_phase(phase, compressor, 2).job_state, strict=True
        ):
            job_state.update(all_of_it)  # of the whole job
        step_gradients = [replica_gradients[:3] for replica_gradients in gradients(1, 2)]
        before = few.state
        assert lost(before, step_gradients, few.step(step_gradients)) < rounded(
            before, step_gradients
        )


# Bytes.


def resnet50(replicas, stem, added=0, index_bytes=2):
    """As the specification counts them: 2 bytes for an index, no vectors, values of the last."""
    entries, last = 23_475, 21
    indices = index_bytes * (entries + last)
    sizes = lgc.Sizes(23_520_842, stem, entries, last, 5872, replicas, indices, index_bytes)
    return sizes, added


def test_ratios_equal_the_specification():
    narrow, wide = 1728, 9408  # elements of a first kernel of 3 x 3 and of 7 x 7
    top_k = [resnet50(1, stem)[0] for stem in (wide, narrow)]
    assert [sizes.ratio(sizes.top_k()) for sizes in top_k] == pytest.approx([527, 636], rel=3e-3)
    for replicas, band in ((2, [1110, 1741]), (8, [1402, 2584])):
        layouts = [resnet50(replicas, stem)[0] for stem in (wide, narrow)]
        ratios = [sizes.ratio(sizes.all_reduce()) for sizes in layouts]
        assert ratios == pytest.approx(band, rel=3e-3)
    layouts = [resnet50(2, wide, 2348), resnet50(2, narrow, 235)]
    ratios = [sizes.ratio(sizes.parameter_server(added)) for sizes, added in layouts]
    assert ratios == pytest.approx([1081, 2154], rel=3e-3)
    runs = [
        lgc.whole_run_ratio(steps, 200, 300, (527, 1110), 216_677 / 23_520_842)
        for steps in (10_000, 50_000, 100_000)
    ]
    assert runs == pytest.approx([47.8, 203.9, 344.6], rel=1e-3)


@every_pattern
def test_counted_bytes_equal_the_formulas(pattern):
    compressor = LGC(pattern, density=0.1, warmup_steps=0, innovation=0.04)
    outcome = in_phase(CODING, compressor, size=2).step(gradients(0, 2))
    dense, coded, plain = 1200 + 30, 120 + 130, 180
    elements = sum(spec.elements for spec in SPECS)
    words = sum(
        lgc.packed(np.zeros(count), spec.elements).size
        for spec, count in zip(SPECS, compressor.layout(SPECS).entries, strict=True)
    )
    sizes = lgc.Sizes(elements, dense, coded, plain, 64, 2, 4 * words)
    flag, header = 4, 56 if pattern == "parameter_server" else 0
    news = 4 / 2  # of the leader, whether its residuals have grown
    by_formula = sizes.all_reduce() if not header else sizes.parameter_server(10)
    assert outcome.payload_bytes[0] == by_formula + flag + news + header


# Settings.


def test_weights_that_are_given_are_in_the_config_and_a_digest_of_them_in_the_text():
    given = {"encoder": [[2, 3, 4]], "decoder": [[3, 3, 4]], "slope": 1.0}
    weights = np.arange(33, dtype=np.float32)
    compressor = LGC(autoencoder={**given, "weights": weights})
    config = json.loads(json.dumps(compressor.get_config()))
    copy = LGC.from_config(config)
    assert_equal_bits(copy.architecture.weights, weights)
    assert copy.architecture == compressor.architecture
    assert len(repr(compressor)) < 600
    other = LGC(autoencoder={**given, "weights": weights + 1})
    assert repr(copy) == repr(compressor) != repr(other)
    assert other.stages[0].fingerprint(SPECS) != copy.stages[0].fingerprint(SPECS)


def test_a_name_with_settings():
    compressor = compressors.get("lgc(pattern='parameter_server', density=0.01, warmup_steps=5)")
    assert (compressor.pattern, compressor.warmup_steps) == ("parameter_server", 5)
    assert compressors.get(compressors.text_of(compressor)).get_config() == compressor.get_config()


def test_which_variables_are_coded():
    def layout(**settings):
        return LGC(**settings).layout(specs)

    specs = [
        *SPECS,
        GradientSpec("table/embeddings", (100, 30), "float32", "embedding"),
        GradientSpec("small/kernel", (30, 30), "float32", "dense"),
    ]
    default = layout()
    assert (default.whole, default.coded, default.plain) == ((0, 2, 5, 6), (1, 3), (4,))
    assert default.entries == (0, 2, 0, 2, 2, 0, 0)
    named = layout(density=0.1, overrides={"first": 0.5, "a/kernel": None, "small": 0.2})
    assert named.entries == (600, 0, 0, 130, 180, 0, 180)
    assert layout(density={"convolution": None, "embedding": 0.01}).coded == (1, 5)
