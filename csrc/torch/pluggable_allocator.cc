// The C functions for torch.cuda.memory.CUDAPluggableAllocator: all memory comes from pools, and
// there is no base.
//
// Without its hooks, torch tells such an allocator nothing of captures: memory of a graph would be
// handed out again while the graph still needs it. So allocating in a capture is refused, except
// for segments of a torch.cuda.MemPool, which the native allocator asks for and holds. With the
// hooks, which cudagraph_pool.pluggable_allocator() sets, each pool of torch's is one of ours, and
// only eager memory comes from the pool that is always open.
#include <c10/cuda/CUDACachingAllocator.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <mutex>
#include <string>
#include <utility>

#include "core/base/error.h"
#include "torch/device_pools.h"
#include "torch/errors.h"
#include "torch/graph_allocator.h"
#include "torch/runtime.h"
#include "torch/scopes/capture_scopes.h"

#define CGP_EXPORT extern "C" __attribute__((visibility("default")))

namespace cgp {
namespace {

// An id that torch never makes: one of its two numbers is always 0.
constexpr PoolId kEagerPool{~0ULL, ~0ULL};

DevicePools& Pools(DeviceIndex device) { return DevicePools::For(device, kPluggableAllocator); }

CaptureScopes& Scopes() {
  static auto* const scopes = new CaptureScopes(kPluggableAllocator, nullptr);
  return *scopes;  // never destroyed, as the pools
}

// Whether torch calls hooks, so that captures are known. Until then what a stream freed is its own
// until memory runs out, as with torch's allocator: a mark that opens it to others would break a
// capture.
std::atomic<bool> calls_hooks{false};

// Orders eager allocations, during which the eager pool stays open. The base may hold its lock when
// it comes here, so neither with this lock nor with that of the scopes is the base's asked for.
std::mutex eager_mutex;

// Whether torch's own allocator is installed, so that only a MemPool of its can be asking.
bool ServesMemPools() { return cca::get()->name() == "native"; }

// Both are called with that mutex held.

// Opens the eager pool if it is not open: it may have its user and no scope, if it could not be
// opened again before.
void OpenEagerPool(PoolSet& set) {
  if (set.InScope(kEagerPool)) return;
  // A MemPool's memory may still be there because somebody captures without our knowing.
  const bool capturing = ServesMemPools() && set.Contains(kEagerPool);
  set.BeginScope(kEagerPool, ScopeKind::kEager, capturing);
  if (set.UseCount(kEagerPool) > 1) set.Release(kEagerPool);  // BeginScope() added one
}

// Lets bytes that were freed behind other streams' work become free to all: fences open after a
// scope, if no capture is known. Not if all segments are MemPools'.
void CycleEagerPool(PoolSet& set) {
  if (ServesMemPools()) return;
  if (set.InScope(kEagerPool)) set.EndScope(kEagerPool);
  OpenEagerPool(set);
}

Block AllocateEager(size_t bytes, DeviceIndex device, cudaStream_t stream) {
  const std::lock_guard lock(eager_mutex);
  PoolSet& set = Pools(device).set;
  OpenEagerPool(set);
  const uint64_t reserved = set.Stats(kEagerPool).reserved_bytes;
  const Block block = set.Allocate(kEagerPool, bytes, ToStreamId(stream));
  // It had to grow: bytes that other streams have freed may help the next time.
  if (!calls_hooks || set.Stats(kEagerPool).reserved_bytes == reserved) return block;
  OrUndo([&] { CycleEagerPool(set); }, [&] { set.Free(block.address); });  // nobody else will
  return block;
}

// Gives back the memory of the device's unused pools, the graphs' too. pre: that mutex is not held.
void FreeUnused(DeviceIndex device) {
  GraphAllocator* const allocator = GraphAllocator::Find();
  allocator == nullptr ? Scopes().Trim(device) : allocator->scopes().TryTrim(device);
}

}  // namespace

CGP_EXPORT void* cudagraph_pool_malloc(size_t bytes, int of_device, cudaStream_t stream) {
  if (bytes == 0) return nullptr;
  const auto device = static_cast<DeviceIndex>(of_device);
  RouteTable& routes = Scopes().routes();
  const auto target = routes.Match(device, stream);
  TORCH_CHECK(target || !IsCapturing(stream) || ServesMemPools(),
              "cudagraph_pool_malloc was called while a CUDA graph is captured, and torch was not "
              "told how to say so: use cudagraph_pool.pluggable_allocator(), which sets the hooks, "
              "or torch.cuda.memory.change_current_allocator(cudagraph_pool.allocator())");
  for (bool first = true;; first = false) {
    try {
      const Block block = target ? Pools(device).set.Allocate(target->id, bytes, ToStreamId(stream),
                                                              target->capture)
                                 : AllocateEager(bytes, device, stream);
      return reinterpret_cast<void*>(block.address);
    } catch (const OutOfMemoryError& error) {
      const bool may_make_room = first && !routes.capturing() && !IsCapturing(stream);
      TORCH_CHECK_WITH(OutOfMemoryError, may_make_room,
                       std::string("CUDA out of memory. ") + error.what() + " " +
                           Pools(device).set.Describe(target ? target->id : kEagerPool));
    }
    std::unique_lock lock(eager_mutex);
    PoolSet& set = Pools(device).set;
    if (set.Contains(kEagerPool)) CycleEagerPool(set);
    lock.unlock();
    FreeUnused(device);
  }
}

CGP_EXPORT void cudagraph_pool_free(void* pointer, size_t /*bytes*/, int /*device*/,
                                    cudaStream_t /*stream*/) {
  if (pointer == nullptr) return;
  Block block;
  DevicePools* const pools = DevicePools::TryFree(pointer, &block, kPluggableAllocator);
  TORCH_CHECK(pools != nullptr,
              "cudagraph_pool_free: no live block starts at " +
                  Hex(reinterpret_cast<Address>(pointer)) +
                  "; it was not allocated by cudagraph_pool_malloc, or freed before");
  // Its memory goes with the last segment of a MemPool, as cudaFree() would give it back. The
  // caller must not take for alive what is freed: it would hand it out again.
  if (!ServesMemPools()) return;
  WithWarnings("giving back the memory of a MemPool", [&] {
    std::unique_lock lock(eager_mutex);
    PoolSet& set = pools->set;
    if (IsCapturing(CurrentStream(pools->device)) || set.UseCount(kEagerPool) == 0 ||
        set.Stats(kEagerPool).live_blocks > 0) {
      return;
    }
    if (set.InScope(kEagerPool)) set.EndScope(kEagerPool, /*may_ask_device=*/false);
    set.Release(kEagerPool);
    lock.unlock();
    FreeUnused(pools->device);
  });
}

// The hooks.

CGP_EXPORT void cudagraph_pool_reset() {  // torch.cuda.empty_cache()
  Scopes().Trim();
}

CGP_EXPORT void cudagraph_pool_memory_fraction(double fraction, int device) {
  DevicePools& pools = Pools(static_cast<DeviceIndex>(device));
  pools.driver.SetLimit(static_cast<uint64_t>(fraction * static_cast<double>(pools.total_bytes)));
}

CGP_EXPORT void* cudagraph_pool_base_alloc(void* pointer, size_t* bytes) {
  void* const base = DevicePools::BaseAllocation(pointer, bytes, kPluggableAllocator);
  TORCH_CHECK(base != nullptr,
              "no live block of cudagraph_pool holds " + Hex(reinterpret_cast<Address>(pointer)));
  return base;
}

// torch does not say which device the stream is of. It is taken for the block's: if it is
// another's, and no default stream, CUDA refuses when the block is freed.
CGP_EXPORT void cudagraph_pool_record_stream(void* pointer, cudaStream_t stream) {
  calls_hooks = true;
  DevicePools::TryRecordUse(pointer, ToStreamId(stream), kPluggableAllocator);
}

CGP_EXPORT void cudagraph_pool_begin_allocate_to_pool(int device, MempoolId_t id,
                                                      StreamFilter filter) {
  calls_hooks = true;
  Scopes().Begin(static_cast<DeviceIndex>(device), id, std::move(filter));
}

CGP_EXPORT void cudagraph_pool_end_allocate_to_pool(int device, MempoolId_t id) {
  Scopes().End(static_cast<DeviceIndex>(device), id);
}

CGP_EXPORT void cudagraph_pool_release_pool(int device, MempoolId_t id) {
  Scopes().Release(static_cast<DeviceIndex>(device), id);
}

}  // namespace cgp
