// The native allocator gives its lists of observers and trackers to nobody, so only itself can tell
// those who were attached before us. Hence it is made to run out as well: it is asked for the same
// bytes in a private pool of their own, which has no cache that could serve them. Then it counts,
// notes and tells as for any allocation of its own. What it tells is what was asked for and what is
// free; the limit is its own, without what graph pools hold of the process's share.
#include "torch/observe/out_of_memory.h"

#include <atomic>
#include <string>
#include <thread>
#include <utility>

#include "core/base/reserve.h"
#include "torch/errors.h"
#include "torch/observe/history.h"

namespace cgp {
namespace {

// Makes the base tell its observers and trackers. Returns false if it did not run out. It is asked
// on the default stream, which never captures: with graph_capture_record_stream_reuse the native
// allocator ends no scope while a stream captures that allocated there.
bool RunOutInBase(MergedStats::Base& base, c10::DeviceIndex device, size_t bytes) {
  // Others have nobody to tell, and may do anything when asked for too much.
  if (base.name() != "native") return false;
  // An id that torch never makes, and that no pool of the base had before: the native allocator
  // reopens none that nobody holds.
  static std::atomic<uint64_t> last{0};
  const c10::MempoolId_t id{++last, ~0ULL};
  base.beginAllocateToPool(device, id, [thread = std::this_thread::get_id()](cudaStream_t) {
    return std::this_thread::get_id() == thread;
  });
  bool open = true;
  const Undo pool([&] {
    TryTwice("the allocator below it, told that memory has run out,", [&] {
      if (open) base.endAllocateToPool(device, id);
      open = false;
      base.releasePool(device, id);
    });
  });
  try {
    base.raw_delete(base.raw_alloc_with_stream(bytes, nullptr));
    return false;
  } catch (const c10::OutOfMemoryError&) {
    return true;
  }
}

}  // namespace

void OutOfMemory::Attach(Base& base, OomRejectionObserver observer) {
  const std::lock_guard lock(mutex_);
  ReserveMore(rejection_observers_, 1);
  ForwardAttachOomRejectionObserver(base, observer);
  rejection_observers_.push_back(std::move(observer));
}

void OutOfMemory::Tell(Base& base, DevicePools& pools, const Request& request, bool rejected,
                       const MemoryInfo& info) {
  if (rejected) {
    pools.stats.CountRejection();
    std::vector<OomRejectionObserver> observers;
    {
      const std::lock_guard lock(mutex_);
      observers = rejection_observers_;
    }
    for (const OomRejectionObserver& observer : observers) {
      observer(pools.device, request.bytes, pools.stats.Now(base).reserved_bytes,
               pools.total_bytes);
    }
  } else {
    // More than there is, if the base has these bytes after all.
    for (const size_t bytes : {request.bytes, request.bytes + pools.total_bytes}) {
      if (RunOutInBase(base, pools.device, bytes)) return;
    }
    pools.stats.CountOutOfMemory();
    if (c10::memoryProfilingEnabled()) {
      const MergedStats::Totals total = pools.stats.Now(base);
      c10::reportOutOfMemoryToProfiler(static_cast<int64_t>(request.bytes), total.allocated_bytes,
                                       total.reserved_bytes, c10::Device(c10::kCUDA, pools.device));
    }
  }
  History& history = History::Get();
  if (!history.active()) return;
  history.Record({History::Action::OOM, pools.device, info.free_bytes, request.bytes,
                  request.stream, request.id},
                 history.Gather(History::When::ALLOC), base.getUserMetadata());
}

void OutOfMemory::Throw(Base& base, DevicePools& pools, const Request& request, bool rejected) {
  const PoolId id = request.id;
  const PoolStats stats = pools.set.Stats(id);
  const int users = pools.set.UseCount(id);
  MemoryInfo info{};
  WithWarnings("asking how much memory is free", [&] { info = pools.driver.Info(); });
  // Who makes room and tries again waits for the error below, not for that of somebody who is told.
  WithWarnings("who was told that memory has run out",
               [&] { Tell(base, pools, request, rejected, info); });
  TORCH_CHECK_WITH(
      OutOfMemoryError, false,
      "CUDA out of memory. Tried to allocate " + Mebibytes(request.bytes) + " in graph pool " +
          ToString(id) + " of GPU " + std::to_string(pools.device) + ", which has " +
          std::to_string(users) + " user(s) (graphs and GraphPool objects), holds " +
          Mebibytes(stats.reserved_bytes) + " and has " + Mebibytes(stats.allocated_bytes) +
          " of it in live blocks. Free on the GPU: " + Mebibytes(info.free_bytes) + " of " +
          Mebibytes(info.total_bytes) + pools.share.Describe() +
          ". A capture cannot give memory back while it runs: free tensors and call "
          "torch.cuda.empty_cache() before it, or capture a smaller batch.");
}

}  // namespace cgp
