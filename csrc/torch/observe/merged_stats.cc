#include "torch/observe/merged_stats.h"

#include <algorithm>
#include <array>

#include "torch/errors.h"
#include "torch/runtime.h"

namespace cgp {
namespace {

using c10::CachingAllocator::Stat;
using c10::CachingAllocator::StatArray;
using c10::CachingAllocator::StatType;

constexpr std::array kMeasures = {
    &DeviceStats::allocation,      &DeviceStats::segment,
    &DeviceStats::active,          &DeviceStats::inactive_split,
    &DeviceStats::allocated_bytes, &DeviceStats::reserved_bytes,
    &DeviceStats::active_bytes,    &DeviceStats::inactive_split_bytes,
    &DeviceStats::requested_bytes,
};

// Calls function(Stat& of a, const Stat& of b) for all that both count, and for all pools of b.
template <typename Function>
void ForEachPair(DeviceStats& a, const DeviceStats& b, Function function) {
  const auto for_each_type = [&](StatArray& of_a, const StatArray& of_b) {
    for (size_t type = 0; type < of_a.size(); ++type) function(of_a[type], of_b[type]);
  };
  for (const auto measure : kMeasures) for_each_type(a.*measure, b.*measure);
  function(a.oversize_allocations, b.oversize_allocations);
  function(a.oversize_segments, b.oversize_segments);
  if (auto* const pools = ReservedByPrivatePool(a)) {
    for (const auto& [id, of_b] : *ReservedByPrivatePool(b)) for_each_type((*pools)[id], of_b);
  }
}

// Calls function(gauge of ours, stat of torch's that shows it).
template <typename Function>
void ForEachShown(SetUsage& usage, DeviceStats& stats, Function function) {
  const auto show = [&](Gauge& gauge, StatType type, auto... measures) {
    (function(gauge, (stats.*measures)[static_cast<size_t>(type)]), ...);
  };
  const auto show_blocks = [&](BlockUsage& blocks, StatType type) {
    show(blocks.count, type, &DeviceStats::allocation, &DeviceStats::active);
    show(blocks.bytes, type, &DeviceStats::allocated_bytes, &DeviceStats::active_bytes);
    show(blocks.requested_bytes, type, &DeviceStats::requested_bytes);
  };
  show_blocks(usage.all, StatType::AGGREGATE);
  show_blocks(usage.small, StatType::SMALL_POOL);
  show_blocks(usage.large, StatType::LARGE_POOL);
  // Pages hold blocks of all sizes, so reserved bytes count as large, torch's word for segments
  // that are not for small blocks only.
  for (const StatType type : {StatType::AGGREGATE, StatType::LARGE_POOL}) {
    show(usage.handles, type, &DeviceStats::segment);
    show(usage.reserved_bytes, type, &DeviceStats::reserved_bytes);
    show(usage.free_bytes, type, &DeviceStats::inactive_split_bytes);
    show(usage.free_extents, type, &DeviceStats::inactive_split);
  }
}

Stat ToStat(const Gauge& gauge) {
  const auto number = [](uint64_t value) { return static_cast<int64_t>(value); };
  return {.current = number(gauge.current),
          .peak = number(gauge.peak),
          .allocated = number(gauge.added),
          .freed = number(gauge.removed)};
}

// What torch.cuda.memory_stats() counts, for this usage alone.
DeviceStats ToDeviceStats(SetUsage usage) {
  DeviceStats stats;
  ForEachShown(usage, stats, [](const Gauge& gauge, Stat& stat) { stat = ToStat(gauge); });
  stats.num_device_alloc = static_cast<int64_t>(usage.handles.added);
  stats.num_device_free = static_cast<int64_t>(usage.handles.removed);
  return stats;
}

void AddBelowPeak(const Stat& part, Stat& sum) {
  sum.current += part.current;
  sum.allocated += part.allocated;
  sum.freed += part.freed;
}

}  // namespace

void AddHigherPeaks(const StatArray& part, StatArray& sum) {
  for (size_t type = 0; type < sum.size(); ++type) {
    AddBelowPeak(part[type], sum[type]);
    sum[type].peak = std::max({sum[type].peak, part[type].peak, sum[type].current});
  }
}

void MergedStats::CatchUp(Base& base) {
  if (fraction_.load() == kUnknown) {
    const RelaxedCaptureMode relaxed;  // as in Ask()
    const double of_base = IfSupported([&] { return base.getMemoryFraction(device_); }, 1.0);
    double unknown = kUnknown;
    fraction_.compare_exchange_strong(unknown, of_base < 1 ? of_base : kNone);
    if (limits()) Gate::Set(Gate::kFractions, true);
  }
  // This comes first, so that growth meanwhile is asked for again.
  const Gate::Word moment = Gate::TakeBaseGrowth();
  Ask(base, &Stat::peak);
  asked_.store(moment, std::memory_order_release);
}

void MergedStats::AfterChange(Base& base) noexcept {
  TryTwice("the statistics", [&] {
    if (set_.TakeNewPeak()) {
      OrUndo([&] { Ask(base, &Stat::current); }, [&] { set_.NoteNewPeak(); });
    }
    LimitBase(base);
  });
}

// The base's peak since the last question may be added to what ours hold now. Either ours held this
// at that peak, or it is what the base held at the last question. What ours hold beside that is no
// new peak, else the base would have been asked when they grew.
DeviceStats MergedStats::Ask(Base& base, int64_t Stat::*of_base) {
  // A capture may be open, and the base of cudaMallocAsync asks CUDA.
  const RelaxedCaptureMode relaxed;
  SetUsage ours = set_.Usage();
  // A base without statistics (CUDAPluggableAllocator) counts as empty.
  DeviceStats bases = IfSupported([&] { return base.getDeviceStats(device_); });
  DeviceStats sum = ToDeviceStats(ours);
  ForEachPair(sum, bases, [&](Stat& both, const Stat& part) {
    both = {.current = part.current, .peak = both.current + part.*of_base};
  });
  {
    const std::lock_guard lock(mutex_);
    ForEachPair(peaks_, sum, [](Stat& known, const Stat& both) {
      known = {.current = both.current, .peak = std::max(known.peak, both.peak)};
    });
    sum = peaks_;
  }
  // What the peak leaves beside the base. A gauge that several stats show gets the least.
  ours.ForEachPair(ours, [](Gauge& gauge, const Gauge&) { gauge.peak = ~uint64_t{0}; });
  ForEachShown(ours, sum, [](Gauge& level, const Stat& stat) {
    const auto left = static_cast<uint64_t>(std::max<int64_t>(0, stat.peak - stat.current));
    level.peak = std::min(level.peak, left);
  });
  // These come last, so that no peak is lost if something fails.
  IfSupported([&] { base.resetPeakStats(device_); });
  set_.ResetPeaks(ours);
  base_reserved_.store(bases.reserved_bytes[0].current, std::memory_order_relaxed);
  LimitOurs();
  return bases;
}

DeviceStats MergedStats::Get(Base& base) {
  DeviceStats stats = Ask(base, &Stat::peak);
  const DeviceStats pools = ToDeviceStats(set_.Usage());
  ForEachPair(stats, pools, [](Stat& sum, const Stat& part) { AddBelowPeak(part, sum); });
  stats.num_device_alloc += pools.num_device_alloc;
  stats.num_device_free += pools.num_device_free;
  stats.num_alloc_retries += retries;
  stats.num_ooms += ooms;
  {
    const std::lock_guard lock(mutex_);
    ForEachPair(stats, peaks_, [](Stat& stat, const Stat& peak) {
      stat.peak = std::max(stat.current, peak.peak);
    });
  }
  // The base may have, or have had, a pool of the same name.
  if (auto* const by_pool = ReservedByPrivatePool(stats)) {
    for (const auto& [id, reserved] : set_.ReservedByPool()) {
      StatArray ours;
      for (const StatType type : {StatType::AGGREGATE, StatType::LARGE_POOL}) {
        ours[static_cast<size_t>(type)] = ToStat(reserved);
      }
      AddHigherPeaks(ours, (*by_pool)[{id.first, id.second}]);
    }
  }
  return stats;
}

void MergedStats::ResetPeaks(Base& base) {
  {
    const std::lock_guard lock(mutex_);
    peaks_ = {};
  }
  set_.ResetPeaksByPool();
  Ask(base, &Stat::current);
}

void MergedStats::ResetAccumulated(Base& base) {
  IfSupported([&] { base.resetAccumulatedStats(device_); });
  set_.ResetTraffic();
  retries = ooms = 0;
}

// --- The fraction ---

void MergedStats::Store(double fraction) {
  fraction_.store(fraction);
  ++settings_;
  if (limits()) Gate::Set(Gate::kFractions, true);
  LimitOurs();
}

void MergedStats::SetFraction(Base& base, double fraction) {
  BeforeChange(base);
  base.setMemoryFraction(fraction, device_);  // refuses what is no fraction
  Store(fraction);
  AfterChange(base);
}

void MergedStats::LimitOurs() {
  const double fraction = fraction_.load();
  const double left = fraction * total_bytes_ - static_cast<double>(base_reserved_.load());
  driver_.SetLimit(fraction > 1 ? MeteredDriver::kNoLimit
                                : static_cast<uint64_t>(std::max(0.0, left)));
}

void MergedStats::LimitBase(Base& base) {
  if (!limits()) return;
  uint64_t state = ShareNow();
  if (told_.load() == state) return;
  // Several threads may tell the base at once, and no lock can order them: some come with the
  // base's lock, others go for it. So after telling, each checks whether that is still true, and
  // tells again if not. The last one has checked, so the last told is true.
  for (;;) {
    const double of_ours = static_cast<double>(driver_.held_bytes()) / total_bytes_;
    base.setMemoryFraction(std::max(0.0, fraction_.load() - of_ours), device_);
    const uint64_t now = ShareNow();
    if (now == state) break;
    state = now;
  }
  told_.store(state);
}

std::string MergedStats::DescribeShare() const {
  if (!limits()) return "";
  return ", of which set_per_process_memory_fraction() allows this process a share of " +
         std::to_string(fraction_.load());
}

}  // namespace cgp
