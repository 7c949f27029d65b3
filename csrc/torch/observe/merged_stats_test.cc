// The peaks of two sides that do not see each other, against an oracle that sees both.
#include "torch/observe/merged_stats.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <future>
#include <random>
#include <vector>

#include "testing/host_driver.h"
#include "torch/testing/fake_base_allocator.h"
#include "torch/torch_version.h"

namespace cgp {
namespace {

constexpr PoolId kId{0, 1};
constexpr size_t kAll = 0, kSmall = 1, kLarge = 2;  // torch's StatType
constexpr int64_t kBorder = kLargestSmallBlock;

// function(what the pool has reserved), where torch tells that.
template <typename Function>
void WithPrivatePool(DeviceStats& stats, c10::MempoolId_t id, const Function& function) {
  if (auto* const pools = ReservedByPrivatePool(stats)) function((*pools)[id]);
}

class MergedStatsTest : public ::testing::Test {
 protected:
  void SetUp() override { set_.BeginScope(kId, ScopeKind::kCapture); }
  void TearDown() override { set_.EndScope(kId); }

  void BaseChanges(int64_t bytes) {
    for (const size_t type : {kAll, std::abs(bytes) <= kBorder ? kSmall : kLarge}) {
      auto& stat = base_.stats.allocated_bytes[type];
      stat.current += bytes;
      stat.peak = std::max(stat.peak, stat.current);
    }
    if (bytes > 0) Gate::NoteBaseGrowth();
  }
  Block Allocate(uint64_t bytes) {
    stats_.BeforeChange(base_);
    const Block block = set_.Allocate(kId, bytes, StreamId{1});
    stats_.AfterChange(base_);
    return block;
  }
  void Free(Address address) {
    stats_.BeforeChange(base_);
    set_.Free(address);
  }

  MeteredDriver driver_{std::make_unique<HostDriver>(HostDriverOptions{.map_memory = false})};
  PoolSet set_{driver_};
  FakeBaseAllocator base_;
  MergedStats stats_{driver_, set_, driver_.Info().total_bytes};
};

TEST_F(MergedStatsTest, EachPoolsMemoryIsToldWhereTorchTellsPoolsApart) {
  const c10::MempoolId_t ours{kId.first, kId.second}, bases{0, 9};
  bool told = false;
  WithPrivatePool(base_.stats, bases, [](auto& reserved) {
    reserved[kAll] = {.current = 20, .peak = 50, .allocated = 60, .freed = 40};
  });
  WithPrivatePool(base_.stats, ours, [](auto& reserved) {  // which served it before
    reserved[kAll] = {.current = 0, .peak = 5 << 20, .allocated = 5 << 20, .freed = 5 << 20};
  });
  stats_.Get(base_);  // resets the base's peaks
  Allocate(3 << 20);
  DeviceStats stats = stats_.Get(base_);
  WithPrivatePool(stats, bases, [](const auto& reserved) {
    EXPECT_EQ(reserved[kAll].peak, 50);
    EXPECT_EQ(reserved[kAll].current, 20);
  });
  WithPrivatePool(stats, ours, [&](const auto& reserved) {
    told = true;
    EXPECT_EQ(reserved[kAll].current, 4 << 20);
    EXPECT_EQ(reserved[kAll].peak, 5 << 20);
    EXPECT_EQ(reserved[kAll].allocated, 9 << 20);
    EXPECT_EQ(reserved[kAll].freed, 5 << 20);
    EXPECT_EQ(reserved[kLarge].allocated, 4 << 20);
    EXPECT_EQ(reserved[kSmall].peak, 0);
  });
  EXPECT_EQ(told, kTorchMinor >= 13);
  stats_.ResetPeaks(base_);
  stats = stats_.Get(base_);
  WithPrivatePool(stats, bases, [](const auto& reserved) { EXPECT_EQ(reserved[kAll].peak, 20); });
}

TEST_F(MergedStatsTest, WhoHoldsTheBasesLockDoesNotWait) {
  Allocate(512);
  std::future<void> merged;
  base_.before_stats = [&] {
    base_.before_stats = [] {};
    merged = std::async(std::launch::async, [&] { stats_.CatchUp(base_); });
    EXPECT_EQ(merged.wait_for(std::chrono::seconds(10)), std::future_status::ready);
  };
  stats_.CatchUp(base_);
  ASSERT_TRUE(merged.valid());
}

TEST_F(MergedStatsTest, RandomProgramsPeakAsTheOracleSays) {
  for (uint32_t seed = 0; seed < 50; ++seed) {
    std::mt19937 random(seed);
    std::vector<int64_t> of_base;
    std::vector<Block> ours;
    std::array<int64_t, 3> now{}, peak{};
    const auto changed = [&](int64_t bytes) {
      for (const size_t type : {kAll, std::abs(bytes) <= kBorder ? kSmall : kLarge}) {
        now[type] += bytes;
        peak[type] = std::max(peak[type], now[type]);
      }
    };
    stats_.ResetPeaks(base_);
    for (int step = 0; step < 400; ++step) {
      const uint64_t bytes = 512 * (1 + random() % (random() % 2 == 0 ? 100 : 8000));
      switch (random() % 6) {
        case 0:
        case 1:
          of_base.push_back(static_cast<int64_t>(bytes));
          BaseChanges(of_base.back());
          changed(of_base.back());
          break;
        case 2:
          if (of_base.empty()) break;
          BaseChanges(-of_base.back());
          changed(-of_base.back());
          of_base.pop_back();
          break;
        case 3:
        case 4:
          ours.push_back(Allocate(bytes));
          changed(static_cast<int64_t>(ours.back().bytes));
          break;
        default:
          if (ours.empty()) break;
          changed(-static_cast<int64_t>(ours.back().bytes));
          Free(ours.back().address);
          ours.pop_back();
      }
      if (random() % 50 == 0) {
        stats_.ResetPeaks(base_);
        peak = now;
      }
      if (random() % 20 != 0) continue;
      const DeviceStats stats = stats_.Get(base_);
      for (const size_t type : {kAll, kSmall, kLarge}) {
        ASSERT_EQ(stats.allocated_bytes[type].current, now[type]) << "seed " << seed;
        ASSERT_EQ(stats.allocated_bytes[type].peak, peak[type])
            << "seed " << seed << " step " << step;
      }
    }
    for (const Block& block : ours) Free(block.address);
    for (const int64_t bytes : of_base) BaseChanges(-bytes);
  }
}

}  // namespace
}  // namespace cgp
