// Captures that repeat earlier ones at another scale, as a program does that is captured for
// several sizes: what the pool predicts, plans and follows (core/planning/predictor.h). Random captures are
// never alike, so without this no plan would ever be made.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "testing/fuzz_session.h"
#include "testing/step.h"

namespace cgp {

class CaptureRepeater {
 public:
  struct Options {
    uint64_t streams = 1;
    uint64_t most_bytes = 0;  // that a repetition may hold at once, beyond what it repeats
    bool faults = false;      // driver calls are made to fail
  };

  // `dice` must outlive this.
  CaptureRepeater(Dice& dice, Options options) : dice_(dice), options_(options) {}

  // The session is about to do this: captures are remembered as they come about.
  void Note(const Step& step, const FuzzSession& session);

  // The steps of a capture that repeats one of this pool, labels counted on from `last_label`;
  // empty if there is none to repeat. pre: no scope of the pool is open.
  Steps Repeat(uint64_t pool, const FuzzSession& session, uint64_t& last_label);

 private:
  // An allocation, or a free.
  struct Event {
    Step step;
    unsigned power = 1;  // of the factor, by which it grows
  };
  using Program = std::vector<Event>;

  Event EventOf(const Step& allocate);
  double Factor(const Program& program);
  Program Vary(const Program& program, double factor, uint64_t& last_label);
  void AddFault(Steps& steps);

  Dice& dice_;
  const Options options_;
  std::map<uint64_t, Program> open_;                   // by pool: what its open capture did so far
  std::map<uint64_t, std::vector<Program>> programs_;  // by pool
  std::map<uint64_t, unsigned> powers_;                // by label of what was repeated
};

}  // namespace cgp
