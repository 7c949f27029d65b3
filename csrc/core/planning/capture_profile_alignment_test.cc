// To which of the profile's steps the blocks of a capture answer, and how large the next ones will
// be.
#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <vector>

#include "core/planning/capture_profile.h"
#include "core/planning/capture_profile_test_captures.h"

namespace cgp {
namespace {

class ProfileAlignmentTest : public ProfiledCaptures {
 protected:
  static Sizes Times(double scale, Sizes sizes) {
    for (uint64_t& bytes : sizes) bytes = static_cast<uint64_t>(static_cast<double>(bytes) * scale);
    return sizes;
  }

  // Sizes whose double, half, square and so on are none of the others, and of which each is larger
  // by a 50th than the one before.
  static Sizes Distinct(uint32_t count) {
    Sizes sizes;
    double bytes = 1'000'000;
    for (uint32_t i = 0; i < count; ++i, bytes *= 1.02)
      sizes.push_back(static_cast<uint64_t>(bytes));
    return sizes;
  }

  // What the block of a step matches after `before` blocks that answer and `misses` that do not.
  static int64_t AnswerAfter(uint32_t before, uint32_t misses, uint32_t step) {
    const Sizes steps = Distinct(200);
    Sizes sizes(steps.begin(), steps.begin() + before);
    for (uint32_t i = 0; i < misses; ++i) sizes.push_back(10'000'019 + i * i * 1'000'003);
    sizes.push_back(steps[step]);
    return Aligned(steps, sizes).back();
  }
};

TEST_F(ProfileAlignmentTest, EqualSizes) {
  CaptureProfile profile = ProfileOf({5000, 7000, 7000, 9000});
  const std::vector<Match> matches = Capture(profile, {5000, 7000, 7000, 9000});
  EXPECT_EQ(AnswersOf(matches), (Answers{0, 1, 2, 3}));
  EXPECT_EQ(matches.front().scale, 1);
  EXPECT_EQ(matches.back().scale, 1);
  EXPECT_EQ(matches.back().next, 4u);
}

TEST_F(ProfileAlignmentTest, SizesAreEqualIfTheirBlocksAre) {
  EXPECT_EQ(Aligned({5000, 5121}, {5120, 5632}), (Answers{0, 1})) << "10 and 11 granules";
  EXPECT_EQ(Aligned({4096, 5120, 6000}, {4096, 5121}), (Answers{0, kNothing}));
}

TEST_F(ProfileAlignmentTest, BeyondTheLastStepNothingAnswers) {
  EXPECT_EQ(Aligned({5000}, {5000, 5000}), (Answers{0, kNothing}));
}

TEST_F(ProfileAlignmentTest, SizesScaledByOneAndAHalf) {
  for (const double scale : {1.5, 0.5, 16.0, 1.0 / 3}) {
    const Sizes sizes = {30'000, 90'000, 60'000, 300'000};
    CaptureProfile profile = ProfileOf(sizes);
    const std::vector<Match> matches = Capture(profile, Times(scale, sizes));
    EXPECT_EQ(AnswersOf(matches), (Answers{0, 1, 2, 3})) << scale;
    EXPECT_EQ(matches[0].scale, scale);
    EXPECT_EQ(matches[0].missed_in_a_row, 0u);
    EXPECT_EQ(matches[3].scale, scale);
  }
}

TEST_F(ProfileAlignmentTest, SizesScaledByTheSquare) {
  EXPECT_EQ(Aligned({30'000, 40'000, 20'000}, {45'000, 90'000, 30'000}), (Answers{0, 1, 2}));
}

TEST_F(ProfileAlignmentTest, ConstantsAmongScaledOnes) {
  EXPECT_EQ(Aligned({30'000, 1'000'000, 60'000, 512, 7000, 90'000},
                    {45'000, 1'000'000, 90'000, 512, 7000, 135'000}),
            (Answers{0, 1, 2, 3, 4, 5}));
}

TEST_F(ProfileAlignmentTest, InsertedAndLeftOutSteps) {
  EXPECT_EQ(Aligned({10'000, 20'000, 30'000}, {10'000, 77'000, 20'000, 99'000, 30'000}),
            (Answers{0, kNothing, 1, kNothing, 2}));
  EXPECT_EQ(Aligned({10'000, 20'000, 30'000, 40'000, 50'000}, {10'000, 30'000, 50'000}),
            (Answers{0, 2, 4}));
  EXPECT_EQ(Aligned({10'000, 22'000, 30'000, 44'000}, {15'000, 71'000, 45'000, 66'000}),
            (Answers{0, kNothing, 2, 3}));
}

TEST_F(ProfileAlignmentTest, CountsWhatAnswersToNothing) {
  CaptureProfile profile = ProfileOf({10'000, 20'000, 30'000});
  const std::vector<Match> matches = Capture(profile, {10'000, 77'003, 99'001, 20'000, 83'003});
  EXPECT_EQ(matches[2].missed_in_a_row, 2u);
  EXPECT_EQ(matches[3].missed_in_a_row, 0u);
  EXPECT_EQ(matches[4].missed_in_a_row, 1u);
}

TEST_F(ProfileAlignmentTest, LooksSixteenStepsAheadAndFurtherAfterMisses) {
  EXPECT_EQ(AnswerAfter(5, 0, 5 + 15), 5 + 15);
  EXPECT_EQ(AnswerAfter(5, 0, 5 + 16), kNothing);
  EXPECT_EQ(AnswerAfter(5, 1, 5 + 31), 5 + 31);
  EXPECT_EQ(AnswerAfter(5, 1, 5 + 32), kNothing);
  EXPECT_EQ(AnswerAfter(5, 6, 5 + 111), 5 + 111);
  EXPECT_EQ(AnswerAfter(5, 6, 5 + 112), kNothing);
  EXPECT_EQ(AnswerAfter(5, 8, 5 + 127), 5 + 127);
  EXPECT_EQ(AnswerAfter(5, 8, 5 + 128), kNothing) << "the widest window";
  EXPECT_EQ(AnswerAfter(5, 8, 4), kNothing) << "never back";
}

TEST_F(ProfileAlignmentTest, BlocksOfAGranuleAnswerToTheNextStepOnly) {
  CaptureProfile profile = ProfileOf({10'000, 512, 20'000, 300, 30'000});
  profile.BeginCapture();
  const std::vector<Match> matches =
      Allocate(profile, {10'000, 8, 512, 20'000, 30'000, 8, 10'000'000});
  EXPECT_EQ(AnswersOf(matches), (Answers{0, 1, kNothing, 2, 4, kNothing, kNothing}));
  EXPECT_EQ(matches[2].missed_in_a_row, 0u) << "they are all alike and say nothing";
  EXPECT_EQ(matches[2].next, 2u);
}

TEST_F(ProfileAlignmentTest, BlocksOfAGranuleDoNotTellTheScale) {
  CaptureProfile profile = ProfileOf({512, 10'000, 20'000});
  profile.BeginCapture();
  const std::vector<Match> matches = Allocate(profile, {100, 300, 30'000, 60'000});
  EXPECT_EQ(matches[1].scale, 0);
  EXPECT_EQ(AnswersOf(matches), (Answers{0, kNothing, 1, 2}));
  EXPECT_EQ(matches[3].scale, 3);
}

TEST_F(ProfileAlignmentTest, WhatTellsTheScaleMayBeWrong) {
  const Answers constants_alone = Aligned({10'000, 20'000, 7000}, {77'000, 30'000, 7000});
  EXPECT_EQ(constants_alone, (Answers{0, kNothing, 2}));
  EXPECT_EQ(Aligned({512}, {77'000}), (Answers{kNothing})) << "nothing to compare it with";
}

TEST_F(ProfileAlignmentTest, EachCaptureIsAlignedAnew) {
  CaptureProfile profile = ProfileOf({30'000, 60'000, 90'000});
  EXPECT_EQ(AnswersOf(Capture(profile, {15'000, 30'000, 45'000})), (Answers{0, 1, 2}));
  EXPECT_EQ(AnswersOf(Capture(profile, {30'000, 60'000, 90'000})), (Answers{0, 1, 2}));
  EXPECT_EQ(AnswersOf(Capture(profile, {10'000, 20'000, 30'000})), (Answers{0, 1, 2}));
}

TEST_F(ProfileAlignmentTest, PredictsHowLargeBlocksWillBe) {
  const CaptureProfile profile = ProfileOf({30'000, 50'001});
  EXPECT_EQ(profile.Predict(0, 0), 30'000u) << "no scale yet";
  EXPECT_EQ(profile.Predict(0, 1), 30'000u);
  EXPECT_EQ(profile.Predict(0, 1.5), 45'000u);
  EXPECT_EQ(profile.Predict(1, 0.25), 12'501u) << "12'500.25 take one more";
}

// The scale of a capture is a quotient that a double holds not quite. What grows by it exactly must
// come out exact, since one byte more may be a granule more.
TEST_F(ProfileAlignmentTest, WhatScalesExactlyIsPredictedExactly) {
  std::mt19937_64 random(5);
  for (int round = 0; round < 20'000; ++round) {
    const uint64_t from = 1 + random() % 1000;
    const uint64_t to = 1 + random() % 1000;
    // All within 2 TiB.
    const uint64_t unit = 513 + random() % (uint64_t{1} << (10 + random() % 21));
    const double scale = static_cast<double>(to * unit) / static_cast<double>(from * unit);
    CaptureProfile profile = ProfileOf({from * unit});
    ASSERT_EQ(profile.Predict(0, scale), to * unit) << from << " " << to << " " << unit;
  }
}

TEST_F(ProfileAlignmentTest, LargeBlocksAnswerExactly) {
  std::mt19937_64 random(6);
  for (int round = 0; round < 2'000; ++round) {
    const uint64_t from = 100 + random() % 900;
    const uint64_t to = 100 + random() % 900;
    const uint64_t unit = (uint64_t{1} << 21) + 512 * (random() % 4096);    // 200 MB to 4 GB
    const uint64_t square = (uint64_t{1} << 20) + 512 * (random() % 1024);  // to 1.5 TB
    if (from == to) continue;
    CaptureProfile profile = ProfileOf({from * unit, from * from * square, from * square});
    const Sizes sizes = {to * unit, to * to * square, to * square};
    profile.BeginCapture();
    const std::vector<Match> matches = Allocate(profile, sizes);
    ASSERT_EQ(AnswersOf(matches), (Answers{0, 1, 2})) << from << " " << to << " " << unit;
  }
}

}  // namespace
}  // namespace cgp
