#include "../kernels/top_k_codec.h"
#include "../kernels/whole_codec.h"
#include "check_fixed.h"
#include "self_check.h"
#include "top_k_on_gpu.h"

namespace gradcomp {

Status CheckTopK(DriverQueue* queue) {
  Codecs codecs;
  codecs.push_back(std::make_unique<TopKCodec>(9001, 90));
  codecs.push_back(std::make_unique<TopKCodec>(70, 70));
  codecs.push_back(std::make_unique<WholeCodec>(300));
  codecs.push_back(std::make_unique<TopKCodec>(4096, 2000));
  return CheckFixed({"top-k", Method::kTopK, EncodeTopKOnGpu, DecodeTopKOnGpu}, codecs, queue);
}

}  // namespace gradcomp
