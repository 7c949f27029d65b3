#include "torch/pluggable_allocator.h"

#include <c10/cuda/CUDACachingAllocator.h>

#include <string>
#include <utility>

#include "torch/graph_allocator.h"
#include "torch/runtime.h"

#define CGP_EXPORT extern "C" __attribute__((visibility("default")))

namespace cgp {
namespace {

// An id that torch never makes: of its two numbers one is always 0.
constexpr PoolId kEagerPool{~0ULL, ~0ULL};

// Whether torch's own allocator is the process's, so that only a MemPool of its can be asking.
bool ServesMemPools() { return cca::get()->name() == "native"; }

}  // namespace

PluggableAllocator& PluggableAllocator::Get() {
  static auto* const allocator = new PluggableAllocator;  // never destroyed, as the pools
  return *allocator;
}

DevicePools& PluggableAllocator::Pools(c10::DeviceIndex device) {
  return DevicePools::For(device, PoolsOwner::kPluggableAllocator);
}

void PluggableAllocator::CycleEagerPool(DevicePools& pools) {
  if (ServesMemPools()) return;
  if (pools.set.InScope(kEagerPool)) pools.set.EndScope(kEagerPool);
  OpenEagerPool(pools);
}

void PluggableAllocator::OpenEagerPool(DevicePools& pools) {
  PoolSet& set = pools.set;
  if (set.InScope(kEagerPool)) return;
  const bool has_user = set.UseCount(kEagerPool) > 0;
  // Memory of a MemPool that did not go may be there because somebody captures unknown to us.
  const bool capturing = ServesMemPools() && set.Contains(kEagerPool);
  set.BeginScope(kEagerPool, ScopeKind::kEager, capturing);
  if (has_user) set.Release(kEagerPool);  // BeginScope() added one
}

Block PluggableAllocator::AllocateEager(size_t bytes, c10::DeviceIndex device,
                                        cudaStream_t stream) {
  const std::lock_guard lock(mutex_);
  DevicePools& pools = Pools(device);
  PoolSet& set = pools.set;
  OpenEagerPool(pools);
  const uint64_t reserved = set.Stats(kEagerPool).reserved_bytes;
  const Block block = set.Allocate(kEagerPool, bytes, ToStreamId(stream));
  // It had to grow: what other streams have freed may help the next time.
  if (!told_ || set.Stats(kEagerPool).reserved_bytes == reserved) return block;
  OrUndo([&] { CycleEagerPool(pools); }, [&] { set.Free(block.address); });  // nobody else will
  return block;
}

void PluggableAllocator::FreeUnused(c10::DeviceIndex device) {
  if (GraphAllocator* const allocator = FindGraphAllocator()) {
    allocator->scopes().TryTrim(device);
  } else {
    AsTorchErrors([&] { scopes_.Trim(device); });
  }
}

void* PluggableAllocator::Malloc(size_t bytes, c10::DeviceIndex device, cudaStream_t stream) {
  if (bytes == 0) return nullptr;
  const auto target = routes_.active() ? routes_.Match(device, stream) : std::nullopt;
  TORCH_CHECK(target || !IsCapturing(stream) || ServesMemPools(),
              "cudagraph_pool_malloc was called while a CUDA graph is captured, and torch was not "
              "told how to say so: use cudagraph_pool.pluggable_allocator(), which sets the hooks, "
              "or torch.cuda.memory.change_current_allocator(cudagraph_pool.allocator())");
  for (bool first = true;; first = false) {
    std::string refusal;
    try {
      const Block block = AsTorchErrors([&] {
        return target ? Pools(device).set.Allocate(target->id, bytes, ToStreamId(stream),
                                                   target->capture)
                      : AllocateEager(bytes, device, stream);
      });
      return reinterpret_cast<void*>(block.address);
    } catch (const OutOfMemoryError& error) {
      refusal = error.what();
    }
    if (!first || routes_.capturing() || IsCapturing(stream)) {
      TORCH_CHECK_WITH(OutOfMemoryError, false, "CUDA out of memory. " + refusal);
    }
    AsTorchErrors([&] {
      std::unique_lock lock(mutex_);
      if (Pools(device).set.Contains(kEagerPool)) CycleEagerPool(Pools(device));
      lock.unlock();
      FreeUnused(device);
    });
  }
}

void PluggableAllocator::Free(void* pointer) {
  if (pointer == nullptr) return;
  Block block;
  DevicePools* const pools = DevicePools::TryFree(pointer, &block, PoolsOwner::kPluggableAllocator);
  TORCH_CHECK(pools != nullptr,
              "cudagraph_pool_free: no live block starts at " +
                  Hex(reinterpret_cast<Address>(pointer)) +
                  "; it was not allocated by cudagraph_pool_malloc, or freed before");
  // Its memory goes once no segment of a MemPool is left in it, as cudaFree() would give it back.
  // Nor may the caller take for alive what is freed: it would hand it out again.
  if (!ServesMemPools()) return;
  WithWarnings("giving back the memory of a MemPool", [&] {
    std::unique_lock lock(mutex_);
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

void PluggableAllocator::SetMemoryFraction(double fraction, c10::DeviceIndex device) {
  DevicePools& pools = AsTorchErrors([&]() -> DevicePools& { return Pools(device); });
  pools.driver.SetLimit(static_cast<uint64_t>(fraction * static_cast<double>(pools.total_bytes)));
}

void* PluggableAllocator::BaseAllocation(void* pointer, size_t* bytes) {
  const std::optional<Block> block = DevicePools::Around(pointer, PoolsOwner::kPluggableAllocator);
  TORCH_CHECK(block.has_value(),
              "no live block of cudagraph_pool holds " + Hex(reinterpret_cast<Address>(pointer)));
  if (bytes != nullptr) *bytes = block->bytes;
  return reinterpret_cast<void*>(block->address);
}

}  // namespace cgp

using cgp::PluggableAllocator;

CGP_EXPORT void* cudagraph_pool_malloc(size_t bytes, int device, cudaStream_t stream) {
  return PluggableAllocator::Get().Malloc(bytes, static_cast<c10::DeviceIndex>(device), stream);
}

CGP_EXPORT void cudagraph_pool_free(void* pointer, size_t /*bytes*/, int /*device*/,
                                    cudaStream_t /*stream*/) {
  PluggableAllocator::Get().Free(pointer);
}

CGP_EXPORT void cudagraph_pool_reset() { PluggableAllocator::Get().Reset(); }

CGP_EXPORT void cudagraph_pool_memory_fraction(double fraction, int device) {
  PluggableAllocator::Get().SetMemoryFraction(fraction, static_cast<c10::DeviceIndex>(device));
}

CGP_EXPORT void* cudagraph_pool_base_alloc(void* pointer, size_t* bytes) {
  return PluggableAllocator::Get().BaseAllocation(pointer, bytes);
}

CGP_EXPORT void cudagraph_pool_record_stream(void* pointer, cudaStream_t stream) {
  PluggableAllocator::Get().RecordStream(pointer, stream);
}

CGP_EXPORT void cudagraph_pool_begin_allocate_to_pool(int device, c10::MempoolId_t id,
                                                      cgp::StreamFilter filter) {
  PluggableAllocator::Get().Begin(static_cast<c10::DeviceIndex>(device), id, std::move(filter));
}

CGP_EXPORT void cudagraph_pool_end_allocate_to_pool(int device, c10::MempoolId_t id) {
  PluggableAllocator::Get().End(static_cast<c10::DeviceIndex>(device), id);
}

CGP_EXPORT void cudagraph_pool_release_pool(int device, c10::MempoolId_t id) {
  PluggableAllocator::Get().Release(static_cast<c10::DeviceIndex>(device), id);
}
