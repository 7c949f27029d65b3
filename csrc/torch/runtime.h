// What the adapter asks of CUDA's runtime and driver, and of torch beside its allocator: in one
// place, so that tests can replace it (fake_cuda.cc).
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <cuda_runtime_api.h>

#include <memory>
#include <optional>

#include "core/driver.h"

namespace cgp {

// --- Streams, without disturbing a capture ---

inline StreamId ToStreamId(cudaStream_t stream) {
  return static_cast<StreamId>(reinterpret_cast<uintptr_t>(stream));
}

// Each is one question to CUDA, legal in captures.

// Whether a capture has begun on the stream, or reached it, and has not been ended. An invalidated
// capture counts: it holds the stream until somebody ends it.
bool IsCapturing(cudaStream_t stream);
// The capture, unless it is invalidated. No thread may end it meanwhile, or the driver crashes
// (Driver::Capture()).
std::optional<CaptureId> CaptureOf(cudaStream_t stream);

// The stream that the calling thread uses on `device`.
cudaStream_t CurrentStream(c10::DeviceIndex device);

// Whether that stream lives as long as the process, as torch's own ones do. It is unknown for a
// stream that somebody else made, a torch.cuda.ExternalStream: false.
bool CurrentStreamLasts(c10::DeviceIndex device);

// While this exists, what captures forbid to the calling thread (waiting, say) does not disturb the
// captures of other threads.
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

// --- Devices ---

// The device that is current in the calling thread.
c10::DeviceIndex CurrentDevice();

// Whether anything was done on `device`. Unlike questions about streams, this makes no context.
bool HasContext(c10::DeviceIndex device);

// The driver behind the device's pools.
std::unique_ptr<Driver> MakeDriver(int device);

// Whether memory that drivers of MakeDriver() make from now on can be exported to other processes.
void SetExportable(bool exportable);
bool Exports();

// Throws std::runtime_error with the reason if MakeDriver() would fail, or if memory must be
// `exportable` and cannot be.
void RequireDriverSupport(int device, bool exportable);

// --- What torch does beside its allocator ---

// Closes the route of a failed capture in torch's own allocator of pinned host memory, if torch
// left it open, as before 2.14. A CUDAGraph opens and closes it together with ours. While it is
// open, no other capture can begin in the same pool.
void EndHostRoute(c10::MempoolId_t id);

}  // namespace cgp
