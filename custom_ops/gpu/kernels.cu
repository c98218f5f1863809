// All kernels: what NVRTC compiles. Their names are in kernel_names.h, too.
#include "adacomp_decode.cu"
#include "adacomp_pack.cu"
#include "adacomp_scan.cu"
#include "chunks.cu"
#include "precondition.cu"
#include "qsgd.cu"
#include "sign_sgd.cu"
#include "top_k.cu"
