#include "torch/streams.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAStream.h>

namespace cgp {

StreamCapture CaptureOf(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  CaptureId id = 0;
  if (cudaStreamGetCaptureInfo(stream, &status, &id) != cudaSuccess) {
    // The legacy stream cannot be asked while a blocking stream captures: it is not capturing
    // itself.
    (void)cudaGetLastError();
    return {};
  }
  return {.capturing = status != cudaStreamCaptureStatusNone,
          .id = status == cudaStreamCaptureStatusActive ? std::optional(id) : std::nullopt};
}

bool IsCapturing(cudaStream_t stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(stream, &status) != cudaSuccess) (void)cudaGetLastError();  // as above
  return status != cudaStreamCaptureStatusNone;
}

bool HasContext(c10::DeviceIndex device) { return c10::cuda::hasPrimaryContext(device); }

cudaStream_t CurrentStream(c10::DeviceIndex device) {
  return c10::cuda::getCurrentCUDAStream(device).stream();
}

bool CurrentStreamLasts(c10::DeviceIndex device) {
  const c10::cuda::CUDAStream stream = c10::cuda::getCurrentCUDAStream(device);
  // The id of an external stream is the stream itself.
  const auto external = static_cast<c10::StreamId>(reinterpret_cast<uintptr_t>(stream.stream()));
  return stream.stream() == nullptr || stream.id() != external;
}

c10::DeviceIndex CurrentDevice() {
  c10::DeviceIndex device = 0;
  C10_CUDA_CHECK(c10::cuda::GetDevice(&device));
  return device;
}

// A forked process has no CUDA, nor any capture: memory is freed there all the same.
RelaxedCaptureMode::RelaxedCaptureMode()
    : changed_(cudaThreadExchangeStreamCaptureMode(&before_) == cudaSuccess) {
  if (!changed_) (void)cudaGetLastError();
}

RelaxedCaptureMode::~RelaxedCaptureMode() {
  if (changed_) C10_CUDA_CHECK_WARN(cudaThreadExchangeStreamCaptureMode(&before_));
}

}  // namespace cgp
