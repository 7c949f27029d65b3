// CUDA's streams as the adapter's tests want them: which stream is in which capture is what the
// test says. fake_cuda.cc puts this behind runtime.h, and the host driver, telling of the same
// captures, behind the pools.
#pragma once

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>
#include <cuda_runtime_api.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "testing/host_driver.h"
#include "torch/runtime.h"
#include "torch/workspaces.h"

namespace cgp::fake_cuda {

inline constexpr uint64_t kPage = uint64_t{2} << 20;
inline constexpr uint64_t kPhysicalLimit = 32 * kPage;

// Of the calling thread.
inline thread_local cudaStream_t current_stream = nullptr;
inline thread_local c10::DeviceIndex current_device = 0;

// A device that nobody used yet. Pools live as long as the process, so each test has its own.
c10::DeviceIndex NextDevice();

cudaStream_t Stream(uintptr_t number);

// The stream joins the capture with this id; 0: it is in none. As in CUDA, an id may not come back
// once its capture is over.
void SetCapture(cudaStream_t stream, CaptureId id);
// What no capture survives happens in that of the stream. It holds the stream until SetCapture().
void Invalidate(cudaStream_t stream);
// No stream is capturing or was asked of, and no host route was ended.
void Reset();

// What a graph's filter asks CUDA for: the id of the stream's capture, or 0.
CaptureId ActiveCapture(cudaStream_t stream);

// The arguments of EndHostRoute().
std::vector<c10::MempoolId_t> ended_host_routes();

// What FindWorkspaces() finds.
inline WorkspaceMap workspaces, lt_workspaces;

// How often the adapter and the filters asked CUDA for the capture of a stream; the pools ask their
// driver. IsCapturing(), which may be asked of any stream, does not count.
int64_t queries();

// What MakeDriver() returns of what it made.
inline std::function<std::unique_ptr<Driver>(std::unique_ptr<Driver>)> around_driver =
    [](std::unique_ptr<Driver> made) { return made; };

// What does the work of a driver of MakeDriver(), unless another one is around it.
HostDriver& HostOf(Driver& made);

}  // namespace cgp::fake_cuda
