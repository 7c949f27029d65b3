#include "core/capture_guide.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <optional>
#include <random>
#include <tuple>
#include <vector>

namespace cgp {
namespace {

using Match = CaptureGuide::Match;
using Sizes = std::vector<uint64_t>;
using Answers = std::vector<int64_t>;  // to which steps, in the order of allocation

constexpr int64_t kNothing = -1;

Placement At(uint32_t slot, uint64_t offset = 0) { return {SlotId{slot}, Granules(offset)}; }

// Allocates in the capture under way. Nothing is freed: the pool holds the sum.
std::vector<Match> Allocate(CaptureGuide& guide, const Sizes& sizes, uint32_t first_slot = 0) {
  std::vector<Match> matches;
  Granules live;
  for (const uint64_t bytes : sizes) {
    live += Granules::FromBytesRoundedUp(bytes);
    matches.push_back(guide.Find(bytes));
    guide.Allocated(matches.back(), At(first_slot++), bytes, live);
  }
  return matches;
}

std::vector<Match> Capture(CaptureGuide& guide, const Sizes& sizes, uint32_t first_slot = 0) {
  guide.BeginCapture();
  std::vector<Match> matches = Allocate(guide, sizes, first_slot);
  guide.EndCapture();
  return matches;
}

CaptureGuide GuideOf(const Sizes& sizes) {
  CaptureGuide guide;
  Capture(guide, sizes);
  return guide;
}

Answers AnswersOf(const std::vector<Match>& matches) {
  Answers answers;
  for (const Match& match : matches)
    answers.push_back(match.step ? int64_t{*match.step} : kNothing);
  return answers;
}

// A guide of these sizes, of a program that is known to grow by the scale.
CaptureGuide LearnedGuideOf(const Sizes& sizes) {
  CaptureGuide guide;
  guide.BeginCapture();
  // Twice as large, but the pool held less: of two captures that with more is the guide.
  for (const uint64_t bytes : sizes)
    guide.Allocated(guide.Find(2 * bytes), {}, 2 * bytes, Granules(1));
  guide.EndCapture();
  Capture(guide, sizes);
  EXPECT_TRUE(guide.learned());
  return guide;
}

// What blocks of these sizes answer to in the next capture of a pool whose guide is `guide`.
Answers Aligned(const Sizes& guide, const Sizes& sizes) {
  CaptureGuide copy = LearnedGuideOf(guide);
  copy.BeginCapture();
  return AnswersOf(Allocate(copy, sizes));
}

auto Fields(const Match& m) {
  return std::tuple(m.step, m.stands_for, m.scale, m.next, m.evidence, m.evidence_bytes,
                    m.missed_in_a_row, m.missed);
}

// Sizes of which none is to another as two of the others are, or as a small number is to another.
constexpr uint64_t kOdd[] = {1'000'003, 1'300'021, 2'100'011, 1'700'023, 2'500'009, 1'100'009};

Sizes Times(double scale, Sizes sizes) {
  for (uint64_t& bytes : sizes) bytes = static_cast<uint64_t>(static_cast<double>(bytes) * scale);
  return sizes;
}

// Sizes whose double, half, square and so on are none of the others.
Sizes Distinct(uint32_t count) {
  Sizes sizes;
  for (uint32_t i = 0; i < count; ++i) sizes.push_back(1'000'000 + 2048 * uint64_t{i});
  return sizes;
}

// --- Which capture is the guide ---

TEST(CaptureGuide, KnowsNothingBeforeTheFirstCaptureIsOver) {
  CaptureGuide guide;
  EXPECT_TRUE(guide.steps().empty());
  guide.BeginCapture();
  for (int i = 0; i < 3; ++i) {
    const Match match = guide.Find(5000);
    EXPECT_EQ(match.step, std::nullopt);
    EXPECT_EQ(match.stands_for, std::nullopt);
    EXPECT_EQ(match.scale, 0);
    guide.Allocated(match, At(1), 5000, Granules(10));
    EXPECT_TRUE(guide.steps().empty());
  }
  EXPECT_FALSE(guide.learned());
}

TEST(CaptureGuide, TellsWhatTheLargestCaptureDid) {
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

TEST(CaptureGuide, TheLargestCaptureIsTheGuide) {
  CaptureGuide guide;
  Capture(guide, {10'240, 10'240}, 100);
  Capture(guide, {512, 512, 512, 512}, 200);
  EXPECT_EQ(guide.steps()[0].start.slot, SlotId{100}) << "more steps are not more memory";
  Capture(guide, {20'992}, 300);
  EXPECT_EQ(guide.steps()[0].start.slot, SlotId{300});
}

TEST(CaptureGuide, OfEquallyLargeCapturesTheLastIsTheGuide) {
  CaptureGuide guide;
  Capture(guide, {10'240, 10'240}, 100);
  Capture(guide, {20'480}, 200);
  ASSERT_EQ(guide.steps().size(), 1u);
  EXPECT_EQ(guide.steps()[0].start.slot, SlotId{200});
}

// What counts is what the pool held at once, not the sum over the capture.
TEST(CaptureGuide, SizeOfACaptureIsItsPeak) {
  CaptureGuide guide;
  Capture(guide, {10'240}, 100);
  guide.BeginCapture();
  for (uint32_t i = 0; i < 5; ++i)
    guide.Freed(guide.Allocated(guide.Find(9728), At(200 + i), 9728, Granules(19)));
  guide.EndCapture();
  EXPECT_EQ(guide.steps()[0].start.slot, SlotId{100});
}

TEST(CaptureGuide, AnEmptyCaptureDoesNotReplaceAGuide) {
  CaptureGuide guide;
  Capture(guide, {2048}, 100);
  Capture(guide, {});
  ASSERT_EQ(guide.steps().size(), 1u);
  EXPECT_EQ(guide.steps()[0].start.slot, SlotId{100});
}

std::vector<bool> LivesAtPeak(const CaptureGuide& guide) {
  std::vector<bool> lives;
  for (const CaptureGuide::Step& step : guide.steps()) lives.push_back(step.lives_at_peak);
  return lives;
}

TEST(CaptureGuide, MarksWhatLivesWhenTheCaptureHoldsMost) {
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

TEST(CaptureGuide, OfEqualPeaksTheFirstCounts) {
  CaptureGuide guide;
  guide.BeginCapture();
  const auto first = guide.Allocated({}, At(0), 4096, Granules(8));
  guide.Freed(first);
  guide.Allocated({}, At(1), 4096, Granules(8));
  guide.EndCapture();
  EXPECT_EQ(LivesAtPeak(guide), (std::vector<bool>{true, false}));
}

// --- Tickets ---

TEST(CaptureGuide, TicketsOfEarlierCapturesAreIgnored) {
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

TEST(CaptureGuide, WhatIsFreedBetweenCapturesIsIgnored) {
  CaptureGuide guide;
  guide.BeginCapture();
  const auto ticket = guide.Allocated({}, At(0), 2048, Granules(4));
  guide.EndCapture();
  guide.Freed(ticket);
  EXPECT_EQ(guide.StepOf(ticket), std::nullopt);
  EXPECT_EQ(guide.steps()[0].freed_at, CaptureGuide::kNever);
}

TEST(CaptureGuide, BlocksWithoutATicketAreIgnored) {
  CaptureGuide guide;
  guide.Freed({});
  guide.BeginCapture();
  guide.Allocated({}, At(0), 2048, Granules(4));
  guide.Freed({});
  EXPECT_EQ(guide.StepOf({}), std::nullopt);
  guide.EndCapture();
  EXPECT_EQ(guide.steps()[0].freed_at, CaptureGuide::kNever);
}

TEST(CaptureGuide, TellsWhichStepALiveBlockAnswersToOrStandsFor) {
  CaptureGuide guide = GuideOf({4000, 8000, 60'000});
  guide.BeginCapture();
  const auto allocate = [&](uint64_t bytes) {
    return guide.Allocated(guide.Find(bytes), At(0), bytes, Granules(1));
  };
  const auto first = allocate(4000);
  const auto stands = allocate(9000);
  const auto alone = allocate(1'000'000);
  const auto third = allocate(60'000);
  EXPECT_EQ(guide.StepOf(first), 0u);
  EXPECT_EQ(guide.StepOf(stands), 1u);
  EXPECT_EQ(guide.StepOf(alone), std::nullopt);
  EXPECT_EQ(guide.StepOf(third), 2u);
  guide.EndCapture();
  EXPECT_EQ(guide.StepOf(first), std::nullopt);
}

// --- The alignment ---

TEST(CaptureGuideAlignment, EqualSizes) {
  CaptureGuide guide = LearnedGuideOf({5000, 7000, 7000, 9000});
  const std::vector<Match> matches = Capture(guide, {5000, 7000, 7000, 9000});
  EXPECT_EQ(AnswersOf(matches), (Answers{0, 1, 2, 3}));
  EXPECT_EQ(matches.front().scale, 1);
  EXPECT_EQ(matches.back().scale, 1);
  EXPECT_EQ(matches.back().evidence, 3u) << "of blocks of one size only the first";
  EXPECT_EQ(matches.back().next, 4u);
  EXPECT_EQ(matches.back().missed, 0u);
}

TEST(CaptureGuideAlignment, SizesAreEqualIfTheirBlocksAre) {
  EXPECT_EQ(Aligned({5000, 5121}, {5120, 5632}), (Answers{0, 1})) << "10 and 11 granules";
  EXPECT_EQ(Aligned({4096, 5120, 6000}, {4096, 5121}), (Answers{0, kNothing}));
}

TEST(CaptureGuideAlignment, BeyondTheLastStepNothingAnswers) {
  CaptureGuide guide = LearnedGuideOf({5000});
  const std::vector<Match> matches = Capture(guide, {5000, 5000});
  EXPECT_EQ(AnswersOf(matches), (Answers{0, kNothing}));
  EXPECT_EQ(matches[1].stands_for, std::nullopt);
}

TEST(CaptureGuideAlignment, SizesScaledByOneAndAHalf) {
  for (const double scale : {1.5, 0.5, 16.0, 1.0 / 3}) {
    const Sizes sizes = {30'000, 90'000, 60'000, 300'000};
    CaptureGuide guide = LearnedGuideOf(sizes);
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

TEST(CaptureGuideAlignment, SizesScaledByTheSquare) {
  CaptureGuide guide = LearnedGuideOf({30'000, 40'000, 20'000});
  const std::vector<Match> matches = Capture(guide, {45'000, 90'000, 30'000});
  EXPECT_EQ(AnswersOf(matches), (Answers{0, 1, 2}));
  EXPECT_EQ(matches[2].evidence, 2u);
}

TEST(CaptureGuideAlignment, ConstantsAmongScaledOnes) {
  CaptureGuide guide = LearnedGuideOf({30'000, 1'000'000, 60'000, 512, 7000, 90'000});
  const std::vector<Match> matches =
      Capture(guide, {45'000, 1'000'000, 90'000, 512, 7000, 135'000});
  EXPECT_EQ(AnswersOf(matches), (Answers{0, 1, 2, 3, 4, 5}));
  EXPECT_EQ(matches[1].evidence, 0u) << "a constant says nothing about the scale";
  EXPECT_EQ(matches[5].evidence, 2u);
}

TEST(CaptureGuideAlignment, InsertedAndLeftOutSteps) {
  EXPECT_EQ(Aligned({10'000, 20'000, 30'000}, {10'000, 77'000, 20'000, 99'000, 30'000}),
            (Answers{0, kNothing, 1, kNothing, 2}));
  EXPECT_EQ(Aligned({10'000, 20'000, 30'000, 40'000, 50'000}, {10'000, 30'000, 50'000}),
            (Answers{0, 2, 4}));
  EXPECT_EQ(Aligned({10'000, 22'000, 30'000, 44'000}, {15'000, 71'000, 45'000, 66'000}),
            (Answers{0, kNothing, 2, 3}));
}

TEST(CaptureGuideAlignment, CountsWhatAnswersToNothing) {
  CaptureGuide guide = LearnedGuideOf({10'000, 20'000, 30'000});
  const std::vector<Match> matches = Capture(guide, {10'000, 77'003, 99'001, 20'000, 83'003});
  EXPECT_EQ(matches[1].missed_in_a_row, 1u);
  EXPECT_EQ(matches[2].missed_in_a_row, 2u);
  EXPECT_EQ(matches[2].missed, 2u);
  EXPECT_EQ(matches[3].missed_in_a_row, 0u);
  EXPECT_EQ(matches[3].missed, 2u);
  EXPECT_EQ(matches[4].missed_in_a_row, 1u);
  EXPECT_EQ(matches[4].missed, 3u);
}

// What the block of a step answers to after `before` blocks that answer and `misses` that do not.
int64_t AnswerAfter(uint32_t before, uint32_t misses, uint32_t step) {
  const Sizes steps = Distinct(200);
  Sizes sizes(steps.begin(), steps.begin() + before);
  for (uint32_t i = 0; i < misses; ++i) sizes.push_back(10'000'019 + i * i * 1'000'003);
  sizes.push_back(steps[step]);
  return Aligned(steps, sizes).back();
}

TEST(CaptureGuideAlignment, LooksSixteenStepsAheadAndFurtherAfterMisses) {
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

TEST(CaptureGuideAlignment, BlocksOfAGranuleAnswerToTheNextStepOnly) {
  CaptureGuide guide = LearnedGuideOf({10'000, 512, 20'000, 300, 30'000});
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

TEST(CaptureGuideAlignment, TheFirstBlockSetsALikelyScale) {
  EXPECT_EQ(Aligned({10'000, 20'000}, {160'000, 320'000}), (Answers{0, 1}));
  CaptureGuide guide = LearnedGuideOf({10'000, 20'000});
  guide.BeginCapture();
  const Match match = guide.Find(160'001);
  EXPECT_EQ(match.step, std::nullopt);
  EXPECT_EQ(match.scale, 0);
}

TEST(CaptureGuideAlignment, TheFirstBlockSetsNoScaleForAConstantOrAnUnsteadyStep) {
  CaptureGuide guide = LearnedGuideOf({70'000, 40'000, 50'000});
  Capture(guide, {60'000'011, 70'000, 80'000, 100'000});
  // The first of that capture had no like, the second did not grow.
  guide.BeginCapture();
  EXPECT_EQ(guide.Find(90'000'000).step, std::nullopt);
  EXPECT_EQ(guide.Find(90'000'000).scale, 0);

  guide = GuideOf({70'000, 40'000, 50'000});
  Capture(guide, {70'000, 80'000, 100'000, 120'000});
  ASSERT_EQ(guide.steps()[0].bytes, 70'000u);
  ASSERT_EQ(guide.steps()[0].power, 0);
  guide.BeginCapture();
  EXPECT_EQ(guide.Find(90'000).scale, 0);
}

TEST(CaptureGuideAlignment, ABlockThatGrowsByTheSquareTellsTheScaleToo) {
  const Sizes steps(kOdd, kOdd + 5);
  const Answers answers = Aligned(steps, {50'000'021, 3 * steps[0], 9 * steps[1], 3 * steps[2]});
  EXPECT_EQ(answers, (Answers{kNothing, kNothing, 1, 2}));
}

TEST(CaptureGuideAlignment, OfBlocksOfOneSizeOnlyTheFirstIsEvidence) {
  CaptureGuide guide = LearnedGuideOf({30'000, 30'000, 40'000, 40'000, 40'000, 50'000});
  guide.BeginCapture();
  const std::vector<Match> matches =
      Allocate(guide, {45'000, 45'000, 60'000, 60'000, 60'000, 75'000});
  std::vector<uint32_t> evidence;
  for (const Match& match : matches) evidence.push_back(match.evidence);
  EXPECT_EQ(evidence, (std::vector<uint32_t>{0, 0, 1, 1, 1, 2}));
}

TEST(CaptureGuideAlignment, TheFirstBlockMayGrowByTheSquare) {
  CaptureGuide guide = LearnedGuideOf({30'000, 30'000, 40'000, 50'000});
  EXPECT_EQ(AnswersOf(Capture(guide, {120'000, 60'000, 80'000, 100'000})).back(), 3)
      << "taken for scaled by 4, and healed";
  guide.BeginCapture();
  const std::vector<Match> matches = Allocate(guide, {1'080'000, 180'000, 240'000});
  EXPECT_EQ(AnswersOf(matches), (Answers{0, 1, 2}));
  EXPECT_EQ(matches[0].scale, 3);
}

// From the third block of the program on all answer, whatever came before them.
void ExpectHealed(const Sizes& before, double scale) {
  const Sizes steps(kOdd, kOdd + 5);
  Sizes sizes = before;
  for (const uint64_t bytes : Times(scale, steps)) sizes.push_back(bytes);
  CaptureGuide guide = LearnedGuideOf(steps);
  guide.BeginCapture();
  const std::vector<Match> matches = Allocate(guide, sizes);
  const Answers answers = AnswersOf(matches);
  EXPECT_EQ(Answers(answers.end() - 3, answers.end()), (Answers{2, 3, 4}));
  EXPECT_EQ(matches.back().scale, scale);
  EXPECT_EQ(matches.back().missed_in_a_row, 0u);
  EXPECT_GE(matches.back().evidence, 2u);
}

TEST(CaptureGuideAlignment, AFirstBlockWithoutALikeIsOvercome) {
  ExpectHealed({50'000'021}, 3);
  ExpectHealed({50'000'021, 64'000'003}, 3);
}

TEST(CaptureGuideAlignment, AWrongFirstScaleIsHealed) {
  ExpectHealed({7'000'022}, 3);
  ExpectHealed({1'000'003}, 3);  // a constant: as if nothing had grown
  ExpectHealed({7'000'022, 1'234'577}, 2);
}

TEST(CaptureGuideAlignment, BlocksOfAGranuleDoNotSetTheScale) {
  ExpectHealed({100}, 3);
  ExpectHealed({100, 512, 8}, 2);
  CaptureGuide guide = LearnedGuideOf({10'000, 20'000});
  guide.BeginCapture();
  EXPECT_EQ(Allocate(guide, {512, 300})[1].scale, 0);
}

// A guide and a capture of it that answers to `agree` steps and then goes on three times as large.
Answers AnswersOfATurnedCapture(uint32_t agree, uint32_t inserted) {
  Sizes steps;
  for (uint64_t i = 0; i < 40; ++i) steps.push_back(1'000'003 + 7001 * i * i);
  Sizes sizes(steps.begin(), steps.begin() + agree);
  for (uint32_t i = 0; i < inserted; ++i) sizes.push_back(90'000'049 + i * i * i * 1'000'003);
  for (uint32_t i = agree; i < agree + 3; ++i) sizes.push_back(3 * steps[i]);
  const Answers answers = Aligned(steps, sizes);
  return {answers.end() - 3, answers.end()};
}

TEST(CaptureGuideAlignment, AfterMuchEvidenceTheScaleIsNotLookedForAgainUnlessLost) {
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

TEST(CaptureGuideAlignment, EachCaptureIsAlignedAnew) {
  CaptureGuide guide = LearnedGuideOf({30'000, 60'000, 90'000});
  EXPECT_EQ(AnswersOf(Capture(guide, {15'000, 30'000, 45'000})), (Answers{0, 1, 2}));
  EXPECT_EQ(AnswersOf(Capture(guide, {30'000, 60'000, 90'000})), (Answers{0, 1, 2}));
  EXPECT_EQ(AnswersOf(Capture(guide, {10'000, 20'000, 30'000})), (Answers{0, 1, 2}));
}

TEST(CaptureGuideAlignment, StandsForTheNextStepIfItMayBeItsLike) {
  CaptureGuide guide = LearnedGuideOf({10'000, 20'000, 300'000});
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

// --- Find() is a question ---

TEST(CaptureGuide, FindChangesNothing) {
  CaptureGuide guide = LearnedGuideOf({30'000, 60'000, 512, 90'000, 44'000});
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

// --- What is learned from one capture for the next ---

TEST(CaptureGuideLearning, FirstCapturesAndLikesAreSteady) {
  CaptureGuide guide = GuideOf({10'000, 20'000, 30'000});
  for (const CaptureGuide::Step& step : guide.steps()) EXPECT_TRUE(step.steady);
  // It answers, has no like, stands for a step, answers, comes after the last step.
  Capture(guide, {10'000, 1'000'000, 21'000, 20'000, 30'000, 30'000});
  std::vector<bool> steady;
  for (const CaptureGuide::Step& step : guide.steps()) steady.push_back(step.steady);
  EXPECT_EQ(steady, (std::vector<bool>{true, false, true, true, true, false}));
}

std::vector<int> Powers(const CaptureGuide& guide) {
  std::vector<int> powers;
  for (const CaptureGuide::Step& step : guide.steps()) powers.push_back(step.power);
  return powers;
}

TEST(CaptureGuideLearning, PowersAreLearnedAndInherited) {
  CaptureGuide guide = GuideOf({30'000, 40'000, 70'000, 50'000});
  EXPECT_EQ(Powers(guide), (std::vector<int>{1, 1, 1, 1})) << "until more is known";
  EXPECT_FALSE(guide.learned());
  Capture(guide, {30'000, 40'000, 70'000, 50'000});
  EXPECT_EQ(Powers(guide), (std::vector<int>{1, 1, 1, 1})) << "equal sizes say nothing";
  EXPECT_FALSE(guide.learned());

  Capture(guide, {45'000, 90'000, 70'000, 75'000});
  EXPECT_EQ(Powers(guide), (std::vector<int>{1, 2, 0, 1}));
  EXPECT_TRUE(guide.learned());
  Capture(guide, {45'000, 90'000, 70'000, 9'000'000, 75'000}, 100);
  EXPECT_EQ(guide.steps()[0].start.slot, SlotId{100});
  EXPECT_EQ(Powers(guide), (std::vector<int>{1, 2, 0, 1, 1})) << "from the guide's likes";
  EXPECT_TRUE(guide.learned());
}

TEST(CaptureGuideLearning, PowersAreThoseByTheLastScale) {
  const auto [a, b, c, d, e] = std::tuple(kOdd[0], kOdd[1], kOdd[2], kOdd[3], kOdd[4]);
  CaptureGuide guide = GuideOf({600'000, a, b, c, d, e});
  // The constant is taken for the first step grown by 8/3 until two in a row agree on 3.
  Capture(guide, {1'600'000, 9 * a, 3 * b, 3 * c, 3 * d, e});
  EXPECT_EQ(Powers(guide)[3], 1);
  EXPECT_EQ(Powers(guide)[4], 1);
  EXPECT_EQ(Powers(guide)[5], 0);
}

TEST(CaptureGuideLearning, WhatStandsForAStepInheritsItsPower) {
  CaptureGuide guide = GuideOf({30'000, 40'000, 70'000});
  Capture(guide, {60'000, 160'000, 70'000});
  ASSERT_EQ(Powers(guide), (std::vector<int>{1, 2, 0}));
  Capture(guide, {60'000, 170'000, 70'000, 9'000'000});
  EXPECT_EQ(Powers(guide), (std::vector<int>{1, 2, 0, 1}));
  Capture(guide, {90'000, 400'000, 70'000, 90'000'000});
  EXPECT_EQ(Powers(guide), (std::vector<int>{1, 2, 0, 1}));
}

TEST(CaptureGuideLearning, SmallerCapturesTeachNothing) {
  CaptureGuide guide = GuideOf({30'000, 40'000, 70'000});
  Capture(guide, {15'000, 10'000, 70'000});
  EXPECT_EQ(Powers(guide), (std::vector<int>{1, 1, 1}));
  EXPECT_FALSE(guide.learned());
}

TEST(CaptureGuideLearning, WhereHalfOfTheBlocksHaveALikeItIsLearned) {
  const auto learned = [](uint32_t without_like) {
    CaptureGuide guide = GuideOf({30'000, 40'000, 70'000});
    Sizes sizes = {45'000, 60'000, 105'000};
    for (uint32_t i = 0; i < without_like; ++i) sizes.push_back(9'000'011 + i * i * i * 1'000'003);
    Capture(guide, sizes);
    return guide.learned();
  };
  EXPECT_TRUE(learned(0));
  EXPECT_TRUE(learned(3));
  EXPECT_FALSE(learned(4));
}

TEST(CaptureGuideLearning, WhatWasLearnedIsForgottenWithTheProgram) {
  CaptureGuide guide = GuideOf({30'000, 40'000, 70'000});
  Capture(guide, {45'000, 60'000, 105'000});
  ASSERT_TRUE(guide.learned());
  Capture(guide, {301'007, 9'000'011, 8'100'053, 9'700'081});  // the scale is that of the first
  EXPECT_FALSE(guide.learned());
}

TEST(CaptureGuideLearning, ForetellsHowLargeBlocksWillBe) {
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
TEST(CaptureGuideLearning, WhatScalesExactlyIsForetoldExactly) {
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

TEST(CaptureGuideLearning, LargeBlocksAnswerExactly) {
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
