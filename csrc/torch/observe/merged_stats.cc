#include "torch/observe/merged_stats.h"

#include <algorithm>
#include <array>

#include "torch/errors.h"
#include "torch/runtime.h"
#include "torch/torch_version.h"

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

// function(Stat& of a, const Stat& of b), for all that both count, and for all pools that b has.
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

Stat ToStat(const Gauge& gauge) {
  Stat stat;
  stat.current = static_cast<int64_t>(gauge.current);
  stat.peak = static_cast<int64_t>(gauge.peak);
  stat.allocated = static_cast<int64_t>(gauge.added);
  stat.freed = static_cast<int64_t>(gauge.removed);
  return stat;
}

void Put(const Stat& stat, StatType type, StatArray& into) {
  into[static_cast<size_t>(type)] = stat;
}

// Pages hold blocks of all sizes: what is reserved counts as large, as torch calls segments that
// are not for small blocks alone.
void PutAsLarge(const Stat& stat, StatArray& into) {
  for (const StatType type : {StatType::AGGREGATE, StatType::LARGE_POOL}) Put(stat, type, into);
}

void PutBlocks(const BlockUsage& blocks, StatType type, DeviceStats& into) {
  for (StatArray* counts : {&into.allocation, &into.active}) {
    Put(ToStat(blocks.count), type, *counts);
  }
  for (StatArray* bytes : {&into.allocated_bytes, &into.active_bytes}) {
    Put(ToStat(blocks.bytes), type, *bytes);
  }
  Put(ToStat(blocks.requested_bytes), type, into.requested_bytes);
}

void AddBelowPeak(const Stat& part, Stat& sum) {
  sum.current += part.current;
  sum.allocated += part.allocated;
  sum.freed += part.freed;
}

// What torch.cuda.memory_stats() counts, for such usage alone.
DeviceStats ToDeviceStats(const SetUsage& usage) {
  DeviceStats stats;
  PutBlocks(usage.all, StatType::AGGREGATE, stats);
  PutBlocks(usage.small, StatType::SMALL_POOL, stats);
  PutBlocks(usage.large, StatType::LARGE_POOL, stats);
  PutAsLarge(ToStat(usage.handles), stats.segment);
  PutAsLarge(ToStat(usage.reserved_bytes), stats.reserved_bytes);
  PutAsLarge(ToStat(usage.free_bytes), stats.inactive_split_bytes);
  PutAsLarge(ToStat(usage.free_extents), stats.inactive_split);
  stats.num_device_alloc = static_cast<int64_t>(usage.handles.added);
  stats.num_device_free = static_cast<int64_t>(usage.handles.removed);
  return stats;
}

}  // namespace

void AddHigherPeaks(const StatArray& part, StatArray& sum) {
  for (size_t type = 0; type < sum.size(); ++type) {
    AddBelowPeak(part[type], sum[type]);
    sum[type].peak = std::max({sum[type].peak, part[type].peak, sum[type].current});
  }
}

void MergedStats::OursGrew(Base& base) {
  if (!set_.TakeNewPeak()) return;
  Undo taken([&] { set_.NoteNewPeak(); });  // next time
  Add(base, &Stat::current);
  taken.Keep();
}

DeviceStats MergedStats::OfBase(Base& base) const {
  return IfSupported([&] { return base.getDeviceStats(device_); }).value_or(DeviceStats{});
}

MergedStats::Totals MergedStats::Now(Base& base) {
  const DeviceStats bases = OfBase(base);
  const SetUsage ours = set_.Usage();
  return {.allocated_bytes =
              static_cast<size_t>(bases.allocated_bytes[0].current) + ours.all.bytes.current,
          .reserved_bytes =
              static_cast<size_t>(bases.reserved_bytes[0].current) + ours.reserved_bytes.current};
}

// Why the base's peak since the last call may be added to what ours hold now: it was either while
// they held that, since they did not change between the base's growth and this call, or at the last
// call, when they held no less, since otherwise they would have called at their peak.
void MergedStats::Add(Base& base, int64_t Stat::*of_base) {
  const DeviceStats ours = ToDeviceStats(set_.Usage());
  // This may be within a capture, and the base of cudaMallocAsync asks CUDA.
  const RelaxedCaptureMode relaxed;
  const DeviceStats bases = OfBase(base);
  DeviceStats sum;
  ForEachPair(sum, bases, [&](Stat& both, const Stat& part) { both.peak = part.*of_base; });
  ForEachPair(sum, ours, [](Stat& both, const Stat& part) { both.peak += part.current; });
  {
    const std::lock_guard lock(mutex_);
    ForEachPair(peaks_, sum,
                [](Stat& peak, const Stat& both) { peak.peak = std::max(peak.peak, both.peak); });
  }
  // Last, so that no peak is lost where something fails.
  IfSupported([&] {
    base.resetPeakStats(device_);
    return true;
  });
  set_.ResetPeaks();
}

DeviceStats MergedStats::Get(Base& base) {
  BaseGrew(base);
  DeviceStats stats = OfBase(base);
  const DeviceStats pools = ToDeviceStats(set_.Usage());
  ForEachPair(stats, pools, [](Stat& sum, const Stat& part) { AddBelowPeak(part, sum); });
  stats.num_device_alloc += pools.num_device_alloc;
  stats.num_device_free += pools.num_device_free;
  stats.num_alloc_retries += retries_;
  stats.num_ooms += ooms_;
  AddRejections(stats, rejections_);
  {
    const std::lock_guard lock(mutex_);
    ForEachPair(stats, peaks_, [](Stat& stat, const Stat& peak) {
      stat.peak = std::max(stat.current, peak.peak);
    });
  }
  // The base may have had a pool under the same name before, or have one now.
  if (auto* const by_pool = ReservedByPrivatePool(stats)) {
    for (const auto& [id, reserved] : set_.ReservedByPool()) {
      StatArray ours;
      PutAsLarge(ToStat(reserved), ours);
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
  Add(base, &Stat::current);
}

void MergedStats::ResetAccumulated(Base& base) {
  IfSupported([&] {
    base.resetAccumulatedStats(device_);
    return true;
  });
  set_.ResetTraffic();
  retries_ = 0;
  ooms_ = 0;
  rejections_ = 0;
}

}  // namespace cgp
