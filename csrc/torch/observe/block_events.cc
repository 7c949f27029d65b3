#include "torch/observe/block_events.h"

#include <c10/core/Allocator.h>
#include <c10/core/impl/GPUTrace.h>

#include <optional>
#include <unordered_map>
#include <utility>
#include <vector>

#include "torch/errors.h"

namespace cgp {
namespace {

using Base = MergedStats::Base;

void Report(Base& base, DevicePools& pools, Address address, int64_t bytes) {
  if (!c10::memoryProfilingEnabled()) return;
  const MergedStats::Totals total = pools.stats.Now(base);
  c10::reportMemoryUsageToProfiler(reinterpret_cast<void*>(address), bytes, total.allocated_bytes,
                                   total.reserved_bytes, c10::Device(c10::kCUDA, pools.device));
}

void Trace(const Block& block, bool allocated) {
  const c10::impl::PyInterpreter* const tracer = c10::impl::GPUTrace::get_trace();
  if (tracer == nullptr) return;
  const auto address = static_cast<uintptr_t>(block.address);
  allocated ? (*tracer)->trace_gpu_memory_allocation(c10::kCUDA, address)
            : (*tracer)->trace_gpu_memory_deallocation(c10::kCUDA, address);
}

void Note(Base& base, History::Action action, const DevicePools::Owned& owned,
          History::Context context = nullptr) {
  const auto& [pools, id, block] = owned;
  History::Get().Record(
      {action, pools->device, block.address, block.requested_bytes, block.stream, id},
      std::move(context), base.getUserMetadata());
}

}  // namespace

void Announce(Base& base, const DevicePools::Owned& made, History::Context context) {
  DevicePools& pools = *made.pools;
  const Block& block = made.block;
  const auto bytes = static_cast<int64_t>(block.bytes);
  bool noted = false;
  bool reported = false;
  try {
    pools.stats.AfterGrowth(base);
    pools.share.LimitBase(base);
    if (History::Get().active()) {
      noted = true;
      Note(base, History::Action::ALLOC, made, std::move(context));
    }
    reported = true;
    Report(base, pools, block.address, bytes);
    Trace(block, true);
  } catch (...) {
    // Nobody will free what nobody got. Who heard of the block hears that it is gone; the error to
    // know is the first.
    Callbacks callbacks;
    if (noted) callbacks.Run([&] { Note(base, History::Action::FREE_REQUESTED, made); });
    TryTwice("freeing a block", [&] { pools.set.Free(block.address); });
    if (reported) callbacks.Run([&] { Report(base, pools, block.address, -bytes); });
    throw;
  }
}

bool FreeAnnounced(Base& base, void* pointer, bool* freed) {
  History& history = History::Get();
  const History::Telling telling(history);
  // Only of the device that the block is on: somebody may wait for another one with the base's lock
  // of it held.
  const auto is_behind = [&](DevicePools& pools) {
    const bool behind = pools.stats.IsBehind();
    return behind && pools.set.HasReserved(reinterpret_cast<Address>(pointer)) ? &pools : nullptr;
  };
  if (auto* const pools = DevicePools::FindFirst(PoolsOwner::kGraphAllocator, is_behind)) {
    pools->stats.BeforeChange(base);
  }
  // The block is freed whatever those say who are told: a second attempt would free what is not
  // there any more, or tell some of them twice.
  Callbacks callbacks;
  // They hear of it before anybody else can have the bytes.
  const bool is_told = history.active() || c10::impl::GPUTrace::get_trace() != nullptr;
  const auto told = is_told ? DevicePools::At(pointer) : std::nullopt;
  if (told) callbacks.Run([&] { Trace(told->block, false); });
  const bool noted = told && history.active();
  const History::Context allocated = noted ? history.ContextOf(told->block.address) : nullptr;
  if (noted) {
    callbacks.Run([&] {
      Note(base, History::Action::FREE_REQUESTED, *told, history.Gather(History::When::ALL));
    });
  }
  Block block;
  DevicePools* pools = nullptr;
  try {
    pools = DevicePools::TryFree(pointer, &block);
  } catch (...) {
    // It could not be freed after all.
    if (noted) callbacks.Run([&] { Note(base, History::Action::ALLOC, *told, allocated); });
    throw;
  }
  *freed = pools != nullptr;
  if (pools != nullptr) {
    callbacks.Run([&] { Report(base, *pools, block.address, -static_cast<int64_t>(block.bytes)); });
  }
  callbacks.Rethrow();
  return pools != nullptr;
}

void NoteRestored(Base& base, DevicePools& pools, PoolId id, const RestoreDelta& delta) {
  // Blocks that live on are in both. Of one list no two have the same address.
  const auto note = [&](History::Action action, const std::vector<Block>& blocks,
                        const std::vector<Block>& others) {
    std::unordered_map<Address, Block> known(others.size());
    for (const Block& other : others) known.emplace(other.address, other);
    for (const Block& block : blocks) {
      const auto same = known.find(block.address);
      if (same == known.end() || same->second != block) Note(base, action, {&pools, id, block});
    }
  };
  note(History::Action::FREE_REQUESTED, delta.freed, delta.allocated);
  note(History::Action::ALLOC, delta.allocated, delta.freed);
}

}  // namespace cgp
