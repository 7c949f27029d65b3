// The decision: where a block of a page or more goes. Smaller ones are a best fit, which
// free_view.h does alone.
//
// A block of n = q pages + r is given at least `ideal` whole pages: q, and one more if no free page
// head or tail (nor one tail and one head together) holds the remainder r. It goes, in this order
// (design: edge stitching):
//
//  1. to where the capture's guide says (capture_guide.h), if it fits there: nothing to map.
//  2. to the newest range that has room for it, where it takes the fewest whole pages: nothing to
//     map. Newest first, because captures repeat themselves: the arrangement that served the last
//     graph serves the next one too, and older ones stay whole. (In a simulation of six recorded
//     pools in six orders each: a third fewer mappings than with the shortest run first.)
//  3. to the free front or back of a range, which is extended there: of all ranges the one that
//     needs the fewest new mappings, as long as it costs no new page that `ideal` would not.
//  4. to a new range: the free tail of a page, whole pages, the free head of a page. The rest of
//     those two pages stays in use by others.
//
// In 2 and 3 it may take one whole page more than `ideal` (Slack): that saves mappings, and what it
// wastes is the rest of a page, which smaller blocks can use. The driver is asked for new pages
// only where 3 and 4 find too few whole ones.
#pragma once

#include <cstdint>
#include <optional>

#include "core/free_view.h"
#include "core/page_space.h"
#include "core/range_table.h"
#include "core/units.h"

namespace cgp {

// Where a block starts: `offset` granules into the slot; it goes on through the slots that follow.
struct Placement {
  SlotId slot{};
  Granules offset;
};

// How many whole pages more than `ideal` a block may take.
enum class Slack : uint8_t { kNone = 0, kOnePage = 1 };

// All functions: pre: length >= a page.

// Step 1: whether the view's stream may take all of [start, start + length).
bool FitsAt(const FreeView& view, const RangeTable& ranges, Granules page_size, Placement start,
            Granules length);

// Step 2. Nothing is changed but the exactness of run bounds.
std::optional<Placement> FindMapped(FreeView& view, const RangeTable& ranges, Granules page_size,
                                    Granules length, Slack slack);

// Steps 3 and 4: what to map so that the block fits, and where it will then start, in granules from
// the first slot that the plan maps; negative if it starts in slots mapped before.
struct GrowthPlan {
  MappingPlan mapping;
  int64_t start = 0;

  // Where the block lies once the plan is carried out and its first slot is `first`.
  Placement PlacementFrom(SlotId first, Granules page_size) const;
};
GrowthPlan PlanGrowth(const FreeView& view, const RangeTable& ranges, Granules page_size,
                      Granules length, Slack slack);

// Of the whole pages the one that stands in the fewest ranges, for a block that breaks it up: that
// costs the fewest runs.
std::optional<PageId> LeastMappedWholePage(const FreeView& view, const RangeTable& ranges);

}  // namespace cgp
