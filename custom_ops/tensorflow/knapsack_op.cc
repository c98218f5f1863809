// The op of L-GreCo's plan. tf_gradcomp/ops/knapsack.py documents the op.
#include <cstdint>
#include <vector>

#include "../kernels/knapsack.h"
#include "op_support.h"
#include "tensorflow/core/framework/op.h"
#include "tensorflow/core/framework/op_kernel.h"
#include "tensorflow/core/framework/shape_inference.h"

namespace gradcomp {
namespace {

constexpr int64_t kMostSteps = 1 << 20;

class KnapsackOp : public OpKernel {
 public:
  explicit KnapsackOp(OpKernelConstruction* context) : OpKernel(context) {
    OP_REQUIRES_OK(context, context->GetAttr("steps", &steps_));
    OP_REQUIRES(context, steps_ >= 1 && steps_ <= kMostSteps,
                InvalidArgument("steps is ", steps_, "; expected 1 to ", kMostSteps));
  }

  void Compute(OpKernelContext* context) override {
    std::vector<int64_t> choices;
    std::vector<int64_t> uniform;
    double budget = 0;
    OP_REQUIRES_OK(context, GetSettings(context, 2, "choices", &choices));
    OP_REQUIRES_OK(context, GetSettings(context, 3, "uniform", &uniform));
    OP_REQUIRES_OK(context, GetScalar(context, 4, "budget", &budget));
    OP_REQUIRES(context, choices.size() == uniform.size(),
                InvalidArgument(uniform.size(), " uniform choices for ", choices.size(),
                                " layers; expected one for each layer"));
    const Tensor& sizes = context->input(0);
    const Tensor& errors = context->input(1);
    int64_t total = 0;
    std::vector<KnapsackLayer> layers;
    for (size_t i = 0; i < choices.size(); ++i) {
      OP_REQUIRES(context, uniform[i] >= 0 && uniform[i] < choices[i],
                  InvalidArgument("uniform[", i, "] is ", uniform[i], "; expected one of ",
                                  choices[i], " choices, from 0 on"));
      layers.push_back({sizes.flat<double>().data() + total, errors.flat<double>().data() + total,
                        choices[i], uniform[i]});
      total += choices[i];
    }
    OP_REQUIRES(context, sizes.NumElements() == total && errors.NumElements() == total,
                InvalidArgument(sizes.NumElements(), " sizes and ", errors.NumElements(),
                                " errors; expected ", total, ", one for each choice"));
    Tensor* chosen;
    OP_REQUIRES_OK(context, context->allocate_output(0, context->input(3).shape(), &chosen));
    Knapsack(layers, steps_, budget, chosen->flat<int64_t>().data());
  }

 private:
  int64_t steps_;
};

absl::Status KnapsackShape(InferenceContext* c) {
  c->set_output(0, c->input(3));
  return absl::OkStatus();
}

REGISTER_OP("Knapsack")
    .Input("sizes: double")
    .Input("errors: double")
    .Input("choices: int64")
    .Input("uniform: int64")
    .Input("budget: double")
    .Output("chosen: int64")
    .Attr("steps: int")
    .SetShapeFn(KnapsackShape);

REGISTER_KERNEL_BUILDER(Name("Knapsack").Device(DEVICE_CPU), KnapsackOp);

}  // namespace
}  // namespace gradcomp
