// The statistics of the base and a device's graph pools as one, with peaks of their sum. They also
// share the memory that torch.cuda.set_per_process_memory_fraction() allows: each gets what the
// other does not hold. Nothing else asks the base for statistics.
//
// Neither side knows the other's changes. But the sum has a new peak only when one of them grows,
// and we see all growth:
//
//  - The base grew: the gate notes it, and the base is asked before our pools change next. These
//    were constant meanwhile, so the sum's peak is the base's peak plus what ours hold.
//  - Ours grew: the base is asked what it holds, but only if ours exceed what the sum's peak leaves
//    beside the base's last answer. Else there is no new peak: the base has not grown since.
//
// Both sides' own peaks serve for that. The base's begins anew when it is asked, and those of ours
// are set to just below a new peak of the sum. What is "inactive" grows when something is freed, so
// its peak is a lower bound.
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

// Adds the statistics of two pools of one name. As their common peak, the higher one is a lower
// bound.
void AddHigherPeaks(const c10::CachingAllocator::StatArray& part,
                    c10::CachingAllocator::StatArray& sum);

class MergedStats {
 public:
  // Both must outlive this. `total_bytes` is the device's memory.
  MergedStats(MeteredDriver& driver, PoolSet& set, uint64_t total_bytes)
      : device_(static_cast<c10::DeviceIndex>(driver.device())),
        driver_(driver),
        set_(set),
        total_bytes_(static_cast<double>(total_bytes)) {}

  // Whether the base may have grown since it was asked; or somebody else wants to know of changes.
  bool IsBehind() const { return Gate::BaseGrewSince(asked_.load(std::memory_order_acquire)); }
  bool IsWatched() const { return Gate::IsWatchedSince(asked_.load(std::memory_order_acquire)); }

  // To be called around changes of our pools. They ask the base what it has, if it may have grown,
  // or ours may have a new peak, and tell each side its share. A thread with the base's lock may
  // call them, since they wait with no lock held. If one fails, the next one asks; AfterChange()
  // only warns, since the change has happened.
  void BeforeChange(Base& base) {
    if (IsBehind()) CatchUp(base);
  }
  void AfterChange(Base& base) noexcept;
  // Asks in any case: the base does not say when it holds less.
  void CatchUp(Base& base);

  // getMemoryFraction() and setMemoryFraction().
  double Fraction(Base& base) const {
    return limits() ? fraction_.load() : base.getMemoryFraction(device_);
  }
  void SetFraction(Base& base, double fraction);
  // For an error's text: the share, if there is one.
  std::string DescribeShare() const;
  // There is another base from now on: drops what is known of the old one.
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

  // Notes what ours hold now, and what the base holds now or held at its peak since the last
  // question. Returns the base's answer.
  DeviceStats Ask(Base& base, int64_t Stat::*of_base);

  // kUnknown: nobody has set a fraction since there are pools. What the base was told before counts
  // for both, and is asked for with the first question. invariant: while it is unknown, none was
  // asked.
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
  std::atomic<Gate::Word> asked_{Gate::kNever};  // until when the base's growth is counted
  std::atomic<int64_t> base_reserved_{0};        // as of then
  std::mutex mutex_;
  DeviceStats peaks_;                       // of the sum; and what the base held when it was asked
  std::atomic<double> fraction_{kUnknown};  // of the device's memory; kNone: all
  std::atomic<uint64_t> settings_{0};       // how often it was set
  std::atomic<uint64_t> told_{0};           // ShareNow() when the base was told
};

}  // namespace cgp
