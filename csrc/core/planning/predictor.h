// What is known beforehand about the capture under way: the profile, where that alone does not do
// the plan made from it, and what the capture has done so far. Decides which advice to follow.
//
// An eager scope counts as a capture, but for plans: mostly it warms up for one, which then finds
// its places.
//
//  - A capture no larger than its profile goes where the profile's blocks lay, but for what would take
//    more whole pages there than hold it. Hardly anything is mapped.
//  - A larger one gets a plan, and so does one that finds the place of a large block taken.
//  - Whatever those have no place for goes where a block of its size lay before. One a little longer
//    than whole pages does so only if another block touches it there: else most of a page is wasted.
//  - A capture of several streams gets no advice: who may take a place is for its graph to prove.
//
// What is predicted decides where a block goes, never how much the pool holds:
//
//     pages after an advised block <= max(pages before it, ceil(what lives with it / page))
//
// so a guess can be wrong by any factor and costs mappings, not memory, but for the page or two by
// which it leaves other gaps for what comes later (cgp_quality --plain --fresh).
#pragma once

#include <cstdint>
#include <optional>

#include "core/base/block.h"
#include "core/base/units.h"
#include "core/memory/free_view.h"
#include "core/memory/live_block.h"
#include "core/memory/range_table.h"
#include "core/memory/shared_space.h"
#include "core/placement/placement.h"
#include "core/planning/capture_plan.h"
#include "core/planning/capture_profile.h"
#include "core/planning/known_places.h"

namespace cgp {

class Predictor {
 public:
  // `blocks` are those that live in the bytes.
  Predictor(const SharedSpace& bytes, const LiveBlocks& blocks) : bytes_(bytes), blocks_(blocks) {}

  // Of eager work, which may last as long as the program, so many allocations are predicted. Of a
  // scope with more nothing is learned.
  static constexpr uint32_t kMostEager = 1 << 16;

  void BeginScope(ScopeKind kind);
  void EndScope();
  // Whether the scope under way is predicted.
  bool is_active() const { return active_; }
  // It is not any more, and nothing is learned of it.
  void Stop();
  // No graph is left: what comes may be another program. pre: no scope is open.
  void Forget() { profile_.Forget(); }
  // Pages and slots have other numbers now, and some are gone.
  void Renumber(const RangeTable::Renumbering& renumbering);

  struct Advice {
    CaptureProfile::Match match;
    std::optional<CapturePlan::Spot> spot;  // none: as if nothing were known
    bool lives_at_peak = false;             // when the capture will hold most
  };
  Advice Advise(uint64_t bytes, const FreeView& view);

  // Whether a plan was made for the capture under way.
  bool has_planned() const { return planned_; }

  // The most pages that an advised block of so many granules may leave the pool with.
  uint64_t MostPages(Granules length) const;

  // So that the next Allocated(), of so many bytes, cannot throw.
  void ReserveOne(uint64_t bytes);
  // The block that was asked for lies there. `live` is what the pool holds with it.
  Ticket Allocated(const Advice& advice, Placement start, uint64_t bytes, Granules live);
  void Freed(Ticket ticket) { profile_.Freed(ticket); }
  // The driver had no memory for what the plan wanted: the capture goes on without.
  void GiveUpPlan() { plan_.reset(); }

 private:
  std::optional<CapturePlan::Spot> Predicted(const CaptureProfile::Match& match, Granules length,
                                             const FreeView& view);
  std::optional<CapturePlan::Spot> Known(Granules length, const FreeView& view) const;
  bool WorthPlanning(const CaptureProfile::Match& match, Granules length) const;
  void MakePlan(const CaptureProfile::Match& match, const RangeTable& ranges);

  const SharedSpace& bytes_;
  const LiveBlocks& blocks_;
  CaptureProfile profile_;
  bool active_ = false;
  ScopeKind kind_ = ScopeKind::kCapture;
  // Of the capture under way, which gets no more than one.
  std::optional<CapturePlan> plan_;
  bool planned_ = false;
  KnownPlaces places_;  // in the capture under way, or the last one
};

}  // namespace cgp
