#include "core/pool_values.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <random>
#include <utility>
#include <vector>

namespace cgp {
namespace {

Block BlockOf(uint64_t bytes, uint64_t requested_bytes) {
  return {.address = 0, .bytes = bytes, .requested_bytes = requested_bytes, .stream = {}};
}

// The gauges, in the order of ForEachPair().
constexpr std::size_t kGauges = 13;
constexpr std::size_t kHandles = 9;
constexpr std::size_t kReservedBytes = 10;
constexpr std::size_t kFreeBytes = 11;  // this and what follows have no peaks to tell of
constexpr std::size_t kFreeExtents = 12;

class UsageModel {
 public:
  std::vector<Block> blocks;
  std::vector<std::pair<uint64_t, uint64_t>> growths;  // handles, bytes
  uint64_t free_extents = 0;

  std::array<uint64_t, kGauges> Values() const {
    std::array<uint64_t, kGauges> values{};
    for (const Block& block : blocks) {
      for (const std::size_t part : {std::size_t{0}, block.bytes <= 1'048'576 ? 3UL : 6UL}) {
        values[part] += 1;
        values[part + 1] += block.bytes;
        values[part + 2] += block.requested_bytes;
      }
    }
    for (const auto& [handles, bytes] : growths) {
      values[kHandles] += handles;
      values[kReservedBytes] += bytes;
    }
    values[kFreeBytes] = values[kReservedBytes] - values[1];
    values[kFreeExtents] = free_extents;
    return values;
  }
};

class RandomUsage : public ::testing::TestWithParam<uint32_t> {};

TEST_P(RandomUsage, IsWhatThereIsAndWas) {
  std::mt19937 random(GetParam());
  SetUsage usage;
  UsageModel model;
  std::array<uint64_t, kGauges> before{};
  std::array<Gauge, kGauges> expected;
  for (int step = 0; step < 400; ++step) {
    bool raised = false;
    const bool grows = model.Values()[kFreeBytes] < (uint64_t{4} << 20);
    const uint32_t what = random() % 8;
    if (grows) {
      model.growths.emplace_back(1 + random() % 3, (uint64_t{2} << 20) * (1 + random() % 8));
      raised = usage.SetReserved(model.Values()[kHandles], model.Values()[kReservedBytes]);
    } else if (what < 4) {
      const uint64_t bytes = 512 * (1 + random() % (random() % 2 == 0 ? 16 : 8000));
      model.blocks.push_back(BlockOf(bytes, bytes - random() % 512));
      raised = usage.Allocated(model.blocks.back());
    } else if (what < 7 && !model.blocks.empty()) {
      std::swap(model.blocks[random() % model.blocks.size()], model.blocks.back());
      usage.Freed(model.blocks.back());
      model.blocks.pop_back();
    } else if (model.growths.size() > 1 &&
               model.growths.back().second <= model.Values()[kFreeBytes]) {
      model.growths.pop_back();
      raised = usage.SetReserved(model.Values()[kHandles], model.Values()[kReservedBytes]);
    }
    model.free_extents = random() % 20;
    usage.free_extents.Set(model.free_extents);
    const std::array<uint64_t, kGauges> values = model.Values();
    bool expect_raised = false;
    for (std::size_t i = 0; i < kGauges; ++i) {
      Gauge& gauge = expected[i];
      gauge.added += values[i] > before[i] ? values[i] - before[i] : 0;
      gauge.removed += values[i] < before[i] ? before[i] - values[i] : 0;
      expect_raised |= values[i] > gauge.peak && i < kFreeBytes;
      gauge.peak = std::max(gauge.peak, values[i]);
      gauge.current = values[i];
    }
    EXPECT_EQ(raised, expect_raised) << "step " << step;
    before = values;
    if (step % 100 == 50) {
      usage.ForEachPair(usage, [](Gauge& gauge, const Gauge&) { gauge.ResetPeak(); });
      for (Gauge& gauge : expected) gauge.peak = gauge.current;
    }
    if (step % 100 == 70) {
      usage.ForEachPair(usage, [](Gauge& gauge, const Gauge&) { gauge.ResetTraffic(); });
      for (Gauge& gauge : expected) gauge.added = gauge.removed = 0;
    }
    std::size_t i = 0;
    usage.ForEachPair(usage, [&](const Gauge& gauge, const Gauge&) {
      const auto figures = [](const Gauge& one) {
        return std::array{one.current, one.peak, one.added, one.removed};
      };
      ASSERT_EQ(figures(gauge), figures(expected[i])) << "gauge " << i << ", step " << step;
      ++i;
    });
  }
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomUsage, ::testing::Range(0U, 20U));

}  // namespace
}  // namespace cgp
