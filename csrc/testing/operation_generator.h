// Random operations for a FuzzSession. Each sequence has its own weights, some of them zero ("swarm
// testing"): a mix of everything at once would hardly ever reach what only many frees, or only
// large blocks, reach.
#pragma once

#include <cstdint>
#include <deque>
#include <optional>
#include <random>
#include <vector>

#include "testing/capture_repeater.h"
#include "testing/fuzz_session.h"
#include "testing/pool_operation.h"

namespace cgp {

class OperationGenerator {
 public:
  // Equal seeds give equal setups and, for sessions in equal states, equal operations.
  OperationGenerator(uint64_t seed, bool map_memory);
  OperationGenerator(const OperationGenerator&) = delete;
  OperationGenerator& operator=(const OperationGenerator&) = delete;

  FuzzSetup setup() const { return setup_; }
  uint64_t length() const { return length_; }
  PoolOperation Next(const FuzzSession& session);

 private:
  struct Weights {
    unsigned allocate, free, begin, end, retain, release, record_use, trim, progress, peer, replay,
        fail, mend, bad, inspect, checkpoint, restore;
  };

  uint64_t Below(uint64_t bound);  // uniform in [0, bound)
  bool OneIn(uint64_t n) { return Below(n) == 0; }
  uint64_t Bytes();
  uint64_t AnyBytes();
  uint64_t Pool() { return 1 + Below(pools_); }
  uint64_t Stream() { return Below(streams_); }
  PoolOperation Allocate(const FuzzSession& session);
  PoolOperation Free(const FuzzSession& session);
  PoolOperation Checkpoint(const FuzzSession& session);
  PoolOperation Restore(const FuzzSession& session);
  PoolOperation Bad(const FuzzSession& session);
  PoolOperation Fail();
  PoolOperation Choose(const FuzzSession& session);
  std::optional<PoolOperation> NextOfRepetition(const FuzzSession& session);

  std::mt19937_64 random_;
  FuzzSetup setup_;
  Weights weights_{};
  uint64_t length_ = 0;
  uint64_t pools_ = 1;
  uint64_t streams_ = 1;
  uint64_t most_live_ = 1;
  double mean_pages_ = 1;
  bool captures_only_ = false;
  bool fails_events_ = false;
  bool large_ = false;                       // reaches a thousand pages
  std::optional<CaptureRepeater> repeater_;  // of sequences that repeat captures
  std::deque<PoolOperation> repetition_;     // what is left of the one under way
  uint64_t interruption_ = 1;                // one operation in so many is none of the repetition
  uint64_t size_step_ = 1;                   // sizes are multiples of this
  std::vector<uint64_t> checkpoints_;        // by number: of which pool it was asked for last
  uint64_t last_label_ = 0;
  int last_peer_ = 0;
};

}  // namespace cgp
