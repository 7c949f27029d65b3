// The decision: where a block of a page or more goes. Smaller ones are a best fit, which
// free_view.h does alone.
//
// A block of n = q pages + r is given at least `ideal` whole pages: q, and one more if no edge
// holds the remainder r. An edge is the free head or tail of a handle that is partly used; a tail
// and a head of two handles do together. The block goes, in this order (design: edge stitching):
//
//  1. to where the captures before it say (predictor.h), if it fits there: hardly anything to map.
//  2. to the newest range where it fits, as far as it can at the end of a free run: nothing to map.
//     Newest first, because captures repeat themselves: the arrangement that served the last graph
//     serves the next one too, and older ones stay whole.
//  3. to the free front or back of a range, which is extended there: of all ranges the one that
//     needs the fewest new mappings, as long as it costs no new page that 4 would not.
//  4. to a new range: the free tail of a handle, wholly free handles, largest first, the free head
//     of a handle. The rest of those two handles stays in use by others.
//
// In 2 and 3 it may take one whole page more than `ideal` (Slack): that saves mappings, and what it
// wastes is the rest of a page, which smaller blocks can use. The driver is asked for new pages only
// where 3 and 4 find too few. They come in handles as large as suits the pool, since the driver's
// price is per handle.
//
// What each of these rules saves and costs stands in docs/ablation.md.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

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

// How many streams allocate in the capture.
enum class Streams : uint8_t { kOne, kSeveral };

// How many whole pages more than `ideal` a block may take.
enum class Slack : uint8_t { kNone = 0, kOnePage = 1 };

// The most pages that a new handle may have in a pool of so many pages, of which `idle` are wholly
// free and of no use to the block that needs new ones: the driver's price is per handle, but what is
// mapped whole is also lost whole to the middle of a range as long as a page of it is in use, and
// idle pages say that this happens.
uint64_t MostHandlePages(uint64_t pool_pages, uint64_t idle);

// Adds handles of so many new pages in all, each as large as suits the pool.
void AppendNewHandles(uint64_t pages, uint64_t pool_pages, uint64_t idle,
                      std::vector<PageId>& handles);

// All functions below: pre: length >= a page, but for FitsWithoutWaste().

// Step 1: whether the view's stream may take all of [start, start + length), and that takes no more
// whole pages than hold so many granules.
bool FitsWithoutWaste(const FreeView& view, const RangeTable& ranges, Granules page_size,
                      Placement start, Granules length);

// How many streams may take all of a page.
using TakersOf = std::function<uint32_t(PageId)>;

// Step 2; with `takers`, of equal places the one whose pages the fewest streams may take, since the
// others are left with more. Nothing is changed but the exactness of run bounds.
std::optional<Placement> FindMapped(FreeView& view, const RangeTable& ranges, Granules page_size,
                                    Granules length, Slack slack, const TakersOf& takers = {});

// Steps 3 and 4: what to map so that the block fits, and where it will then start, in granules from
// the first slot that the plan maps; negative if it starts in slots mapped before.
struct GrowthPlan {
  MappingPlan mapping;
  int64_t start = 0;

  // Where the block lies once the plan is carried out and its first slot is `first`.
  Placement PlacementFrom(SlotId first, Granules page_size) const;

  // What to map so that the last new handle has up to so many pages more, behind all that the block
  // needs: the place stays the same. nullopt where something else comes last, the range has no room,
  // or the handle is as large as any.
  std::optional<MappingPlan> MappingAhead(const RangeTable& ranges, uint32_t most_pages) const;
};
GrowthPlan PlanGrowth(FreeView& view, const RangeTable& ranges, Granules page_size, Granules length,
                      Slack slack, Streams streams);

// The whole page to break up for a block below a page: one whose handle has no other page or is in
// use already, else one of the smallest handle; of those, with `takers`, the one that the fewest
// streams may take; of those the one that stands in the fewest ranges, which costs the fewest runs.
std::optional<PageId> WholePageToBreak(const FreeView& view, const RangeTable& ranges,
                                       const TakersOf& takers = {});

}  // namespace cgp
