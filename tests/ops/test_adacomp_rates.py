"""The op reproduces the compression rates of the paper (papers' accounting: codes alone)."""

import numpy as np
import pytest
import tensorflow as tf

from tf_gradcomp import ops

SIZE, STEPS, AVERAGED = 50_000, 400, 99
NOISE = {
    "gaussian": lambda rng: rng.normal(scale=0.3, size=SIZE),
    "laplace": lambda rng: rng.laplace(scale=0.3, size=SIZE),
}


def mean_payload_bytes(noise, bin_size):
    rng = np.random.default_rng(1)
    mean = rng.normal(scale=0.02, size=SIZE)
    residual = tf.Variable(tf.zeros(SIZE))
    sent = []
    for step in range(STEPS):
        gradient = tf.constant(mean + NOISE[noise](rng), tf.float32)
        _, tensor_bytes = ops.adacomp_encode(
            [residual], [gradient], step, bin_sizes=[bin_size], fingerprint=0
        )
        sent.append(int(tensor_bytes[0]))
    return np.mean(sent[-AVERAGED:])


@pytest.mark.parametrize(
    ("noise", "bin_size", "ratio"),
    [("gaussian", 50, 40), ("gaussian", 500, 175), ("laplace", 50, 52), ("laplace", 500, 203)],
)
def test_ratio_on_simulated_gradients_equals_the_papers(noise, bin_size, ratio):
    assert 4 * SIZE / mean_payload_bytes(noise, bin_size) == pytest.approx(ratio, rel=0.05)
