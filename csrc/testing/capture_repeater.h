// Captures that repeat earlier ones at another scale, as a program does that is captured for
// several sizes: what the pool predicts, plans and follows (core/planning/predictor.h). Random captures are
// never alike, so without this no plan would ever be made.
#pragma once

#include <cstdint>
#include <map>
#include <random>
#include <vector>

#include "testing/fuzz_session.h"
#include "testing/pool_operation.h"

namespace cgp {

class CaptureRepeater {
 public:
  struct Options {
    uint64_t streams = 1;
    uint64_t most_bytes = 0;  // that a repetition may hold at once, beyond what it repeats
    bool faults = false;      // driver calls are made to fail
  };

  // `random` must outlive this.
  CaptureRepeater(std::mt19937_64& random, Options options) : random_(random), options_(options) {}

  // The session is about to do this: captures are remembered as they come about.
  void Note(const PoolOperation& operation, const FuzzSession& session);

  // The operations of a capture that repeats one of this pool, labels counted on from `last_label`;
  // empty if there is none to repeat. pre: no scope of the pool is open.
  std::vector<PoolOperation> Repeat(uint64_t pool, const FuzzSession& session,
                                    uint64_t& last_label);

 private:
  // One allocation, or one free if bytes is 0.
  struct Step {
    uint64_t label = 0;
    uint64_t bytes = 0;
    uint64_t stream = 0;
    unsigned power = 1;  // of the factor, by which it grows
  };
  using Program = std::vector<Step>;

  uint64_t Below(uint64_t bound) { return random_() % bound; }
  bool OneIn(uint64_t n) { return Below(n) == 0; }
  Step StepOf(const AllocateOp& op);
  double Factor(const Program& program);
  Program Vary(const Program& program, double factor, uint64_t& last_label);
  void AddFault(std::vector<PoolOperation>& operations);

  std::mt19937_64& random_;
  const Options options_;
  std::map<uint64_t, Program> open_;                   // by pool: what its open capture did so far
  std::map<uint64_t, std::vector<Program>> programs_;  // by pool
  std::map<uint64_t, unsigned> powers_;                // by label of what was repeated
};

}  // namespace cgp
