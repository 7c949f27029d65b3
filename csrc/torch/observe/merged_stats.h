// The statistics of the base and of a device's graph pools as one, with peaks that are peaks of the
// sum.
//
// Neither side knows the other's changes, but a peak of the sum is only reached when one of them
// grows, and growth passes through us:
//
//  - The base grew: noted by a flag, since eager allocations must not cost more. It is asked before
//    our pools change next: they were constant meanwhile, so the sum's peak is the base's peak plus
//    what ours hold.
//  - Ours reached a new peak: the base is asked what it holds now.
//
// Both sides' own peaks are in use for that: they begin anew whenever they are asked. What is
// "inactive" grows when something is freed, so its peak is a lower bound.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <atomic>
#include <mutex>

#include "core/pool_set.h"

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

  // The base has allocated, on whichever device. Costs a load.
  static void NoteBaseAllocation() {
    if (!base_grew.load(std::memory_order_relaxed))
      base_grew.store(true, std::memory_order_release);
  }
  // Whether one was made since this was asked last.
  static bool TakeBaseGrew() {
    return base_grew.load(std::memory_order_relaxed) &&
           base_grew.exchange(false, std::memory_order_acq_rel);
  }
  // The same of this device, for all that is known: who takes the one notes the other for all
  // devices.
  void NoteBaseGrew() { base_grew_here_.store(true, std::memory_order_release); }
  bool TakeBaseGrewHere() { return base_grew_here_.exchange(false, std::memory_order_acq_rel); }
  // Whether one of them would be taken.
  bool IsBehindBase() const {
    return base_grew.load(std::memory_order_relaxed) ||
           base_grew_here_.load(std::memory_order_relaxed);
  }

  // None of these waits for the base with a lock held: who has the base's lock may call them too.

  // To be called before our pools change if the base grew.
  void BaseGrew(Base& base) { Add(base, &Stat::peak); }
  // To be called after our pools have allocated.
  void OursGrew(Base& base);

  // What torch counts as num_alloc_retries and num_ooms.
  void CountRetry() { ++retries_; }
  void CountOutOfMemory() { ++ooms_; }
  // ... and, from 2.12 on, as num_oom_rejections.
  void CountRejection() { ++rejections_; }

  // What the base counts: nothing if it does not count (CUDAPluggableAllocator).
  DeviceStats OfBase(Base& base) const;
  // What there is now, of both.
  struct Totals {
    size_t allocated_bytes = 0;
    size_t reserved_bytes = 0;
  };
  Totals Now(Base& base);
  DeviceStats Get(Base& base);
  void ResetPeaks(Base& base);
  void ResetAccumulated(Base& base);

 private:
  using Stat = c10::CachingAllocator::Stat;

  // Notes what ours hold now and the base did: now, or at its peak since the last call.
  void Add(Base& base, int64_t Stat::*of_base);

  inline static std::atomic<bool> base_grew{false};

  const c10::DeviceIndex device_;
  PoolSet& set_;
  std::atomic<bool> base_grew_here_{true};  // before there were pools
  std::mutex mutex_;
  DeviceStats peaks_;  // of the sum; only the peaks mean anything
  std::atomic<int64_t> retries_{0};
  std::atomic<int64_t> ooms_{0};
  std::atomic<int64_t> rejections_{0};
};

}  // namespace cgp
