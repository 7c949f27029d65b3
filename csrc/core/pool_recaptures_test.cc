// Captures that are made again and again in one pool.
#include <gtest/gtest.h>

#include <array>
#include <cstdint>
#include <utility>

#include "core/pool.h"
#include "testing/host_driver.h"

namespace cgp {
namespace {

constexpr uint64_t kPage = uint64_t{2} << 20;
constexpr int kRounds = 12;

// Eight captures of different sizes, each with scratch and an output. An output is kept until its
// capture was made again (`one_by_one`), or until the round after it begins.
class Recaptures {
 public:
  explicit Recaptures(bool one_by_one) : one_by_one_(one_by_one) {}

  PoolStats Round() {
    if (!one_by_one_) {
      for (Address& output : kept_) Drop(output);
    }
    for (uint64_t graph = 0; graph < kept_.size(); ++graph) {
      pool_.BeginScope(ScopeKind::kCapture);
      const uint64_t bytes = (graph + 2) * kPage + kPage / 3;
      const Address scratch = pool_.Allocate(3 * bytes, StreamId{1}).address;
      const Address output = pool_.Allocate(bytes, StreamId{1}).address;
      pool_.Free(scratch);
      pool_.EndScope();
      Drop(kept_[graph]);
      kept_[graph] = output;
      pool_.Check();
    }
    return pool_.Stats();
  }

 private:
  void Drop(Address& output) {
    if (output != 0) pool_.Free(output);
    output = 0;
  }

  const bool one_by_one_;
  HostDriver driver_{{.map_memory = false}};
  Pool pool_{driver_, {}};
  std::array<Address, 8> kept_{};
};

class PoolRecapturesTest : public ::testing::TestWithParam<bool> {};

TEST_P(PoolRecapturesTest, MapNothingFromTheFourthRoundOn) {
  Recaptures captures(GetParam());
  captures.Round();
  captures.Round();
  const PoolStats third = captures.Round();
  for (int round = 4; round <= kRounds; ++round) {
    const PoolStats stats = captures.Round();
    EXPECT_EQ(stats.page_mappings, third.page_mappings) << "in round " << round;
    EXPECT_EQ(stats.pages, third.pages) << "in round " << round;
  }
  // All outputs once, 54 pages, the largest scratch, and what the ring has beside: the largest
  // output and a block.
  EXPECT_LE(third.pages, 54 + 28 + 3 * 10);
}

// Captures that are alike find each other's outputs alive in every round, and yet nothing takes turns.
TEST(PoolAlikeTest, WhatIsDroppedAllAtOnceHasNoRing) {
  HostDriver driver({.map_memory = false});
  Pool pool(driver, {});
  std::array<Address, 8> kept{};
  for (int round = 1; round <= kRounds; ++round) {
    for (Address& output : kept) {
      if (output != 0) pool.Free(output);
    }
    for (Address& output : kept) {
      pool.BeginScope(ScopeKind::kCapture);
      output = pool.Allocate(3 * kPage, StreamId{1}).address;
      pool.EndScope();
      pool.Check();
    }
    EXPECT_EQ(pool.Stats().pages, 3 * kept.size());
    EXPECT_TRUE(pool.Snapshot().ring.empty());
  }
}

TEST(PoolAlikeTest, WhatTheRingHasIsForOthersWhereMemoryRunsOut) {
  HostDriver driver({.physical_limit_bytes = 12 * kPage, .map_memory = false});
  Pool pool(driver, {});
  const auto capture = [&pool](uint64_t pages) {
    pool.BeginScope(ScopeKind::kCapture);
    const Address output = pool.Allocate(pages * kPage, StreamId{1}).address;
    pool.EndScope();
    pool.Check();
    return output;
  };
  Address kept = capture(2);
  for (int round = 0; round < 3; ++round) {
    const Address output = capture(2);
    pool.Free(std::exchange(kept, output));
  }
  EXPECT_FALSE(pool.Snapshot().ring.empty());
  EXPECT_NO_THROW(capture(10));
  EXPECT_TRUE(pool.Snapshot().ring.empty());
}

INSTANTIATE_TEST_SUITE_P(AllAtOnceAndOneByOne, PoolRecapturesTest, ::testing::Bool());

}  // namespace
}  // namespace cgp
