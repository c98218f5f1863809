// The ops of alternating PowerSGD, on CPUs.
#include <algorithm>
#include <cstdint>
#include <memory>
#include <vector>

#include "../kernels/power_sgd_alternating.h"
#include "host_tensors.h"
#include "op_on_device.h"
#include "power_sgd_inputs.h"
#include "tensorflow/core/framework/op_kernel.h"

namespace gradcomp {
namespace {

class AlternatingWork : public PowerSgdInputs {
 public:
  struct Step {
    Work work;
    int64_t step = 0;
  };

  absl::Status Read(OpKernelContext* context, Step* step) const {
    TF_RETURN_IF_ERROR(GetScalar(context, own_index(0), "step", &step->step));
    return Begin(context, &step->work);
  }

 protected:
  absl::Status ReadAttributes(OpKernelConstruction* context, int num_own_inputs) {
    return PowerSgdInputs::ReadAttributes(context, FactorInputs::kBoth, num_own_inputs);
  }

  absl::Status MakeMethod(OpKernelContext* context, Step* step, bool writes, HostTensors* host,
                          std::unique_ptr<AlternatingPowerSgd>* method) const {
    std::vector<PowerSgdTensor> tensors;
    std::vector<float*> factors;
    TF_RETURN_IF_ERROR(TensorsOnHost(&step->work, writes, host, &tensors, &factors));
    *method = std::make_unique<AlternatingPowerSgd>(tensors, factors, step->step,
                                                    ThreadPool(context));
    return absl::OkStatus();
  }
};

class AlternatingProjectWork : public AlternatingWork {
 public:
  absl::Status ReadAttributes(OpKernelConstruction* context) {
    return AlternatingWork::ReadAttributes(context, 1);
  }

  absl::Status OnHost(OpKernelContext* context, Step* step) const {
    HostTensors host(context);
    std::unique_ptr<AlternatingPowerSgd> method;
    TF_RETURN_IF_ERROR(MakeMethod(context, step, /*writes=*/false, &host, &method));
    Tensor* local;
    Tensor* tensor_bytes;
    bool* finite;
    TF_RETURN_IF_ERROR(context->allocate_output(0, TensorShape({method->size()}), &local));
    TF_RETURN_IF_ERROR(context->allocate_output(1, TensorShape({num_tensors()}), &tensor_bytes));
    TF_RETURN_IF_ERROR(AllocateFlag(context, 2, &finite));
    *finite = method->Project(local->flat<float>().data());
    for (int i = 0; i < num_tensors(); ++i) {
      tensor_bytes->flat<int64_t>()(i) = sizeof(float) * method->sent_size(i);
    }
    return host.Finish();
  }
};

class AlternatingReduceWork : public AlternatingWork {
 public:
  absl::Status ReadAttributes(OpKernelConstruction* context) {
    return AlternatingWork::ReadAttributes(context, 5);
  }

  absl::Status OnHost(OpKernelContext* context, Step* step) const {
    bool keep = false;
    bool finite = false;
    TF_RETURN_IF_ERROR(GetScalar(context, own_index(3), "keep", &keep));
    TF_RETURN_IF_ERROR(GetScalar(context, own_index(4), "finite", &finite));
    HostTensors host(context);
    std::unique_ptr<AlternatingPowerSgd> method;
    TF_RETURN_IF_ERROR(MakeMethod(context, step, /*writes=*/true, &host, &method));
    const float* local = nullptr;
    const float* total = nullptr;
    TF_RETURN_IF_ERROR(GetVector(context, 1, "local", method->size(), &local));
    TF_RETURN_IF_ERROR(GetVector(context, 2, "total", method->size(), &total));
    std::vector<float*> reduced;
    TF_RETURN_IF_ERROR(ReducedOnHost(step->work, &host, &reduced));
    bool* all_finite;
    TF_RETURN_IF_ERROR(AllocateFlag(context, num_tensors(), &all_finite));
    *all_finite = finite && method->CanReduce(total);
    if (*all_finite) {
      method->Reduce(local, total, reduced);
      return host.Finish();
    }
    if (keep) method->Keep(total);
    FillWithZeros(step->work, reduced);
    return host.Finish();
  }
};

REGISTER_KERNEL_BUILDER(Name("PowerSgdProject").Device(DEVICE_CPU),
                        OpOnHost<AlternatingProjectWork>);
REGISTER_KERNEL_BUILDER(Name("PowerSgdReduceProjected").Device(DEVICE_CPU),
                        OpOnHost<AlternatingReduceWork>);

}  // namespace
}  // namespace gradcomp
