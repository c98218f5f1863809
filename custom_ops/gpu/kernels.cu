// All kernels: what NVRTC compiles. Their names are in kernel_names.h, too.
#include "adacomp.cu"
#include "precondition.cu"
