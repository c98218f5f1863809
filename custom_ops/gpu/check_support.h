// The checks of each method, and the helpers that they share.
#pragma once

#include <cstdint>
#include <vector>

#include "../kernels/source.h"
#include "kernels_on_gpu.h"

namespace gradcomp {

using Tensors = std::vector<std::vector<float>>;

void OnThisThread(int64_t count, int64_t cost, const Work& work);

// Returns numbers between -1 and 1, in steps that keep sums of maxima exact in any order.
Tensors NumbersOf(const std::vector<int64_t>& sizes, uint32_t seed);

std::vector<float*> Pointers(Tensors* tensors);

std::vector<Source> Sources(const std::vector<float*>& residuals,
                            const std::vector<float*>& gradients);

std::vector<float*> Upload(const Tensors& tensors, DriverQueue* queue);

// Returns a value in device memory.
template <typename Value>
Value Downloaded(const Value* on_gpu, DriverQueue* queue) {
  Value value = {};
  queue->Download(on_gpu, sizeof value, &value);
  return value;
}

// Returns whether tensors on a GPU have the expected bits.
bool AreEqual(const std::vector<float*>& on_gpu, const Tensors& expected, DriverQueue* queue);

Status CheckAdaComp(DriverQueue* queue);
Status CheckPrecondition(DriverQueue* queue);
Status CheckChunks(DriverQueue* queue);
Status CheckPowerSgd(DriverQueue* queue);
Status CheckFixedLength(DriverQueue* queue);

}  // namespace gradcomp
