#include "../kernels/sign_sgd_codec.h"
#include "check_fixed.h"
#include "self_check.h"
#include "sign_sgd_on_gpu.h"

namespace gradcomp {

// Some of more than one block.
Status CheckSignSgd(DriverQueue* queue) {
  Codecs codecs;
  for (int64_t size : {70, 70001, 9001}) codecs.push_back(std::make_unique<SignSgdCodec>(size));
  return CheckFixed({"SignSGD", Method::kSignSgd, EncodeSignSgdOnGpu, DecodeSignSgdOnGpu}, codecs,
                    queue);
}

}  // namespace gradcomp
