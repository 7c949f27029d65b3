#include "driver/cuda_context.h"

#include <string>

namespace cgp {

const CudaApi& CudaApiOrThrow(int device) {
  std::string reason;
  const CudaApi* const api = LoadCudaApi(&reason);
  if (api == nullptr) {
    throw DriverError(DriverStatus::kFailed, "cuInit", CUDA_ERROR_SHARED_OBJECT_INIT_FAILED,
                      "CUDA_ERROR_SHARED_OBJECT_INIT_FAILED", 0, device, reason);
  }
  return *api;
}

void CheckCuda(const CudaApi& api, int device, std::string_view call, CUresult code,
               DriverStatus out_of_memory) {
  if (code == CUDA_SUCCESS) return;
  throw DriverError(code == CUDA_ERROR_OUT_OF_MEMORY ? out_of_memory : DriverStatus::kFailed, call,
                    code, CudaErrorName(api, code), 0, device);
}

CudaContext::CudaContext(const CudaApi& api, int device) : api_(api), device_(device) {
  CheckCuda(api, device, "cuInit", api.cuInit(0));
  CheckCuda(api, device, "cuDeviceGet", api.cuDeviceGet(&cu_device_, device));
}

CudaContext::~CudaContext() {
  // Fails if CUDA has shut down before this, at the end of the process; then there is nothing to
  // release.
  if (context_.load() != nullptr) api_.cuDevicePrimaryCtxRelease(cu_device_);
}

CUcontext CudaContext::Get() {
  if (CUcontext context = context_.load(std::memory_order_acquire)) return context;
  const std::lock_guard lock(mutex_);
  CUcontext context = context_.load(std::memory_order_relaxed);
  if (context == nullptr) {
    const UnsafeCallsAllowed allowed(api_);
    CheckCuda(api_, device_, "cuDevicePrimaryCtxRetain",
              api_.cuDevicePrimaryCtxRetain(&context, cu_device_), DriverStatus::kOutOfMemory);
    context_.store(context, std::memory_order_release);
  }
  return context;
}

CurrentContext::CurrentContext(CudaContext& context) : api_(context.api()) {
  CUcontext const wanted = context.Get();
  CUcontext current = nullptr;
  CheckCuda(api_, context.device(), "cuCtxGetCurrent", api_.cuCtxGetCurrent(&current));
  if (current == wanted) return;
  CheckCuda(api_, context.device(), "cuCtxPushCurrent", api_.cuCtxPushCurrent(wanted));
  pushed_ = true;
}

CurrentContext::~CurrentContext() {
  CUcontext popped = nullptr;
  if (pushed_) api_.cuCtxPopCurrent(&popped);
}

}  // namespace cgp
