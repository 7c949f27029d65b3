// The history of our pools for torch.cuda.memory._record_memory_history(): what was done in them,
// and where their live blocks were allocated.
//
// The base has its own history with the same settings. MergeInto() sorts our entries between the
// base's by time. The caller gathers contexts (stacks) before it takes any lock, since that may
// wait for the GIL.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <atomic>
#include <cstddef>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/pool_set.h"
#include "torch/observe/gate.h"

namespace cgp {

class History {
 public:
  using TraceEntry = c10::CachingDeviceAllocator::TraceEntry;
  using Action = TraceEntry::Action;
  using Context = std::shared_ptr<c10::GatheredContext>;
  using When = c10::CachingDeviceAllocator::RecordContext;
  using Tracker = c10::CachingDeviceAllocator::AllocatorTraceTracker;

  // What happened. `size` is in bytes; for blocks it is what was asked for.
  struct Event {
    Action action{};
    c10::DeviceIndex device = 0;
    size_t address = 0;
    size_t size = 0;
    StreamId stream{};
    PoolId pool;
  };

  // While one exists its thread may map and unmap. At its end the trackers are told, unless another
  // thread is telling them something: then that one tells them this too. To be made before any lock
  // is taken.
  class Telling {
   public:
    explicit Telling(History& history) : history_(history) {}
    ~Telling() {
      if (active()) history_.TellMappings();
    }
    Telling(const Telling&) = delete;
    Telling& operator=(const Telling&) = delete;

   private:
    History& history_;
  };

  // While one exists, its thread's mappings are recorded for this pool and stream.
  struct Purpose {
    Purpose(PoolId pool, StreamId stream) { now = {pool, stream}; }
    ~Purpose() { now = {}; }
    Purpose(const Purpose&) = delete;
    Purpose& operator=(const Purpose&) = delete;
    static inline constinit thread_local std::pair<PoolId, StreamId> now{};
  };

  // The only one of the process.
  static History& Get();

  // CUDAAllocator::recordHistory(). Throws c10::Error if an action to skip is unknown. `configure`
  // runs first: if it throws, nothing changes here.
  void Configure(
      bool enabled, c10::CachingDeviceAllocator::CreateContextFn recorder, size_t max_entries,
      When when, bool clear, const std::vector<std::string>& skip_actions,
      const std::function<void()>& configure = [] {});
  // `attach` runs first: if it throws, the tracker is not attached here either.
  void AttachTracker(
      Tracker tracker, const std::function<void()>& attach = [] {});
  bool HasTrackers() const {
    const std::lock_guard lock(mutex_);
    return !trackers_->empty();
  }

  // Whether anybody wants to know of events. Costs a load.
  static bool active() { return (Gate::Read() & Gate::kHistory) != 0; }

  // The caller's stack, if one is wanted from this level on, else nullptr.
  Context Gather(When level) const;

  // Records what happened, and tells the trackers before it returns. `metadata` is torch's user
  // metadata. A block's context is known from its ALLOC to its FREE_REQUESTED, which FREE_COMPLETED
  // follows.
  void Record(Event event, Context context, const std::string& metadata);
  // The same for mapping and unmapping, in the process's history. It may be called with any lock
  // held: the trackers are told later, in the order of these calls.
  static void Mapped(int device, bool mapped, Address address, uint64_t bytes) noexcept;

  // Where the live block at `address` was allocated, if that was recorded.
  Context ContextOf(Address address) const;

  // Merges the entries into the base's by time, as far back as the history reaches.
  void MergeInto(std::vector<std::vector<TraceEntry>>& device_traces);

 private:
  using Trackers = std::vector<Tracker>;
  // Stores an entry, and adds it to `told` if there are trackers. pre: mutex_ is held.
  void Insert(const Event& event, const Context& context, const std::string& metadata,
              std::deque<TraceEntry>& told);
  // Tells all trackers. Their errors change nothing, since it has happened. pre: telling_mutex_ is
  // held.
  void Tell(const TraceEntry& entry) const;
  void TellMappings() noexcept;

  // Held only while trackers are told, which may ask for statistics, or even allocate. In the order
  // of locks it comes before all others.
  std::recursive_mutex telling_mutex_;
  mutable std::mutex mutex_;
  std::atomic<c10::CachingDeviceAllocator::CreateContextFn> recorder_{nullptr};
  std::atomic<When> when_{When::NEVER};
  size_t max_entries_ = 0;  // 0: only trackers are told
  std::set<Action> skipped_;
  std::shared_ptr<const Trackers> trackers_ = std::make_shared<Trackers>();
  std::deque<TraceEntry> mappings_;  // that trackers have not been told of; oldest first
  std::map<c10::DeviceIndex, std::deque<TraceEntry>> entries_;  // oldest first
  std::unordered_map<Address, Context> live_;
  c10::ApproximateClockToUnixTimeConverter clock_;
};

}  // namespace cgp
