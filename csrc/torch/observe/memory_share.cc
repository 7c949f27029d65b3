#include "torch/observe/memory_share.h"

#include <algorithm>

#include "torch/errors.h"
#include "torch/runtime.h"

namespace cgp {

void MemoryShare::Store(double fraction) {
  fraction_.store(fraction);
  ++settings_;
  if (limits()) Gate::Set(Gate::kFractions, true);
}

void MemoryShare::Set(Base& base, double fraction) {
  LimitOurs(base);                             // asks what is in force, to go back to
  base.setMemoryFraction(fraction, device());  // refuses what is no fraction
  const double before = fraction_.load();
  Store(fraction);
  OrUndo([&] { LimitBase(base); },
         [&] {
           Store(before);
           base.setMemoryFraction(std::min(before, 1.0), device());
           LimitBase(base);
         });
}

void MemoryShare::LimitOurs(Base& base) {
  if (fraction_.load() == kUnknown) {
    // This may be within a capture, and the base of cudaMallocAsync asks CUDA.
    const RelaxedCaptureMode relaxed;
    const double of_base =
        IfSupported([&] { return base.getMemoryFraction(device()); }).value_or(1);
    double unknown = kUnknown;
    fraction_.compare_exchange_strong(unknown, of_base < 1 ? of_base : kNone);
    if (limits()) Gate::Set(Gate::kFractions, true);
  }
  stats_.BeforeChange(base);
  if (!limits()) return;
  const double all = std::min(fraction_.load(), 1.0) * total_bytes_;
  driver_.SetLimit(
      static_cast<uint64_t>(std::max(0.0, all - static_cast<double>(stats_.base_reserved()))));
}

bool MemoryShare::Raise(Base& base) {
  const uint64_t before = driver_.limit();
  stats_.CatchUp(base);
  LimitOurs(base);
  return driver_.limit() > before;
}

void MemoryShare::LimitBase(Base& base) {
  if (!limits()) return;
  uint64_t state = StateNow();
  if (told_.load() == state) return;
  // Several threads may tell the base at once, and no lock can order them: some come with the
  // base's held, others go for it. So each looks, after it has told, whether what it told is still
  // so, and tells again if not. The last to tell has looked, so the base was told the truth last.
  for (;;) {
    const double of_ours = static_cast<double>(driver_.held_bytes()) / total_bytes_;
    base.setMemoryFraction(std::max(0.0, fraction_.load() - of_ours), device());
    const uint64_t now = StateNow();
    if (now == state) break;
    state = now;
  }
  told_.store(state);
}

std::string MemoryShare::Describe() const {
  if (!limits()) return "";
  return ", of which set_per_process_memory_fraction() allows this process a share of " +
         std::to_string(fraction_.load());
}

}  // namespace cgp
