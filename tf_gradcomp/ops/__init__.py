"""The native ops, one thin function per op.

All ops raise `tf.errors.InvalidArgumentError` if shapes, types, settings or positions are wrong,
and `tf.errors.FailedPreconditionError` if a variable is not initialized.
"""

from tf_gradcomp.ops.chunks import (
    Chunked,
    ChunkSplit,
    chunk_apply,
    chunk_draw,
    chunk_select,
    chunk_split,
    chunk_take,
)
from tf_gradcomp.ops.library import LibraryError, library_info
from tf_gradcomp.ops.payload import pass_if_equal, payload_read, payload_write, payloads_finite
from tf_gradcomp.ops.power_sgd import (
    power_sgd_left,
    power_sgd_project,
    power_sgd_reduce,
    power_sgd_reduce_projected,
    power_sgd_right,
)
from tf_gradcomp.ops.precondition import SecondMoments, precondition
from tf_gradcomp.ops.quantization import (
    qsgd_decode,
    qsgd_encode,
    qsgd_errors,
    qsgd_put_back,
    sign_sgd_decode,
    sign_sgd_encode,
    sign_sgd_put_back,
)
from tf_gradcomp.ops.sparsification import (
    SketchSettings,
    adacomp_decode,
    adacomp_encode,
    adacomp_put_back,
    count_sketch,
    count_sketch_largest,
    local_bin_select,
    momentum_correction,
    residual_accumulate,
    sidco_choose,
    ternary_quantize,
    top_k_decode,
    top_k_encode,
    top_k_keep_velocity,
    top_k_put_back,
)

__all__ = [
    "ChunkSplit",
    "Chunked",
    "LibraryError",
    "SecondMoments",
    "SketchSettings",
    "adacomp_decode",
    "adacomp_encode",
    "adacomp_put_back",
    "chunk_apply",
    "chunk_draw",
    "chunk_select",
    "chunk_split",
    "chunk_take",
    "count_sketch",
    "count_sketch_largest",
    "library_info",
    "local_bin_select",
    "momentum_correction",
    "pass_if_equal",
    "payload_read",
    "payload_write",
    "payloads_finite",
    "power_sgd_left",
    "power_sgd_project",
    "power_sgd_reduce",
    "power_sgd_reduce_projected",
    "power_sgd_right",
    "precondition",
    "qsgd_decode",
    "qsgd_encode",
    "qsgd_errors",
    "qsgd_put_back",
    "residual_accumulate",
    "sidco_choose",
    "sign_sgd_decode",
    "sign_sgd_encode",
    "sign_sgd_put_back",
    "ternary_quantize",
    "top_k_decode",
    "top_k_encode",
    "top_k_keep_velocity",
    "top_k_put_back",
]
