// What to map so that a block fits: steps 3 and 4 of placement.h.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/base/units.h"
#include "core/memory/free_view.h"
#include "core/memory/range_table.h"
#include "core/placement/placement.h"

namespace cgp {

// How many streams allocate in the capture.
enum class Streams : uint8_t { kOne, kSeveral };

// The most pages that a new handle may have in a pool of so many pages: the driver's price is per
// handle, but what is mapped whole is also lost whole to the middle of a range as long as a page of
// it is in use. And at most half of `together`, the new pages that are made for one block: blocks of
// few pages would break larger ones.
uint64_t MostHandlePages(uint64_t pool_pages, uint64_t together);

// Of how many ranges, the newest, the ends are looked at, and how many of these, those with most
// free, are tried: enough to choose well, and a bound on the time.
inline constexpr uint32_t kRangesLookedAt = 128;
inline constexpr std::size_t kEndsTried = 16;

// Adds handles of so many new pages in all, of `most` each.
void AppendNewHandles(uint64_t pages, uint64_t most, std::vector<PageId>& handles);

// What to map so that the block fits, and where it will then start, in granules from the first slot
// that the plan maps; negative if it starts in slots mapped before.
struct GrowthPlan {
  MappingPlan mapping;
  int64_t start = 0;

  // Where the block lies once the plan is carried out and its first slot is `first`.
  Placement PlacementFrom(SlotId first, Granules page_size) const;

  // What to map so that the last new handle has up to so many pages more, behind all that the block
  // needs: the place stays the same. nullopt where something else comes last, the range has no
  // room, or the handle is as large as any.
  std::optional<MappingPlan> MappingAhead(const RangeTable& ranges, uint32_t most_pages) const;
};

GrowthPlan PlanGrowth(FreeView& view, Granules length, Slack slack, Streams streams);

}  // namespace cgp
