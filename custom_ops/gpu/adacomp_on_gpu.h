// Plans AdaComp's work on a GPU and submits it to a queue. The kernels are in adacomp_*.cu.
#pragma once

#include <cstdint>
#include <vector>

#include "../kernels/adacomp_decoder.h"
#include "../kernels/adacomp_encoder.h"
#include "../kernels/precondition.h"
#include "adacomp_tables.h"
#include "queue.h"

namespace gradcomp {

// Pointers to device memory, valid once the queue has done its work.
struct EncodedOnGpu {
  const gpu::EncodeSummary* summary = nullptr;
  const int32_t* body = nullptr;  // the payload behind the header, of summary->body_words
  gpu::EncodeStep step = {};      // how it was encoded
};

// Encodes like AdaCompEncoder, followed by Rollback if not all sums are finite; the tensors have
// device pointers. The scale of a tensor may differ from AdaCompEncoder's scale in its last bit.
// `tensors` may have any sizes, including 0.
EncodedOnGpu EncodeAdaComp(const std::vector<EncoderTensor>& tensors, float scale_factor,
                           GpuQueue* queue);

// Reverts EncodeAdaComp's changes of the tensors, on the same queue.
void TakeBackAdaComp(const EncodedOnGpu& encoded, GpuQueue* queue);

// Decodes like AdaCompDecoder::Reduce, or like AddTo if `adds`, into values in device memory.
// Requires ReducesToFinite. The payloads are on the host.
void DecodeAdaComp(const AdaCompDecoder& decoder, const std::vector<float*>& values, bool adds,
                   GpuQueue* queue);

}  // namespace gradcomp
