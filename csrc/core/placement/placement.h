// The decision: where a block goes. One below a page lies in a best fit, which free_view.h finds
// alone; where there is none it may take the steps below (placer.cc).
//
// A block of n = q pages + r is given at least `ideal` whole pages: q, and one more if no edge
// holds the remainder r. An edge is the free head or tail of a handle that is partly used; a tail
// and a head of two handles do together. The block goes, in this order (design: edge stitching):
//
//  1. to where its like lay in an earlier scope, or a block of as many pages earlier in this one
//     (known_places.h): nothing to map.
//  2. to the oldest range where it fits, as far as it can at the end of a free run: nothing to map.
//     Oldest first, because then new ranges stay whole for what only they can hold.
//  3. to the free front or back of a range, which is extended there: of all ranges the one that
//     needs the fewest new mappings, as long as it costs no new page that 4 would not.
//  4. to a new range: the free tail of a handle, wholly free handles, largest first, the free head
//     of a handle. The rest of those two handles stays in use by others.
//
// In 2 and 3 it may take one whole page more than `ideal` (Slack): that saves mappings, and what it
// wastes is the rest of a page, which smaller blocks can use. The driver is asked for new pages
// only where 3 and 4 find too few. They come in handles as large as suits the pool, since the
// driver's price is per handle.
//
// What each of these rules saves and costs stands in docs/ablation.md.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "core/base/units.h"
#include "core/memory/free_view.h"

namespace cgp {

// Where a block starts: `offset` granules into the slot; it goes on through the slots that follow.
struct Placement {
  SlotId slot{};
  Granules offset;

  bool operator==(const Placement&) const = default;
};

// How many whole pages more than `ideal` a block may take.
enum class Slack : uint8_t { kNone = 0, kOnePage = 1 };

// How many whole pages [start, start + length) takes; nullopt unless the view's stream may take all
// of it. O(words of the slots, and nodes of two pages). pre: start is mapped.
std::optional<uint64_t> WholePagesAt(const FreeView& view, Placement start, Granules length);

// Step 1: whether the view's stream may take all of [start, start + length), and that takes no more
// whole pages than hold so many granules.
bool FitsWithoutWaste(const FreeView& view, Placement start, Granules length);

// How many streams may take all of a page.
using TakersOf = std::function<uint32_t(PageId)>;

// Step 2; with `takers`, of equal places the one whose pages the fewest streams may take, since the
// others are left with more. Nothing is changed but the exactness of run bounds.
std::optional<Placement> FindMapped(FreeView& view, Granules length, Slack slack,
                                    const TakersOf& takers = {});

// The same in one range, of at most so many whole pages.
std::optional<Placement> FindInRange(FreeView& view, Granules length, RangeId range,
                                     uint64_t most_whole);

// What the stream may take at the end of a range.
Granules FreeAtBack(const FreeView& view, RangeId range);

// The whole page to break up for a block below a page: one whose handle has no other page or is in
// use already, else one of the smallest handle; of those, with `takers`, the one that the fewest
// streams may take; of those the one that stands in the fewest ranges, which costs the fewest runs.
std::optional<PageId> WholePageToBreak(const FreeView& view, const TakersOf& takers = {});

}  // namespace cgp
