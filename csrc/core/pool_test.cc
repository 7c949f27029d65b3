// What pool.h says of one pool: shapes, scopes, who may take freed memory when, and what stitching
// saves.
#include "core/pool.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <sstream>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/capture_guide.h"
#include "core/error.h"
#include "driver/faulty_driver.h"
#include "driver/host_driver.h"
#include "testing/driver_watch.h"
#include "testing/placement_validator.h"

namespace cgp {
namespace {

using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

constexpr StreamId kA{1};
constexpr StreamId kB{2};
constexpr StreamId kC{3};
constexpr uint64_t kPage = 8192;  // 16 granules
constexpr uint64_t kGranule = kGranuleBytes;

// A pool on numbers instead of memory; what is mapped and what the device has done is the watch's
// to say.
class PoolTest : public ::testing::Test {
 protected:
  void TearDown() override {
    EXPECT_NO_THROW(pool_.Check());
    watch_.Quiesce();
    EXPECT_THAT(watch_.violations(), IsEmpty());
  }

  Block Allocate(uint64_t bytes, StreamId stream = kA) {
    const Block block = pool_.Allocate(bytes, stream);
    watch_.MarkUsed();
    return block;
  }

  // Whether a block of `bytes` gets bytes of the page and place that `freed` had.
  bool GetsBytesOf(const std::vector<PhysicalPiece>& freed, uint64_t bytes, StreamId stream) {
    const Block block = Allocate(bytes, stream);
    const std::vector<PhysicalPiece> pieces = pool_.Pieces(block.address);
    pool_.Free(block.address);
    for (const PhysicalPiece& a : pieces) {
      for (const PhysicalPiece& b : freed) {
        if (a.page == b.page && a.offset_bytes < b.offset_bytes + b.length_bytes &&
            b.offset_bytes < a.offset_bytes + a.length_bytes) {
          return true;
        }
      }
    }
    return false;
  }

  std::vector<PhysicalPiece> AllocateAndFree(uint64_t bytes, StreamId stream) {
    const Block block = Allocate(bytes, stream);
    std::vector<PhysicalPiece> pieces = pool_.Pieces(block.address);
    pool_.Free(block.address);
    return pieces;
  }

  HostDriver host_{{.granularity = 4096, .map_memory = false}};
  DriverWatch watch_{host_};
  Pool pool_{watch_, {.page_bytes = kPage}};
};

TEST_F(PoolTest, BlocksAreWholeGranulesWhereTheyAreSaidToBe) {
  pool_.BeginScope(ScopeKind::kCapture);
  for (const uint64_t bytes : {uint64_t{1}, uint64_t{512}, uint64_t{513}, kPage, 3 * kPage + 1}) {
    const Block block = Allocate(bytes, kB);
    EXPECT_EQ(block.bytes, (bytes + 511) / 512 * 512);
    EXPECT_EQ(block.requested_bytes, bytes);
    EXPECT_EQ(block.stream, kB);
    EXPECT_EQ(block.address % 512, 0U);
    uint64_t sum = 0;
    for (const PhysicalPiece& piece : pool_.Pieces(block.address)) {
      const auto place = watch_.At(block.address + sum);
      ASSERT_TRUE(place.has_value());
      EXPECT_TRUE(place->accessible);
      EXPECT_EQ(place->offset_bytes, piece.offset_bytes);
      EXPECT_GE(place->left_bytes, piece.length_bytes);
      sum += piece.length_bytes;
    }
    EXPECT_EQ(sum, block.bytes);
  }
}

TEST_F(PoolTest, FindsTheBlockThatHoldsAnAddress) {
  pool_.BeginScope(ScopeKind::kCapture);
  const Block a = Allocate(1024);
  const Block b = Allocate(2 * kPage);
  EXPECT_EQ(pool_.Find(a.address)->address, a.address);
  EXPECT_EQ(pool_.Find(a.address + 1023)->address, a.address);
  EXPECT_EQ(pool_.Find(b.address + kPage)->address, b.address);
  pool_.Free(a.address);
  EXPECT_EQ(pool_.Find(a.address), nullptr);
  EXPECT_EQ(pool_.Find(0), nullptr);
  EXPECT_EQ(pool_.Find(~uint64_t{0}), nullptr);
}

TEST_F(PoolTest, CountsWhatItHolds) {
  pool_.BeginScope(ScopeKind::kCapture);
  const Block a = Allocate(1000);
  const Block b = Allocate(2 * kPage);
  PoolStats stats = pool_.Stats();
  EXPECT_EQ(stats.page_bytes, kPage);
  EXPECT_EQ(stats.pages, 3U);
  EXPECT_EQ(stats.reserved_bytes, 3 * kPage);
  EXPECT_EQ(stats.allocated_bytes, 1024 + 2 * kPage);
  EXPECT_EQ(stats.requested_bytes, 1000 + 2 * kPage);
  EXPECT_EQ(stats.live_blocks, 2U);
  pool_.Free(a.address);
  pool_.Free(b.address);
  pool_.EndScope();
  stats = pool_.Stats();
  EXPECT_EQ(stats.allocated_bytes, 0U);
  EXPECT_EQ(stats.requested_bytes, 0U);
  EXPECT_EQ(stats.live_blocks, 0U);
  EXPECT_EQ(stats.reserved_bytes, 3 * kPage);
  EXPECT_EQ(stats.peak_allocated_bytes, 1024 + 2 * kPage);
  EXPECT_EQ(stats.peak_reserved_bytes, 3 * kPage);
  EXPECT_EQ(stats.allocations, 2U);
  EXPECT_EQ(stats.frees, 2U);
  EXPECT_EQ(stats.page_mappings, watch_.mappings());
}

TEST_F(PoolTest, SnapshotsBlocksAndRangesInTheOrderOfAddresses) {
  pool_.BeginScope(ScopeKind::kCapture);
  for (const uint64_t bytes : {kPage / 2, 3 * kPage, kPage / 4, 5 * kPage}) Allocate(bytes);
  const PoolSnapshot snapshot = pool_.Snapshot();
  ASSERT_THAT(snapshot.blocks, SizeIs(4));
  for (size_t i = 1; i < snapshot.blocks.size(); ++i) {
    EXPECT_LT(snapshot.blocks[i - 1].block.address, snapshot.blocks[i].block.address);
  }
  uint64_t mapped = 0;
  for (const PoolSnapshot::Range& range : snapshot.ranges) mapped += range.pages.size();
  EXPECT_GE(mapped, snapshot.stats.page_mappings);
  EXPECT_THAT(snapshot.ranges, SizeIs(snapshot.stats.ranges));
}

// --- Scopes and bad input ---

TEST_F(PoolTest, OnlyOneScopeAtATime) {
  EXPECT_FALSE(pool_.in_scope());
  EXPECT_THROW(pool_.EndScope(), InternalError);
  pool_.BeginScope(ScopeKind::kEager);
  EXPECT_TRUE(pool_.in_scope());
  EXPECT_THROW(pool_.BeginScope(ScopeKind::kCapture), InternalError);
  EXPECT_TRUE(pool_.in_scope());
  pool_.EndScope();
  EXPECT_FALSE(pool_.in_scope());
  EXPECT_THROW(pool_.EndScope(), InternalError);
}

TEST_F(PoolTest, RefusesAddressesWhereNoLiveBlockStarts) {
  pool_.BeginScope(ScopeKind::kCapture);
  const Block block = Allocate(2048);
  const Block freed = Allocate(512);
  pool_.Free(freed.address);
  for (const Address address :
       {freed.address, block.address + 1, block.address + 512, Address{0}, ~Address{0}}) {
    EXPECT_THROW(pool_.Free(address), UsageError) << address;
    EXPECT_THROW(pool_.RecordUse(address, kB), UsageError) << address;
    EXPECT_THROW(pool_.Pieces(address), UsageError) << address;
  }
  EXPECT_EQ(pool_.Stats().live_blocks, 1U);
  pool_.Free(block.address);
}

TEST(PoolOptionsTest, PagesArePowerOfTwoMultiplesOfTheGranularity) {
  HostDriver host({.granularity = 4096, .map_memory = false});
  EXPECT_EQ(Pool(host, {}).Stats().page_bytes, 4096U);
  EXPECT_EQ(Pool(host, {.page_bytes = 32768}).Stats().page_bytes, 32768U);
  for (const uint64_t bytes : {uint64_t{512}, uint64_t{2048}, uint64_t{4095}, uint64_t{12288},
                               uint64_t{4097}, ~uint64_t{0}}) {
    EXPECT_THROW(Pool(host, {.page_bytes = bytes}), UsageError) << bytes;
  }
}

// --- Who may take freed memory when ---

TEST_F(PoolTest, InACaptureTheSameStreamTakesFreedMemoryAtOnce) {
  pool_.BeginScope(ScopeKind::kCapture);
  const auto freed = AllocateAndFree(3 * kPage, kA);
  EXPECT_TRUE(GetsBytesOf(freed, 3 * kPage, kA));
  EXPECT_EQ(pool_.Stats().pages, 3U);
}

TEST_F(PoolTest, InACaptureAnotherStreamHasToWaitForItsEnd) {
  pool_.BeginScope(ScopeKind::kCapture);
  const auto freed = AllocateAndFree(3 * kPage, kA);
  EXPECT_FALSE(GetsBytesOf(freed, 3 * kPage, kB));
  EXPECT_EQ(pool_.Stats().pages, 6U);
  pool_.EndScope();
  pool_.BeginScope(ScopeKind::kCapture);
  Allocate(6 * kPage, kC);  // all of it: the three of A and the three of B
  EXPECT_EQ(pool_.Stats().pages, 6U);
}

TEST_F(PoolTest, AForeignUseKeepsMemoryFromAllStreamsUntilTheCaptureEnds) {
  pool_.BeginScope(ScopeKind::kCapture);
  const Block block = Allocate(kPage, kA);
  const auto pieces = pool_.Pieces(block.address);
  pool_.RecordUse(block.address, kB);
  pool_.Free(block.address);
  EXPECT_FALSE(GetsBytesOf(pieces, kPage, kA));
  EXPECT_FALSE(GetsBytesOf(pieces, kPage, kB));
  pool_.EndScope();
  pool_.BeginScope(ScopeKind::kCapture);
  Allocate(3 * kPage, kC);
  EXPECT_EQ(pool_.Stats().pages, 3U);
}

TEST_F(PoolTest, AUseByTheOwnStreamChangesNothing) {
  pool_.BeginScope(ScopeKind::kCapture);
  const Block block = Allocate(kPage, kA);
  const auto pieces = pool_.Pieces(block.address);
  pool_.RecordUse(block.address, kA);
  pool_.Free(block.address);
  EXPECT_TRUE(GetsBytesOf(pieces, kPage, kA));
}

TEST_F(PoolTest, NeighboursThatTheStreamMayTakeCountAsOne) {
  pool_.BeginScope(ScopeKind::kCapture);
  std::vector<Block> blocks;
  for (int i = 0; i < 16; ++i) blocks.push_back(Allocate(kGranule, i % 2 == 0 ? kA : kB));
  for (const Block& block : blocks) pool_.Free(block.address);
  pool_.EndScope();
  pool_.BeginScope(ScopeKind::kCapture);
  Allocate(kPage, kC);
  EXPECT_EQ(pool_.Stats().pages, 1U);
}

TEST_F(PoolTest, AGraphsOutputFreedBetweenCapturesIsFreeToAll) {
  pool_.BeginScope(ScopeKind::kCapture);
  const Block output = Allocate(2 * kPage, kA);
  pool_.EndScope();
  watch_.Submit(kA);
  pool_.Free(output.address);
  EXPECT_EQ(watch_.events(), 0U);
  pool_.BeginScope(ScopeKind::kCapture);
  Allocate(2 * kPage, kB);
  EXPECT_EQ(pool_.Stats().pages, 2U);
}

TEST_F(PoolTest, AnOutputThatAnotherStreamUsedWaitsForThatStream) {
  pool_.BeginScope(ScopeKind::kCapture);
  const Block output = Allocate(2 * kPage, kA);
  pool_.EndScope();
  pool_.RecordUse(output.address, kB);
  watch_.Submit(kB);
  const auto pieces = pool_.Pieces(output.address);
  pool_.Free(output.address);
  pool_.BeginScope(ScopeKind::kCapture);
  EXPECT_FALSE(GetsBytesOf(pieces, 2 * kPage, kA));
  EXPECT_FALSE(GetsBytesOf(pieces, 2 * kPage, kC));
  pool_.EndScope();
  watch_.FinishAll();
  pool_.BeginScope(ScopeKind::kCapture);
  Allocate(6 * kPage, kA);
  EXPECT_EQ(pool_.Stats().pages, 6U);
}

// A later capture frees it: that this capture has ended says nothing of what B does eagerly.
TEST_F(PoolTest, AnOutputThatAnotherStreamUsedIsNotFreeAtTheEndOfTheCaptureThatFreesIt) {
  pool_.BeginScope(ScopeKind::kCapture);
  const Block output = Allocate(2 * kPage, kA);
  pool_.EndScope();
  pool_.RecordUse(output.address, kB);
  watch_.Submit(kB);
  const auto pieces = pool_.Pieces(output.address);
  pool_.BeginScope(ScopeKind::kCapture);
  pool_.Free(output.address);
  pool_.EndScope();
  pool_.BeginScope(ScopeKind::kCapture);
  EXPECT_FALSE(GetsBytesOf(pieces, 2 * kPage, kA));
  EXPECT_FALSE(GetsBytesOf(pieces, 2 * kPage, kC));
  pool_.EndScope();
  watch_.FinishAll();
  pool_.BeginScope(ScopeKind::kCapture);
  Allocate(6 * kPage, kA);
  EXPECT_EQ(pool_.Stats().pages, 6U);
}

TEST_F(PoolTest, InEagerWorkTheSameStreamTakesAtOnceAndOthersAfterItsEvents) {
  pool_.BeginScope(ScopeKind::kEager);
  const Block block = Allocate(2 * kPage, kA);
  watch_.Submit(kA);
  const auto pieces = pool_.Pieces(block.address);
  pool_.Free(block.address);
  EXPECT_TRUE(GetsBytesOf(pieces, 2 * kPage, kA));
  pool_.EndScope();
  pool_.BeginScope(ScopeKind::kEager);
  EXPECT_TRUE(GetsBytesOf(pieces, 2 * kPage, kA)) << "the stream still orders its own work";
  EXPECT_EQ(pool_.Stats().pages, 2U);
  EXPECT_FALSE(GetsBytesOf(pieces, 2 * kPage, kB)) << "A has not done its work yet";
  EXPECT_EQ(pool_.Stats().pages, 4U);
  pool_.EndScope();
  watch_.FinishAll();
  pool_.BeginScope(ScopeKind::kEager);
  Allocate(4 * kPage, kB);
  EXPECT_EQ(pool_.Stats().pages, 4U);
}

TEST_F(PoolTest, ACaptureDoesNotTakeWhatEagerWorkHasNotDoneWith) {
  pool_.BeginScope(ScopeKind::kEager);
  const Block block = Allocate(2 * kPage, kA);
  watch_.Submit(kA);
  const auto pieces = pool_.Pieces(block.address);
  pool_.Free(block.address);
  pool_.EndScope();
  pool_.BeginScope(ScopeKind::kCapture);
  // The graph will be replayed on whatever stream, so not even A may take it now.
  EXPECT_FALSE(GetsBytesOf(pieces, 2 * kPage, kA));
  watch_.FinishAll();
  EXPECT_TRUE(GetsBytesOf(pieces, 4 * kPage, kA)) << "done now, and found out at once";
}

TEST_F(PoolTest, AnEagerBlockWithAForeignUseWaitsForBothStreams) {
  pool_.BeginScope(ScopeKind::kEager);
  const Block block = Allocate(2 * kPage, kA);
  watch_.Submit(kA);
  pool_.RecordUse(block.address, kB);
  const uint64_t use = watch_.Submit(kB);
  const auto pieces = pool_.Pieces(block.address);
  pool_.Free(block.address);
  EXPECT_FALSE(GetsBytesOf(pieces, 2 * kPage, kA));
  pool_.EndScope();
  watch_.Progress(kA, 100);
  pool_.BeginScope(ScopeKind::kCapture);
  EXPECT_FALSE(GetsBytesOf(pieces, 2 * kPage, kA));
  watch_.Finish(kB, use);
  watch_.FinishAll();
  EXPECT_TRUE(GetsBytesOf(pieces, 2 * kPage, kA) || GetsBytesOf(pieces, 4 * kPage, kA));
}

TEST_F(PoolTest, EventsAreNotKeptForLongerThanNeeded) {
  for (int i = 0; i < 50; ++i) {
    pool_.BeginScope(ScopeKind::kEager);
    AllocateAndFree(kPage, kA);
    AllocateAndFree(kPage, kB);
    pool_.EndScope();
    watch_.FinishAll();
  }
  EXPECT_LE(watch_.events(), 4U);
}

// --- Stitching ---

// 300 graphs, ever larger, each of which leaves ten small outputs behind, made in the midst of its
// big blocks.
TEST(PoolStitchingTest, ThousandsOfSmallSurvivorsDoNotPinBigBlocksApart) {
  constexpr uint64_t kLargePage = 512 * kGranule;
  HostDriver host({.granularity = kLargePage, .map_memory = false});
  Pool pool(host, {});
  for (uint64_t graph = 0; graph < 300; ++graph) {
    pool.BeginScope(ScopeKind::kCapture);
    std::vector<Block> big;
    for (uint64_t layer = 0; layer < 10; ++layer) {
      big.push_back(pool.Allocate((graph + 1) * (1 + layer % 3) * 37 * kGranule, kA));
      pool.Allocate(kGranule * (1 + graph % 3), kA);
    }
    for (const Block& block : big) pool.Free(block.address);
    pool.EndScope();
  }
  const PoolStats stats = pool.Stats();
  EXPECT_EQ(stats.live_blocks, 3000U);
  EXPECT_LE(stats.reserved_bytes, stats.peak_allocated_bytes * 102 / 100 + kLargePage);
  pool.Check();
}

TEST_F(PoolTest, SmallSurvivorsGatherInFewPages) {
  pool_.BeginScope(ScopeKind::kCapture);
  std::mt19937_64 random(7);
  std::vector<Block> live;
  // Blocks of all sizes come and go; of the small ones, some stay.
  std::vector<Block> survivors;
  for (int i = 0; i < 4000; ++i) {
    const bool is_small = random() % 2 == 0;
    live.push_back(Allocate(is_small ? kGranule * (1 + random() % 3) : kPage * (1 + random() % 6)));
    if (live.size() > 12) {
      const size_t pick = random() % live.size();
      if (live[pick].bytes < kPage && random() % 8 == 0) {
        survivors.push_back(live[pick]);
      } else {
        pool_.Free(live[pick].address);
      }
      live.erase(live.begin() + static_cast<std::ptrdiff_t>(pick));
    }
  }
  const PoolStats stats = pool_.Stats();
  EXPECT_LE(stats.reserved_bytes, stats.peak_allocated_bytes * 110 / 100);
}

TEST_F(PoolTest, ABlockStartsInAFreeTailAndEndsInAFreeHead) {
  pool_.BeginScope(ScopeKind::kCapture);
  // Page 0: [4 granules live | 12 free]. Page 1: [12 free | 4 live]. Neither holds the 14 granules
  // that a page leaves over.
  const Block head = Allocate(4 * kGranule);
  const Block filler = Allocate(12 * kGranule);
  const Block gone = Allocate(12 * kGranule);
  const Block tail = Allocate(4 * kGranule);
  pool_.Free(filler.address);
  pool_.Free(gone.address);
  ASSERT_EQ(pool_.Stats().pages, 2U);
  const auto head_page = pool_.Pieces(head.address).front().page;
  const auto tail_page = pool_.Pieces(tail.address).front().page;
  ASSERT_NE(head_page, tail_page);

  const Block stitched = Allocate(kPage + 14 * kGranule);
  EXPECT_EQ(pool_.Stats().pages, 3U);
  const std::vector<PhysicalPiece> pieces = pool_.Pieces(stitched.address);
  ASSERT_THAT(pieces, SizeIs(3));
  EXPECT_EQ(pieces[0].page, head_page);
  EXPECT_EQ(pieces[0].offset_bytes + pieces[0].length_bytes, kPage);
  EXPECT_EQ(pieces[1].length_bytes, kPage);
  EXPECT_EQ(pieces[2].page, tail_page);
  EXPECT_EQ(pieces[2].offset_bytes, 0U);
}

TEST_F(PoolTest, NothingIsMappedAnewWhereABlockFits) {
  pool_.BeginScope(ScopeKind::kCapture);
  for (const uint64_t bytes : {9 * kPage, 3 * kPage, kPage, 5 * kPage + 3 * kGranule}) {
    const Block keep = Allocate(kPage);  // so that each size has a range of its own to come back to
    AllocateAndFree(bytes, kA);
    const uint64_t mappings = pool_.Stats().page_mappings;
    AllocateAndFree(bytes, kA);
    AllocateAndFree(bytes - kPage / 2, kA);
    EXPECT_EQ(pool_.Stats().page_mappings, mappings) << bytes;
    pool_.Free(keep.address);
  }
}

// The driver's price is per handle: 16 pages are one where the pool is large enough, and a page is
// still found by the granule.
TEST_F(PoolTest, ALargePoolMakesFewHandlesAndStaysExact) {
  pool_.BeginScope(ScopeKind::kCapture);
  const Block large = Allocate(2048 * kPage);
  EXPECT_EQ(watch_.handles(), 128U);
  EXPECT_EQ(watch_.mappings(), 128U);
  EXPECT_EQ(pool_.Stats().page_mappings, 128U);
  EXPECT_EQ(pool_.Stats().pages, 2048U);
  ASSERT_THAT(pool_.Pieces(large.address), SizeIs(2048));
  pool_.Free(large.address);

  // Whatever comes back in pieces needs no page more, and no two blocks share a byte.
  std::set<std::pair<uint32_t, uint64_t>> taken;
  std::vector<Block> live;
  for (uint64_t i = 0; i < 64; ++i) {
    const Block block = Allocate(31 * kPage + kPage / 2);
    live.push_back(block);
    uint64_t sum = 0;
    for (const PhysicalPiece& piece : pool_.Pieces(block.address)) {
      const auto place = watch_.At(block.address + sum);
      ASSERT_TRUE(place && place->accessible);
      ASSERT_EQ(place->offset_bytes % kPage, piece.offset_bytes);
      for (uint64_t b = 0; b < piece.length_bytes; b += kGranule) {
        ASSERT_TRUE(taken.emplace(Index(piece.page), piece.offset_bytes + b).second);
      }
      sum += piece.length_bytes;
    }
    ASSERT_EQ(sum, block.bytes);
  }
  EXPECT_EQ(pool_.Stats().pages, 2048U);
  for (const Block& block : live) pool_.Free(block.address);
  Allocate(2048 * kPage);
  EXPECT_EQ(pool_.Stats().pages, 2048U);
  EXPECT_EQ(pool_.Stats().page_mappings, watch_.mappings());
}

TEST_F(PoolTest, ASmallPoolHasHandlesOfOnePage) {
  pool_.BeginScope(ScopeKind::kCapture);
  Allocate(100 * kPage);
  Allocate(27 * kPage);
  EXPECT_EQ(watch_.handles(), 127U);
  Allocate(100 * kPage);
  EXPECT_LT(watch_.handles(), 227U);
}

TEST_F(PoolTest, APageStandsInSeveralRangesAndItsRestStaysInUse) {
  pool_.BeginScope(ScopeKind::kCapture);
  const Block a = Allocate(4 * kPage);
  const Block keep = Allocate(kGranule);
  pool_.Free(a.address);
  const Block b = Allocate(4 * kPage + 15 * kGranule);
  EXPECT_EQ(pool_.Stats().pages, 5U) << "the tail of the page of `keep` holds the remainder";
  pool_.Free(b.address);
  EXPECT_NE(pool_.Find(keep.address), nullptr);
  EXPECT_GE(pool_.Stats().page_mappings, 5U);
}

// One captured graph: layers whose inputs are freed when their outputs exist.
uint64_t CaptureGraph(Pool& pool, uint64_t batch, uint64_t* live_bytes) {
  uint64_t peak = 0;
  pool.BeginScope(ScopeKind::kCapture);
  Block input = pool.Allocate(batch * 700, kA);
  uint64_t live = input.bytes;
  for (const uint64_t width : {4096U, 11008U, 4096U, 512U, 16384U, 4096U}) {
    const Block output = pool.Allocate(batch * width, kA);
    const Block scratch = pool.Allocate(batch * 77 + 512, kA);
    live += output.bytes + scratch.bytes;
    peak = std::max(peak, live);
    pool.Free(input.address);
    pool.Free(scratch.address);
    live -= input.bytes + scratch.bytes;
    input = output;
  }
  pool.EndScope();
  pool.Free(input.address);
  *live_bytes = std::max(*live_bytes, peak);
  return peak;
}

class GraphOrderTest : public ::testing::TestWithParam<std::string> {};

TEST_P(GraphOrderTest, ManyGraphsCostWhatTheLargestNeeds) {
  constexpr uint64_t kLargePage = 64 * 1024;
  HostDriver host({.granularity = kLargePage, .map_memory = false});
  Pool pool(host, {});
  std::vector<uint64_t> batches;
  for (uint64_t batch = 1; batch <= 128; ++batch) batches.push_back(batch * 3);
  if (GetParam() == "desc") std::reverse(batches.begin(), batches.end());
  if (GetParam() == "shuffled") std::shuffle(batches.begin(), batches.end(), std::mt19937_64(5));
  uint64_t minimum = 0;
  for (const uint64_t batch : batches) CaptureGraph(pool, batch, &minimum);
  EXPECT_LE(pool.Stats().reserved_bytes, minimum * 102 / 100 + 2 * kLargePage);
  pool.Check();
}

INSTANTIATE_TEST_SUITE_P(Orders, GraphOrderTest, ::testing::Values("asc", "desc", "shuffled"),
                         [](const auto& one) { return one.param; });

// --- Failure and peers ---

TEST(PoolLimitTest, RunsOutWithNumbersAndGoesOnAfterwards) {
  HostDriver host({.granularity = 4096, .physical_limit_bytes = 10 * 4096, .map_memory = false});
  Pool pool(host, {});
  pool.BeginScope(ScopeKind::kCapture);
  const Block block = pool.Allocate(6 * 4096, kA);
  try {
    pool.Allocate(5 * 4096, kA);
    FAIL() << "there are only ten pages";
  } catch (const OutOfMemoryError& error) {
    EXPECT_EQ(error.requested_bytes(), 5U * 4096);
    EXPECT_THAT(error.what(), HasSubstr("20480"));
  }
  EXPECT_EQ(pool.Stats().pages, 6U);
  EXPECT_EQ(host.usage().handles, 6U);
  pool.Check();
  pool.Allocate(4 * 4096, kA);
  pool.Free(block.address);
  pool.Allocate(6 * 4096, kA);
  EXPECT_EQ(pool.Stats().pages, 10U);
}

TEST(PoolLimitTest, SizesBeyondAllMemoryRunOutToo) {
  HostDriver host({.granularity = 4096, .map_memory = false});
  Pool pool(host, {});
  pool.BeginScope(ScopeKind::kCapture);
  const uint64_t most = ~uint64_t{0};
  for (const uint64_t bytes : {most, most - 511, most - 4096, most / 2, most / 512, most / 4096,
                               (most / 4096) << 11, uint64_t{1} << 48, uint64_t{1} << 43}) {
    EXPECT_THROW(pool.Allocate(bytes, kA), OutOfMemoryError) << bytes;
    EXPECT_EQ(pool.Stats().pages, 0U);
    EXPECT_EQ(host.usage(), HostUsage{});
  }
  pool.Allocate(1, kA);
}

TEST_F(PoolTest, RefreshedAccessReachesEveryMapping) {
  pool_.BeginScope(ScopeKind::kCapture);
  const Block a = Allocate(3 * kPage);
  Allocate(kGranule);
  pool_.Free(a.address);
  Allocate(3 * kPage + 15 * kGranule);
  watch_.AddPeer(1);
  pool_.RefreshAccess();
  for (const PoolSnapshot::Range& range : pool_.Snapshot().ranges) {
    for (uint64_t i = 0; i < range.pages.size(); ++i) {
      EXPECT_EQ(watch_.At(range.address + i * kPage)->peers, 1);
    }
  }
  const Block later = Allocate(5 * kPage);
  EXPECT_EQ(watch_.At(later.address)->peers, 1);
}

TEST(PoolEndTest, LeavesNothingBehindEvenWithLiveBlocks) {
  HostDriver host({.granularity = 4096, .map_memory = false});
  DriverWatch watch(host);
  {
    Pool pool(watch, {});
    pool.BeginScope(ScopeKind::kEager);
    pool.Free(pool.Allocate(3 * 4096, kA).address);
    pool.Allocate(5 * 4096 + 512, kB);
    pool.EndScope();
    watch.MarkUsed();
    watch.Quiesce();
  }
  EXPECT_EQ(host.usage(), HostUsage{});
  EXPECT_EQ(watch.events(), 0U);
  EXPECT_THAT(watch.violations(), IsEmpty());
}

}  // namespace
}  // namespace cgp
