// Captures of given sizes, for the tests of capture_profile.h.
#pragma once

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "core/planning/capture_profile.h"

namespace cgp {

class ProfiledCaptures : public ::testing::Test {
 protected:
  using Match = CaptureProfile::Match;
  using Sizes = std::vector<uint64_t>;
  using Answers = std::vector<int64_t>;  // to which steps, in the order of allocation

  static constexpr int64_t kNothing = -1;

  static Placement At(uint32_t slot, uint64_t offset = 0) {
    return {SlotId{slot}, Granules(offset)};
  }

  // Allocates in the capture under way. Nothing is freed: the pool holds the sum.
  static std::vector<Match> Allocate(CaptureProfile& profile, const Sizes& sizes,
                                     uint32_t first_slot = 0) {
    std::vector<Match> matches;
    Granules live;
    for (const uint64_t bytes : sizes) {
      live += Granules::FromBytesRoundedUp(bytes);
      matches.push_back(profile.Find(bytes));
      profile.Allocated(matches.back(), At(first_slot++), bytes, live);
    }
    return matches;
  }

  static std::vector<Match> Capture(CaptureProfile& profile, const Sizes& sizes,
                                    uint32_t first_slot = 0) {
    profile.BeginCapture();
    std::vector<Match> matches = Allocate(profile, sizes, first_slot);
    profile.EndCapture();
    return matches;
  }

  static CaptureProfile ProfileOf(const Sizes& sizes) {
    CaptureProfile profile;
    Capture(profile, sizes);
    return profile;
  }

  static Answers AnswersOf(const std::vector<Match>& matches) {
    Answers answers;
    for (const Match& match : matches)
      answers.push_back(match.step ? int64_t{*match.step} : kNothing);
    return answers;
  }

  // What blocks of these sizes match in the next capture of a pool whose profile is `profile`.
  static Answers Aligned(const Sizes& profile, const Sizes& sizes) {
    CaptureProfile copy = ProfileOf(profile);
    copy.BeginCapture();
    return AnswersOf(Allocate(copy, sizes));
  }
};

}  // namespace cgp
