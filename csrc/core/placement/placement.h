// The decision: where a block goes, of the steps in docs/design.md, section 4. Its step 1, the best
// fit of a block below a page, is free_view.h's, and 3 to 5 are growth.h's.
//
// A block of n = q pages + r is given at least `ideal` whole pages: q, and one more if no edge
// holds the remainder r. An edge is the free head or tail of a handle that is partly used; a tail
// and a head of two handles do together. In steps 2 and 3 it may take one whole page more (Slack):
// that saves mappings, and what it wastes is the rest of a page, which smaller blocks can use.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>

#include "core/base/units.h"
#include "core/memory/free_view.h"

namespace cgp {

// How many whole pages more than `ideal` a block may take.
enum class Slack : uint8_t { kNone = 0, kOnePage = 1 };

// How many whole pages [start, start + length) takes; nullopt unless the view's stream may take all
// of it. O(words of the slots, and nodes of two pages). pre: start is mapped.
std::optional<uint64_t> WholePagesAt(const FreeView& view, Placement start, Granules length);

// How many streams may take all of a page.
using TakersOf = std::function<uint32_t(PageId)>;

// Step 2: the oldest range where it fits; with `takers`, of equal places the one whose pages the
// fewest streams may take, since the others are left with more. Nothing is changed but the exactness
// of run bounds.
std::optional<Placement> FindMapped(FreeView& view, Granules length, Slack slack,
                                    const TakersOf& takers = {});

// What the stream may take at an end of a range.
Granules FreeAtEnd(FreeView& view, RangeId range, bool at_front);

// The whole page to break up for a block below a page: one whose handle has no other page or is in
// use already, else one of the smallest handle; of those, with `takers`, the one that the fewest
// streams may take; of those the one that stands in the fewest ranges, which costs the fewest runs.
std::optional<PageId> WholePageToBreak(const FreeView& view, const TakersOf& takers = {});

}  // namespace cgp
