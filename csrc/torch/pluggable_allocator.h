// What stands behind the C functions for torch.cuda.memory.CUDAPluggableAllocator: all memory of a
// device from graph pools, without a base.
//
// torch tells such an allocator nothing of captures unless its hooks are set. Without them memory
// of a graph would be handed out again while the graph still needs it, so allocating during a
// capture is refused; but for the segments of a torch.cuda.MemPool, which the native allocator asks
// for and keeps. With the hooks (cudagraph_pool.pluggable_allocator() sets them) each pool of
// torch's is one of ours, and only eager memory comes from the pool that is always open.
#pragma once

#include <cuda_runtime_api.h>

#include <atomic>
#include <mutex>

#include "torch/device_pools.h"
#include "torch/scopes/capture_scopes.h"

namespace cgp {

class PluggableAllocator {
 public:
  // The process's one.
  static PluggableAllocator& Get();

  CaptureScopes& scopes() { return scopes_; }
  // The same, and torch calls hooks that tell of captures.
  CaptureScopes& Told() {
    told_ = true;
    return scopes_;
  }

  void* Malloc(size_t bytes, DeviceIndex device, cudaStream_t stream);
  void Free(void* pointer);

 private:
  Block AllocateEager(size_t bytes, DeviceIndex device, cudaStream_t stream);
  // Gives the memory of the device's unused pools back, the graphs' too. pre: mutex_ is not held.
  void FreeUnused(DeviceIndex device);

  CaptureScopes scopes_{kPluggableAllocator, nullptr};
  // Whether torch calls hooks, so that captures are known. Until then what a stream freed is
  // its own, as it is with torch's allocator, until memory runs out: a mark that opens it to others
  // would break a capture.
  std::atomic<bool> told_ = false;
  // Orders eager allocations, during which the eager pool stays open. The base may hold its lock
  // when it comes here: its lock is never asked for behind this one, nor behind that of the scopes.
  std::mutex mutex_;
};

}  // namespace cgp
