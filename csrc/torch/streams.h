// What the adapter asks of CUDA streams, without disturbing a capture.
#pragma once

#include <c10/core/Device.h>
#include <cuda_runtime_api.h>

#include "driver/driver.h"

namespace cgp {

inline StreamId ToStreamId(cudaStream_t stream) {
  return static_cast<StreamId>(reinterpret_cast<uintptr_t>(stream));
}

// Whether a capture was begun on the stream, or reached it, and has not been ended. An invalidated
// capture counts: it holds the stream until somebody ends it. Legal at any time.
bool IsCapturing(cudaStream_t stream);

// The stream that the calling thread uses on `device`.
cudaStream_t CurrentStream(c10::DeviceIndex device);

// The device that is current in the calling thread.
c10::DeviceIndex CurrentDevice();

// While it lives, what the calling thread does that captures forbid (waiting, say) does not disturb the captures of
// other threads.
class RelaxedCaptureMode {
 public:
  RelaxedCaptureMode();
  ~RelaxedCaptureMode();
  RelaxedCaptureMode(const RelaxedCaptureMode&) = delete;
  RelaxedCaptureMode& operator=(const RelaxedCaptureMode&) = delete;

 private:
  cudaStreamCaptureMode before_ = cudaStreamCaptureModeRelaxed;
};

}  // namespace cgp
