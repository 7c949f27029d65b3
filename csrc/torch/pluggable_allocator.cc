// The C functions for torch.cuda.memory.CUDAPluggableAllocator: all memory from pools, and no base.
//
// torch tells such an allocator nothing of captures unless its hooks are set. Without them memory
// of a graph would be handed out again while the graph still needs it, so allocating during a
// capture is refused; but for the segments of a torch.cuda.MemPool, which the native allocator asks
// for and keeps. With the hooks (cudagraph_pool.pluggable_allocator() sets them) each pool of
// torch's is one of ours, and only eager memory comes from the pool that is always open.
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

// An id that torch never makes: of its two numbers one is always 0.
constexpr PoolId kEagerPool{~0ULL, ~0ULL};

DevicePools& Pools(DeviceIndex device) { return DevicePools::For(device, kPluggableAllocator); }

CaptureScopes& Scopes() {
  static auto* const scopes = new CaptureScopes(kPluggableAllocator, nullptr);
  return *scopes;  // never destroyed, as the pools
}

// Whether torch calls hooks, so that captures are known. Until then what a stream freed is its own,
// as it is with torch's allocator, until memory runs out: a mark that opens it to others would break
// a capture.
std::atomic<bool> calls_hooks{false};

// Orders eager allocations, during which the eager pool stays open. The base may hold its lock when
// it comes here: its lock is never asked for behind this one, nor behind that of the scopes.
std::mutex eager_mutex;

// Whether torch's own allocator is the process's, so that only a MemPool of its can be asking.
bool ServesMemPools() { return cca::get()->name() == "native"; }

// Both are called with that mutex held.

// Opens the eager pool if it is not open: it may have its user and no scope, where it could not be
// opened again.
void OpenEagerPool(PoolSet& set) {
  if (set.InScope(kEagerPool)) return;
  // Memory of a MemPool that did not go may be there because somebody captures unknown to us.
  const bool capturing = ServesMemPools() && set.Contains(kEagerPool);
  set.BeginScope(kEagerPool, ScopeKind::kEager, capturing);
  if (set.UseCount(kEagerPool) > 1) set.Release(kEagerPool);  // BeginScope() added one
}

// Lets what was freed behind other streams' work become free to all: fences open after a scope, if
// no capture is known of. Not where segments of MemPools are all there is.
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
  // It had to grow: what other streams have freed may help the next time.
  if (!calls_hooks || set.Stats(kEagerPool).reserved_bytes == reserved) return block;
  OrUndo([&] { CycleEagerPool(set); }, [&] { set.Free(block.address); });  // nobody else will
  return block;
}

// Gives the memory of the device's unused pools back, the graphs' too. pre: that mutex is not held.
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
  // Its memory goes once no segment of a MemPool is left in it, as cudaFree() would give it back.
  // Nor may the caller take for alive what is freed: it would hand it out again.
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

// torch does not say which device's the stream is. One of another device than the block's is taken
// for this one's: if it is no default stream CUDA refuses when the block is freed.
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
