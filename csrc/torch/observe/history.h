// What torch.cuda.memory._record_memory_history() asks for, of our pools: a trace of what was done
// in them, and where their live blocks were allocated.
//
// The base keeps its own; both get the same settings, and MergeInto() puts ours between the base's
// entries by time. Contexts (stacks) are gathered by the caller before any lock is taken, since
// that may wait for the GIL.
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

  // Of what happened; `size` is in bytes, of blocks as it was asked for.
  struct Event {
    Action action{};
    c10::DeviceIndex device = 0;
    size_t address = 0;
    size_t size = 0;
    StreamId stream{};
    PoolId pool;
  };

  // While one lives its thread may map and unmap; then the trackers hear of it, unless another
  // thread is telling them something: that tells them this too. To be made before any lock is
  // taken.
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

  // While one lives, what its thread maps is noted as being for this pool and stream.
  struct Purpose {
    Purpose(PoolId pool, StreamId stream) { now = {pool, stream}; }
    ~Purpose() { now = {}; }
    Purpose(const Purpose&) = delete;
    Purpose& operator=(const Purpose&) = delete;
    static inline constinit thread_local std::pair<PoolId, StreamId> now{};
  };

  // The process's one.
  static History& Get();

  // CUDAAllocator::recordHistory(). Throws c10::Error for an unknown action to skip. `configure`
  // runs before anything changes here, which it does not if that throws.
  void Configure(
      bool enabled, c10::CachingDeviceAllocator::CreateContextFn recorder, size_t max_entries,
      When when, bool clear, const std::vector<std::string>& skip_actions,
      const std::function<void()>& configure = [] {});
  // `attach` runs before the tracker is attached here too, which it is not if that throws.
  void AttachTracker(
      Tracker tracker, const std::function<void()>& attach = [] {});

  // Whether anybody wants to know anything. Costs a load.
  static bool active() { return (Gate::Read() & Gate::kHistory) != 0; }

  // The stack of the caller, if one is wanted from this level on, else nullptr.
  Context Gather(When level) const;

  // Notes what happened. `metadata` is torch's user metadata. The trackers are told before this
  // returns. Where a block was allocated is kept from its ALLOC to its FREE_REQUESTED, which is
  // followed by FREE_COMPLETED.
  void Record(Event event, Context context, const std::string& metadata);
  // The same of the process's history, for what is mapped and unmapped. It may be called with any
  // lock held: the trackers are told later, in the order of these calls.
  static void Mapped(int device, bool mapped, Address address, uint64_t bytes) noexcept;

  // Where the live block at `address` was allocated, if that was recorded.
  Context ContextOf(Address address) const;

  // Adds the entries to the base's, in order of time, as far as the history reaches back.
  void MergeInto(std::vector<std::vector<TraceEntry>>& device_traces);

 private:
  using Trackers = std::vector<Tracker>;
  // Keeps an entry, and adds it to `told` if there are trackers. pre: mutex_ is held.
  void Insert(const Event& event, const Context& context, const std::string& metadata,
              std::deque<TraceEntry>& told);
  // Tells all trackers. What they throw changes nothing: what happened has. pre: telling_mutex_ is
  // held.
  void Tell(const TraceEntry& entry) const;
  void TellMappings() noexcept;

  // Held while trackers are told, by none but them: these may ask for statistics, and even
  // allocate. In the order of locks it comes before all others.
  std::recursive_mutex telling_mutex_;
  mutable std::mutex mutex_;
  std::atomic<c10::CachingDeviceAllocator::CreateContextFn> recorder_{nullptr};
  std::atomic<When> when_{When::NEVER};
  size_t max_entries_ = 0;  // 0: only trackers are told
  std::set<Action> skipped_;
  std::shared_ptr<const Trackers> trackers_ = std::make_shared<Trackers>();
  std::deque<TraceEntry> mappings_;  // of which the trackers are to be told; oldest first
  std::map<c10::DeviceIndex, std::deque<TraceEntry>> entries_;  // oldest first
  std::unordered_map<Address, Context> live_;
  c10::ApproximateClockToUnixTimeConverter clock_;
};

}  // namespace cgp
