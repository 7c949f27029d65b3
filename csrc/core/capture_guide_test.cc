// What capture_guide.h says of which capture is the guide and of what it records.
#include "core/capture_guide.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "core/capture_guide_test_captures.h"

namespace cgp {
namespace {

class CaptureGuideTest : public GuidedCaptures {
 protected:
  static auto Fields(const Match& m) {
    return std::tuple(m.step, m.scale, m.next, m.missed_in_a_row);
  }

  static std::vector<bool> LivesAtPeak(const CaptureGuide& guide) {
    std::vector<bool> lives;
    for (const CaptureGuide::Step& step : guide.steps()) lives.push_back(step.lives_at_peak);
    return lives;
  }
};

// --- Which capture is the guide ---

TEST_F(CaptureGuideTest, KnowsNothingBeforeTheFirstCaptureIsOver) {
  CaptureGuide guide;
  EXPECT_TRUE(guide.steps().empty());
  guide.BeginCapture();
  for (int i = 0; i < 3; ++i) {
    const Match match = guide.Find(5000);
    EXPECT_EQ(match.step, std::nullopt);
    EXPECT_EQ(match.scale, 0);
    guide.Allocated(match, At(1), 5000, Granules(10));
    EXPECT_TRUE(guide.steps().empty());
  }
}

TEST_F(CaptureGuideTest, TellsWhatTheLargestCaptureDid) {
  CaptureGuide guide;
  guide.BeginCapture();
  const auto first = guide.Allocated(guide.Find(2001), At(3, 2), 2001, Granules(4));
  guide.Allocated(guide.Find(2500), At(9), 2500, Granules(9));
  guide.Freed(first);
  guide.EndCapture();
  ASSERT_EQ(guide.steps().size(), 2u);
  const CaptureGuide::Step& step = guide.steps()[0];
  EXPECT_EQ(step.start.slot, SlotId{3});
  EXPECT_EQ(step.start.offset, Granules(2));
  EXPECT_EQ(step.bytes, 2001u) << "as it was asked for: rounded sizes do not scale";
  EXPECT_EQ(step.freed_at, 2u);
  EXPECT_EQ(guide.steps()[1].start.slot, SlotId{9});
  EXPECT_EQ(guide.steps()[1].freed_at, CaptureGuide::kNever);
}

TEST_F(CaptureGuideTest, TheLargestCaptureIsTheGuide) {
  CaptureGuide guide;
  Capture(guide, {10'240, 10'240}, 100);
  Capture(guide, {512, 512, 512, 512}, 200);
  EXPECT_EQ(guide.steps()[0].start.slot, SlotId{100}) << "more steps are not more memory";
  Capture(guide, {20'992}, 300);
  EXPECT_EQ(guide.steps()[0].start.slot, SlotId{300});
}

TEST_F(CaptureGuideTest, OfEquallyLargeCapturesTheLastIsTheGuide) {
  CaptureGuide guide;
  Capture(guide, {10'240, 10'240}, 100);
  Capture(guide, {20'480}, 200);
  ASSERT_EQ(guide.steps().size(), 1u);
  EXPECT_EQ(guide.steps()[0].start.slot, SlotId{200});
}

// What counts is what the pool held at once, not the sum over the capture.
TEST_F(CaptureGuideTest, SizeOfACaptureIsItsPeak) {
  CaptureGuide guide;
  Capture(guide, {10'240}, 100);
  guide.BeginCapture();
  for (uint32_t i = 0; i < 5; ++i)
    guide.Freed(guide.Allocated(guide.Find(9728), At(200 + i), 9728, Granules(19)));
  guide.EndCapture();
  EXPECT_EQ(guide.steps()[0].start.slot, SlotId{100});
}

TEST_F(CaptureGuideTest, AnEmptyCaptureDoesNotReplaceAGuide) {
  CaptureGuide guide;
  Capture(guide, {2048}, 100);
  Capture(guide, {});
  ASSERT_EQ(guide.steps().size(), 1u);
  EXPECT_EQ(guide.steps()[0].start.slot, SlotId{100});
}

TEST_F(CaptureGuideTest, MarksWhatLivesWhenTheCaptureHoldsMost) {
  CaptureGuide guide;
  guide.BeginCapture();
  const auto early = guide.Allocated({}, At(0), 2048, Granules(4));
  guide.Freed(early);  // before the peak
  const auto at_peak = guide.Allocated({}, At(1), 3072, Granules(6));
  const auto just_before = guide.Allocated({}, At(2), 512, Granules(7));
  guide.Freed(just_before);
  guide.Allocated({}, At(3), 4096, Granules(14));  // the peak; never freed
  guide.Freed(at_peak);                            // right after it
  guide.Allocated({}, At(4), 2560, Granules(13));  // after the peak
  guide.EndCapture();
  EXPECT_EQ(LivesAtPeak(guide), (std::vector<bool>{false, true, false, true, false}));
}

TEST_F(CaptureGuideTest, OfEqualPeaksTheFirstCounts) {
  CaptureGuide guide;
  guide.BeginCapture();
  const auto first = guide.Allocated({}, At(0), 4096, Granules(8));
  guide.Freed(first);
  guide.Allocated({}, At(1), 4096, Granules(8));
  guide.EndCapture();
  EXPECT_EQ(LivesAtPeak(guide), (std::vector<bool>{true, false}));
}

// --- Tickets ---

TEST_F(CaptureGuideTest, TicketsOfEarlierCapturesAreIgnored) {
  CaptureGuide guide;
  guide.BeginCapture();
  const auto old = guide.Allocated({}, At(0), 2048, Granules(4));
  guide.EndCapture();

  guide.BeginCapture();
  guide.Allocated(guide.Find(3072), At(1), 3072, Granules(10));
  guide.Freed(old);  // its step number is that of the block just recorded
  EXPECT_EQ(guide.StepOf(old), std::nullopt);
  guide.EndCapture();
  EXPECT_EQ(guide.steps()[0].freed_at, CaptureGuide::kNever);
}

TEST_F(CaptureGuideTest, WhatIsFreedBetweenCapturesIsIgnored) {
  CaptureGuide guide;
  guide.BeginCapture();
  const auto ticket = guide.Allocated({}, At(0), 2048, Granules(4));
  guide.EndCapture();
  guide.Freed(ticket);
  EXPECT_EQ(guide.StepOf(ticket), std::nullopt);
  EXPECT_EQ(guide.steps()[0].freed_at, CaptureGuide::kNever);
}

TEST_F(CaptureGuideTest, BlocksWithoutATicketAreIgnored) {
  CaptureGuide guide;
  guide.Freed({});
  guide.BeginCapture();
  guide.Allocated({}, At(0), 2048, Granules(4));
  guide.Freed({});
  EXPECT_EQ(guide.StepOf({}), std::nullopt);
  guide.EndCapture();
  EXPECT_EQ(guide.steps()[0].freed_at, CaptureGuide::kNever);
}

TEST_F(CaptureGuideTest, TellsWhichStepALiveBlockAnswersTo) {
  CaptureGuide guide = GuideOf({4000, 8000, 60'000});
  guide.BeginCapture();
  const auto allocate = [&](uint64_t bytes) {
    return guide.Allocated(guide.Find(bytes), At(0), bytes, Granules(1));
  };
  const auto first = allocate(4000);
  const auto alone = allocate(1'000'000);
  const auto third = allocate(60'000);
  EXPECT_EQ(guide.StepOf(first), 0u);
  EXPECT_EQ(guide.StepOf(alone), std::nullopt);
  EXPECT_EQ(guide.StepOf(third), 2u);
  guide.EndCapture();
  EXPECT_EQ(guide.StepOf(first), std::nullopt);
}

// --- Find() is a question ---

TEST_F(CaptureGuideTest, FindChangesNothing) {
  CaptureGuide guide = GuideOf({30'000, 60'000, 512, 90'000, 44'000});
  guide.BeginCapture();
  for (const uint64_t bytes : Sizes{45'000, 77'000, 90'000, 512, 9, 135'000}) {
    const CaptureGuide before = guide;
    const Match match = guide.Find(bytes);
    // An allocation that fails is not followed by Allocated().
    for (const uint64_t failed : Sizes{1, 512, 66'000, 90'000, 1'000'000}) guide.Find(failed);
    EXPECT_EQ(Fields(guide.Find(bytes)), Fields(match));
    EXPECT_EQ(Fields(before.Find(bytes)), Fields(match));
    guide.Allocated(match, At(0), bytes, Granules(1));
  }
  EXPECT_EQ(guide.Find(66'000).step, 4u);
}

}  // namespace
}  // namespace cgp
