#include "torch/observe/events.h"

#include <c10/core/Allocator.h>
#include <c10/core/impl/GPUTrace.h>

#include <atomic>
#include <optional>
#include <string>
#include <thread>
#include <unordered_map>
#include <utility>

#include "core/base/error.h"

namespace cgp {
namespace {

// Tells torch's profiler, if it is on, what base and pools have now.
template <typename Function>
void Report(Base& base, DevicePools& pools, const Function& report) {
  if (!c10::memoryProfilingEnabled()) return;
  WithWarnings("torch's profiler", [&] {
    const DeviceStats now = pools.stats.Get(base);
    report(static_cast<size_t>(now.allocated_bytes[0].current),
           static_cast<size_t>(now.reserved_bytes[0].current),
           c10::Device(c10::kCUDA, pools.device));
  });
}
void ReportBlock(Base& base, DevicePools& pools, const Block& block, int sign) {
  Report(base, pools, [&](auto... now) {
    c10::reportMemoryUsageToProfiler(reinterpret_cast<void*>(block.address),
                                     sign * static_cast<int64_t>(block.bytes), now...);
  });
}

void Trace(const Block& block, bool allocated) {
  const c10::impl::PyInterpreter* const tracer = c10::impl::GPUTrace::get_trace();
  if (tracer == nullptr) return;
  const auto address = static_cast<uintptr_t>(block.address);
  WithWarnings("torch's sanitizer", [&] {
    allocated ? (*tracer)->trace_gpu_memory_allocation(c10::kCUDA, address)
              : (*tracer)->trace_gpu_memory_deallocation(c10::kCUDA, address);
  });
}

void Note(Base& base, History::Action action, const DevicePools::Owned& owned,
          History::Context context = nullptr) {
  if (!History::active()) return;
  WithWarnings("the history of allocations", [&] {
    const auto& [pools, id, block] = owned;
    History::Get().Record(
        {action, pools->device, block.address, block.requested_bytes, block.stream, id},
        std::move(context), base.getUserMetadata());
  });
}

// The native allocator tells nobody which observers and trackers it has, so only it can tell those
// that were attached before us. Hence it is made to run out as well: it is asked for the same bytes
// in a private pool of their own, which has no cache to serve them. Then it counts, records and
// tells as for any allocation of its own. It tells what was asked for and what is free; the limit
// is its own, without what graph pools hold of the process's share.
//
// Makes the base tell its observers and trackers. Returns false if it did not run out. It is asked
// on the default stream, which never captures: with graph_capture_record_stream_reuse the native
// allocator ends no scope while a stream that allocated there captures.
bool RunOutInBase(Base& base, c10::DeviceIndex device, size_t bytes) {
  // Other allocators have nobody to tell, and may do anything when asked for too much.
  if (base.name() != "native") return false;
  // An id that torch never makes, and no earlier pool of the base had: the native allocator reopens
  // no pool without a user.
  static std::atomic<uint64_t> last{0};
  const c10::MempoolId_t id{++last, ~0ULL};
  base.beginAllocateToPool(device, id, [thread = std::this_thread::get_id()](cudaStream_t) {
    return std::this_thread::get_id() == thread;
  });
  // Whatever its observers throw, it ran out.
  bool ran_out = true;
  WithWarnings("who was told that memory has run out", [&] {
    try {
      base.raw_delete(base.raw_alloc_with_stream(bytes, nullptr));
      ran_out = false;
    } catch (const c10::OutOfMemoryError&) {  // NOLINT(bugprone-empty-catch): as it was to be
    }
  });
  bool open = true;
  TryTwice("the allocator below it, told that memory has run out,", [&] {
    if (open) base.endAllocateToPool(device, id);
    open = false;
    base.releasePool(device, id);
  });
  return ran_out;
}

void TellOutOfMemory(Base& base, DevicePools& pools, const Request& request,
                     const MemoryInfo& info) {
  // The second asks for more than there is, if the base has these bytes after all.
  for (const size_t bytes : {request.bytes, request.bytes + pools.total_bytes}) {
    if (RunOutInBase(base, pools.device, bytes)) return;
  }
  ++pools.stats.ooms;
  Report(base, pools, [&](auto... now) {
    c10::reportOutOfMemoryToProfiler(static_cast<int64_t>(request.bytes), now...);
  });
  // The address of such an entry is the free memory.
  Note(base, History::Action::OOM,
       {&pools,
        request.id,
        {.address = Address{info.free_bytes},
         .requested_bytes = request.bytes,
         .stream = request.stream}},
       History::Get().Gather(History::When::ALLOC));
}

}  // namespace

void Announce(Base& base, const DevicePools::Owned& made, History::Context context) noexcept {
  made.pools->stats.AfterChange(base);
  Note(base, History::Action::ALLOC, made, std::move(context));
  ReportBlock(base, *made.pools, made.block, 1);
  Trace(made.block, true);
}

bool FreeAnnounced(Base& base, void* pointer) {
  History& history = History::Get();
  const History::Telling telling(history);
  // Only the block's device is asked: a thread may wait for another device with the base's lock of
  // it held.
  DevicePools::FindFirst(PoolsOwner::kGraphAllocator, [&](DevicePools& pools) {
    const bool asks =
        pools.stats.IsBehind() && pools.set.HasReserved(reinterpret_cast<Address>(pointer));
    if (asks) pools.stats.BeforeChange(base);
    return asks;
  });
  // Everybody is told before anyone else can have the bytes.
  const bool is_told = history.active() || c10::impl::GPUTrace::get_trace() != nullptr;
  const auto told = is_told ? DevicePools::At(pointer) : std::nullopt;
  History::Context allocated = told ? history.ContextOf(told->block.address) : nullptr;
  if (told) {
    History::Context context;
    WithWarnings("the recorder of stacks", [&] { context = history.Gather(History::When::ALL); });
    Trace(told->block, false);
    Note(base, History::Action::FREE_REQUESTED, *told, std::move(context));
  }
  Block block;
  const auto free = [&] { return DevicePools::TryFree(pointer, &block); };
  DevicePools* const pools = OrUndo(free, [&] {
    if (told) Note(base, History::Action::ALLOC, *told, std::move(allocated));
  });
  if (pools == nullptr) return false;
  ReportBlock(base, *pools, block, -1);
  return true;
}

void NoteRestored(Base& base, DevicePools& pools, PoolId id, const RestoreDelta& delta) noexcept {
  if (!History::active()) return;
  // Blocks that live on are in both lists. A list has no address twice.
  const auto note = [&](History::Action action, const std::vector<Block>& blocks,
                        const std::vector<Block>& others) {
    std::unordered_map<Address, Block> known(others.size());
    for (const Block& other : others) known.emplace(other.address, other);
    for (const Block& block : blocks) {
      const auto same = known.find(block.address);
      if (same == known.end() || same->second != block) Note(base, action, {&pools, id, block});
    }
  };
  WithWarnings("the history of allocations", [&] {
    note(History::Action::FREE_REQUESTED, delta.freed, delta.allocated);
    note(History::Action::ALLOC, delta.allocated, delta.freed);
  });
}

void AddPools(c10::OutOfMemoryError& error, DeviceIndex device) noexcept {
  WithWarnings("saying what graph pools hold", [&] {
    const DevicePools* const pools = DevicePools::Find(device);
    const std::string text = pools == nullptr ? "" : pools->set.Describe();
    if (!text.empty()) error.add_context(text);
  });
}

void ThrowOutOfMemory(Base& base, DevicePools& pools, const Request& request) {
  MemoryInfo info{};
  WithWarnings("asking how much memory is free", [&] { info = pools.driver.Info(); });
  // A caller that makes room and tries again waits for the error below, not for an observer's.
  WithWarnings("who was told that memory has run out",
               [&] { TellOutOfMemory(base, pools, request, info); });
  const std::string held = pools.set.Describe(request.id);
  TORCH_CHECK_WITH(
      OutOfMemoryError, false,
      "CUDA out of memory. Tried to allocate " + Size(request.bytes) + " in graph pool " +
          ToString(request.id) + " of GPU " + std::to_string(pools.device) + ". Free on the GPU: " +
          Size(info.free_bytes) + " of " + Size(info.total_bytes) + pools.stats.DescribeShare() +
          ". A capture cannot give memory back while it runs: free tensors and call "
          "torch.cuda.empty_cache() before it, or capture a smaller batch." +
          (held.empty() ? "" : " (" + held + ")"));
}

}  // namespace cgp
