// What the largest capture into a pool so far did, as a profile for the next one.
//
// Graphs that share a pool are mostly one program captured for several sizes: the allocations of
// one are those of the next, each just as large or larger by the same factor (or, where a program
// pairs everything with everything, by its square). So the capture under way is aligned with the
// largest one: an allocation matches the next step whose size, scaled or not, is its own. The
// first that is larger than a granule tells the scale. Libraries that choose other kernels for
// other sizes add and leave out steps, so a few steps ahead are looked at. From there on the
// profile predicts how large each block will be and how long it will live.
//
// All this is advice, tried and checked by those who follow it, so a pool that very different
// programs share loses nothing.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/base/block.h"
#include "core/base/reserve.h"
#include "core/base/units.h"
#include "core/memory/range_table.h"
#include "core/placement/placement.h"

namespace cgp {

class CaptureProfile {
 public:
  static constexpr uint32_t kNever = ~uint32_t{0};

  struct Step {
    Placement start;
    uint64_t bytes = 0;
    uint32_t freed_at = kNever;    // the number of steps done when it was freed
    bool lives_at_peak = false;    // of the capture's memory
    std::optional<uint32_t> like;  // the step that it matched, of the profile of then

    // Where it lay is not unmapped.
    bool has_place() const { return Index(start.slot) != RangeTable::Renumbering::kGone; }
  };

  // Which step of the profile an allocation matches, and what follows from that. A value: nothing
  // is changed until the allocation is told to have been made.
  struct Match {
    std::optional<uint32_t> step;

    // The alignment from here on.
    double scale = 0;              // of this capture to the profile; 0: not known yet
    uint32_t next = 0;             // the profile's step that is looked at first
    uint32_t missed_in_a_row = 0;  // how many of the last ones matched nothing
  };

  void BeginCapture();

  // pre: bytes > 0.
  Match Find(uint64_t bytes) const;

  // So that the next Allocated() cannot throw.
  void ReserveOne() { ReserveMore(recorded_, 1); }
  // The next step of this capture, done. `live` is what the pool holds with the new block.
  Ticket Allocated(const Match& match, Placement start, uint64_t bytes, Granules live);
  // pre: each ticket is freed once.
  void Freed(Ticket ticket);

  // The capture is the profile from now on if none before it held more.
  void EndCapture();
  // It ends as if it had not been.
  void AbandonCapture();
  void Forget();
  // Pages and slots have other numbers now, and some are gone.
  void Renumber(const RangeTable::Renumbering& renumbering);

  // The steps of the largest capture; empty before there was one.
  const std::vector<Step>& steps() const { return largest_; }
  // How large the block of a step will be at this scale.
  uint64_t Predict(uint32_t step, double scale) const;
  // The profile's step that a live block matched, if it is of the capture under way.
  std::optional<uint32_t> StepOf(Ticket ticket) const;

 private:
  // Of a block that lives on for 2^31 scopes, whose numbers begin anew then, or of one without a
  // number, it may be wrong, which costs no more than bad advice.
  bool IsOfThis(Ticket ticket) const {
    return ticket.capture == capture_ && ticket.step < recorded_.size();
  }
  bool AsLarge(uint32_t step, uint64_t bytes, double scale) const;
  bool MatchNext(uint64_t bytes, Match& match) const;
  void TakeScale(uint64_t bytes, Match& match) const;

  uint32_t capture_ = 0;  // the number of the one under way
  Match alignment_;       // after its last step
  std::vector<Step> recorded_;
  Granules peak_;
  uint32_t peak_step_ = 0;

  std::vector<Step> largest_;
  Granules largest_peak_;
};

}  // namespace cgp
