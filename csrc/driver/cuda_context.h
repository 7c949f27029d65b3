// What a thread needs to call CUDA's driver for a device, whatever state it is in.
#pragma once

#include <atomic>
#include <mutex>
#include <string_view>
#include <type_traits>

#include "core/driver.h"
#include "driver/cuda_api.h"

namespace cgp {

// The primary context of a device, which the CUDA runtime and PyTorch use. The first call that
// needs it retains it; the constructor makes no context.
class CudaContext {
 public:
  // `device` is an ordinal as the CUDA runtime counts. `api` must outlive this. Throws DriverError
  // if there is no such device.
  CudaContext(const CudaApi& api, int device);
  ~CudaContext();

  const CudaApi& api() const { return api_; }
  int device() const { return device_; }
  CUdevice cu_device() const { return cu_device_; }  // CUDA's number for it

  // Throws DriverError.
  CUcontext Get();

  // Throws DriverError, which names the device, unless the call succeeded. The caller says what
  // out-of-memory means for its call.
  void Check(std::string_view call, CUresult code,
             DriverStatus out_of_memory = DriverStatus::kFailed, uint64_t bytes = 0) const;
  // Calls the function, and checks it so.
  template <typename... Parameters>
  void Call(const CudaFunction<CUresult(Parameters...)>& function,
            std::type_identity_t<Parameters>... arguments) const {
    Check(function.name, function(arguments...));
  }

 private:
  const CudaApi& api_;
  const int device_;
  CUdevice cu_device_ = 0;
  std::atomic<CUcontext> context_{nullptr};
  std::mutex mutex_;
};

// Makes a context current to this thread while this exists, and restores the thread afterwards.
class CurrentContext {
 public:
  explicit CurrentContext(CudaContext& context);
  ~CurrentContext();
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  const CudaApi& api_;
  bool pushed_ = false;
};

// While one exists, "potentially unsafe" calls of this thread neither break a capture nor fail.
class UnsafeCallsAllowed {
 public:
  explicit UnsafeCallsAllowed(const CudaApi& api) : api_(api) {
    api_.cuThreadExchangeStreamCaptureMode(&mode_);
  }
  ~UnsafeCallsAllowed() { api_.cuThreadExchangeStreamCaptureMode(&mode_); }
  UnsafeCallsAllowed(const UnsafeCallsAllowed&) = delete;
  UnsafeCallsAllowed& operator=(const UnsafeCallsAllowed&) = delete;

 private:
  const CudaApi& api_;
  CUstreamCaptureMode mode_ = CU_STREAM_CAPTURE_MODE_RELAXED;
};

}  // namespace cgp
