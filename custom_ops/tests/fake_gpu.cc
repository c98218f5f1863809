// A fake GPU. The library is both CUDA's driver (libcuda.so.1) and a TensorFlow plugin with a
// device of type GPU. The device uses host memory, and its kernels run in the emulator. Its only
// stream works in a separate thread, with delays, so that missing synchronization shows as wrong
// results.
//
// GRADCOMP_FAKE_GPU injects a fault: "wrong_sums", "no_memory", "no_contexts" or
// "no_memory_for_contexts".
#include "gpu_emulator.h"

#include "../gpu/kernels.cu"
#include "../gpu/kernel_names.h"

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <map>
#include <mutex>
#include <string>
#include <thread>

#include "tensorflow/c/experimental/stream_executor/stream_executor.h"

struct SP_Stream_st {};
struct SP_Event_st {
  uint64_t ticket = 0;
};
struct SP_Timer_st {};

namespace {

bool Is(const char* fault) {
  const char* faults = std::getenv("GRADCOMP_FAKE_GPU");
  return faults && std::string(faults) == fault;
}

// The work submitted to all streams, in order.
class Work {
 public:
  uint64_t Give(std::function<void()> work) {
    const std::lock_guard<std::mutex> lock(mutex_);
    waiting_.push_back(std::move(work));
    changed_.notify_all();
    return ++given_;
  }

  void WaitFor(uint64_t ticket) {
    std::unique_lock<std::mutex> lock(mutex_);
    changed_.wait(lock, [&] { return done_ >= ticket; });
  }
  void WaitForAll() { WaitFor(Give([] {})); }

  bool IsDone(uint64_t ticket) {
    const std::lock_guard<std::mutex> lock(mutex_);
    return done_ >= ticket;
  }

  static Work& Get() {
    static Work* const work = new Work();
    return *work;
  }

 private:
  Work() {
    std::thread([this] { Run(); }).detach();
  }

  void Run() {
    while (true) {
      std::unique_lock<std::mutex> lock(mutex_);
      changed_.wait(lock, [&] { return !waiting_.empty(); });
      const std::function<void()> work = std::move(waiting_.front());
      waiting_.pop_front();
      lock.unlock();
      std::this_thread::sleep_for(std::chrono::microseconds(200));
      work();
      lock.lock();
      ++done_;
      changed_.notify_all();
    }
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<std::function<void()>> waiting_;
  uint64_t given_ = 0;
  uint64_t done_ = 0;
};

std::atomic<bool> host_is_full{false};

std::mutex launches_mutex;
std::map<const void*, int> launches;  // for each kernel


void WrongDecode(gradcomp::gpu::DecodeStep step) {
  gradcomp::gpu::gradcomp_adacomp_decode(step);
  const auto& block = step.blocks[0];
  const bool is_first = gpu_emulator::block_index.x == 0 && gpu_emulator::ThreadIndex().x == 0;
  if (Is("wrong_sums") && !step.adds && is_first && block.size > 3) block.values[0] += 1;
}

// A kernel with its parameter, as submitted to a stream.
using Launched = std::function<void()>;
using Launcher = std::function<Launched(void** parameters)>;

template <typename Parameter>
Launcher LauncherOf(void (*kernel)(Parameter)) {
  return [kernel](void** parameters) {
    return [kernel, parameter = *static_cast<Parameter*>(parameters[0])] { kernel(parameter); };
  };
}

#define LAUNCHER(kernel) {#kernel, LauncherOf(gradcomp::gpu::kernel)},
const std::map<std::string, Launcher>& Kernels() {
  static const auto* const kernels = [] {
    auto* all = new std::map<std::string, Launcher>{GRADCOMP_ALL_KERNELS(LAUNCHER)};
    (*all)["gradcomp_adacomp_decode"] = LauncherOf(WrongDecode);
    return all;
  }();
  return *kernels;
}

void Launch(const Launcher& launcher, unsigned num_blocks, unsigned num_threads,
            void** parameters) {
  Work::Get().Give([num_blocks, num_threads, kernel = launcher(parameters)] {
    static unsigned seed = 1;
    gpu_emulator::Launch(num_blocks, num_threads, seed++, kernel);
  });
}

void Copy(void* to, const void* from, size_t bytes) {
  Work::Get().Give([=] { std::memcpy(to, from, bytes); });
}
void* Memory(unsigned long long address) { return reinterpret_cast<void*>(address); }

constexpr int kInvalidValue = 1, kOutOfMemory = 2, kNotFound = 500;
int the_context;
thread_local int num_pushed = 0;

int CopyInContext(void* to, const void* from, size_t bytes) {
  Copy(to, from, bytes);
  return num_pushed > 0 ? 0 : kInvalidValue;
}

}  // namespace

// The driver's functions that gpu/driver.h uses. Functions that need a context fail without one.
extern "C" {

int fake_gpu_launches(const char* kernel) {
  const std::lock_guard<std::mutex> lock(launches_mutex);
  return launches[&Kernels().at(kernel)];
}

void fake_gpu_fill_host() { host_is_full = true; }

int cuInit(unsigned) { return 0; }
int cuGetExportTable(const void**, const void*) { return kNotFound; }  // NVRTC asks for it
int cuGetErrorName(int error, const char** name) {
  *name = error == kOutOfMemory ? "CUDA_ERROR_OUT_OF_MEMORY"
          : error == kNotFound  ? "CUDA_ERROR_NOT_FOUND"
                                : "CUDA_ERROR_INVALID_VALUE";
  return 0;
}
int cuDeviceGet(int* device, int ordinal) {
  *device = ordinal;
  return ordinal == 0 ? 0 : kInvalidValue;
}
int cuDeviceGetName(char* name, int size, int) {
  std::snprintf(name, size, "Emulated GPU");
  return 0;
}
int cuDeviceGetAttribute(int* value, int attribute, int) {
  *value = attribute == 75 ? 9 : 0;
  return 0;
}
int cuDevicePrimaryCtxRetain(void** context, int) {
  *context = &the_context;
  return 0;
}
int cuCtxPushCurrent_v2(void* context) {
  ++num_pushed;
  return context == &the_context ? 0 : kInvalidValue;
}
int cuCtxPopCurrent_v2(void** context) {
  --num_pushed;
  *context = &the_context;
  return 0;
}
int cuCtxGetDevice(int* device) {
  *device = 0;
  return num_pushed > 0 ? 0 : kInvalidValue;
}
int cuModuleLoadData(void** module, const void* image) {
  *module = &the_context;
  const bool is_elf = std::memcmp(image, "\177ELF", 4) == 0;  // what NVRTC makes
  return num_pushed > 0 && is_elf ? 0 : kInvalidValue;
}
int cuModuleGetFunction(void** function, void*, const char* name) {
  const auto found = Kernels().find(name);
  if (found == Kernels().end()) return kNotFound;
  *function = const_cast<Launcher*>(&found->second);
  return 0;
}
int cuLaunchKernel(void* function, unsigned x, unsigned y, unsigned z, unsigned threads, unsigned,
                   unsigned, unsigned, void*, void** parameters, void**) {
  const bool is_size = threads == gradcomp::gpu::kThreads || threads == gradcomp::gpu::kScanThreads;
  if (x == 0 || y != 1 || z != 1 || !is_size) return kInvalidValue;
  if (num_pushed == 0) return kInvalidValue;
  {
    const std::lock_guard<std::mutex> lock(launches_mutex);
    ++launches[function];
  }
  Launch(*static_cast<const Launcher*>(function), x, threads, parameters);
  return 0;
}
int cuLaunchHostFunc(void*, void (*function)(void*), void* data) {
  if (num_pushed == 0) return kInvalidValue;
  Work::Get().Give([=] { function(data); });
  return 0;
}
int cuMemAlloc_v2(unsigned long long* memory, size_t bytes) {
  if (num_pushed == 0) return kInvalidValue;
  if (Is("no_memory")) return kOutOfMemory;
  *memory = reinterpret_cast<unsigned long long>(std::malloc(bytes));
  std::memset(Memory(*memory), 0xcd, bytes);
  return 0;
}
int cuMemFree_v2(unsigned long long memory) {
  std::free(Memory(memory));
  return 0;
}
int cuMemcpyHtoDAsync_v2(unsigned long long to, const void* from, size_t bytes, void*) {
  return CopyInContext(Memory(to), from, bytes);
}
int cuMemcpyDtoHAsync_v2(void* to, unsigned long long from, size_t bytes, void*) {
  return CopyInContext(to, Memory(from), bytes);
}
int cuMemcpyDtoDAsync_v2(unsigned long long to, unsigned long long from, size_t bytes, void*) {
  return CopyInContext(Memory(to), Memory(from), bytes);
}
int cuMemsetD8Async(unsigned long long to, unsigned char value, size_t bytes, void*) {
  Work::Get().Give([=] { std::memset(Memory(to), value, bytes); });
  return num_pushed > 0 ? 0 : kInvalidValue;
}
int cuStreamCreate(void** stream, unsigned) {
  *stream = &the_context;
  return num_pushed > 0 ? 0 : kInvalidValue;
}
int cuStreamDestroy_v2(void*) { return 0; }
int cuStreamGetCtx(void*, void** context) {
  *context = &the_context;
  if (Is("no_memory_for_contexts")) return kOutOfMemory;
  return Is("no_contexts") ? kInvalidValue : 0;
}
int cuEventCreate(void** event, unsigned) {
  *event = &the_context;
  return 0;
}
int cuEventRecord(void*, void*) { return 0; }
int cuEventElapsedTime(float* milliseconds, void*, void*) {
  *milliseconds = 1;
  return 0;
}
int cuEventDestroy_v2(void*) { return 0; }
int cuStreamSynchronize(void*) {
  Work::Get().WaitForAll();
  return 0;
}

}  // extern "C"

// The TensorFlow plugin.
namespace {

using Device = const SP_Device*;
using Location = SP_DeviceMemoryBase*;
using ConstLocation = const SP_DeviceMemoryBase*;

void FillExecutor(SP_StreamExecutor* executor) {
  executor->struct_size = SP_STREAMEXECUTOR_STRUCT_SIZE;
  executor->allocate = [](Device, uint64_t size, int64_t, Location memory) {
    memory->struct_size = SP_DEVICE_MEMORY_BASE_STRUCT_SIZE;
    memory->opaque = std::aligned_alloc(256, (size + 255) / 256 * 256);
    std::memset(memory->opaque, 0xcd, size);
    memory->size = size;
  };
  executor->deallocate = [](Device, Location memory) {
    Work::Get().WaitForAll();
    std::free(memory->opaque);
  };
  executor->host_memory_allocate = [](Device, uint64_t size) {
    return host_is_full ? nullptr : std::aligned_alloc(256, (size + 255) / 256 * 256);
  };
  executor->host_memory_deallocate = [](Device, void* memory) {
    Work::Get().WaitForAll();
    std::free(memory);
  };
  executor->get_allocator_stats = [](Device, SP_AllocatorStats*) { return static_cast<TF_Bool>(0); };
  executor->device_memory_usage = [](Device, int64_t* free, int64_t* total) {
    *free = *total = int64_t{1} << 30;
    return static_cast<TF_Bool>(1);
  };
  executor->create_stream = [](Device, SP_Stream* stream, TF_Status*) {
    *stream = new SP_Stream_st();
  };
  executor->destroy_stream = [](Device, SP_Stream stream) { delete stream; };
  executor->create_stream_dependency = [](Device, SP_Stream, SP_Stream, TF_Status*) {};
  executor->get_stream_status = [](Device, SP_Stream, TF_Status*) {};
  executor->create_event = [](Device, SP_Event* event, TF_Status*) { *event = new SP_Event_st(); };
  executor->destroy_event = [](Device, SP_Event event) { delete event; };
  executor->get_event_status = [](Device, SP_Event event) {
    return Work::Get().IsDone(event->ticket) ? SE_EVENT_COMPLETE : SE_EVENT_PENDING;
  };
  executor->record_event = [](Device, SP_Stream, SP_Event event, TF_Status*) {
    event->ticket = Work::Get().Give([] {});
  };
  executor->wait_for_event = [](const SP_Device*, SP_Stream, SP_Event, TF_Status*) {};
  executor->create_timer = [](Device, SP_Timer* timer, TF_Status*) { *timer = new SP_Timer_st(); };
  executor->destroy_timer = [](Device, SP_Timer timer) { delete timer; };
  executor->start_timer = [](Device, SP_Stream, SP_Timer, TF_Status*) {};
  executor->stop_timer = [](Device, SP_Stream, SP_Timer, TF_Status*) {};
  executor->memcpy_dtoh = [](Device, SP_Stream, void* to, ConstLocation from, uint64_t size,
                             TF_Status*) { Copy(to, from->opaque, size); };
  executor->memcpy_htod = [](Device, SP_Stream, Location to, const void* from, uint64_t size,
                             TF_Status*) { Copy(to->opaque, from, size); };
  executor->memcpy_dtod = [](Device, SP_Stream, Location to, ConstLocation from, uint64_t size,
                             TF_Status*) { Copy(to->opaque, from->opaque, size); };
  executor->sync_memcpy_dtoh = [](Device, void* to, ConstLocation from, uint64_t size, TF_Status*) {
    Copy(to, from->opaque, size);
    Work::Get().WaitForAll();
  };
  executor->sync_memcpy_htod = [](Device, Location to, const void* from, uint64_t size,
                                  TF_Status*) {
    Copy(to->opaque, from, size);
    Work::Get().WaitForAll();
  };
  executor->sync_memcpy_dtod = [](Device, Location to, ConstLocation from, uint64_t size,
                                  TF_Status*) {
    Copy(to->opaque, from->opaque, size);
    Work::Get().WaitForAll();
  };
  executor->block_host_for_event = [](Device, SP_Event event, TF_Status*) {
    Work::Get().WaitFor(event->ticket);
  };
  executor->block_host_until_done = [](Device, SP_Stream, TF_Status*) {
    Work::Get().WaitForAll();
  };
  executor->synchronize_all_activity = [](Device, TF_Status*) { Work::Get().WaitForAll(); };
  executor->mem_zero = [](Device, SP_Stream, Location to, uint64_t size, TF_Status*) {
    Work::Get().Give([to = to->opaque, size] { std::memset(to, 0, size); });
  };
  executor->memset = [](Device, SP_Stream, Location to, uint8_t value, uint64_t size,
                        TF_Status*) {
    Work::Get().Give([to = to->opaque, value, size] { std::memset(to, value, size); });
  };
  executor->memset32 = [](Device, SP_Stream, Location to, uint32_t value, uint64_t size,
                          TF_Status*) {
    Work::Get().Give([to = static_cast<uint32_t*>(to->opaque), value, size] {
      std::fill_n(to, size / 4, value);
    });
  };
  executor->host_callback = [](Device, SP_Stream, SE_StatusCallbackFn function, void* data) {
    Work::Get().Give([=] {
      TF_Status* status = TF_NewStatus();
      function(data, status);
      TF_DeleteStatus(status);
    });
    return static_cast<TF_Bool>(1);
  };
}

}  // namespace

extern "C" void SE_InitPlugin(SE_PlatformRegistrationParams* params, TF_Status*) {
  params->major_version = SE_MAJOR;
  params->minor_version = SE_MINOR;
  params->patch_version = SE_PATCH;
  params->platform->struct_size = SP_PLATFORM_STRUCT_SIZE;
  params->platform->name = "EMULATED";
  params->platform->type = "GPU";
  params->platform->use_bfc_allocator = 0;
  SP_PlatformFns* functions = params->platform_fns;
  functions->get_device_count = [](const SP_Platform*, int* count, TF_Status*) { *count = 1; };
  functions->create_device = [](const SP_Platform*, SE_CreateDeviceParams* created, TF_Status*) {
    created->device->struct_size = SP_DEVICE_STRUCT_SIZE;
    created->device->hardware_name = "emulated";
    created->device->device_vendor = "nobody";
    created->device->pci_bus_id = "0000:00:00.0";
  };
  functions->destroy_device = [](const SP_Platform*, SP_Device*) {};
  functions->create_device_fns = [](const SP_Platform*, SE_CreateDeviceFnsParams* created,
                                    TF_Status*) {
    created->device_fns->struct_size = SP_DEVICE_FNS_STRUCT_SIZE;
    created->device_fns->get_numa_node = [](Device) { return int32_t{-1}; };
    created->device_fns->get_memory_bandwidth = [](Device) { return int64_t{-1}; };
    created->device_fns->get_gflops = [](Device) { return -1.0; };
  };
  functions->destroy_device_fns = [](const SP_Platform*, SP_DeviceFns*) {};
  functions->create_stream_executor = [](const SP_Platform*,
                                         SE_CreateStreamExecutorParams* created,
                                         TF_Status*) { FillExecutor(created->stream_executor); };
  functions->destroy_stream_executor = [](const SP_Platform*, SP_StreamExecutor*) {};
  functions->create_timer_fns = [](const SP_Platform*, SP_TimerFns* timer, TF_Status*) {
    timer->struct_size = SP_TIMER_FNS_STRUCT_SIZE;
    timer->nanoseconds = [](SP_Timer) { return uint64_t{0}; };
  };
  functions->destroy_timer_fns = [](const SP_Platform*, SP_TimerFns*) {};
  params->destroy_platform = [](SP_Platform*) {};
  params->destroy_platform_fns = [](SP_PlatformFns*) {};
}
