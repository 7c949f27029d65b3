// Going back to a checkpoint: who lives then, where, and what protects their bytes.
#include "core/pool_checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <vector>

#include "core/error.h"
#include "core/pool_set.h"
#include "driver/host_driver.h"

namespace cgp {
namespace {

constexpr StreamId kA{1};
constexpr PoolId kId{0, 1};

class PoolCheckpointTest : public ::testing::Test {
 protected:
  void TearDown() override { set_.Check(); }

  std::map<Address, uint64_t> Live() {
    std::map<Address, uint64_t> live;
    for (const auto& entry : set_.Snapshot(kId).blocks)
      live[entry.block.address] = entry.block.bytes;
    return live;
  }

  HostDriver driver_{HostDriverOptions{}};
  PoolSet set_{driver_};
};

TEST_F(PoolCheckpointTest, WhatLivedThenLivesAgainAndNothingElse) {
  set_.BeginScope(kId, ScopeKind::kCapture);
  const Block stays = set_.Allocate(kId, 3 << 20, kA);
  const Block dies = set_.Allocate(kId, 1000, kA);
  const Block large = set_.Allocate(kId, 5 << 20, kA);
  set_.EndScope(kId);
  const PoolCheckpoint checkpoint = set_.Checkpoint(kId);
  const auto live_then = Live();

  set_.Free(dies.address);
  set_.Free(large.address);
  set_.BeginScope(kId, ScopeKind::kCapture);
  for (int i = 0; i < 20; ++i) set_.Allocate(kId, (1 << 20) + i * 70000, kA);
  set_.EndScope(kId);

  const RestoreDelta delta = set_.Restore(kId, checkpoint);
  EXPECT_EQ(Live(), live_then);
  EXPECT_THAT(delta.allocated, ::testing::UnorderedElementsAre(stays, dies, large));
  EXPECT_EQ(delta.freed.size(), 21u);
  EXPECT_EQ(set_.Usage().all.count.current, 3u);
}

}  // namespace
}  // namespace cgp
