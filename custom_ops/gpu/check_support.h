// What the checks of all methods are made of.
#ifndef TF_GRADCOMP_CUSTOM_OPS_GPU_CHECK_SUPPORT_H_
#define TF_GRADCOMP_CUSTOM_OPS_GPU_CHECK_SUPPORT_H_

#include <cstdint>
#include <vector>

#include "../kernels/precondition.h"
#include "../kernels/source.h"
#include "kernels_on_gpu.h"

namespace gradcomp {

using Tensors = std::vector<std::vector<float>>;

inline constexpr AdamSettings kAdam{0.999f, 1e-7f, 10.0f};

void OnThisThread(int64_t count, int64_t cost, const Work& work);

// Between -1 and 1, in steps that leave sums of maxima exact, so that their order does not matter.
Tensors NumbersOf(const std::vector<int64_t>& sizes, uint32_t seed);

std::vector<float*> Pointers(Tensors* tensors);

std::vector<Source> Sources(const std::vector<float*>& residuals,
                            const std::vector<float*>& gradients);

std::vector<float*> Upload(const Tensors& tensors, DriverQueue* queue);

// Whether tensors on a GPU are the expected ones, to the bit.
bool AreEqual(const std::vector<float*>& on_gpu, const Tensors& expected, DriverQueue* queue);

}  // namespace gradcomp

#endif  // TF_GRADCOMP_CUSTOM_OPS_GPU_CHECK_SUPPORT_H_
