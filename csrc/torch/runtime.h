// What the adapter asks of CUDA's runtime, of torch beside its allocator, and of CUDA's driver: all
// in one place, so that tests bring another (fake_cuda.cc).
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

// Whether a capture was begun on the stream, or reached it, and has not been ended. An invalidated
// capture counts: it holds the stream until somebody ends it.
bool IsCapturing(cudaStream_t stream);
// Which one, unless it is invalidated. No thread may end it meanwhile: the driver would crash
// (Driver::Capture()).
std::optional<CaptureId> CaptureOf(cudaStream_t stream);

// The stream that the calling thread uses on `device`.
cudaStream_t CurrentStream(c10::DeviceIndex device);

// Whether that stream lives as long as the process, as torch's own ones do. Of a stream that
// somebody else made, a torch.cuda.ExternalStream, nobody knows.
bool CurrentStreamLasts(c10::DeviceIndex device);

// While it lives, what the calling thread does that captures forbid (waiting, say) does not disturb
// the captures of other threads.
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

// Whether anything was done on `device`. Unlike those about streams this question makes no context.
bool HasContext(c10::DeviceIndex device);

// The driver behind the device's pools.
std::unique_ptr<Driver> MakeDriver(int device);

// Whether memory that drivers of MakeDriver() take from now on can be exported to other processes.
void SetExportable(bool exportable);

// Throws std::runtime_error with the reason where MakeDriver() would fail, or the memory cannot be
// exported that must be `exportable`.
void RequireDriverSupport(int device, bool exportable);

// --- What torch does beside its allocator ---

// Closes the route of a failed capture in torch's own allocator of pinned host memory, which a
// CUDAGraph opens and closes together with ours, if torch left it open (before 2.14 it does): with
// it, no other capture could begin in the same pool.
void EndHostRoute(c10::MempoolId_t id);

}  // namespace cgp
