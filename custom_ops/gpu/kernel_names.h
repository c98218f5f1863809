// The names of all kernels, by method.
#pragma once

#define GRADCOMP_ADACOMP_KERNELS(KERNEL) \
  KERNEL(gradcomp_adacomp_check)         \
  KERNEL(gradcomp_adacomp_scan)          \
  KERNEL(gradcomp_adacomp_tensors)       \
  KERNEL(gradcomp_adacomp_layout)        \
  KERNEL(gradcomp_adacomp_pack)          \
  KERNEL(gradcomp_adacomp_unpack)        \
  KERNEL(gradcomp_adacomp_decode)

#define GRADCOMP_PRECONDITION_KERNELS(KERNEL) \
  KERNEL(gradcomp_precondition_check)         \
  KERNEL(gradcomp_precondition_divide)

#define GRADCOMP_CHUNKS_KERNELS(KERNEL) \
  KERNEL(gradcomp_chunks_choose)        \
  KERNEL(gradcomp_chunks_pack)          \
  KERNEL(gradcomp_chunks_take)          \
  KERNEL(gradcomp_chunks_keep)          \
  KERNEL(gradcomp_chunks_spread)        \
  KERNEL(gradcomp_chunks_place)

#define GRADCOMP_POWER_SGD_KERNELS(KERNEL) \
  KERNEL(gradcomp_power_sgd_left)          \
  KERNEL(gradcomp_power_sgd_right)         \
  KERNEL(gradcomp_power_sgd_join)          \
  KERNEL(gradcomp_power_sgd_reduce)        \
  KERNEL(gradcomp_power_sgd_keep)

#define GRADCOMP_TOP_K_KERNELS(KERNEL) \
  KERNEL(gradcomp_top_k_count)         \
  KERNEL(gradcomp_top_k_pick)          \
  KERNEL(gradcomp_top_k_tally)         \
  KERNEL(gradcomp_top_k_places)        \
  KERNEL(gradcomp_top_k_send)          \
  KERNEL(gradcomp_top_k_decode)

#define GRADCOMP_QSGD_KERNELS(KERNEL) \
  KERNEL(gradcomp_qsgd_measure)       \
  KERNEL(gradcomp_qsgd_send)          \
  KERNEL(gradcomp_qsgd_decode)

#define GRADCOMP_SIGN_SGD_KERNELS(KERNEL) \
  KERNEL(gradcomp_sign_sgd_sum)           \
  KERNEL(gradcomp_sign_sgd_mean)          \
  KERNEL(gradcomp_sign_sgd_send)          \
  KERNEL(gradcomp_sign_sgd_decode)

#define GRADCOMP_ALL_KERNELS(KERNEL)    \
  GRADCOMP_ADACOMP_KERNELS(KERNEL)      \
  GRADCOMP_CHUNKS_KERNELS(KERNEL)       \
  GRADCOMP_POWER_SGD_KERNELS(KERNEL)    \
  GRADCOMP_PRECONDITION_KERNELS(KERNEL) \
  GRADCOMP_QSGD_KERNELS(KERNEL)         \
  GRADCOMP_SIGN_SGD_KERNELS(KERNEL)     \
  GRADCOMP_TOP_K_KERNELS(KERNEL)
