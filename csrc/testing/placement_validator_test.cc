// Each violation is caught, with the verdict that names it, and its lawful neighbour is not.
#include "testing/placement_validator.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <limits>

namespace cgp {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kPage = 4096;
constexpr uint64_t kBase = 1 << 20;

Verdict VerdictOf(const std::vector<PlacementEvent>& events) { return Judge(events).verdict; }

// Two pages, and block 1 stitched from the tail of page 7 and the head of page 3.
std::vector<PlacementEvent> Stitched() {
  return {PageMade{7, kPage}, PageMade{3, kPage},
          BlockPlaced{1, 2048, kBase + 3072, {{7, 3072, 1024}, {3, 0, 1024}}}};
}

std::vector<PlacementEvent> StitchedAnd(std::vector<PlacementEvent> more) {
  std::vector<PlacementEvent> events = Stitched();
  events.insert(events.end(), more.begin(), more.end());
  return events;
}

TEST(PlacementValidator, AcceptsNeighboursInPagesAndAddresses) {
  EXPECT_EQ(VerdictOf(StitchedAnd({
                BlockPlaced{2, 3072, kBase, {{7, 0, 3072}}},
                BlockPlaced{3, 3072, kBase + 5120, {{3, 1024, 3072}}},
                BlockFreed{1},
                BlockPlaced{1, 1024, kBase + (1 << 20), {{3, 0, 1024}}},
                ReservedIs{2 * kPage},
            })),
            Verdict::kGood);
}

TEST(PlacementValidator, AcceptsTheSameBytesAtAnotherAddressOnceFreed) {
  EXPECT_EQ(VerdictOf(StitchedAnd({
                BlockFreed{1},
                BlockPlaced{2, 2048, kBase + (1 << 20), {{3, 0, 1024}, {7, 3072, 1024}}},
            })),
            Verdict::kGood);
}

TEST(PlacementValidator, CatchesSharedBytesAtOtherAddresses) {
  const Finding finding =
      Judge(StitchedAnd({BlockPlaced{2, 1024, kBase + (1 << 20), {{3, 512, 1024}}}}));
  EXPECT_EQ(finding.verdict, Verdict::kSharedBytes);
  EXPECT_THAT(finding.description, HasSubstr("event 3"));
  EXPECT_THAT(finding.description, HasSubstr("[512, 1536) of page 3"));
}

TEST(PlacementValidator, CatchesSharedBytesWhereOneBlockCoversTheOther) {
  EXPECT_EQ(VerdictOf({PageMade{0, kPage}, BlockPlaced{1, 512, kBase, {{0, 1024, 512}}},
                       BlockPlaced{2, kPage, 2 * kBase, {{0, 0, kPage}}}}),
            Verdict::kSharedBytes);
  EXPECT_EQ(VerdictOf({PageMade{0, kPage}, BlockPlaced{1, kPage, kBase, {{0, 0, kPage}}},
                       BlockPlaced{2, 512, 2 * kBase, {{0, 1024, 512}}}}),
            Verdict::kSharedBytes);
}

TEST(PlacementValidator, CatchesABlockThatHoldsAByteTwice) {
  EXPECT_EQ(
      VerdictOf({PageMade{0, kPage}, BlockPlaced{1, 2048, kBase, {{0, 0, 1024}, {0, 512, 1024}}}}),
      Verdict::kSharedBytes);
}

TEST(PlacementValidator, CatchesSharedAddresses) {
  EXPECT_EQ(VerdictOf(StitchedAnd({BlockPlaced{2, 512, kBase + 4608, {{3, 2048, 512}}}})),
            Verdict::kSharedAddresses);
  EXPECT_EQ(VerdictOf(StitchedAnd({BlockPlaced{2, 1024, kBase + 2560, {{3, 2048, 1024}}}})),
            Verdict::kSharedAddresses);
}

TEST(PlacementValidator, CatchesPiecesThatDoNotAddUp) {
  EXPECT_EQ(VerdictOf({PageMade{0, kPage}, BlockPlaced{1, 2048, kBase, {{0, 0, 1536}}}}),
            Verdict::kPiecesDoNotAddUp);
  EXPECT_EQ(VerdictOf({PageMade{0, kPage}, BlockPlaced{1, 1024, kBase, {{0, 0, 1536}}}}),
            Verdict::kPiecesDoNotAddUp);
  EXPECT_EQ(VerdictOf({PageMade{0, kPage}, BlockPlaced{1, 1024, kBase, {}}}),
            Verdict::kPiecesDoNotAddUp);
}

TEST(PlacementValidator, CatchesPiecesOutsideTheirPage) {
  EXPECT_EQ(VerdictOf({PageMade{0, kPage}, BlockPlaced{1, 1024, kBase, {{0, 3584, 1024}}}}),
            Verdict::kOutsidePage);
  EXPECT_EQ(VerdictOf({PageMade{0, kPage}, BlockPlaced{1, 512, kBase, {{0, kPage, 512}}}}),
            Verdict::kOutsidePage);
  const uint64_t far = std::numeric_limits<uint64_t>::max() - 511;
  EXPECT_EQ(VerdictOf({PageMade{0, kPage}, BlockPlaced{1, 1024, kBase, {{0, far, 1024}}}}),
            Verdict::kOutsidePage);
}

TEST(PlacementValidator, CatchesPagesThatAreNotThere) {
  EXPECT_EQ(VerdictOf({BlockPlaced{1, 512, kBase, {{0, 0, 512}}}}), Verdict::kUnknownPage);
  EXPECT_EQ(VerdictOf({PageGone{0}}), Verdict::kUnknownPage);
  EXPECT_EQ(VerdictOf({PageMade{0, kPage}, PageGone{0}, BlockPlaced{1, 512, kBase, {{0, 0, 512}}}}),
            Verdict::kUnknownPage);
}

TEST(PlacementValidator, CatchesAPageGivenBackUnderALiveBlock) {
  EXPECT_EQ(VerdictOf(StitchedAnd({PageGone{3}})), Verdict::kPageInUse);
  EXPECT_EQ(VerdictOf(StitchedAnd({BlockFreed{1}, PageGone{3}, ReservedIs{kPage}})),
            Verdict::kGood);
}

TEST(PlacementValidator, CatchesNumbersUsedTwice) {
  EXPECT_EQ(VerdictOf({PageMade{0, kPage}, PageMade{0, kPage}}), Verdict::kPageMadeTwice);
  EXPECT_EQ(VerdictOf(StitchedAnd({BlockPlaced{1, 512, 2 * kBase, {{3, 2048, 512}}}})),
            Verdict::kBlockMadeTwice);
}

TEST(PlacementValidator, CatchesFreesOfWhatIsNotLive) {
  EXPECT_EQ(VerdictOf({BlockFreed{1}}), Verdict::kNotLive);
  EXPECT_EQ(VerdictOf(StitchedAnd({BlockFreed{1}, BlockFreed{1}})), Verdict::kNotLive);
}

TEST(PlacementValidator, CatchesMisshapenBlocksAndPages) {
  EXPECT_EQ(VerdictOf({PageMade{0, 0}}), Verdict::kBadPage);
  EXPECT_EQ(VerdictOf({BlockPlaced{1, 0, kBase, {}}}), Verdict::kEmptyBlock);
  EXPECT_EQ(VerdictOf({PageMade{0, kPage}, BlockPlaced{1, 512, kBase, {{0, 0, 512}, {0, 512, 0}}}}),
            Verdict::kEmptyBlock);
  EXPECT_EQ(VerdictOf({PageMade{0, kPage}, BlockPlaced{1, 512, kBase + 8, {{0, 0, 512}}}}),
            Verdict::kMisaligned);
  EXPECT_EQ(VerdictOf({PageMade{0, kPage}, BlockPlaced{1, 520, kBase, {{0, 0, 520}}}}),
            Verdict::kMisaligned);
  EXPECT_EQ(VerdictOf({PageMade{0, kPage}, BlockPlaced{1, 512, kBase, {{0, 8, 512}}}}),
            Verdict::kMisaligned);
  const uint64_t last = std::numeric_limits<uint64_t>::max() - 511;
  EXPECT_EQ(VerdictOf({PageMade{0, kPage}, BlockPlaced{1, 1024, last, {{0, 0, 1024}}}}),
            Verdict::kAddressOverflow);
}

TEST(PlacementValidator, CatchesReservedThatIsNotTheSumOfThePages) {
  EXPECT_EQ(VerdictOf(StitchedAnd({ReservedIs{kPage}})), Verdict::kReservedDiffers);
  EXPECT_EQ(VerdictOf({ReservedIs{0}}), Verdict::kGood);
  EXPECT_EQ(VerdictOf({ReservedIs{1}}), Verdict::kReservedDiffers);
}

TEST(PlacementValidator, ABadEventChangesNothing) {
  PlacementValidator validator;
  for (const PlacementEvent& event : Stitched()) ASSERT_TRUE(validator.Apply(event).good());
  // Its first piece is free, its second is not.
  EXPECT_EQ(validator.Apply(BlockPlaced{2, 1024, 2 * kBase, {{7, 0, 512}, {7, 3584, 512}}}).verdict,
            Verdict::kSharedBytes);
  EXPECT_EQ(validator.live_blocks(), 1U);
  EXPECT_TRUE(validator.Apply(BlockPlaced{2, 512, 2 * kBase, {{7, 0, 512}}}).good());
}

}  // namespace
}  // namespace cgp
