// Random steps for a FuzzSession. Captures and eager scopes repeat earlier ones at another scale now
// and then, as a program does that is captured for several sizes. Random scopes are never alike, so without this no
// place would be known from before (core/placement/known_places.h).
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <vector>

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
  Step Lease(Step::Kind kind, const FuzzSession& session);
  Step Bad(const FuzzSession& session);
  Step Fail();
  Step Choose(const FuzzSession& session);
  std::optional<Step> NextOfRepetition(const FuzzSession& session);
  // The session is about to do this: captures are remembered as they come about.
  void Note(const Step& step, const FuzzSession& session);
  uint64_t Scaled(const Step& allocate, double factor) const;
  Steps Vary(const Steps& program);
  // A scope that repeats one of this pool; nothing if there is none. pre: no scope of the pool is
  // open.
  void Repeat(uint64_t pool, const FuzzSession& session);

  Dice dice_;
  Weights weights_;
  uint64_t left_ = 0;  // steps
  uint64_t pools_ = 1;
  uint64_t streams_ = 1;
  uint64_t most_live_ = 1;
  double mean_pages_ = 1;
  bool captures_only_ = false;
  bool leases_ = false;
  bool names_ = false;  // each capture, so that its graph can go
  bool fails_events_ = false;
  bool large_ = false;              // reaches a thousand pages
  bool repeats_ = false;            // scopes
  bool repeats_fail_ = false;       // driver calls in these are made to fail
  std::map<uint64_t, Steps> open_;  // by pool: what its open scope allocated and freed so far
  std::map<uint64_t, std::vector<Steps>> programs_;  // by pool: what its scopes did
  std::map<uint64_t, unsigned>
      powers_;                   // by label: of the factor, by which the block grows in repetitions
  std::deque<Step> repetition_;  // what is left of the one under way
  uint64_t interruption_ = 1;    // one step in so many is none of the repetition
  uint64_t size_step_ = 1;       // sizes are multiples of this
  std::vector<uint64_t> checkpoints_;  // by number: of which pool it was asked for last
  uint64_t last_label_ = 0;
  uint64_t last_peer_ = 0;
};

}  // namespace cgp
