// The statistics of the base and of a device's graph pools as one, with peaks that are peaks of the
// sum. Nothing else asks the base for statistics.
//
// Neither side knows the other's changes, but a peak of the sum is only reached when one of them
// grows, and growth passes through us:
//
//  - The base grew: the gate notes it. The base is asked before our pools change next: they were
//    constant meanwhile, so the sum's peak is the base's peak plus what ours hold.
//  - Ours grew: the base is asked what it holds now, but only where that may be a new peak. It may
//    be where ours exceed what the sum's peak so far leaves beside what the base held when it was
//    asked last: since then it has not grown.
//
// Both sides' own peaks are in use for that: the base's begins anew when it is asked, and those of
// ours are set to what would be too little for a new one. What is "inactive" grows when something
// is freed, so its peak is a lower bound.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <atomic>
#include <mutex>

#include "core/pool_set.h"
#include "torch/observe/gate.h"

namespace cgp {

using c10::CachingDeviceAllocator::DeviceStats;

// Adds what two pools of one name had. Of their peaks the higher is at most that of both.
void AddHigherPeaks(const c10::CachingAllocator::StatArray& part,
                    c10::CachingAllocator::StatArray& sum);

class MergedStats {
 public:
  using Base = c10::cuda::CUDACachingAllocator::CUDAAllocator;

  // `set` must outlive this.
  MergedStats(c10::DeviceIndex device, PoolSet& set) : device_(device), set_(set) {}

  // Whether the base may have grown since it was asked, and whether anybody else wants to know of
  // a change.
  bool IsBehind() const { return Gate::BaseGrewSince(asked_.load(std::memory_order_acquire)); }
  bool IsWatched() const { return Gate::IsWatchedSince(asked_.load(std::memory_order_acquire)); }

  // These ask the base where that is needed, but wait for it with no lock held: who has the base's
  // lock may call them too. Where it fails they will ask the next time.

  // To be called before our pools change.
  void BeforeChange(Base& base) {
    if (IsBehind()) CatchUp(base);
  }
  // To be called after our pools have allocated.
  void AfterGrowth(Base& base);
  // The base's reserved bytes, as of when it was asked last. Another question to it.
  int64_t base_reserved() const { return base_reserved_.load(std::memory_order_relaxed); }
  void CatchUp(Base& base);

  // What torch counts as num_alloc_retries and num_ooms.
  void CountRetry() { ++retries_; }
  void CountOutOfMemory() { ++ooms_; }
  // ... and, from 2.12 on, as num_oom_rejections.
  void CountRejection() { ++rejections_; }

  // What there is now, of both.
  struct Totals {
    size_t allocated_bytes = 0;
    size_t reserved_bytes = 0;
  };
  Totals Now(Base& base) const;
  DeviceStats Get(Base& base);
  void ResetPeaks(Base& base);
  void ResetAccumulated(Base& base);

 private:
  using Stat = c10::CachingAllocator::Stat;

  // What the base counts: nothing if it does not count (CUDAPluggableAllocator).
  DeviceStats OfBase(Base& base) const;
  // Notes what ours hold now and the base did: now, or at its peak since it was asked last. Returns
  // what it says.
  DeviceStats Ask(Base& base, int64_t Stat::*of_base);

  const c10::DeviceIndex device_;
  PoolSet& set_;
  std::atomic<Gate::Word> asked_{Gate::kNever};  // up to when the base's growth is noted
  std::atomic<int64_t> base_reserved_{0};
  std::mutex mutex_;
  DeviceStats peaks_;  // of the sum; only the peaks mean anything
  std::atomic<int64_t> retries_{0};
  std::atomic<int64_t> ooms_{0};
  std::atomic<int64_t> rejections_{0};
};

}  // namespace cgp
