// What capture_profile.h says of which capture is the profile and of what it records.
#include "core/planning/capture_profile.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <tuple>
#include <vector>

#include "core/planning/capture_profile_test_captures.h"

namespace cgp {
namespace {

class CaptureProfileTest : public ProfiledCaptures {
 protected:
  static auto Fields(const Match& m) {
    return std::tuple(m.step, m.scale, m.next, m.missed_in_a_row);
  }

  static std::vector<bool> LivesAtPeak(const CaptureProfile& profile) {
    std::vector<bool> lives;
    for (const CaptureProfile::Step& step : profile.steps()) lives.push_back(step.lives_at_peak);
    return lives;
  }
};

// --- Which capture is the profile ---

TEST_F(CaptureProfileTest, KnowsNothingBeforeTheFirstCaptureIsOver) {
  CaptureProfile profile;
  EXPECT_TRUE(profile.steps().empty());
  profile.BeginCapture();
  for (int i = 0; i < 3; ++i) {
    const Match match = profile.Find(5000);
    EXPECT_EQ(match.step, std::nullopt);
    EXPECT_EQ(match.scale, 0);
    profile.Allocated(match, At(1), 5000, Granules(10));
    EXPECT_TRUE(profile.steps().empty());
  }
}

TEST_F(CaptureProfileTest, KnowsNothingOfATicketThatIsNotOfTheCapture) {
  CaptureProfile profile;
  profile.BeginCapture();
  Ticket ticket = profile.Allocated(profile.Find(5000), At(1), 5000, Granules(10));
  ++ticket.step;  // as after 2^31 scopes, when their numbers come again
  EXPECT_EQ(profile.StepOf(ticket), std::nullopt);
  profile.Freed(ticket);
  profile.EndCapture();
  EXPECT_EQ(profile.steps()[0].freed_at, CaptureProfile::kNever);
}

TEST_F(CaptureProfileTest, TellsWhatTheLargestCaptureDid) {
  CaptureProfile profile;
  profile.BeginCapture();
  const auto first = profile.Allocated(profile.Find(2001), At(3, 2), 2001, Granules(4));
  profile.Allocated(profile.Find(2500), At(9), 2500, Granules(9));
  profile.Freed(first);
  profile.EndCapture();
  ASSERT_EQ(profile.steps().size(), 2u);
  const CaptureProfile::Step& step = profile.steps()[0];
  EXPECT_EQ(step.start.slot, SlotId{3});
  EXPECT_EQ(step.start.offset, Granules(2));
  EXPECT_EQ(step.bytes, 2001u) << "as it was asked for: rounded sizes do not scale";
  EXPECT_EQ(step.freed_at, 2u);
  EXPECT_EQ(profile.steps()[1].start.slot, SlotId{9});
  EXPECT_EQ(profile.steps()[1].freed_at, CaptureProfile::kNever);
}

TEST_F(CaptureProfileTest, TheLargestCaptureIsTheProfile) {
  CaptureProfile profile;
  Capture(profile, {10'240, 10'240}, 100);
  Capture(profile, {512, 512, 512, 512}, 200);
  EXPECT_EQ(profile.steps()[0].start.slot, SlotId{100}) << "more steps are not more memory";
  Capture(profile, {20'992}, 300);
  EXPECT_EQ(profile.steps()[0].start.slot, SlotId{300});
}

TEST_F(CaptureProfileTest, OfEquallyLargeCapturesTheLastIsTheProfile) {
  CaptureProfile profile;
  Capture(profile, {10'240, 10'240}, 100);
  Capture(profile, {20'480}, 200);
  ASSERT_EQ(profile.steps().size(), 1u);
  EXPECT_EQ(profile.steps()[0].start.slot, SlotId{200});
}

// What counts is what the pool held at once, not the sum over the capture.
TEST_F(CaptureProfileTest, SizeOfACaptureIsItsPeak) {
  CaptureProfile profile;
  Capture(profile, {10'240}, 100);
  profile.BeginCapture();
  for (uint32_t i = 0; i < 5; ++i)
    profile.Freed(profile.Allocated(profile.Find(9728), At(200 + i), 9728, Granules(19)));
  profile.EndCapture();
  EXPECT_EQ(profile.steps()[0].start.slot, SlotId{100});
}

TEST_F(CaptureProfileTest, AnEmptyCaptureDoesNotReplaceAProfile) {
  CaptureProfile profile;
  Capture(profile, {2048}, 100);
  Capture(profile, {});
  ASSERT_EQ(profile.steps().size(), 1u);
  EXPECT_EQ(profile.steps()[0].start.slot, SlotId{100});
}

TEST_F(CaptureProfileTest, MarksWhatLivesWhenTheCaptureHoldsMost) {
  CaptureProfile profile;
  profile.BeginCapture();
  const auto early = profile.Allocated({}, At(0), 2048, Granules(4));
  profile.Freed(early);  // before the peak
  const auto at_peak = profile.Allocated({}, At(1), 3072, Granules(6));
  const auto just_before = profile.Allocated({}, At(2), 512, Granules(7));
  profile.Freed(just_before);
  profile.Allocated({}, At(3), 4096, Granules(14));  // the peak; never freed
  profile.Freed(at_peak);                            // right after it
  profile.Allocated({}, At(4), 2560, Granules(13));  // after the peak
  profile.EndCapture();
  EXPECT_EQ(LivesAtPeak(profile), (std::vector<bool>{false, true, false, true, false}));
}

TEST_F(CaptureProfileTest, OfEqualPeaksTheFirstCounts) {
  CaptureProfile profile;
  profile.BeginCapture();
  const auto first = profile.Allocated({}, At(0), 4096, Granules(8));
  profile.Freed(first);
  profile.Allocated({}, At(1), 4096, Granules(8));
  profile.EndCapture();
  EXPECT_EQ(LivesAtPeak(profile), (std::vector<bool>{true, false}));
}

// --- Tickets ---

TEST_F(CaptureProfileTest, TicketsOfEarlierCapturesAreIgnored) {
  CaptureProfile profile;
  profile.BeginCapture();
  const auto old = profile.Allocated({}, At(0), 2048, Granules(4));
  profile.EndCapture();

  profile.BeginCapture();
  profile.Allocated(profile.Find(3072), At(1), 3072, Granules(10));
  profile.Freed(old);  // its step number is that of the block just recorded
  EXPECT_EQ(profile.StepOf(old), std::nullopt);
  profile.EndCapture();
  EXPECT_EQ(profile.steps()[0].freed_at, CaptureProfile::kNever);
}

TEST_F(CaptureProfileTest, WhatIsFreedBetweenCapturesIsIgnored) {
  CaptureProfile profile;
  profile.BeginCapture();
  const auto ticket = profile.Allocated({}, At(0), 2048, Granules(4));
  profile.EndCapture();
  profile.Freed(ticket);
  EXPECT_EQ(profile.StepOf(ticket), std::nullopt);
  EXPECT_EQ(profile.steps()[0].freed_at, CaptureProfile::kNever);
}

TEST_F(CaptureProfileTest, BlocksWithoutATicketAreIgnored) {
  CaptureProfile profile;
  profile.Freed({});
  profile.BeginCapture();
  profile.Allocated({}, At(0), 2048, Granules(4));
  profile.Freed({});
  EXPECT_EQ(profile.StepOf({}), std::nullopt);
  profile.EndCapture();
  EXPECT_EQ(profile.steps()[0].freed_at, CaptureProfile::kNever);
}

TEST_F(CaptureProfileTest, TellsWhichStepALiveBlockMatches) {
  CaptureProfile profile = ProfileOf({4000, 8000, 60'000});
  profile.BeginCapture();
  const auto allocate = [&](uint64_t bytes) {
    return profile.Allocated(profile.Find(bytes), At(0), bytes, Granules(1));
  };
  const auto first = allocate(4000);
  const auto alone = allocate(1'000'000);
  const auto third = allocate(60'000);
  EXPECT_EQ(profile.StepOf(first), 0u);
  EXPECT_EQ(profile.StepOf(alone), std::nullopt);
  EXPECT_EQ(profile.StepOf(third), 2u);
  profile.EndCapture();
  EXPECT_EQ(profile.StepOf(first), std::nullopt);
}

// --- Find() is a question ---

TEST_F(CaptureProfileTest, FindChangesNothing) {
  CaptureProfile profile = ProfileOf({30'000, 60'000, 512, 90'000, 44'000});
  profile.BeginCapture();
  for (const uint64_t bytes : Sizes{45'000, 77'000, 90'000, 512, 9, 135'000}) {
    const CaptureProfile before = profile;
    const Match match = profile.Find(bytes);
    // An allocation that fails is not followed by Allocated().
    for (const uint64_t failed : Sizes{1, 512, 66'000, 90'000, 1'000'000}) profile.Find(failed);
    EXPECT_EQ(Fields(profile.Find(bytes)), Fields(match));
    EXPECT_EQ(Fields(before.Find(bytes)), Fields(match));
    profile.Allocated(match, At(0), bytes, Granules(1));
  }
  EXPECT_EQ(profile.Find(66'000).step, 4u);
}

}  // namespace
}  // namespace cgp
