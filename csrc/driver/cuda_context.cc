#include "driver/cuda_context.h"

namespace cgp {

CudaContext::CudaContext(const CudaApi& api, int device) : api_(api), device_(device) {
  Call(api.cuInit, 0);
  Call(api.cuDeviceGet, &cu_device_, device);
}

CudaContext::~CudaContext() {
  // This fails if CUDA has already shut down, at the end of the process; then nothing is left to
  // release.
  if (context_.load() != nullptr) api_.cuDevicePrimaryCtxRelease(cu_device_);
}

CUcontext CudaContext::Get() {
  if (CUcontext context = context_.load(std::memory_order_acquire)) return context;
  const std::lock_guard lock(mutex_);
  CUcontext context = context_.load(std::memory_order_relaxed);
  if (context == nullptr) {
    const UnsafeCallsAllowed allowed(api_);
    Check("cuDevicePrimaryCtxRetain", api_.cuDevicePrimaryCtxRetain(&context, cu_device_),
          DriverStatus::kOutOfMemory);
    context_.store(context, std::memory_order_release);
  }
  return context;
}

void CudaContext::Check(std::string_view call, CUresult code, DriverStatus out_of_memory,
                        uint64_t bytes) const {
  if (code == CUDA_SUCCESS) return;
  const char* name = nullptr;
  if (api_.cuGetErrorName(code, &name) != CUDA_SUCCESS || name == nullptr) name = "unknown error";
  throw DriverError(code == CUDA_ERROR_OUT_OF_MEMORY ? out_of_memory : DriverStatus::kFailed, call,
                    code, name, bytes, device_);
}

CurrentContext::CurrentContext(CudaContext& context) : api_(context.api()) {
  CUcontext const wanted = context.Get();
  CUcontext current = nullptr;
  context.Call(api_.cuCtxGetCurrent, &current);
  if (current == wanted) return;
  context.Call(api_.cuCtxPushCurrent, wanted);
  pushed_ = true;
}

CurrentContext::~CurrentContext() {
  CUcontext popped = nullptr;
  if (pushed_) api_.cuCtxPopCurrent(&popped);
}

}  // namespace cgp
