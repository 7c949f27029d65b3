// What is known beforehand about the capture under way: the guide and, where that alone does not
// do, the plan made from it. Decides which advice to follow.
//
//  - A capture no larger than its guide goes where the guide's blocks lay. Nothing is mapped.
//  - One that finds the place of a large block taken gets a plan, of what is mapped.
//  - A larger one gets a plan, and another one when it comes to be trusted, if it was refused pages
//    before.
//  - A small block that nothing is known of, or that is known to stay, goes beside others that
//    stayed.
//
// A plan may have new pages made ahead of need: its gaps are filled later. A capture that only
// begins like the guide's program must not make the pool grow in vain: until three blocks of
// different sizes have been as large as foretold, a plan gets a 64th of the pool and one page
// more, or what lives needs anyway.
// From then on a wrong guess can cost what is foretold: the scale, or for blocks that grow by its
// square that, times what the guide held.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "core/capture_guide.h"
#include "core/capture_plan.h"
#include "core/free_view.h"
#include "core/page_space.h"
#include "core/placement.h"
#include "core/range_table.h"
#include "core/units.h"

namespace cgp {

class Foresight {
 public:
  Foresight(const PageSpace& space, const RangeTable& ranges) : space_(space), ranges_(ranges) {}

  void BeginCapture();
  void EndCapture() { guide_.EndCapture(); }

  struct Advice {
    CaptureGuide::Match match;
    std::optional<CapturePlan::Spot> spot;  // none: as if nothing were known
    bool planned = false;                   // the spot is the plan's
    bool lives_at_peak = false;             // when the capture will hold most
  };
  // `for_each_live(function)` calls function(page, offset, length, ticket) for each piece of each live
  // block; asked only when a plan is made.
  using PieceFunction = std::function<void(PageId, Granules, Granules, CaptureGuide::Ticket)>;
  using ForEachLive = std::function<void(const PieceFunction&)>;
  Advice Advise(uint64_t bytes, const FreeView& view, const ForEachLive& for_each_live);

  // So that the next Allocated() cannot throw.
  void ReserveOne() { guide_.ReserveOne(); }
  // The block that was asked for lies there. `live` is what the pool holds with it.
  CaptureGuide::Ticket Allocated(const Advice& advice, Placement start, uint64_t bytes,
                                 Granules live);
  void Freed(CaptureGuide::Ticket ticket) { guide_.Freed(ticket); }
  // The driver had no memory for what the plan wanted: the capture goes on without.
  void GiveUpPlan();

 private:
  bool WorthPlanning(const CaptureGuide::Match& match, Granules length) const;
  bool Trusts(const CaptureGuide::Match& match) const;
  void MakePlan(const CaptureGuide::Match& match, const FreeView& view,
                const ForEachLive& for_each_live);
  uint64_t MostPages(const CaptureGuide::Match& match, Granules length) const;
  std::optional<Placement> BesideSurvivors(Granules length, const FreeView& view) const;

  const PageSpace& space_;
  const RangeTable& ranges_;
  CaptureGuide guide_;
  std::optional<CapturePlan> plan_;
  // Of the capture under way:
  int plans_left_ = 0;
  bool refused_ = false;       // the plan was not trusted with the pages for a block
  uint64_t pages_before_ = 0;  // what the pool had when it began
};

}  // namespace cgp
