// Every sequence of operations, up to a depth, on a pool of pages of four granules and two streams:
// what random sequences might miss. Each is run by the fuzzer's session, so each is compared with
// the model after every step.
#include <gtest/gtest.h>

#include <cstdint>
#include <ostream>
#include <string>
#include <vector>

#include "testing/fuzz_session.h"
#include "testing/test_names.h"

namespace cgp {
namespace {

using enum Step::Kind;

struct Alphabet {
  std::string name;
  Step::Kind scope;
  std::vector<uint64_t> granules;  // sizes to allocate
  bool uses;                       // record_stream
  size_t depth;
  uint64_t least_sequences;
  friend void PrintTo(const Alphabet& one, std::ostream* out) { *out << one.name; }
};

class ExhaustiveTest : public ::testing::TestWithParam<Alphabet> {
 protected:
  static constexpr uint64_t kPage = 4 * kGranule;

  // A sequence so far, and what it has come to.
  struct Prefix {
    Steps steps;
    std::vector<uint64_t> live;
    uint64_t labels = 0;
    bool open = true;
  };

  // Runs every sequence that begins so; stops at the first that fails.
  void Extend(const Prefix& prefix) {
    const Alphabet& alphabet = GetParam();
    if (HasFailure()) return;
    if (prefix.steps.size() > alphabet.depth) return RunSequence(prefix.steps);
    const auto with = [&](const Step& step, const auto& change) {
      Prefix next = prefix;
      next.steps.push_back(step);
      change(next);
      Extend(next);
    };
    // Without an open scope an allocation is only refused, which other tests show.
    for (const uint64_t granules : prefix.open ? alphabet.granules : std::vector<uint64_t>()) {
      // The streams are alike until one of them has been named.
      for (uint64_t stream = 0; stream < (prefix.labels == 0 ? 1U : 2U); ++stream) {
        with({kAllocate, stream, prefix.labels + 1, granules * kGranule},
             [](Prefix& next) { next.live.push_back(++next.labels); });
      }
    }
    for (const uint64_t label : prefix.live) {
      with({kFree, 0, label}, [&](Prefix& next) { std::erase(next.live, label); });
      for (uint64_t stream = 0; stream < (alphabet.uses ? 2U : 0U); ++stream) {
        with({kUse, stream, label}, [](Prefix&) {});
      }
    }
    // A scope's end that nothing follows shows nothing.
    if (prefix.steps.size() == alphabet.depth) return;
    with({prefix.open ? kEnd : kBeginCapture}, [](Prefix& next) { next.open = !next.open; });
  }

  void RunSequence(const Steps& steps) {
    ++sequences_;
    FuzzSession session({.granularity_bytes = kPage,
                         .page_bytes = kPage,
                         .map_memory = false,
                         .inspect_every = GetParam().depth + 1,
                         .tidy_end = sequences_ % 2 == 0});
    EXPECT_EQ(RunAll(session, steps), "") << "after\n" << ToString(steps);
  }

  uint64_t sequences_ = 0;
};

TEST_P(ExhaustiveTest, EverySequenceIsRight) {
  Extend({.steps = {{GetParam().scope}}, .live = {}});
  EXPECT_GT(sequences_, GetParam().least_sequences);
}

INSTANTIATE_TEST_SUITE_P(
    All, ExhaustiveTest,
    ::testing::Values(Alphabet{"CapturesOfFewSizes", kBeginCapture, {1, 3, 4, 6}, false, 5, 20'000},
                      Alphabet{"DeepCapturesOfTwoSizes", kBeginCapture, {2, 7}, false, 6, 10'000},
                      Alphabet{"CapturesWithForeignUses", kBeginCapture, {3, 5}, true, 5, 5'000},
                      Alphabet{"EagerWorkThenCaptures", kBeginEager, {2, 5}, true, 5, 5'000}),
    [](const auto& one) { return one.param.name; });

}  // namespace
}  // namespace cgp
