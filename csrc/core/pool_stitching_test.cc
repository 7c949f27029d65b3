// What stitching saves: a pool reserves little more than what lives at the same time.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <random>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/pool.h"
#include "core/pool_test_pool.h"
#include "testing/host_driver.h"

namespace cgp {
namespace {

using ::testing::SizeIs;

class PoolStitchingTest : public PoolTest {};

// 300 graphs, ever larger, each of which leaves ten small outputs behind, made in the midst of its
// big blocks.
TEST(SurvivorsTest, ThousandsOfSmallSurvivorsDoNotPinBigBlocksApart) {
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

TEST_F(PoolStitchingTest, PagesForSmallBlocksStandInOneRange) {
  pool_.BeginScope(ScopeKind::kCapture);
  for (int i = 0; i < 8; ++i) Allocate(kPage / 2);
  EXPECT_EQ(pool_.Stats().pages, 4U);
  EXPECT_EQ(pool_.Stats().ranges, 1U);
}

TEST_F(PoolStitchingTest, SmallSurvivorsGatherInFewPages) {
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

TEST_F(PoolStitchingTest, ABlockStartsInAFreeTailAndEndsInAFreeHead) {
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

TEST_F(PoolStitchingTest, NothingIsMappedAnewWhereABlockFits) {
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

// Far from its peak, a block of two pages and a half finds a free run, and half a page elsewhere.

// The driver's price is per handle: 36 pages are one where a block needs many, and a page is still
// found by the granule.
TEST_F(PoolStitchingTest, ALargePoolMakesFewHandlesAndStaysExact) {
  pool_.BeginScope(ScopeKind::kCapture);
  const Block large = Allocate(2048 * kPage);
  EXPECT_EQ(watch_.handles(), 57U);  // of 36 pages, a 56th
  EXPECT_EQ(watch_.mappings(), 57U);
  EXPECT_EQ(pool_.Stats().page_mappings, 57U);
  EXPECT_EQ(pool_.Stats().pages, 2048U);
  ASSERT_THAT(pool_.Pieces(large.address), SizeIs(2048));
  pool_.Free(large.address);

  // Whatever comes back in pieces needs no page more, and no two blocks share a byte.
  std::set<std::pair<uint32_t, uint64_t>> taken;
  std::vector<Block> live;
  for (uint64_t i = 0; i < 114; ++i) {
    const Block block = Allocate(17 * kPage + kPage / 2);
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

// Blocks that do not fit handles lie side by side, whatever is left of the handles.
TEST_F(PoolStitchingTest, HandlesCostNoPageWhereBlocksOfAnotherSizeFollow) {
  for (const uint64_t eighths : {26U, 44U, 140U, 252U, 324U}) {
    HostDriver driver({.granularity = 4096, .map_memory = false});
    Pool pool(driver, {.page_bytes = kPage});
    pool.BeginScope(ScopeKind::kCapture);
    pool.Free(pool.Allocate(2048 * kPage, kA).address);
    for (uint64_t i = 0; i < 2047 * 8 / eighths; ++i) pool.Allocate(kPage * eighths / 8, kA);
    EXPECT_EQ(pool.Stats().pages, 2048U) << "blocks of " << eighths << " eighths of a page";
    pool.EndScope();
  }
}

// Pages of a pool in which `kept` pages live, and `filled` more are taken by as many blocks below a
// page as fit; `emptied` pages were in use before.
uint64_t PagesFilledWith(uint64_t granules, uint64_t kept, uint64_t emptied, uint64_t filled) {
  HostDriver driver({.granularity = 4096, .map_memory = false});
  Pool pool(driver, {.page_bytes = kPage});
  pool.BeginScope(ScopeKind::kCapture);
  if (kept > 0) pool.Allocate(kept * kPage, kA);
  if (emptied > 0) pool.Free(pool.Allocate(emptied * kPage, kA).address);
  const uint64_t count = filled * kPage / (granules * kGranule);
  for (uint64_t i = 0; i < count; ++i) pool.Allocate(granules * kGranule, kA);
  return pool.Stats().pages;
}

TEST_F(PoolStitchingTest, ABlockLeavesATwelfthOfAPageToTheNext) {
  HostDriver driver({.granularity = 4096, .map_memory = false});
  Pool pool(driver, {.page_bytes = 64 * kGranule});
  pool.BeginScope(ScopeKind::kCapture);
  for (int i = 0; i < 64; ++i) pool.Allocate(58 * kGranule, kA);
  EXPECT_EQ(pool.Stats().pages, 58U);
}

// Of blocks of more than half a page, which no page holds two of.
TEST_F(PoolStitchingTest, BlocksBelowAPageLieAcrossPages) {
  for (const uint64_t granules : {9U, 10U, 12U, 14U}) {
    EXPECT_LE(PagesFilledWith(granules, 0, 0, 64), 64U) << "blocks of " << granules << " granules";
  }
}

TEST_F(PoolStitchingTest, AtThePeakTheyLieAcrossWholePagesToo) {
  for (const uint64_t granules : {9U, 10U, 12U, 14U}) {
    EXPECT_LE(PagesFilledWith(granules, 48, 15, 15), 65U)
        << "blocks of " << granules << " granules";
  }
}

// It is not worth the mappings.
TEST_F(PoolStitchingTest, ABlockThatNearlyFillsAPageLiesInOne) {
  pool_.BeginScope(ScopeKind::kCapture);
  for (int i = 0; i < 40; ++i) {
    EXPECT_EQ(pool_.Pieces(Allocate(15 * kGranule).address).size(), 1U);
  }
}

// Though the newer page has a shorter rest.
TEST_F(PoolStitchingTest, SmallBlocksGatherInTheOlderOfTwoPages) {
  pool_.BeginScope(ScopeKind::kCapture);
  const Block older = Allocate(6 * kGranule);
  Allocate(kPage - 6 * kGranule);
  const Block newer = Allocate(4 * kGranule);
  Allocate(kPage - 4 * kGranule);
  ASSERT_EQ(pool_.Stats().pages, 2U);
  const PageId home = pool_.Pieces(older.address).front().page;
  pool_.Free(older.address);
  pool_.Free(newer.address);
  EXPECT_EQ(pool_.Pieces(Allocate(3 * kGranule).address).front().page, home);
}

// Though it would be a shorter rest of a page beside the large one.
TEST_F(PoolStitchingTest, ASmallBlockThatOutlivesALargeOneLiesBesideItsKind) {
  pool_.BeginScope(ScopeKind::kCapture);
  const Block large = Allocate(kPage + 12 * kGranule);
  const Block filling = Allocate(4 * kGranule);
  const Block small = Allocate(6 * kGranule);
  pool_.Free(filling.address);
  const Block tiny = Allocate(kGranule);
  EXPECT_EQ(pool_.Pieces(tiny.address).front().page, pool_.Pieces(small.address).front().page);
  pool_.Free(large.address);
  Allocate(2 * kPage);
  EXPECT_EQ(pool_.Stats().pages, 3U);
}

TEST_F(PoolStitchingTest, HandlesGrowWithThePool) {
  pool_.BeginScope(ScopeKind::kCapture);
  for (int i = 0; i < 19; ++i) Allocate(20 * kPage);
  EXPECT_EQ(watch_.handles(), 185U);
  Allocate(20 * kPage);
  EXPECT_EQ(watch_.handles(), 188U);
}

TEST_F(PoolStitchingTest, APageStandsInSeveralRangesAndItsRestStaysInUse) {
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

}  // namespace
}  // namespace cgp
