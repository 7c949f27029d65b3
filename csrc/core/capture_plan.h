// Where the blocks of the capture under way will lie: foretold by the guide (capture_guide.h) and
// packed offline (layout.h) into one range that comes to show the pages of the pool, its *home*. So
// a growing pool maps little more than what it grows by, where block after block would have to be
// stitched together from what happens to be free.
//
//     home    [p0 p1 p2 p3 | p7 p5 | new new ...]
//              mapped now    pages not shown there yet, then new ones: mapped when a block is to
//                            lie there
//
// The range that shows most pages is the home; where blocks that stay part it so that not all that
// is foretold fits, a new one of the pages that are free.
//
// Like the guide it is advice: a block goes where the plan says if that is free by then, and else
// to another gap of the plan. What is not foretold gets a gap too, so that it is in nobody's way.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/capture_guide.h"
#include "core/free_view.h"
#include "core/layout.h"
#include "core/placement.h"
#include "core/range_table.h"
#include "core/units.h"

namespace cgp {

class CapturePlan {
 public:
  // A part of a block that lives when the plan is made, and until which step of the guide it does.
  struct LivePiece {
    PageId page{};
    Granules offset;
    Granules length;
    uint32_t end = LayoutItem::kForever;
  };

  // From the step of the guide that `match` has come to.
  CapturePlan(const CaptureGuide& guide, const CaptureGuide::Match& match, const FreeView& view,
              const RangeTable& ranges, Granules page_size, std::span<const LivePiece> live);

  // Of the capture to its guide.
  double scale() const { return scale_; }
  // Whether it has a place for all that is foretold. If not it had better not be followed: blocks
  // without a place would take that of others.
  bool complete() const { return complete_; }
  // How many pages the pool has if the plan comes true.
  uint64_t pages_after() const { return pages_after_; }
  // How many handles are to be mapped into the home that other ranges show already.
  std::size_t missing_handles() const { return missing_.size(); }

  // A place for a block: what to map for it, which is nothing mostly, and where it then lies.
  struct Spot {
    std::optional<GrowthPlan> growth;
    Placement place;  // without growth
    LayoutItem item;
  };
  // For the block of an allocation. nullopt if the plan has no place for it that is free to the
  // view's stream and does not take the pool beyond `most_pages`.
  std::optional<Spot> Find(const CaptureGuide::Match& match, Granules length, const FreeView& view,
                           const RangeTable& ranges, uint64_t most_pages) const;
  // The block lies there now.
  void Take(const CaptureGuide::Match& match, const Spot& spot, Placement start,
            const RangeTable& ranges);

 private:
  void ChooseHome(const RangeTable& ranges);
  void StartHome(const FreeView& view, const RangeTable& ranges);
  bool Pack(const CaptureGuide& guide, const RangeTable& ranges, std::span<const LivePiece> live);
  std::vector<LayoutItem> Foretell(const CaptureGuide& guide, const RangeTable& ranges) const;
  std::vector<LayoutItem> Fix(std::span<const LivePiece> live, const RangeTable& ranges) const;
  bool HasRoom(const RangeTable& ranges) const;
  const LayoutItem* ItemOf(std::optional<uint32_t> step) const;
  std::optional<Spot> Reach(const LayoutItem& item, const FreeView& view, const RangeTable& ranges,
                            uint64_t most_pages) const;

  const double scale_;
  const uint64_t page_;  // in granules
  const uint32_t first_step_;
  const uint64_t pages_before_;
  uint64_t pages_after_ = 0;
  bool complete_ = false;

  std::optional<RangeId> home_;  // none: a range that does not exist yet
  uint32_t base_ = 0;            // the home's slot at position 0
  std::vector<PageId> missing_;  // handles that the home did not show, in the order to come
  uint64_t end_ = 0;             // the position where the home will end

  std::vector<LayoutItem> items_;  // by step, from first_step_ on; of length 0 if not foretold
  Layout layout_;
  uint32_t unexpected_ = 0;  // how many blocks in the layout were not foretold
};

}  // namespace cgp
