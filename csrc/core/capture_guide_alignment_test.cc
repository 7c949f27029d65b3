// To which of the guide's steps the blocks of a capture answer.
#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "core/capture_guide.h"
#include "core/capture_guide_test_captures.h"

namespace cgp {
namespace {

class GuideAlignmentTest : public GuidedCaptures {
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

  // What the block of a step answers to after `before` blocks that answer and `misses` that do not.
  static int64_t AnswerAfter(uint32_t before, uint32_t misses, uint32_t step) {
    const Sizes steps = Distinct(200);
    Sizes sizes(steps.begin(), steps.begin() + before);
    for (uint32_t i = 0; i < misses; ++i) sizes.push_back(10'000'019 + i * i * 1'000'003);
    sizes.push_back(steps[step]);
    return Aligned(steps, sizes).back();
  }

  // From the third block of the program on all answer, whatever came before them.
  static void ExpectHealed(const Sizes& before, double scale) {
    const Sizes steps(kOdd, kOdd + 5);
    Sizes sizes = before;
    for (const uint64_t bytes : Times(scale, steps)) sizes.push_back(bytes);
    CaptureGuide guide = GuideOf(steps);
    guide.BeginCapture();
    const std::vector<Match> matches = Allocate(guide, sizes);
    const Answers answers = AnswersOf(matches);
    EXPECT_EQ(Answers(answers.end() - 3, answers.end()), (Answers{2, 3, 4}));
    EXPECT_EQ(matches.back().scale, scale);
    EXPECT_EQ(matches.back().missed_in_a_row, 0u);
    EXPECT_GE(matches.back().evidence, 2u);
  }

  // A guide and a capture of it that answers to `agree` steps and then goes on three times as large.
  static Answers AnswersOfATurnedCapture(uint32_t agree, uint32_t inserted) {
    Sizes steps;
    for (uint64_t i = 0; i < 40; ++i) steps.push_back(1'000'003 + 7001 * i * i);
    Sizes sizes(steps.begin(), steps.begin() + agree);
    for (uint32_t i = 0; i < inserted; ++i) sizes.push_back(90'000'049 + i * i * i * 1'000'003);
    for (uint32_t i = agree; i < agree + 3; ++i) sizes.push_back(3 * steps[i]);
    const Answers answers = Aligned(steps, sizes);
    return {answers.end() - 3, answers.end()};
  }
};

TEST_F(GuideAlignmentTest, EqualSizes) {
  CaptureGuide guide = GuideOf({5000, 7000, 7000, 9000});
  const std::vector<Match> matches = Capture(guide, {5000, 7000, 7000, 9000});
  EXPECT_EQ(AnswersOf(matches), (Answers{0, 1, 2, 3}));
  EXPECT_EQ(matches.front().scale, 1);
  EXPECT_EQ(matches.back().scale, 1);
  EXPECT_EQ(matches.back().evidence, 3u) << "of blocks of one size only the first";
  EXPECT_EQ(matches.back().next, 4u);
  EXPECT_EQ(matches.back().missed, 0u);
}

TEST_F(GuideAlignmentTest, SizesAreEqualIfTheirBlocksAre) {
  EXPECT_EQ(Aligned({5000, 5121}, {5120, 5632}), (Answers{0, 1})) << "10 and 11 granules";
  EXPECT_EQ(Aligned({4096, 5120, 6000}, {4096, 5121}), (Answers{0, kNothing}));
}

TEST_F(GuideAlignmentTest, BeyondTheLastStepNothingAnswers) {
  CaptureGuide guide = GuideOf({5000});
  const std::vector<Match> matches = Capture(guide, {5000, 5000});
  EXPECT_EQ(AnswersOf(matches), (Answers{0, kNothing}));
  EXPECT_EQ(matches[1].stands_for, std::nullopt);
}

TEST_F(GuideAlignmentTest, SizesScaledByOneAndAHalf) {
  for (const double scale : {1.5, 0.5, 16.0, 1.0 / 3}) {
    const Sizes sizes = {30'000, 90'000, 60'000, 300'000};
    CaptureGuide guide = GuideOf(sizes);
    const std::vector<Match> matches = Capture(guide, Times(scale, sizes));
    EXPECT_EQ(AnswersOf(matches), (Answers{0, 1, 2, 3})) << scale;
    EXPECT_EQ(matches[0].scale, scale);
    EXPECT_EQ(matches[0].missed, 0u);
    EXPECT_EQ(matches[0].missed_in_a_row, 0u);
    EXPECT_EQ(matches[0].evidence, 0u) << "the first sets the scale: nothing speaks for it yet";
    EXPECT_EQ(matches[3].scale, scale);
    EXPECT_EQ(matches[3].evidence, 3u);
  }
}

TEST_F(GuideAlignmentTest, SizesScaledByTheSquare) {
  CaptureGuide guide = GuideOf({30'000, 40'000, 20'000});
  const std::vector<Match> matches = Capture(guide, {45'000, 90'000, 30'000});
  EXPECT_EQ(AnswersOf(matches), (Answers{0, 1, 2}));
  EXPECT_EQ(matches[2].evidence, 2u);
}

TEST_F(GuideAlignmentTest, ConstantsAmongScaledOnes) {
  CaptureGuide guide = GuideOf({30'000, 1'000'000, 60'000, 512, 7000, 90'000});
  const std::vector<Match> matches =
      Capture(guide, {45'000, 1'000'000, 90'000, 512, 7000, 135'000});
  EXPECT_EQ(AnswersOf(matches), (Answers{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(matches[1].evidence, 0u) << "a constant says nothing about the scale";
  EXPECT_EQ(matches[5].evidence, 2u);
}

TEST_F(GuideAlignmentTest, InsertedAndLeftOutSteps) {
  EXPECT_EQ(Aligned({10'000, 20'000, 30'000}, {10'000, 77'000, 20'000, 99'000, 30'000}),
            (Answers{0, kNothing, 1, kNothing, 2}));
  EXPECT_EQ(Aligned({10'000, 20'000, 30'000, 40'000, 50'000}, {10'000, 30'000, 50'000}),
            (Answers{0, 2, 4}));
  EXPECT_EQ(Aligned({10'000, 22'000, 30'000, 44'000}, {15'000, 71'000, 45'000, 66'000}),
            (Answers{0, kNothing, 2, 3}));
}

TEST_F(GuideAlignmentTest, CountsWhatAnswersToNothing) {
  CaptureGuide guide = GuideOf({10'000, 20'000, 30'000});
  const std::vector<Match> matches = Capture(guide, {10'000, 77'003, 99'001, 20'000, 83'003});
  EXPECT_EQ(matches[1].missed_in_a_row, 1u);
  EXPECT_EQ(matches[2].missed_in_a_row, 2u);
  EXPECT_EQ(matches[2].missed, 2u);
  EXPECT_EQ(matches[3].missed_in_a_row, 0u);
  EXPECT_EQ(matches[3].missed, 2u);
  EXPECT_EQ(matches[4].missed_in_a_row, 1u);
  EXPECT_EQ(matches[4].missed, 3u);
}

TEST_F(GuideAlignmentTest, LooksSixteenStepsAheadAndFurtherAfterMisses) {
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

TEST_F(GuideAlignmentTest, BlocksOfAGranuleAnswerToTheNextStepOnly) {
  CaptureGuide guide = GuideOf({10'000, 512, 20'000, 300, 30'000});
  guide.BeginCapture();
  const std::vector<Match> matches =
      Allocate(guide, {10'000, 8, 512, 20'000, 30'000, 8, 10'000'000});
  EXPECT_EQ(AnswersOf(matches), (Answers{0, 1, kNothing, 2, 4, kNothing, kNothing}));
  EXPECT_EQ(matches[1].evidence, 1u) << "they are all alike and say nothing";
  EXPECT_EQ(matches[2].missed, 0u);
  EXPECT_EQ(matches[2].missed_in_a_row, 0u);
  EXPECT_EQ(matches[2].next, 2u);
  EXPECT_EQ(matches[4].evidence, 3u);
}

TEST_F(GuideAlignmentTest, TheFirstBlockSetsNoScaleForAConstant) {
  CaptureGuide guide = GuideOf({70'000, 40'000, 50'000});
  Capture(guide, {70'000, 80'000, 100'000, 120'000});
  ASSERT_EQ(guide.steps()[0].bytes, 70'000u);
  ASSERT_EQ(guide.steps()[0].power, 0);
  guide.BeginCapture();
  EXPECT_EQ(guide.Find(90'000).scale, 0);
}

TEST_F(GuideAlignmentTest, ABlockThatGrowsByTheSquareTellsTheScaleToo) {
  const Sizes steps(kOdd, kOdd + 5);
  const Answers answers = Aligned(steps, {50'000'021, 3 * steps[0], 9 * steps[1], 3 * steps[2]});
  EXPECT_EQ(answers, (Answers{0, kNothing, 1, 2}));
}

TEST_F(GuideAlignmentTest, OfBlocksOfOneSizeOnlyTheFirstIsEvidence) {
  CaptureGuide guide = GuideOf({30'000, 30'000, 40'000, 40'000, 40'000, 50'000});
  guide.BeginCapture();
  const std::vector<Match> matches =
      Allocate(guide, {45'000, 45'000, 60'000, 60'000, 60'000, 75'000});
  std::vector<uint32_t> evidence;
  for (const Match& match : matches) evidence.push_back(match.evidence);
  EXPECT_EQ(evidence, (std::vector<uint32_t>{0, 0, 1, 1, 1, 2}));
}

TEST_F(GuideAlignmentTest, TheFirstBlockMayGrowByTheSquare) {
  CaptureGuide guide = GuideOf({30'000, 30'000, 40'000, 50'000});
  EXPECT_EQ(AnswersOf(Capture(guide, {120'000, 60'000, 80'000, 100'000})).back(), 3)
      << "taken for scaled by 4, and healed";
  guide.BeginCapture();
  const std::vector<Match> matches = Allocate(guide, {1'080'000, 180'000, 240'000});
  EXPECT_EQ(AnswersOf(matches), (Answers{0, 1, 2}));
  EXPECT_EQ(matches[0].scale, 3);
}

TEST_F(GuideAlignmentTest, AFirstBlockWithoutALikeIsOvercome) {
  ExpectHealed({50'000'021}, 3);
  ExpectHealed({50'000'021, 64'000'003}, 3);
}

TEST_F(GuideAlignmentTest, AWrongFirstScaleIsHealed) {
  ExpectHealed({7'000'022}, 3);
  ExpectHealed({1'000'003}, 3);  // a constant: as if nothing had grown
  ExpectHealed({7'000'022, 1'234'577}, 2);
}

TEST_F(GuideAlignmentTest, BlocksOfAGranuleDoNotSetTheScale) {
  ExpectHealed({100}, 3);
  ExpectHealed({100, 512, 8}, 2);
  CaptureGuide guide = GuideOf({10'000, 20'000});
  guide.BeginCapture();
  EXPECT_EQ(Allocate(guide, {512, 300})[1].scale, 0);
}

TEST_F(GuideAlignmentTest, AfterMuchEvidenceTheScaleIsNotLookedForAgainUnlessLost) {
  EXPECT_EQ(AnswersOfATurnedCapture(3, 0), (Answers{kNothing, 4, 5}));
  EXPECT_EQ(AnswersOfATurnedCapture(4, 0), (Answers{kNothing, kNothing, kNothing}));
  // It is looked for at the first 8 misses, and at the 64th in a row.
  const Answers nothing(3, kNothing);
  EXPECT_EQ(AnswersOfATurnedCapture(3, 6), (Answers{kNothing, 4, 5}));
  EXPECT_EQ(AnswersOfATurnedCapture(3, 7), nothing);
  EXPECT_EQ(AnswersOfATurnedCapture(4, 60), nothing);
  EXPECT_EQ(AnswersOfATurnedCapture(4, 61), (Answers{kNothing, kNothing, 6}));
  EXPECT_EQ(AnswersOfATurnedCapture(4, 62), (Answers{kNothing, 5, 6}));
  EXPECT_EQ(AnswersOfATurnedCapture(4, 63), nothing);
}

TEST_F(GuideAlignmentTest, EachCaptureIsAlignedAnew) {
  CaptureGuide guide = GuideOf({30'000, 60'000, 90'000});
  EXPECT_EQ(AnswersOf(Capture(guide, {15'000, 30'000, 45'000})), (Answers{0, 1, 2}));
  EXPECT_EQ(AnswersOf(Capture(guide, {30'000, 60'000, 90'000})), (Answers{0, 1, 2}));
  EXPECT_EQ(AnswersOf(Capture(guide, {10'000, 20'000, 30'000})), (Answers{0, 1, 2}));
}

TEST_F(GuideAlignmentTest, StandsForTheNextStepIfItMayBeItsLike) {
  CaptureGuide guide = GuideOf({10'000, 20'000, 300'000});
  guide.BeginCapture();
  Allocate(guide, {15'000});  // the next step is foretold to be 30'000 bytes large
  EXPECT_EQ(guide.Find(120'000).stands_for, 1u);
  EXPECT_EQ(guide.Find(120'001).stands_for, std::nullopt);
  EXPECT_EQ(guide.Find(7500).stands_for, 1u);
  EXPECT_EQ(guide.Find(7499).stands_for, std::nullopt);
  EXPECT_EQ(guide.Find(30'000).stands_for, std::nullopt) << "it is its like";

  // The step itself may still come.
  const std::vector<Match> matches = Allocate(guide, {50'000, 26'000, 30'000, 512});
  EXPECT_EQ(matches[0].stands_for, 1u);
  EXPECT_EQ(matches[1].stands_for, 1u);
  EXPECT_EQ(matches[2].step, 1u);
  EXPECT_EQ(matches[3].stands_for, std::nullopt);
}

}  // namespace
}  // namespace cgp
