// Every sequence of operations, up to a depth, on a pool of pages of four granules and two streams: what random
// sequences might miss. Each is run by the fuzzer's session, so each is compared with the model after every step.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <string>
#include <vector>

#include "testing/fuzz_session.h"
#include "testing/pool_operation.h"

namespace cgp {
namespace {

constexpr uint64_t kGranule = 512;
constexpr uint64_t kPage = 4 * kGranule;

struct Alphabet {
  ScopeKind kind;
  std::vector<uint64_t> granules;  // sizes to allocate
  bool uses;                       // record_stream
  size_t depth;
};

class Enumeration {
 public:
  explicit Enumeration(Alphabet alphabet) : alphabet_(std::move(alphabet)) {
    operations_.push_back(BeginOp{1, alphabet_.kind});
  }

  // Runs every sequence; stops at the first that fails.
  void Run() { Extend(); }

  uint64_t sequences() const { return sequences_; }

 private:
  // Whether the sequence so far is worth running: not a mere prefix of others.
  void Extend() {
    if (!failure_.empty()) return;
    if (operations_.size() > alphabet_.depth) {
      RunSequence();
      return;
    }
    for (const uint64_t granules : alphabet_.granules) {
      // The streams are alike until one of them has been named.
      for (uint64_t stream = 0; stream < (labels_ == 0 ? 1U : 2U); ++stream) {
        ++labels_;
        With(AllocateOp{labels_, 1, granules * kGranule, stream}, labels_);
        --labels_;
      }
    }
    for (const uint64_t label : std::vector<uint64_t>(live_)) {
      const auto at = std::find(live_.begin(), live_.end(), label);
      const auto index = at - live_.begin();
      live_.erase(at);
      With(FreeOp{label});
      live_.insert(live_.begin() + index, label);
      if (!alphabet_.uses) continue;
      for (uint64_t stream = 0; stream < 2; ++stream) With(RecordUseOp{label, stream});
    }
    // A scope's end that nothing follows shows nothing.
    if (operations_.size() < alphabet_.depth) {
      With(open_ ? PoolOperation(EndOp{1}) : PoolOperation(BeginOp{1, ScopeKind::kCapture}));
    }
  }

  void With(PoolOperation operation, uint64_t allocated = 0) {
    const bool toggles =
        std::holds_alternative<EndOp>(operation) || std::holds_alternative<BeginOp>(operation);
    // Without an open scope an allocation is only refused, which other tests show.
    if (allocated != 0 && !open_) return;
    operations_.push_back(operation);
    if (allocated != 0) live_.push_back(allocated);
    if (toggles) open_ = !open_;
    Extend();
    if (toggles) open_ = !open_;
    if (allocated != 0) live_.pop_back();
    operations_.pop_back();
  }

  void RunSequence() {
    ++sequences_;
    FuzzSession session(FuzzSetup{.granularity_bytes = kPage,
                                  .page_bytes = kPage,
                                  .map_memory = false,
                                  .inspect_every = alphabet_.depth + 1,
                                  .tidy_end = sequences_ % 2 == 0});
    for (const PoolOperation& operation : operations_) {
      failure_ = session.Run(operation);
      if (!failure_.empty()) break;
    }
    if (failure_.empty()) failure_ = session.Finish();
    EXPECT_EQ(failure_, "") << "after\n" << ToString(operations_);
  }

  const Alphabet alphabet_;
  std::vector<PoolOperation> operations_;
  std::vector<uint64_t> live_;
  std::string failure_;
  uint64_t labels_ = 0;
  uint64_t sequences_ = 0;
  bool open_ = true;
};

TEST(ExhaustiveTest, CapturesOfFewSizes) {
  Enumeration all({ScopeKind::kCapture, {1, 3, 4, 6}, false, 5});
  all.Run();
  EXPECT_GT(all.sequences(), 20'000U);
}

TEST(ExhaustiveTest, DeepCapturesOfTwoSizes) {
  Enumeration all({ScopeKind::kCapture, {2, 7}, false, 6});
  all.Run();
  EXPECT_GT(all.sequences(), 10'000U);
}

TEST(ExhaustiveTest, CapturesWithForeignUses) {
  Enumeration all({ScopeKind::kCapture, {3, 5}, true, 5});
  all.Run();
  EXPECT_GT(all.sequences(), 5'000U);
}

TEST(ExhaustiveTest, EagerWorkThenCaptures) {
  Enumeration all({ScopeKind::kEager, {2, 5}, true, 5});
  all.Run();
  EXPECT_GT(all.sequences(), 5'000U);
}

}  // namespace
}  // namespace cgp
