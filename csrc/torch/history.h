// What torch.cuda.memory._record_memory_history() asks for, of our pools: a trace of what was done
// in them, and where their live blocks were allocated.
//
// The base keeps its own; both get the same settings, and MergeInto() puts ours between the base's
// entries by time. Contexts (stacks) are gathered by the caller before any lock is taken, since that
// may wait for the GIL.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <atomic>
#include <cstddef>
#include <deque>
#include <exception>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_map>
#include <vector>

#include "core/pool_set.h"

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

  // The process's one.
  static History& Get();

  // CUDAAllocator::recordHistory(). Throws c10::Error for an unknown action to skip.
  void Configure(bool enabled, c10::CachingDeviceAllocator::CreateContextFn recorder,
                 size_t max_entries, When when, bool clear,
                 const std::vector<std::string>& skip_actions);
  void AttachTracker(Tracker tracker);

  // Whether anybody wants to know anything. Costs a load.
  bool active() const { return active_.load(std::memory_order_acquire); }

  // The stack of the caller, if one is wanted from this level on, else nullptr.
  Context Gather(When level) const;

  // Notes what happened. `metadata` is torch's user metadata.
  void Record(const Event& event, Context context, const std::string& metadata);
  // A block was allocated, or is about to be freed: notes it and keeps or returns where it was
  // allocated. An error of a tracker is thrown once all is noted.
  void Allocated(const Event& event, Context context, const std::string& metadata);
  void Freed(Event event, Context context, const std::string& metadata);

  // Where the live block at `address` was allocated, if that was recorded.
  Context ContextOf(Address address) const;

  // CUDAAllocator::pushCompileContext() and pop, of this thread.
  static void PushCompileContext(const std::string& context);
  static void PopCompileContext();

  // Adds the entries to the base's, in order of time, as far as the history reaches back.
  void MergeInto(std::vector<std::vector<TraceEntry>>& device_traces);

 private:
  // Keeps an entry and tells the trackers, all of them: the error of the first that throws one comes
  // back.
  std::exception_ptr Insert(const Event& event, const Context& context,
                            const std::string& metadata);

  mutable std::mutex mutex_;
  std::atomic<bool> active_{false};
  bool enabled_ = false;
  std::atomic<c10::CachingDeviceAllocator::CreateContextFn> recorder_{nullptr};
  std::atomic<When> when_{When::NEVER};
  size_t max_entries_ = 0;
  std::set<Action> skipped_;
  std::vector<Tracker> trackers_;
  std::map<c10::DeviceIndex, std::deque<TraceEntry>> entries_;  // oldest first
  std::unordered_map<Address, Context> live_;
  c10::ApproximateClockToUnixTimeConverter clock_;
};

}  // namespace cgp
