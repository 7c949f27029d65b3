// The memory fraction, of which base and pools each get what the other one does not hold.
#include <algorithm>

#include "torch/errors.h"
#include "torch/observe/merged_stats.h"

namespace cgp {

void MergedStats::Store(double fraction) {
  fraction_.store(fraction);
  ++settings_;
  if (limits()) Gate::Set(Gate::kFractions, true);
}

void MergedStats::SetFraction(Base& base, double fraction) {
  BeforeChange(base);                         // asks what is in force, to go back to
  base.setMemoryFraction(fraction, device_);  // refuses what is no fraction
  const double before = fraction_.load();
  Store(fraction);
  OrUndo([&] { LimitBase(base); },
         [&] {
           Store(before);
           base.setMemoryFraction(std::min(before, 1.0), device_);
           LimitBase(base);
         });
}

void MergedStats::BeforeChange(Base& base) {
  if (IsBehind()) CatchUp(base);
  if (!limits()) return;
  const double all = std::min(fraction_.load(), 1.0) * total_bytes_;
  driver_.SetLimit(
      static_cast<uint64_t>(std::max(0.0, all - static_cast<double>(base_reserved_.load()))));
}

bool MergedStats::RaiseLimit(Base& base) {
  const uint64_t before = driver_.limit();
  CatchUp(base);
  BeforeChange(base);
  return driver_.limit() > before;
}

void MergedStats::LimitBase(Base& base) {
  if (!limits()) return;
  uint64_t state = ShareNow();
  if (told_.load() == state) return;
  // Several threads may tell the base at once, and no lock can order them: some come with the
  // base's held, others go for it. So each looks, after it has told, whether what it told is still
  // so, and tells again if not. The last to tell has looked, so the base was told the truth last.
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
