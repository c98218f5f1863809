// What tf_gradcomp/ops/library.py asks of the library.
#include "../kernels/scan_bins.h"

#ifndef TF_GRADCOMP_TENSORFLOW_VERSION
#error "define TF_GRADCOMP_TENSORFLOW_VERSION as the version of TensorFlow that is compiled against"
#endif

extern "C" {

// Found by its prefix in the file, because a library for another TensorFlow can't be opened.
extern const char tf_gradcomp_build_info[];
const char tf_gradcomp_build_info[] = "tf_gradcomp built for TensorFlow " TF_GRADCOMP_TENSORFLOW_VERSION;

const char* tf_gradcomp_simd() { return gradcomp::Name(gradcomp::BestSimd()); }

}
