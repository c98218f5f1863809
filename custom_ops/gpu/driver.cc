#include "driver.h"

#include <dlfcn.h>

#include <iterator>
#include <mutex>

// Embeds the source of a kernel, followed by a zero. Compilers run in the repository's root.
#define GRADCOMP_EMBED(name, path)                      \
  asm(".pushsection .rodata\n" #name ":\n.incbin \"" path \
      "\"\n.byte 0\n.popsection\n");                    \
  extern "C" __attribute__((visibility("hidden"))) const char name[]

#define GRADCOMP_GPU_SOURCES "custom_ops/gpu/"  // from the folder of setup.py

#define GRADCOMP_SOURCES(SOURCE)                                       \
  SOURCE(gradcomp_source_philox, "../kernels/philox.h")                \
  SOURCE(gradcomp_source_adacomp_decode, "adacomp_decode.cu")          \
  SOURCE(gradcomp_source_adacomp_device, "adacomp_device.h")           \
  SOURCE(gradcomp_source_adacomp_pack, "adacomp_pack.cu")              \
  SOURCE(gradcomp_source_adacomp_scan, "adacomp_scan.cu")              \
  SOURCE(gradcomp_source_adacomp_tables, "adacomp_tables.h")           \
  SOURCE(gradcomp_source_adacomp_vectors, "adacomp_vectors.h")         \
  SOURCE(gradcomp_source_chunks, "chunks.cu")                          \
  SOURCE(gradcomp_source_chunks_tables, "chunks_tables.h")             \
  SOURCE(gradcomp_source_device, "device.h")                           \
  SOURCE(gradcomp_source_fixed_device, "fixed_device.h")               \
  SOURCE(gradcomp_source_fixed_tables, "fixed_tables.h")               \
  SOURCE(gradcomp_source_power_sgd, "power_sgd.cu")                    \
  SOURCE(gradcomp_source_power_sgd_tables, "power_sgd_tables.h")       \
  SOURCE(gradcomp_source_precondition, "precondition.cu")              \
  SOURCE(gradcomp_source_precondition_tables, "precondition_tables.h") \
  SOURCE(gradcomp_source_qsgd, "qsgd.cu")                              \
  SOURCE(gradcomp_source_qsgd_tables, "qsgd_tables.h")                 \
  SOURCE(gradcomp_source_sign_sgd, "sign_sgd.cu")                      \
  SOURCE(gradcomp_source_sign_sgd_tables, "sign_sgd_tables.h")         \
  SOURCE(gradcomp_source_tables, "tables.h")                           \
  SOURCE(gradcomp_source_top_k, "top_k.cu")                            \
  SOURCE(gradcomp_source_top_k_tables, "top_k_tables.h")

#define GRADCOMP_EMBED_ONE(name, file) GRADCOMP_EMBED(name, GRADCOMP_GPU_SOURCES file);
GRADCOMP_SOURCES(GRADCOMP_EMBED_ONE)
GRADCOMP_EMBED(gradcomp_source_kernels, GRADCOMP_GPU_SOURCES "kernels.cu");

namespace gradcomp {
namespace {

// The files that kernels.cu includes.
#define GRADCOMP_TEXT(name, file) name,
#define GRADCOMP_FILE(name, file) file,
const char* const kTexts[] = {GRADCOMP_SOURCES(GRADCOMP_TEXT)};
const char* const kFiles[] = {GRADCOMP_SOURCES(GRADCOMP_FILE)};

void* OpenFirst(const std::vector<std::string>& names, std::string* errors) {
  for (const std::string& name : names) {
    if (void* library = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) return library;
    const char* error = dlerror();
    if (errors->empty() && error) *errors = error;
  }
  return nullptr;
}

template <typename Function>
bool Find(void* library, const char* name, Function* function) {
  *function = reinterpret_cast<Function>(dlsym(library, name));
  return *function != nullptr;
}

Status Load(Driver* driver) {
  std::string error;
  void* library = OpenFirst({"libcuda.so.1"}, &error);
  if (!library) return {Concat("there is no CUDA driver: ", error)};
  const char* missing = nullptr;
  const auto find = [&](const char* name, auto* function) {
    if (!Find(library, name, function) && !missing) missing = name;
  };
  find("cuInit", &driver->cuInit);
  find("cuGetErrorName", &driver->cuGetErrorName);
  find("cuDeviceGet", &driver->cuDeviceGet);
  find("cuDeviceGetName", &driver->cuDeviceGetName);
  find("cuDeviceGetAttribute", &driver->cuDeviceGetAttribute);
  find("cuDevicePrimaryCtxRetain", &driver->cuDevicePrimaryCtxRetain);
  find("cuCtxPushCurrent_v2", &driver->cuCtxPushCurrent);
  find("cuCtxPopCurrent_v2", &driver->cuCtxPopCurrent);
  find("cuCtxGetDevice", &driver->cuCtxGetDevice);
  find("cuModuleLoadData", &driver->cuModuleLoadData);
  find("cuModuleGetFunction", &driver->cuModuleGetFunction);
  find("cuLaunchKernel", &driver->cuLaunchKernel);
  find("cuLaunchHostFunc", &driver->cuLaunchHostFunc);
  find("cuMemAlloc_v2", &driver->cuMemAlloc);
  find("cuMemFree_v2", &driver->cuMemFree);
  find("cuMemcpyHtoDAsync_v2", &driver->cuMemcpyHtoDAsync);
  find("cuMemcpyDtoHAsync_v2", &driver->cuMemcpyDtoHAsync);
  find("cuMemcpyDtoDAsync_v2", &driver->cuMemcpyDtoDAsync);
  find("cuMemsetD8Async", &driver->cuMemsetD8Async);
  find("cuStreamCreate", &driver->cuStreamCreate);
  find("cuStreamDestroy_v2", &driver->cuStreamDestroy);
  find("cuStreamGetCtx", &driver->cuStreamGetCtx);
  find("cuStreamSynchronize", &driver->cuStreamSynchronize);
  if (missing) return {Concat("the CUDA driver is too old: it has no ", missing)};
  return driver->Check(driver->cuInit(0), "cuInit");
}

using nvrtcProgram = struct nvrtcProgram_st*;

struct Nvrtc {
  int (*create)(nvrtcProgram* program, const char* source, const char* name, int num_headers,
                const char* const* headers, const char* const* include_names);
  int (*destroy)(nvrtcProgram* program);
  int (*compile)(nvrtcProgram program, int num_options, const char* const* options);
  int (*log_size)(nvrtcProgram program, size_t* size);
  int (*log)(nvrtcProgram program, char* log);
  int (*cubin_size)(nvrtcProgram program, size_t* size);
  int (*cubin)(nvrtcProgram program, char* cubin);
};

std::mutex nvrtc_mutex;
std::string nvrtc_path;

Status Load(Nvrtc* nvrtc) {
  std::vector<std::string> names = {"libnvrtc.so.12", "libnvrtc.so.13", "libnvrtc.so"};
  if (!nvrtc_path.empty()) names.insert(names.begin(), nvrtc_path);
  std::string error;
  void* library = OpenFirst(names, &error);
  if (!library) return {Concat("CUDA's compiler NVRTC was not found: ", error)};
  if (!Find(library, "nvrtcCreateProgram", &nvrtc->create) ||
      !Find(library, "nvrtcDestroyProgram", &nvrtc->destroy) ||
      !Find(library, "nvrtcCompileProgram", &nvrtc->compile) ||
      !Find(library, "nvrtcGetProgramLogSize", &nvrtc->log_size) ||
      !Find(library, "nvrtcGetProgramLog", &nvrtc->log) ||
      !Find(library, "nvrtcGetCUBINSize", &nvrtc->cubin_size) ||
      !Find(library, "nvrtcGetCUBIN", &nvrtc->cubin)) {
    return {"CUDA's compiler NVRTC is too old: it makes no device code"};
  }
  return {};
}

Status Compile(const Nvrtc& nvrtc, nvrtcProgram program, int capability,
               std::vector<char>* cubin) {
  const std::string architecture = Concat("--gpu-architecture=sm_", capability);
  // The sources use intrinsics for every rounding; these options cover all other operations.
  const char* options[] = {architecture.c_str(), "--std=c++17", "--fmad=false", "--device-int128"};
  const int error = nvrtc.compile(program, std::size(options), options);
  size_t size = 0;
  if (error != 0) {
    nvrtc.log_size(program, &size);
    std::string log(size, '\0');
    if (size > 0) nvrtc.log(program, log.data());
    return {Concat("NVRTC can't compile for sm_", capability, ": error ", error, ": ",
                   log.c_str())};
  }
  if (nvrtc.cubin_size(program, &size) != 0) return {"NVRTC made no device code"};
  cubin->resize(size);
  if (nvrtc.cubin(program, cubin->data()) != 0) return {"NVRTC made no device code"};
  return {};
}

}  // namespace

const Driver* Driver::Get(Status* status) {
  static Driver driver;
  static const Status loaded = Load(&driver);
  *status = loaded;
  return loaded.ok() ? &driver : nullptr;
}

Status Driver::Check(int error, const char* what) const {
  if (error == 0) return {};
  const char* name = nullptr;
  cuGetErrorName(error, &name);
  return {Concat(what, " fails: ", name ? name : "error ", name ? "" : Concat(error))};
}

void SetNvrtcPath(const std::string& path) {
  const std::lock_guard<std::mutex> lock(nvrtc_mutex);
  nvrtc_path = path;
}

Status CompileKernels(int capability, std::vector<char>* cubin) {
  const std::lock_guard<std::mutex> lock(nvrtc_mutex);
  Nvrtc nvrtc = {};
  const Status loaded = Load(&nvrtc);
  if (!loaded.ok()) return loaded;
  nvrtcProgram program;
  if (nvrtc.create(&program, gradcomp_source_kernels, "kernels.cu", std::size(kTexts), kTexts,
                   kFiles) != 0) {
    return {"NVRTC can't be used"};
  }
  const Status compiled = Compile(nvrtc, program, capability, cubin);
  nvrtc.destroy(&program);
  return compiled;
}

}  // namespace gradcomp
