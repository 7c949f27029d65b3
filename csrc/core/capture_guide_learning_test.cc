// What is learned from one capture for the next: how its steps grow.
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <tuple>
#include <vector>

#include "core/capture_guide.h"
#include "core/capture_guide_test_captures.h"

namespace cgp {
namespace {

class GuideLearningTest : public GuidedCaptures {
 protected:
  static std::vector<int> Powers(const CaptureGuide& guide) {
    std::vector<int> powers;
    for (const CaptureGuide::Step& step : guide.steps()) powers.push_back(step.power);
    return powers;
  }
};

TEST_F(GuideLearningTest, PowersAreLearnedAndInherited) {
  CaptureGuide guide = GuideOf({30'000, 40'000, 70'000, 50'000});
  EXPECT_EQ(Powers(guide), (std::vector<int>{1, 1, 1, 1})) << "until more is known";
  Capture(guide, {30'000, 40'000, 70'000, 50'000});
  EXPECT_EQ(Powers(guide), (std::vector<int>{1, 1, 1, 1})) << "equal sizes say nothing";

  Capture(guide, {45'000, 90'000, 70'000, 75'000});
  EXPECT_EQ(Powers(guide), (std::vector<int>{1, 2, 0, 1}));
  Capture(guide, {45'000, 90'000, 70'000, 9'000'000, 75'000}, 100);
  EXPECT_EQ(guide.steps()[0].start.slot, SlotId{100});
  EXPECT_EQ(Powers(guide), (std::vector<int>{1, 2, 0, 1, 1})) << "from the guide's likes";
}

TEST_F(GuideLearningTest, PowersAreThoseByTheLastScale) {
  const auto [a, b, c, d, e] = std::tuple(kOdd[0], kOdd[1], kOdd[2], kOdd[3], kOdd[4]);
  CaptureGuide guide = GuideOf({600'000, a, b, c, d, e});
  // The constant is taken for the first step grown by 8/3 until two in a row agree on 3.
  Capture(guide, {1'600'000, 9 * a, 3 * b, 3 * c, 3 * d, e});
  EXPECT_EQ(Powers(guide)[3], 1);
  EXPECT_EQ(Powers(guide)[4], 1);
  EXPECT_EQ(Powers(guide)[5], 0);
}

TEST_F(GuideLearningTest, WhatStandsForAStepInheritsItsPower) {
  CaptureGuide guide = GuideOf({30'000, 40'000, 70'000});
  Capture(guide, {60'000, 160'000, 70'000});
  ASSERT_EQ(Powers(guide), (std::vector<int>{1, 2, 0}));
  Capture(guide, {60'000, 170'000, 70'000, 9'000'000});
  EXPECT_EQ(Powers(guide), (std::vector<int>{1, 2, 0, 1}));
  Capture(guide, {90'000, 400'000, 70'000, 90'000'000});
  EXPECT_EQ(Powers(guide), (std::vector<int>{1, 2, 0, 1}));
}

TEST_F(GuideLearningTest, ASmallerCaptureTeachesAsMuch) {
  CaptureGuide guide = GuideOf({300'000, 400'000, 700'000});
  Capture(guide, {150'000, 100'000, 700'000}, /*first_slot=*/100);
  EXPECT_EQ(Powers(guide), (std::vector<int>{1, 2, 0}));
  EXPECT_EQ(guide.steps()[1].bytes, 400'000u) << "the guide is still the larger one";
  EXPECT_EQ(guide.steps()[1].start.slot, SlotId{1});
}

TEST_F(GuideLearningTest, SmallBlocksOfASmallerCaptureTeachNothing) {
  const auto power = [](uint64_t bytes) {
    CaptureGuide guide = GuideOf({300'000, 4 * bytes});
    Capture(guide, {150'000, bytes});
    return Powers(guide)[1];
  };
  EXPECT_EQ(power(32 * 512), 2);
  EXPECT_EQ(power(31 * 512), 1) << "small enough to be so large by another power";
}

TEST_F(GuideLearningTest, ASmallerCaptureOfTheSameScaleOrAnotherProgramTeachesNothing) {
  CaptureGuide guide = GuideOf({3'000'000, 4'000'000, 7'000'000});
  Capture(guide, {3'000'000, 4'000'000});
  Capture(guide, {1'500'000, 307'001, 201'003, 151'007, 253'011, 110'303});
  EXPECT_EQ(Powers(guide), (std::vector<int>{1, 1, 1}));
}

TEST_F(GuideLearningTest, ASmallerCaptureTeachesIfHalfOfItsBlocksHaveALike) {
  const auto learned = [](uint32_t without_like) {
    CaptureGuide guide = GuideOf({300'000, 400'000, 700'000});
    Sizes sizes = {150'000, 100'000, 350'000};
    for (uint32_t i = 0; i < without_like; ++i) sizes.push_back(30'011 + i * i * i * 1003);
    Capture(guide, sizes);
    return Powers(guide) == std::vector<int>{1, 2, 1};
  };
  EXPECT_TRUE(learned(0));
  EXPECT_TRUE(learned(3));
  EXPECT_FALSE(learned(4));
}

TEST_F(GuideLearningTest, ForetellsHowLargeBlocksWillBe) {
  CaptureGuide guide = GuideOf({30'000, 40'000, 70'000, 50'001});
  Capture(guide, {60'000, 160'000, 70'000, 100'002});
  ASSERT_EQ(Powers(guide), (std::vector<int>{1, 2, 0, 1}));
  for (uint32_t step = 0; step < 4; ++step) {
    const uint64_t bytes = guide.steps()[step].bytes;
    EXPECT_EQ(guide.Foretell(step, 0), bytes) << "no scale yet";
    EXPECT_EQ(guide.Foretell(step, 1), bytes);
  }
  EXPECT_EQ(guide.Foretell(0, 1.5), 90'000u);
  EXPECT_EQ(guide.Foretell(1, 1.5), 360'000u);
  EXPECT_EQ(guide.Foretell(2, 1.5), 70'000u);
  EXPECT_EQ(guide.Foretell(3, 0.125), 12'501u) << "12'500.25 take one more";
}

// The scale of a capture is a quotient that a double holds not quite. What grows by it exactly must
// come out exact, since one byte more may be a granule more.
TEST_F(GuideLearningTest, WhatScalesExactlyIsForetoldExactly) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 20'000; ++round) {
    const uint64_t from = 1 + random() % 1000;
    const uint64_t to = 1 + random() % 1000;
    // All within 2 TiB.
    const uint64_t unit = 513 + random() % (uint64_t{1} << (10 + random() % 21));
    const double scale = static_cast<double>(to * unit) / static_cast<double>(from * unit);
    CaptureGuide guide = GuideOf({from * unit});
    ASSERT_EQ(guide.Foretell(0, scale), to * unit) << from << " " << to << " " << unit;
  }
}

TEST_F(GuideLearningTest, LargeBlocksAnswerExactly) {
  std::mt19937_64 random(6);
  for (int round = 0; round < 2'000; ++round) {
    const uint64_t from = 100 + random() % 900;
    const uint64_t to = 100 + random() % 900;
    const uint64_t unit = (uint64_t{1} << 21) + 512 * (random() % 4096);    // 200 MB to 4 GB
    const uint64_t square = (uint64_t{1} << 20) + 512 * (random() % 1024);  // to 1.5 TB
    if (from == to) continue;
    CaptureGuide guide = GuideOf({from * unit, from * from * square, from * square});
    const Sizes sizes = {to * unit, to * to * square, to * square};
    guide.BeginCapture();
    const std::vector<Match> matches = Allocate(guide, sizes);
    ASSERT_EQ(AnswersOf(matches), (Answers{0, 1, 2})) << from << " " << to << " " << unit;
  }
}

}  // namespace
}  // namespace cgp
