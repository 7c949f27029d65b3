// What stands behind the C functions for torch.cuda.memory.CUDAPluggableAllocator: all memory of a
// device from graph pools, without a base.
//
// torch tells such an allocator nothing of captures unless its hooks are set. Without them memory
// of a graph would be handed out again while the graph still needs it, so allocating during a
// capture is refused; but for the segments of a torch.cuda.MemPool, which the native allocator asks
// for and keeps. With the hooks (cudagraph_pool.pluggable_allocator() sets them) each pool of
// torch's is one of ours, and only eager memory comes from the pool that is always open.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstddef>
#include <mutex>
#include <utility>

#include "torch/device_pools.h"
#include "torch/errors.h"
#include "torch/scopes/capture_scopes.h"

namespace cgp {

class PluggableAllocator {
 public:
  // The process's one.
  static PluggableAllocator& Get();

  void* Malloc(size_t bytes, c10::DeviceIndex device, cudaStream_t stream);
  void Free(void* pointer);

  // The hooks. They throw c10::Error.
  void Reset() {  // torch.cuda.empty_cache()
    AsTorchErrors([&] { scopes_.Trim(); });
  }
  void SetMemoryFraction(double fraction, c10::DeviceIndex device);
  void* BaseAllocation(void* pointer, size_t* bytes);
  // torch does not say which device's the stream is. One of another device than the block's is
  // taken for this one's: if it is no default stream CUDA refuses when the block is freed.
  void RecordStream(void* pointer, cudaStream_t stream) {
    told_ = true;
    DevicePools::TryRecordUse(pointer, ToStreamId(stream), PoolsOwner::kPluggableAllocator);
  }
  void Begin(c10::DeviceIndex device, c10::MempoolId_t id, StreamFilter filter) {
    told_ = true;
    scopes_.Begin(device, id, std::move(filter));
  }
  void End(c10::DeviceIndex device, c10::MempoolId_t id) { scopes_.End(device, id); }
  void Release(c10::DeviceIndex device, c10::MempoolId_t id) { scopes_.Release(device, id); }

 private:
  static DevicePools& Pools(c10::DeviceIndex device);
  Block AllocateEager(size_t bytes, c10::DeviceIndex device, cudaStream_t stream);
  // Gives the memory of the device's unused pools back, the graphs' too.
  void FreeUnused(c10::DeviceIndex device);
  // Lets what was freed behind other streams' work become free to all: fences open after a scope,
  // if no capture is known of. Not where segments of MemPools are all there is. pre: mutex_ is
  // held.
  void CycleEagerPool(DevicePools& pools);
  // Opens the eager pool if it is not open: it may have its user and no scope, where it could not be
  // opened again. pre: mutex_ is held.
  void OpenEagerPool(DevicePools& pools);

  CaptureScopes scopes_{PoolsOwner::kPluggableAllocator, nullptr};
  RouteTable& routes_ = scopes_.routes();
  // Whether torch calls the hooks, so that captures are known. Until then what a stream freed is
  // its own, as it is with torch's allocator, until memory runs out: a mark that opens it to others
  // would break a capture.
  std::atomic<bool> told_ = false;
  // Orders eager allocations, during which the eager pool stays open. The base may hold its lock
  // when it comes here: its lock is never asked for behind this one, nor behind that of the scopes.
  std::mutex mutex_;
};

}  // namespace cgp
