// What the programs of a fuzzer are made of, and their text: a program that fails prints as what
// StepsOf() reads.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iosfwd>
#include <iterator>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "driver/faulty_driver.h"

namespace cgp {

// Pools and streams are small numbers; a block is `item`, a number of the program's own. A step
// that makes no sense where it stands does nothing, so that a program still means something when
// steps are taken out. FuzzSession and CaptureSession each know some of the kinds.
struct Step {
  enum class Kind : uint8_t {
    kAllocate,      // a block, named `item` (not 0), of `amount` bytes on `stream`
    kFree,          // block `item`; a second time, if it was freed before: bad input
    kRead,          // a kernel on `stream` checks block `item`, and says so with RecordUse()
    kWrite,         // one that checks and then fills it
    kReadUnsaid,    // the same without RecordUse(): the block's stream waits before the free
    kWriteUnsaid,   //
    kBeginCapture,  // a scope; with an `amount` something captures that only the caller knows of
    kBeginEager,    //
    kEnd,           // the scope
    kRetain,        //
    kRelease,       //
    kTrim,          //
    kUse,           // RecordUse() of block `item` by `stream`, without a kernel
    kLaunch,        // a kernel on `stream` that touches nothing
    kLaunchEarly,   // the same, launched programmatically
    kRecord,        // event `item` on `stream`
    kWait,          // `stream` waits for event `item`, recorded at any time before
    kWaitEarly,     // the same, for a programmatic event
    kBeginOwn,      // `stream` begins a capture of its own, as a conditional body does
    kEndOwn,        // it ends one that no other stream is part of, and works on
    kInvalidate,    // the capture that `stream` is part of fails
    kProgress,  // the device does up to `amount` more of the stream's work, if that is not captured
    kNextGraph,       // the scope ends, and another begins; `amount` 1: after a sleep, 2: a trim
    kPeer,            // device `item` becomes a peer
    kFail,            // from now on driver calls fail as `fault` says
    kMend,            //
    kFailAllocation,  // of the next call to the set, one on the heap, or all from that one on
    kFreeInside,      // frees addresses in block `item`, other than its start: bad input
    kFreeWild,        // frees address `amount`, if no live block starts there: bad input
    kInspect,         // compares all that is too slow to be compared after each step
    kCheckpoint,      // of the pool, kept as `item` in place of what was kept as that before
    kRestore,         // goes back to checkpoint `item`; of another pool: bad input
    kReplay,  // a graph that was captured into the pool runs on `stream`, that number `item`
    kBeginApart,
    kBeginLoan,    // its pool is number 2^63 + `pool`
    kSleep,        // with an `amount` live blocks go too
    kWake,         //
    kTrimToNeeds,  //
    kLease,        // number `item`, of each live block of the pool whose number is a multiple of
                   // `amount`; of 0: bad input
    kLeaseOut,     // its pages go
    kLeaseBack,    // and come back
    kLeaseEnd,     //
    kNameCapture,  // the pool's last
    kDropCapture,  // that number `item`
  };
  static constexpr size_t kKinds = 44;

  Kind kind{};
  uint64_t stream = 0;
  uint64_t item = 0;
  uint64_t amount = 0;
  uint64_t pool = 1;
  Fault fault = {};
};
using Steps = std::vector<Step>;

// Its kind, stream, item, amount and pool, and the fault in numbers where the kind is of one.
std::string ToString(const Step& step);
// One step a line, with commas.
std::string ToString(const Steps& steps);
// What prints so; numbers at the end of a step may be left out. Throws UsageError if it is none.
Steps StepsOf(const std::string& text);
// For gtest.
std::ostream& operator<<(std::ostream& out, const Step& step);

// Runs the steps, and then Finish(). Returns the first complaint, behind the step that it came
// after.
template <typename Session>
std::string RunAll(Session&& session, const Steps& steps) {
  for (const Step& step : steps) {
    std::string complaint = session.Run(step);
    if (!complaint.empty()) return complaint;
  }
  return session.Finish();
}

// Draws what programs are made of. No distribution of the library: their values differ between
// libraries.
class Dice {
 public:
  explicit Dice(uint64_t seed) : random_(seed) {}

  uint64_t Any() { return random_(); }
  uint64_t Below(uint64_t bound) { return random_() % bound; }
  bool OneIn(uint64_t times) { return Below(times) == 0; }
  template <typename List>
  const auto& Of(const List& list) {
    return list[Below(list.size())];
  }
  // Every other time one of the last `few`.
  template <typename List>
  const auto& NewOf(const List& list, uint64_t few) {
    return list[list.size() - 1 - Below(OneIn(2) ? std::min(list.size(), few) : list.size())];
  }
  // A place in a list of weights.
  template <typename List>
  size_t Weighted(const List& weights) {
    uint64_t left = Below(std::accumulate(std::begin(weights), std::end(weights), uint64_t{0}));
    size_t place = 0;
    while (left >= weights[place]) left -= weights[place++];
    return place;
  }
  // 0, or up to `usual`.
  unsigned Some(unsigned usual) { return OneIn(3) ? 0U : 1 + static_cast<unsigned>(Below(usual)); }

 private:
  std::mt19937_64 random_;
};

// How often each kind of step is to be drawn. Each program has its own weights, some of them zero
// ("swarm testing"): a mix of everything at once would hardly ever reach what only many frees, or
// only large blocks, reach.
class Weights {
 public:
  unsigned& operator[](Step::Kind kind) { return weights_[static_cast<size_t>(kind)]; }
  Step::Kind Pick(Dice& dice) const { return static_cast<Step::Kind>(dice.Weighted(weights_)); }

 private:
  unsigned weights_[Step::kKinds] = {};
};

}  // namespace cgp
