#include "chunk_inputs.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "host_tensors.h"

namespace gradcomp {

using ::tensorflow::OpKernelConstruction;
using ::tensorflow::OpKernelContext;
using ::tensorflow::Tensor;
using ::tensorflow::TensorShape;

absl::Status ChunkInputs::ReadAttributes(OpKernelConstruction* context, int num_own_inputs) {
  TF_RETURN_IF_ERROR(context->GetAttr("N", &num_tensors_));
  return CheckOneGradientEach(context, num_tensors_, 2 + num_own_inputs);
}

absl::Status ChunkInputs::Begin(OpKernelContext* context, Work* work) const {
  std::vector<int64_t> chunk_sizes;
  std::vector<int64_t> groups;
  TF_RETURN_IF_ERROR(GetSettings(context, 2 * num_tensors_, "chunk_sizes", &chunk_sizes));
  TF_RETURN_IF_ERROR(GetSettings(context, 2 * num_tensors_ + 1, "groups", &groups));
  TF_RETURN_IF_ERROR(ToTensorFlow(CheckChunks(chunk_sizes, groups, num_tensors_)));
  TF_RETURN_IF_ERROR(work->residuals.Lock(context, num_tensors_));
  TF_RETURN_IF_ERROR(CheckGradientShapes(context, work->residuals, num_tensors_));
  work->layout =
      std::make_unique<ChunkLayout>(work->residuals.all_sizes(), chunk_sizes, groups);
  return absl::OkStatus();
}

absl::Status ChunkInputs::GetFlag(OpKernelContext* context, int i, const char* name,
                                  bool* flag) const {
  return GetScalar(context, own_index(i), name, flag);
}

absl::Status ChunkInputs::GetOffsets(OpKernelContext* context, const Work& work,
                                     const int32_t** offsets) const {
  const Tensor& tensor = own_input(context, 0);
  if (tensor.NumElements() != work.layout->num_words()) {
    return InvalidArgument("offsets have ", tensor.NumElements(), " words; expected ",
                           work.layout->num_words(), ": those of the same tensors and chunks");
  }
  *offsets = tensor.flat<int32_t>().data();
  return ToTensorFlow(CheckOffsets(*work.layout, *offsets));
}

absl::Status ChunkSelectInputs::Read(OpKernelContext* context, Step* step) const {
  TF_RETURN_IF_ERROR(GetFlag(context, 0, "lead", &step->lead));
  TF_RETURN_IF_ERROR(Begin(context, &step->work));
  Tensor* offsets;
  TF_RETURN_IF_ERROR(AllocateOnHost(context, 0, step->work.layout->num_words(), &offsets));
  Tensor* finite;
  TF_RETURN_IF_ERROR(context->allocate_output(1, TensorShape({}), &finite));
  if (!step->lead) offsets->flat<int32_t>().setZero();
  step->offsets = offsets->flat<int32_t>().data();
  step->finite = finite->flat<bool>().data();
  return absl::OkStatus();
}

absl::Status ChunkSelectInputs::OnHost(OpKernelContext* context, Step* step) const {
  HostTensors host(context);
  std::vector<Source> sources;
  TF_RETURN_IF_ERROR(
      host.Sources(&step->work.residuals, num_tensors(), /*writes=*/false, &sources));
  *step->finite = SelectLargest(*step->work.layout, sources, ThreadPool(context),
                                step->lead ? step->offsets : nullptr);
  return host.Finish();
}

absl::Status ChunkTakeInputs::Read(OpKernelContext* context, Step* step) const {
  bool finite = false;
  TF_RETURN_IF_ERROR(GetFlag(context, 1, "finite", &finite));
  TF_RETURN_IF_ERROR(Begin(context, &step->work));
  TF_RETURN_IF_ERROR(GetOffsets(context, step->work, &step->offsets));
  const int64_t count = step->work.layout->num_chunks();
  Tensor* values;
  TF_RETURN_IF_ERROR(AllocateOnHost(context, 0, count + 1, &values));
  step->values = values->flat<float>().data();
  step->values[count] = finite ? 0 : std::numeric_limits<float>::quiet_NaN();
  return absl::OkStatus();
}

absl::Status ChunkTakeInputs::OnHost(OpKernelContext* context, Step* step) const {
  HostTensors host(context);
  std::vector<Source> sources;
  TF_RETURN_IF_ERROR(
      host.Sources(&step->work.residuals, num_tensors(), /*writes=*/false, &sources));
  TakeChosen(*step->work.layout, sources, step->offsets, ThreadPool(context), step->values);
  return host.Finish();
}

absl::Status ChunkApplyInputs::ReadAttributes(OpKernelConstruction* context) {
  TF_RETURN_IF_ERROR(context->GetAttr("filter", &filter_));
  return ChunkInputs::ReadAttributes(context, 5);
}

absl::Status ChunkApplyInputs::Read(OpKernelContext* context, Step* step) const {
  TF_RETURN_IF_ERROR(GetFlag(context, 2, "own_finite", &step->own_finite));
  TF_RETURN_IF_ERROR(GetFlag(context, 3, "finite", &step->finite));
  TF_RETURN_IF_ERROR(Begin(context, &step->work));
  TF_RETURN_IF_ERROR(GetOffsets(context, step->work, &step->offsets));
  const Tensor& totals = own_input(context, 1);
  const int64_t count = step->work.layout->num_chunks() + 1;
  if (totals.NumElements() != count) {
    return InvalidArgument("totals have ", totals.NumElements(), " elements; expected ", count,
                           ": one for each chunk, and the flag");
  }
  const Tensor& rests = own_input(context, 4);
  if (rests.NumElements() != 0 && rests.NumElements() != count - 1) {
    return InvalidArgument("rests have ", rests.NumElements(), " elements; expected ", count - 1,
                           ", one for each chunk, or none");
  }
  step->totals = totals.flat<float>().data();
  if (rests.NumElements() > 0) step->rests = rests.flat<float>().data();
  for (int64_t i = 0; i < count; ++i) step->finite &= std::isfinite(step->totals[i]);
  Tensor* all_finite;
  TF_RETURN_IF_ERROR(context->allocate_output(num_tensors(), TensorShape({}), &all_finite));
  all_finite->scalar<bool>()() = step->finite;
  return absl::OkStatus();
}

absl::Status ChunkApplyInputs::OnHost(OpKernelContext* context, Step* step) const {
  HostTensors host(context);
  std::vector<float*> outputs(num_tensors());
  for (int i = 0; i < num_tensors(); ++i) {
    TF_RETURN_IF_ERROR(host.Output(i, step->work.residuals.shape(i), &outputs[i]));
  }
  std::vector<Source> sources;
  TF_RETURN_IF_ERROR(
      host.Sources(&step->work.residuals, num_tensors(), /*writes=*/true, &sources));
  if (step->finite) {
    ApplyTotals(*step->work.layout, sources, step->offsets, step->totals, step->rests, filter_,
                ThreadPool(context), outputs);
    return host.Finish();
  }
  for (int i = 0; i < num_tensors(); ++i) {
    std::fill_n(outputs[i], step->work.residuals.shape(i).num_elements(), 0.0f);
  }
  if (step->own_finite) {
    KeepGradients(*step->work.layout, sources, filter_, ThreadPool(context));
  }
  return host.Finish();
}

}  // namespace gradcomp
