// The decision: where a block goes, of the steps in docs/design.md, section 4. Its step 1, the best
// fit of a block below a page, is free_list.h's; step 2 is in placement.cc; what to map so that a
// block fits, steps 3 to 5, in placement_growth.cc.
//
// A block of n = q pages + r is given at least `ideal` whole pages: q, and one more if no partial
// holds the remainder r. A partial is the free head or tail of a handle that is partly used; a tail
// and a head of two handles do together. In steps 2 and 3 it may take one whole page more (Slack):
// that saves mappings, and what it wastes is the rest of a page, which smaller blocks can use.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <set>
#include <vector>

#include "core/base/units.h"
#include "core/memory/free_list.h"
#include "core/memory/range_table.h"

namespace cgp {

// Whether a rule of placement applies. Each does, but in a test build that takes rules out to see
// what they are worth: csrc/testing/ablate.py.
#ifdef CGP_RULE_SWITCHES
bool On(const char* rule);
#else
constexpr bool On(const char*) { return true; }
#endif

// How many whole pages more than `ideal` a block may take.
enum class Slack : uint8_t { kNone = 0, kOnePage = 1 };

// How many whole pages [start, start + length) takes; nullopt unless the free list's stream may
// take all of it. O(words of the virtual pages, and nodes of two pages). pre: start is mapped.
std::optional<uint64_t> WholePagesAt(const FreeList& list, Placement start, Granules length);

// How many streams may take all of a page.
using TakersOf = std::function<uint32_t(PageId)>;

// Step 2: the oldest range where it fits; with `takers`, of equal places the one whose pages the
// fewest streams may take, since the others are left with more. Nothing is changed but the
// exactness of run bounds.
std::optional<Placement> FindMapped(FreeList& list, Granules length, Slack slack,
                                    const TakersOf& takers = {});

// The whole page to break up for a block below a page: one whose handle has no other page or is in
// use already, else one of the smallest handle; of those, with `takers`, the one that the fewest
// streams may take; of those the one that stands in the fewest ranges, which costs the fewest runs.
std::optional<PageId> WholePageToBreak(const FreeList& list, const TakersOf& takers = {});

// --- What to map ---

// Which partials a span of addresses begins and ends with.
struct PartialPair {
  std::optional<PartialHandle> tail;
  std::optional<PartialHandle> head;

  bool is_one() const { return tail.has_value() != head.has_value(); }
  uint64_t length() const { return (tail ? tail->length : 0) + (head ? head->length : 0); }
};

// Where a span of addresses may have a partial: an extension in front of a range begins with a
// tail, one behind it ends with a head, a new range does both.
enum class Ends : uint8_t { kTail, kHead, kBoth };

// The shortest partial of at least `length` whose handle passes `allowed`.
template <typename Allowed>
std::optional<PartialHandle> ShortestPartial(const std::set<PartialHandle>& partials,
                                             uint64_t length, Allowed&& allowed) {
  for (auto it = partials.lower_bound({.length = length}); it != partials.end(); ++it) {
    if (allowed(it->handle)) return *it;
  }
  return std::nullopt;
}

// Of how many tails, the longest that do not hold all, a head is looked for.
inline constexpr int kTailsTried = 16;

// The partials that hold `length` and leave least: one, or a tail and a head of two handles.
// pre: `allowed` passes all handles if ends is kBoth.
template <typename Allowed>
std::optional<PartialPair> ChoosePartials(const FreeHandles& free, uint64_t length, Ends ends,
                                          Allowed&& allowed) {
  if (length == 0) return PartialPair{};
  const auto tail =
      ends == Ends::kHead ? std::nullopt : ShortestPartial(free.tails, length, allowed);
  const auto head =
      ends == Ends::kTail ? std::nullopt : ShortestPartial(free.heads, length, allowed);
  std::optional<PartialPair> best;
  if (tail && (!head || tail->length <= head->length)) {
    best = PartialPair{.tail = tail, .head = {}};
  } else if (head) {
    best = PartialPair{.tail = {}, .head = head};
  }
  if (ends != Ends::kBoth) return best;
  int left = kTailsTried;
  auto shorter = free.tails.lower_bound({.length = length});
  while (shorter != free.tails.begin() && left-- > 0) {
    const PartialHandle first = *--shorter;
    const auto is_other = [&](PageId handle) { return handle != first.handle; };
    const PartialPair pair{.tail = first,
                           .head = ShortestPartial(free.heads, length - first.length, is_other)};
    if (pair.head && (!best || pair.length() < best->length())) best = pair;
  }
  return best;
}

// The most pages that a new handle may have in a pool of so many pages: the driver's price is per
// handle, but what is mapped whole is also lost whole to the middle of a range as long as a page of
// it is in use. And at most half of `together`, the new pages that are made for one block: blocks
// of few pages would break larger ones.
uint64_t MostHandlePages(uint64_t pool_pages, uint64_t together);

// Of how many ranges, the newest, the ends are looked at, and how many of these, those with most
// free, are tried: enough to choose well, and a bound on the time.
inline constexpr uint32_t kRangesLookedAt = 128;
inline constexpr std::size_t kEndsTried = 16;

// Adds handles of so many new pages in all, of `most` each.
void AppendNewHandles(uint64_t pages, uint64_t most, std::vector<PageId>& handles);

// What to map so that the block fits, and where it will then start, in granules from the first
// virtual page that the plan maps; negative if it starts in virtual pages mapped before.
struct GrowthPlan {
  MappingPlan mapping;
  int64_t start = 0;

  // Where the block lies once the plan is carried out and its first virtual page is `first`.
  Placement PlacementFrom(VirtualPage first, Granules page_size) const;

  // What to map so that the last new handle has up to so many pages more, behind all that the block
  // needs: the place stays the same. nullopt where something else comes last, the range has no
  // room, or the handle is as large as any.
  std::optional<MappingPlan> MappingAhead(const RangeTable& ranges, uint32_t most_pages) const;
};

GrowthPlan PlanGrowth(FreeList& list, Granules length, Slack slack, bool several_streams);

}  // namespace cgp
