// What the largest capture into a pool so far did with each of its allocations, as a guide for the
// next one.
//
// Graphs that share a pool are mostly one program captured for several sizes: allocation k of one
// is allocation k of the next, only larger or smaller. So where the largest capture put its block
// k, there is room for every smaller block k at the moment it is asked for, and no mapping is
// needed; and if it lived when that capture held most, it probably will again. A guide is only
// advice: what it says is tried and checked, so a pool that very different programs share loses
// nothing. (Replayed largest first, the recorded captures of ResNet-50 need 161 page mappings for
// 160 pages, those of the MLP 150 for 73: hardly more than their largest alone.)
#pragma once

#include <cstdint>
#include <vector>

#include "core/placement.h"
#include "core/units.h"

namespace cgp {

class CaptureGuide {
 public:
  struct Step {
    Placement start;
    Granules length;
    bool lives_at_peak = false;  // of the capture's memory
  };

  // A live block's place in the capture that allocated it; kNone for what no capture is told of.
  struct Ticket {
    static constexpr uint32_t kNone = ~uint32_t{0};
    uint32_t capture = kNone;
    uint32_t step = 0;
  };

  void BeginCapture();

  // What the largest capture did in the step that comes next here; nullptr if it had no such step.
  const Step* Next() const;

  // The next step of this capture, done. `live` is what the pool holds with the new block.
  Ticket Allocated(Placement start, Granules length, Granules live);
  // pre: each ticket is freed once.
  void Freed(Ticket ticket);

  // The capture is the guide from now on if none before it held more.
  void EndCapture();

 private:
  struct Recorded {
    Step step;
    uint32_t freed_at = ~uint32_t{0};  // the number of steps done when it was freed
  };

  uint32_t capture_ = 0;  // the number of the one under way
  std::vector<Recorded> recorded_;
  Granules peak_;
  uint32_t peak_step_ = 0;
  std::vector<Step> largest_;
  Granules largest_peak_;
};

}  // namespace cgp
