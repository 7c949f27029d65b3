// What the adapter asks of CUDA streams, without disturbing a capture.
#pragma once

#include <c10/core/Device.h>
#include <cuda_runtime_api.h>

#include <optional>

#include "driver/driver.h"

namespace cgp {

inline StreamId ToStreamId(cudaStream_t stream) {
  return static_cast<StreamId>(reinterpret_cast<uintptr_t>(stream));
}

struct StreamCapture {
  // Whether a capture was begun on the stream, or reached it, and has not been ended. An
  // invalidated capture counts: it holds the stream until somebody ends it.
  bool capturing = false;
  // Not of an invalidated capture.
  std::optional<CaptureId> id;
};

// Each is one question to CUDA, legal in captures. No thread may end the stream's capture while
// CaptureOf() asks: the driver would crash (Driver::Capture()). IsCapturing() may always be asked.
StreamCapture CaptureOf(cudaStream_t stream);
bool IsCapturing(cudaStream_t stream);

// Whether anything was done on `device`. Unlike those about streams this question makes no context.
bool HasContext(c10::DeviceIndex device);

// The stream that the calling thread uses on `device`.
cudaStream_t CurrentStream(c10::DeviceIndex device);

// Whether that stream lives as long as the process, as torch's own ones do. Of a stream that somebody
// else made, a torch.cuda.ExternalStream, nobody knows.
bool CurrentStreamLasts(c10::DeviceIndex device);

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
  [[maybe_unused]] cudaStreamCaptureMode before_ =
      cudaStreamCaptureModeRelaxed;  // fake_cuda.cc changes nothing
  [[maybe_unused]] const bool changed_;
};

}  // namespace cgp
