// All kernels: what NVRTC compiles. Their names are in kernel_names.h, too.
#include "adacomp.cu"
#include "chunks.cu"
#include "precondition.cu"
#include "top_k.cu"
