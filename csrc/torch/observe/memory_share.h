// What torch.cuda.set_per_process_memory_fraction() allows the base and a device's graph pools
// together: each gets what the other one does not hold.
#pragma once

#include <c10/core/Device.h>
#include <c10/cuda/CUDACachingAllocator.h>

#include <atomic>
#include <cstdint>
#include <string>

#include "driver/metered_driver.h"
#include "torch/observe/merged_stats.h"

namespace cgp {

class MemoryShare {
 public:
  using Base = c10::cuda::CUDACachingAllocator::CUDAAllocator;

  // Both must outlive this, which is of a device with so much memory.
  MemoryShare(MergedStats& stats, MeteredDriver& driver, uint64_t total_bytes)
      : stats_(stats), driver_(driver), total_bytes_(static_cast<double>(total_bytes)) {}

  // getMemoryFraction() and setMemoryFraction().
  double Get(Base& base) const {
    return limits() ? fraction_.load() : base.getMemoryFraction(device());
  }
  void Set(Base& base, double fraction);

  // Another base: what was set is forgotten.
  void Forget() { Store(kUnknown); }

  // To be called before ours allocate: asks the base what it has, if that may be more than it was.
  void LimitOurs(Base& base);
  // The limit has refused: the base is asked whether it holds less by now. Returns whether ours may
  // have more.
  bool Raise(Base& base);
  // To be called after ours have taken memory or given it back.
  void LimitBase(Base& base);

  // Of an error's text: which share that is, if there is one.
  std::string Describe() const;

 private:
  // Nobody has set one since there are pools. What the base was told before counts for both: it is
  // asked when ours allocate for the first time.
  static constexpr double kUnknown = 3;
  static constexpr double kNone = 2;

  c10::DeviceIndex device() const { return static_cast<c10::DeviceIndex>(driver_.device()); }
  bool limits() const { return fraction_.load() <= 1; }
  uint64_t StateNow() const { return settings_.load() + driver_.changes(); }
  void Store(double fraction);

  MergedStats& stats_;
  MeteredDriver& driver_;
  const double total_bytes_;
  std::atomic<double> fraction_{kUnknown};  // of the device's memory; kNone: all
  std::atomic<uint64_t> settings_{0};       // how often it was set
  std::atomic<uint64_t> told_{0};           // StateNow() when the base was told
};

}  // namespace cgp
