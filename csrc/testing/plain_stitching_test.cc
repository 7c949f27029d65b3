#include "testing/plain_stitching.h"

#include <gtest/gtest.h>

namespace cgp {
namespace {

constexpr uint64_t kPage = 4096;

TEST(PlainStitchingTest, SmallBlocksTakeTheShortestStretchThatHoldsThem) {
  PlainStitching pool(kPage);
  pool.Allocate(1, 2048, 0);
  pool.Allocate(2, 512, 0);
  pool.Allocate(3, 1000, 0);
  pool.Allocate(4, 512, 0);
  EXPECT_EQ(pool.pages(), 1u);  // full
  pool.Free(1);
  pool.Free(3);
  pool.Allocate(5, 1024, 0);  // where block 3 lay
  pool.Allocate(6, 2048, 0);
  EXPECT_EQ(pool.pages(), 1u);
  pool.Allocate(7, 1, 0);
  EXPECT_EQ(pool.pages(), 2u);
}

TEST(PlainStitchingTest, ABlockLiesInWhatIsMapped) {
  PlainStitching pool(kPage);
  pool.Allocate(1, 5 * kPage, 0);
  pool.Free(1);
  pool.Allocate(2, 2 * kPage + 512, 0);
  pool.Allocate(3, 2 * kPage + 512, 0);  // from the third page on, which block 2 ends in
  EXPECT_EQ(pool.pages(), 5u);
  EXPECT_EQ(pool.mappings(), 5u);
}

TEST(PlainStitchingTest, TheFreeEndOfARangeIsExtended) {
  PlainStitching pool(kPage);
  pool.Allocate(1, 2 * kPage, 0);
  pool.Free(1);
  pool.Allocate(2, 5 * kPage, 0);
  EXPECT_EQ(pool.pages(), 5u);
  EXPECT_EQ(pool.mappings(), 5u);
}

TEST(PlainStitchingTest, ARangeBeginsInATailAndEndsInAHead) {
  PlainStitching pool(kPage);
  pool.Allocate(1, kPage - 1024, 0);
  pool.Allocate(2, 1024, 0);
  pool.Allocate(3, kPage - 512, 0);  // its page's tail stays free
  pool.Allocate(4, 1536, 0);
  pool.Allocate(5, kPage - 1536, 0);
  pool.Allocate(6, kPage, 0);
  pool.Free(4);  // a head
  EXPECT_EQ(pool.pages(), 4u);
  pool.Allocate(7, kPage + 2048, 0);  // tail of page 1, a new page, head of page 2
  EXPECT_EQ(pool.pages(), 5u);
  EXPECT_EQ(pool.mappings(), 4u + 3u);
}

TEST(PlainStitchingTest, OnlyItsStreamTakesWhatACaptureFreed) {
  PlainStitching pool(kPage);
  pool.Allocate(1, 2 * kPage, 1);
  pool.Free(1);
  pool.Allocate(2, 2 * kPage, 2);
  EXPECT_EQ(pool.pages(), 4u);
  pool.Free(2);
  pool.Allocate(3, 512, 2);
  pool.Free(3);
  pool.BeginCapture();
  pool.Allocate(4, 4 * kPage, 3);
  EXPECT_EQ(pool.pages(), 4u);
}

}  // namespace
}  // namespace cgp
