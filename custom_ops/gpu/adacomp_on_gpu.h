// Plans AdaComp's work on a GPU and gives it to a queue. What the kernels do: adacomp_*.cu.
#pragma once

#include <cstdint>
#include <vector>

#include "../kernels/adacomp_decoder.h"
#include "../kernels/adacomp_encoder.h"
#include "../kernels/precondition.h"
#include "adacomp_tables.h"
#include "queue.h"

namespace gradcomp {

// In the memory of the device, once the queue has done its work.
struct EncodedOnGpu {
  const gpu::EncodeSummary* summary = nullptr;
  const int32_t* body = nullptr;  // the payload behind the header, of summary->body_words
  gpu::EncodeStep step = {};      // how it was encoded
};

// What AdaCompEncoder does with tensors whose pointers are the device's, with Rollback where not all is
// finite. The scale of a tensor may differ from AdaCompEncoder's in its last bit. `tensors` may be
// of any sizes, also 0.
EncodedOnGpu EncodeAdaComp(const std::vector<EncoderTensor>& tensors, float scale_factor,
                           GpuQueue* queue);

// Takes back what EncodeAdaComp did with the tensors, on the same queue.
void TakeBackAdaComp(const EncodedOnGpu& encoded, GpuQueue* queue);

// What AdaCompDecoder::Reduce does, if its ReducesToFinite, with values in the device's memory; if
// `adds`, what AddTo does. The payloads are on the host.
void DecodeAdaComp(const AdaCompDecoder& decoder, const std::vector<float*>& values, bool adds,
                   GpuQueue* queue);

}  // namespace gradcomp
