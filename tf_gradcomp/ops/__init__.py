"""The native ops, one thin function per op."""

from tf_gradcomp.ops.adacomp import (
    adacomp_decode,
    adacomp_encode,
    adacomp_put_back,
    local_bin_select,
    residual_accumulate,
    ternary_quantize,
)
from tf_gradcomp.ops.library import LibraryError, library_info

__all__ = [
    "LibraryError",
    "adacomp_decode",
    "adacomp_encode",
    "adacomp_put_back",
    "library_info",
    "local_bin_select",
    "residual_accumulate",
    "ternary_quantize",
]
