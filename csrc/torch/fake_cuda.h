// CUDA's streams as the adapter's tests want them: which stream is in which capture is what the
// test says. fake_cuda.cc puts this behind streams.h, and the host driver behind the pools.
#pragma once

#include <c10/core/Device.h>
#include <cuda_runtime_api.h>

#include <cstdint>

namespace cgp::fake_cuda {

inline constexpr uint64_t kPage = uint64_t{2} << 20;
inline constexpr uint64_t kPhysicalLimit = 32 * kPage;

// Of the calling thread. Pools live as long as the process, so each test has a device of its own.
inline thread_local cudaStream_t current_stream = nullptr;
inline thread_local c10::DeviceIndex current_device = 0;

cudaStream_t Stream(uintptr_t number);

// The stream joins the capture with this id; 0: it is in none. As in CUDA, an id may not come back
// once its capture is over.
void SetCaptureId(cudaStream_t stream, unsigned long long id);
// The capture of the stream fails: it holds the stream, and no longer says which it is.
void Invalidate(cudaStream_t stream);
// No stream is capturing.
void Reset();

// What a graph's filter asks CUDA for: the id of the stream's capture, or 0.
unsigned long long CaptureId(cudaStream_t stream);

// How often anybody asked CUDA for the capture of a stream.
int64_t queries();

}  // namespace cgp::fake_cuda
