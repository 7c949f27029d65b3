// Random steps for a FuzzSession.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <vector>

#include "testing/capture_repeater.h"
#include "testing/fuzz_session.h"
#include "testing/step.h"

namespace cgp {

class OperationGenerator {
 public:
  // Equal seeds give equal setups and, for sessions in equal states, equal steps.
  OperationGenerator(uint64_t seed, bool map_memory);
  OperationGenerator(const OperationGenerator&) = delete;
  OperationGenerator& operator=(const OperationGenerator&) = delete;

  // Nothing once the sequence is as long as it is to be.
  std::optional<Step> Next(const FuzzSession& session);

  FuzzSetup setup;

 private:
  uint64_t Bytes();
  uint64_t AnyBytes();
  uint64_t Pool() { return 1 + dice_.Below(pools_); }
  uint64_t Stream() { return dice_.Below(streams_); }
  Step Begin(uint64_t pool);
  Step Allocate(const FuzzSession& session);
  Step Free(const FuzzSession& session);
  Step Checkpoint(const FuzzSession& session);
  Step Restore(const FuzzSession& session);
  Step Bad(const FuzzSession& session);
  Step Fail();
  Step Choose(const FuzzSession& session);
  std::optional<Step> NextOfRepetition(const FuzzSession& session);

  Dice dice_;
  Weights weights_;
  uint64_t left_ = 0;  // steps
  uint64_t pools_ = 1;
  uint64_t streams_ = 1;
  uint64_t most_live_ = 1;
  double mean_pages_ = 1;
  bool captures_only_ = false;
  bool fails_events_ = false;
  bool large_ = false;                       // reaches a thousand pages
  std::optional<CaptureRepeater> repeater_;  // of sequences that repeat captures
  std::deque<Step> repetition_;              // what is left of the one under way
  uint64_t interruption_ = 1;                // one step in so many is none of the repetition
  uint64_t size_step_ = 1;                   // sizes are multiples of this
  std::vector<uint64_t> checkpoints_;        // by number: of which pool it was asked for last
  uint64_t last_label_ = 0;
  uint64_t last_peer_ = 0;
};

}  // namespace cgp
