// The two C functions for torch.cuda.memory.CUDAPluggableAllocator(path, "cudagraph_pool_malloc",
// "cudagraph_pool_free"): all memory of a device from one pool whose scope is always open.
//
// torch tells such functions nothing of captures, so memory of a graph would be handed out again
// while the graph still needs it: allocating during a capture is refused.
// cudagraph_pool.allocator() and enable() have no such limit.
#include <c10/util/Exception.h>
#include <cuda_runtime_api.h>

#include <mutex>

#include "core/error.h"
#include "torch/device_pools.h"
#include "torch/streams.h"

#define CGP_EXPORT extern "C" __attribute__((visibility("default")))

namespace cgp {
namespace {

// An id that torch never makes: of its two numbers one is always 0.
constexpr PoolId kPlainPool{~0ULL, ~0ULL};

DevicePools& OpenPlainPool(c10::DeviceIndex device) {
  static std::mutex mutex;
  const std::lock_guard lock(mutex);
  DevicePools& pools = DevicePools::For(device);
  if (!pools.set().Contains(kPlainPool)) pools.set().BeginScope(kPlainPool, ScopeKind::kEager);
  return pools;
}

void* Malloc(size_t bytes, int device, cudaStream_t stream) {
  if (bytes == 0) return nullptr;
  TORCH_CHECK(!IsCapturing(stream),
              "cudagraph_pool_malloc was called while a CUDA graph is captured, which "
              "CUDAPluggableAllocator cannot "
              "support; use torch.cuda.memory.change_current_allocator(cudagraph_pool.allocator()) "
              "instead");
  try {
    DevicePools& pools = OpenPlainPool(static_cast<c10::DeviceIndex>(device));
    return reinterpret_cast<void*>(
        pools.set().Allocate(kPlainPool, bytes, ToStreamId(stream)).address);
  } catch (const OutOfMemoryError& error) {
    TORCH_CHECK_WITH(OutOfMemoryError, false, std::string("CUDA out of memory. ") + error.what());
  } catch (const DriverError& error) {
    TORCH_CHECK(false, error.what());
  }
}

void Free(void* pointer) {
  if (pointer == nullptr) return;
  Block block;
  TORCH_CHECK(DevicePools::TryFree(pointer, &block) != nullptr,
              "cudagraph_pool_free: no live block starts at " +
                  Hex(reinterpret_cast<Address>(pointer)) +
                  "; it was not allocated by cudagraph_pool_malloc, or freed before");
}

}  // namespace
}  // namespace cgp

CGP_EXPORT void* cudagraph_pool_malloc(size_t bytes, int device, cudaStream_t stream);
CGP_EXPORT void cudagraph_pool_free(void* pointer, size_t bytes, int device, cudaStream_t stream);

void* cudagraph_pool_malloc(size_t bytes, int device, cudaStream_t stream) {
  return cgp::Malloc(bytes, device, stream);
}

void cudagraph_pool_free(void* pointer, size_t /*bytes*/, int /*device*/, cudaStream_t /*stream*/) {
  cgp::Free(pointer);
}
