// Going back to a checkpoint: what the books say, and that nothing gathers. Who lives then, where, and
// who may take what was let go of, the fuzzer judges.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "core/pool_set.h"
#include "testing/driver_watch.h"
#include "testing/host_driver.h"
#include "testing/test_names.h"

namespace cgp {
namespace {

class PoolCheckpointTest : public ::testing::Test {
 protected:
  static constexpr PoolId kId{0, 1};
  static constexpr uint64_t kPage = 8192;  // 16 granules

  void TearDown() override {
    EXPECT_NO_THROW(set_.Check());
    EXPECT_THAT(watch_.violations(), ::testing::IsEmpty());
  }

  Block Allocate(uint64_t bytes, StreamId stream = kA) {
    const Block block = set_.Allocate(kId, bytes, stream);
    watch_.MarkUsed();
    return block;
  }
  // One block, allocated in a scope of its own.
  Block AllocateIn(ScopeKind kind, uint64_t bytes, StreamId stream = kA) {
    set_.BeginScope(kId, kind);
    const Block block = Allocate(bytes, stream);
    set_.EndScope(kId);
    return block;
  }
  // A graph that leaves its outputs behind: some small, one of several pages, one stitched.
  std::vector<Block> Capture(uint64_t scale, StreamId stream = kA) {
    set_.BeginScope(kId, ScopeKind::kCapture);
    std::vector<Block> outputs = {Allocate(scale * 3 * kGranule, stream)};
    const Block scratch = Allocate(scale * 2 * kPage, stream);
    outputs.push_back(Allocate(kGranule, stream));
    set_.Free(scratch.address);
    outputs.push_back(Allocate(scale * (kPage + 5 * kGranule), stream));
    set_.EndScope(kId);
    return outputs;
  }

  HostDriver host_{{.granularity = 4096}};
  DriverWatch watch_{host_};
  PoolSet set_{watch_, {.page_bytes = kPage}};
};

TEST_F(PoolCheckpointTest, AThousandRestoresAddNothing) {
  const std::vector<Block> root = Capture(2);
  const PoolCheckpoint before = set_.Checkpoint(kId);
  PoolCheckpoint behind = before;
  PoolStats stats;
  size_t events = 0;
  for (int round = 0; round < 500; ++round) {
    set_.Restore(kId, before);
    set_.Free(root[1].address);
    Capture(3);
    // Graph trees warm up in the pool.
    const Block eager = AllocateIn(ScopeKind::kEager, 3 * kPage, kB);
    watch_.Submit(kB);
    if (round % 2 == 0) set_.Free(eager.address);
    behind = set_.Checkpoint(kId);
    set_.Restore(kId, before);
    set_.Restore(kId, behind);
    watch_.FinishAll();
    if (round == 10) {
      stats = set_.Stats(kId);
      events = watch_.events();
    }
  }
  const PoolStats end = set_.Stats(kId);
  EXPECT_EQ(end.pages, stats.pages);
  EXPECT_EQ(end.ranges, stats.ranges);
  EXPECT_EQ(end.page_mappings, stats.page_mappings);
  EXPECT_EQ(end.peak_allocated_bytes, stats.peak_allocated_bytes);
  EXPECT_LE(watch_.events(), events + 2);
  EXPECT_EQ(watch_.handles(), end.pages);
}

// As native has it: all that lived is freed, all that lives is allocated.
TEST_F(PoolCheckpointTest, TrafficCountsAllBlocks) {
  Capture(1);
  const PoolCheckpoint checkpoint = set_.Checkpoint(kId);
  AllocateIn(ScopeKind::kCapture, kPage);
  set_.ResetTraffic();
  set_.Restore(kId, checkpoint);
  EXPECT_EQ(set_.Usage().all.count.removed, 4U);
  EXPECT_EQ(set_.Usage().all.count.added, 3U);
  EXPECT_EQ(set_.Usage().reserved_bytes.added, 0U);
}

}  // namespace
}  // namespace cgp
