#include "torch/streams.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

namespace cgp {

bool IsCapturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamGetCaptureInfo(stream, &status, nullptr) != cudaSuccess) {
    // The legacy stream cannot be asked while a blocking stream captures: it is not capturing
    // itself.
    (void)cudaGetLastError();
    return false;
  }
  return status != cudaStreamCaptureStatusNone;
}

cudaStream_t CurrentStream(c10::DeviceIndex device) {
  return c10::cuda::getCurrentCUDAStream(device).stream();
}

c10::DeviceIndex CurrentDevice() {
  c10::DeviceIndex device = 0;
  C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
  return device;
}

RelaxedCaptureMode::RelaxedCaptureMode() {
  C10_CUDA_CHECK(cudaThreadExchangeStreamCaptureMode(&before_));
}

RelaxedCaptureMode::~RelaxedCaptureMode() {
  C10_CUDA_CHECK_WARN(cudaThreadExchangeStreamCaptureMode(&before_));
}

}  // namespace cgp
