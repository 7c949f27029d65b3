// Where the blocks of the capture under way will lie: predicted by the profile (capture_profile.h)
// and packed offline (layout.h) into one range that comes to show the pages of the pool, its
// *home*. So a growing pool maps little more than what it grows by, where block after block would
// have to be stitched together from what happens to be free.
//
//     home    [p0 p1 p2 p3 | p7 p5 | new new ...]
//              mapped now    pages not shown there yet, then new ones: mapped when a block is to
//                            lie there
//
// A block lies within the pages that the pool has by then, or needs by then for what lives:
//
//     end of a block <= max(pages now, ceil(what lives at any time until its birth / page)) * page
//
// Like the profile it is advice: a block goes where the plan says if that is free by then.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/base/units.h"
#include "core/memory/free_view.h"
#include "core/memory/range_table.h"
#include "core/placement/growth.h"
#include "core/placement/placement.h"
#include "core/planning/capture_profile.h"
#include "core/planning/layout.h"

namespace cgp {

class CapturePlan {
 public:
  // A part of a block that lives when the plan is made, and until which step of the profile it
  // does.
  struct LivePiece {
    PageId page{};
    Granules offset;
    Granules length;
    uint32_t end = LayoutItem::kForever;
  };

  // From the step of the profile that `match` has come to.
  CapturePlan(const CaptureProfile& profile, const CaptureProfile::Match& match,
              const RangeTable& ranges, Granules page_size, std::span<const LivePiece> live);

  // Whether it has a place for all that is predicted. If not it had better not be followed: blocks
  // without a place would take that of others.
  bool complete() const { return complete_; }

  // A place for a block: what to map for it, which is nothing mostly, and where it then lies.
  struct Spot {
    std::optional<GrowthPlan> growth;
    Placement place;  // without growth
  };
  // For the block that matches the step. nullopt if the plan has no place for it that is free to
  // the view's stream and does not take the pool beyond `most_pages`.
  std::optional<Spot> Find(uint32_t step, Granules length, const FreeView& view,
                           uint64_t most_pages) const;

 private:
  std::vector<LayoutItem> Predict(const CaptureProfile& profile, double scale,
                                  const RangeTable& ranges) const;
  std::vector<LayoutItem> Fix(std::span<const LivePiece> live, const RangeTable& ranges) const;
  void Limit(std::vector<LayoutItem>& items, std::span<const LayoutItem> fixed,
             const RangeTable& ranges) const;

  const uint64_t page_;  // in granules
  const uint32_t first_step_;
  bool complete_ = false;

  RangeId home_{};
  uint32_t base_ = 0;              // the home's slot at position 0
  std::vector<PageId> missing_;    // handles that the home did not show, in the order to come
  std::vector<LayoutItem> items_;  // by step, from first_step_ on; of length 0 if not predicted
};

}  // namespace cgp
