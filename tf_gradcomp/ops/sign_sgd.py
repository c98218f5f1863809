"""SignSGD with error feedback: the ops of one step.

Source: Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes",
ICML 2019, https://arxiv.org/abs/1901.09847, Algorithm 1. `tests.reference.sign_sgd` computes the
same in NumPy.

With e the residual and g the gradient of a variable:

    p = e + g
    mean = the mean of |p| over the variable
    sent: sign(p) * mean, where 0 and -0 count as positive
    e <- p - sent

All arithmetic is float32, in this order, without fused multiply-add. Only the mean is summed in
float64, in an order that depends on the variable's size alone.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import tensorflow as tf

from tf_gradcomp.ops import coding


def sign_sgd_encode(
    residuals: Sequence[tf.Tensor | tf.Variable],
    gradients: Sequence[tf.Tensor],
    step: tf.Tensor | int,
    *,
    fingerprint: int,
) -> tuple[tf.Tensor, tf.Tensor]:
    """Packs gradients as signs and one mean per tensor, as `ops.coding.encode` describes.

    The payload's length depends on the shapes alone.
    """
    return coding.encode("sign_sgd", residuals, gradients, step, fingerprint=fingerprint)


sign_sgd_decode = functools.partial(coding.decode, "sign_sgd")
sign_sgd_put_back = functools.partial(coding.put_back, "sign_sgd")
