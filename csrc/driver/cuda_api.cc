#include "driver/cuda_api.h"

#include <dlfcn.h>

#include <string>

#include "core/driver.h"

namespace cgp {
namespace {

constexpr char kLibrary[] = "libcuda.so.1";

struct Loaded {
  CudaApi api;
  std::string reason;  // why it cannot be used; empty if it can
};

// Why `function` cannot be used; empty if it was found.
std::string Find(PFN_cuGetProcAddress_v12000 get_address, const char* function, int version,
                 int driver_version, void** found) {
  *found = nullptr;
  // A driver that is asked for a newer form than it knows may return the one that it has, which
  // takes other arguments.
  if (version > driver_version) {
    const auto text = [](int v) {
      return std::to_string(v / 1000) + "." + std::to_string(v % 1000 / 10);
    };
    return std::string("the NVIDIA driver is too old: ") + function + " takes CUDA " +
           text(version) + ", and the driver has " + text(driver_version) + ": update it";
  }
  const CUresult code = get_address(function, found, version, CU_GET_PROC_ADDRESS_DEFAULT, nullptr);
  if (code == CUDA_ERROR_STUB_LIBRARY) {
    return std::string(kLibrary) +
           " is the CUDA toolkit's stub to link with, not a driver: take its folder out of "
           "LD_LIBRARY_PATH";
  }
  if (code == CUDA_SUCCESS && *found != nullptr) return "";
  return std::string("the NVIDIA driver has no ") + function + " (error " + std::to_string(code) +
         "): update it";
}

Loaded Load() {
  Loaded loaded;
  // Never closed: the functions are used until the process ends.
  void* const library = dlopen(kLibrary, RTLD_NOW | RTLD_LOCAL);
  if (library == nullptr) {
    const char* const error = dlerror();
    loaded.reason = "no NVIDIA driver was found on this machine (" +
                    std::string(error != nullptr ? error : "no further reason given") +
                    "): it takes an NVIDIA GPU and its driver";
    return loaded;
  }
  const auto get_address =
      reinterpret_cast<PFN_cuGetProcAddress_v12000>(dlsym(library, "cuGetProcAddress_v2"));
  if (get_address == nullptr) {
    loaded.reason =
        std::string("the NVIDIA driver is too old: ") + kLibrary +
        " has no cuGetProcAddress_v2, which came with CUDA 12.0 (driver 525): update it";
    return loaded;
  }
  const auto get_version =
      reinterpret_cast<PFN_cuDriverGetVersion_v2020>(dlsym(library, "cuDriverGetVersion"));
  int& driver_version = loaded.api.version;
  if (get_version != nullptr) get_version(&driver_version);
  void* found = nullptr;
#define CGP_CUDA_FIND(function, version)                                         \
  loaded.reason = Find(get_address, #function, version, driver_version, &found); \
  if (!loaded.reason.empty()) return loaded;                                     \
  loaded.api.function = reinterpret_cast<PFN_##function##_v##version>(found);
  CGP_CUDA_FUNCTIONS(CGP_CUDA_FIND)
#undef CGP_CUDA_FIND
  if (Find(get_address, "cuCtxRecordEvent", 12050, driver_version, &found).empty()) {
    loaded.api.cuCtxRecordEvent = reinterpret_cast<PFN_cuCtxRecordEvent_v12050>(found);
  }
  return loaded;
}

}  // namespace

const CudaApi& CudaApiOrThrow(int device) {
  static const Loaded loaded = Load();
  if (loaded.reason.empty()) return loaded.api;
  throw DriverError(DriverStatus::kFailed, "cuInit", CUDA_ERROR_SHARED_OBJECT_INIT_FAILED,
                    "CUDA_ERROR_SHARED_OBJECT_INIT_FAILED", 0, device, loaded.reason);
}

}  // namespace cgp
