#include "gpu_support.h"

#include <cstring>
#include <mutex>
#include <set>

#include "tensorflow/core/framework/device.h"
#include "tensorflow/core/platform/logging.h"
#include "tensorflow/core/platform/threadpool.h"
#include "xla/stream_executor/stream.h"

namespace gradcomp {
namespace {

CUstream StreamOf(OpKernelContext* context) {
  return static_cast<CUstream>(
      context->op_device_context()->stream()->platform_specific_handle().stream);
}

bool HasStream(OpKernelContext* context) {
  return context->op_device_context() && context->op_device_context()->stream();
}

void SayOnce(const std::string& why) {
  static std::mutex mutex;
  static auto* const said = new std::set<std::string>();
  const std::lock_guard<std::mutex> lock(mutex);
  if (!said->insert(why).second) return;
  LOG(WARNING) << "tf_gradcomp: the kernels for GPUs are not used, because " << why
               << ". Gradients are copied to the host for compression.";
}

// The argument of a driver's callback.
struct Callback {
  tensorflow::thread::ThreadPool* threads;
  std::function<void()> work;

  static void Run(void* callback) {
    std::unique_ptr<Callback> own(static_cast<Callback*>(callback));
    own->threads->Schedule(std::move(own->work));
  }
};

}  // namespace

const KernelsOnGpu* UsableKernels(OpKernelContext* context) {
  if (!HasStream(context)) {
    SayOnce("this device has no stream of CUDA's");
    return nullptr;
  }
  const KernelsOnGpu& kernels = KernelsOnGpu::OfStream(StreamOf(context));
  if (kernels.status.ok()) return &kernels;
  SayOnce(kernels.status.message);
  return nullptr;
}

TensorFlowQueue::TensorFlowQueue(const KernelsOnGpu& kernels, OpKernelContext* context)
    : DriverQueue(kernels, StreamOf(context)),
      context_(context),
      threads_(context->device()->tensorflow_cpu_worker_threads()->workers) {}

void* TensorFlowQueue::AllocateWith(AllocatorAttributes attributes, int64_t bytes) {
  if (bytes == 0 || !status().ok()) return nullptr;
  memory_.emplace_back();
  const absl::Status allocated = context_->allocate_temp(
      tensorflow::DT_INT8, TensorShape({bytes}), &memory_.back(), attributes);
  if (allocated.ok()) return memory_.back().data();
  Fail({std::string(allocated.message())});
  return nullptr;
}

void* TensorFlowQueue::Allocate(int64_t bytes) { return AllocateWith({}, bytes); }

void* TensorFlowQueue::AllocateOnHost(int64_t bytes) {
  return AllocateWith(PinnedOnHost(), bytes);
}

void* TensorFlowQueue::Upload(const void* data, int64_t bytes) {
  void* to = Allocate(bytes);
  void* from = AllocateOnHost(bytes);
  if (!to || !from) return nullptr;
  std::memcpy(from, data, bytes);
  Check(driver().cuMemcpyHtoDAsync(ToCuda(to), from, bytes, stream()), "cuMemcpyHtoDAsync");
  return to;
}

void TensorFlowQueue::CopyToHost(const void* from, int64_t bytes, void* to) {
  if (bytes == 0 || !status().ok()) return;
  Check(driver().cuMemcpyDtoHAsync(to, ToCuda(from), bytes, stream()), "cuMemcpyDtoHAsync");
}

int* TensorFlowQueue::FlagToHost(const int* flag) {
  auto* on_host = static_cast<int*>(AllocateOnHost(sizeof(int)));
  if (flag) {
    CopyToHost(flag, sizeof(int), on_host);
  } else if (on_host) {
    *on_host = 0;
  }
  return on_host;
}

void TensorFlowQueue::CopyOnGpu(const void* from, int64_t bytes, void* to) {
  if (bytes == 0 || !status().ok()) return;
  Check(driver().cuMemcpyDtoDAsync(ToCuda(to), ToCuda(from), bytes, stream()),
        "cuMemcpyDtoDAsync");
}

bool TensorFlowQueue::Then(std::function<void()> work) {
  if (!status().ok()) return false;
  auto callback = std::make_unique<Callback>(
      Callback{threads_, [self = shared_from_this(), work = std::move(work)] { work(); }});
  if (!Check(driver().cuLaunchHostFunc(stream(), &Callback::Run, callback.get()),
             "cuLaunchHostFunc")) {
    return false;
  }
  callback.release();
  return true;
}

void TensorFlowQueue::Continue(const AsyncOpKernel::DoneCallback& done,
                               std::function<void()> work) {
  if (Then(std::move(work))) return;
  context_->SetStatus(KeepUntilDone());
  done();
}

void TensorFlowQueue::Finish(const AsyncOpKernel::DoneCallback& done,
                             std::function<void()> work) {
  Continue(done, [done, work = std::move(work)] {
    work();
    done();
  });
}

absl::Status TensorFlowQueue::KeepUntilDone() {
  if (status().ok()) Then([] {});
  if (!status().ok()) driver().cuStreamSynchronize(stream());
  return ToTensorFlow();
}

absl::Status TensorFlowQueue::Unshare(LockedResiduals* variables) {
  return variables->Unshare(context_, [this](const float* from, int64_t size, float* to) {
    CopyOnGpu(from, 4 * size, to);
    return ToTensorFlow();
  });
}

absl::Status TensorFlowQueue::ToTensorFlow() const {
  if (status().ok()) return absl::OkStatus();
  return absl::InternalError(status().message);
}

}  // namespace gradcomp
