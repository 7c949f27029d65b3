// What the base and a device's graph pools have together: their statistics as one, with peaks that
// are peaks of the sum, and the share of the memory that
// torch.cuda.set_per_process_memory_fraction() allows both, of which each gets what the other one
// does not hold. Nothing else asks the base for statistics.
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
#include <string>

#include "core/pool_set.h"
#include "driver/metered_driver.h"
#include "torch/observe/gate.h"
#include "torch/torch_version.h"

namespace cgp {

using c10::CachingDeviceAllocator::DeviceStats;

// Adds what two pools of one name had. Of their peaks the higher is at most that of both.
void AddHigherPeaks(const c10::CachingAllocator::StatArray& part,
                    c10::CachingAllocator::StatArray& sum);

class MergedStats {
 public:
  // Both must outlive this, which is of a device with so much memory.
  MergedStats(MeteredDriver& driver, PoolSet& set, uint64_t total_bytes)
      : device_(static_cast<c10::DeviceIndex>(driver.device())),
        driver_(driver),
        set_(set),
        total_bytes_(static_cast<double>(total_bytes)) {}

  // Whether the base may have grown since it was asked, and whether anybody else wants to know of
  // a change.
  bool IsBehind() const { return Gate::BaseGrewSince(asked_.load(std::memory_order_acquire)); }
  bool IsWatched() const { return Gate::IsWatchedSince(asked_.load(std::memory_order_acquire)); }

  // To be called around what changes our pools: asks the base what it has, if that may be more than
  // it was, or where ours may have a new peak; and tells each side its share. Who has the base's
  // lock may call them, since they wait with no lock held. Where one fails the next one asks; what
  // has changed has, so the latter only warns.
  void BeforeChange(Base& base) {
    if (IsBehind()) CatchUp(base);
  }
  void AfterChange(Base& base) noexcept;
  // Asks in any case: the base may hold less than it did, which it says to nobody.
  void CatchUp(Base& base);

  // getMemoryFraction() and setMemoryFraction().
  double Fraction(Base& base) const {
    return limits() ? fraction_.load() : base.getMemoryFraction(device_);
  }
  void SetFraction(Base& base, double fraction);
  // Of an error's text: which share that is, if there is one.
  std::string DescribeShare() const;
  // There is another base from now on.
  void DropBase() {
    asked_.store(Gate::kNever, std::memory_order_release);
    Store(kUnknown);
  }

  // As torch counts them: num_alloc_retries and num_ooms.
  std::atomic<int64_t> retries{0};
  std::atomic<int64_t> ooms{0};

  DeviceStats Get(Base& base);
  void ResetPeaks(Base& base);
  void ResetAccumulated(Base& base);

 private:
  using Stat = c10::CachingAllocator::Stat;

  // Notes what ours hold now and the base did: now, or at its peak since it was asked last. Returns
  // what it says.
  DeviceStats Ask(Base& base, int64_t Stat::*of_base);

  // Nobody has set one since there are pools. What the base was told before counts for both: the
  // base is asked with the first question. invariant: where it is unknown, none was asked.
  static constexpr double kUnknown = 3;
  static constexpr double kNone = 2;
  bool limits() const { return fraction_.load() <= 1; }
  uint64_t ShareNow() const { return settings_.load() + driver_.changes(); }
  void Store(double fraction);
  void LimitOurs();
  void LimitBase(Base& base);

  const c10::DeviceIndex device_;
  MeteredDriver& driver_;
  PoolSet& set_;
  const double total_bytes_;
  std::atomic<Gate::Word> asked_{Gate::kNever};  // up to when the base's growth is noted
  std::atomic<int64_t> base_reserved_{0};        // as of then
  std::mutex mutex_;
  DeviceStats peaks_;                       // of the sum; and what the base held when it was asked
  std::atomic<double> fraction_{kUnknown};  // of the device's memory; kNone: all
  std::atomic<uint64_t> settings_{0};       // how often it was set
  std::atomic<uint64_t> told_{0};           // ShareNow() when the base was told
};

}  // namespace cgp
