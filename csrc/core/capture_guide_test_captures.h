// Captures of given sizes, for the tests of capture_guide.h.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "core/capture_guide.h"

namespace cgp {

class GuidedCaptures : public ::testing::Test {
 protected:
  using Match = CaptureGuide::Match;
  using Sizes = std::vector<uint64_t>;
  using Answers = std::vector<int64_t>;  // to which steps, in the order of allocation

  static constexpr int64_t kNothing = -1;

  static Placement At(uint32_t slot, uint64_t offset = 0) {
    return {SlotId{slot}, Granules(offset)};
  }

  // Allocates in the capture under way. Nothing is freed: the pool holds the sum.
  static std::vector<Match> Allocate(CaptureGuide& guide, const Sizes& sizes,
                                     uint32_t first_slot = 0) {
    std::vector<Match> matches;
    Granules live;
    for (const uint64_t bytes : sizes) {
      live += Granules::FromBytesRoundedUp(bytes);
      matches.push_back(guide.Find(bytes));
      guide.Allocated(matches.back(), At(first_slot++), bytes, live);
    }
    return matches;
  }

  static std::vector<Match> Capture(CaptureGuide& guide, const Sizes& sizes,
                                    uint32_t first_slot = 0) {
    guide.BeginCapture();
    std::vector<Match> matches = Allocate(guide, sizes, first_slot);
    guide.EndCapture();
    return matches;
  }

  static CaptureGuide GuideOf(const Sizes& sizes) {
    CaptureGuide guide;
    Capture(guide, sizes);
    return guide;
  }

  static Answers AnswersOf(const std::vector<Match>& matches) {
    Answers answers;
    for (const Match& match : matches)
      answers.push_back(match.step ? int64_t{*match.step} : kNothing);
    return answers;
  }

  // What blocks of these sizes answer to in the next capture of a pool whose guide is `guide`.
  static Answers Aligned(const Sizes& guide, const Sizes& sizes) {
    CaptureGuide copy = GuideOf(guide);
    copy.BeginCapture();
    return AnswersOf(Allocate(copy, sizes));
  }
};

}  // namespace cgp
