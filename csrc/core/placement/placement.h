// Decides where a block goes, by the steps in docs/design.md, section 4. Of step 1, free_list.h
// does the best fit of a block below a page. Step 2 is in placement.cc, and steps 3 to 5, what to
// map for the block, in placement_growth.cc.
//
// A block of n = q pages + r gets at least `ideal` whole pages: q, and one more if no *partial*
// holds the remainder r. A partial is the free head or tail of a partly used handle; a tail and a
// head of two handles can do it together. In steps 2 and 3 a block may take one whole page more
// (Slack). That saves mappings, and it wastes the rest of a page, which smaller blocks can use.
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

// Whether a rule of placement applies. All do, except in a test build that takes rules out to
// measure what they are worth: csrc/testing/ablate.py.
#ifdef CGP_RULE_SWITCHES
bool On(const char* rule);
#else
constexpr bool On(const char*) { return true; }
#endif

// How many whole pages more than `ideal` a block may take.
enum class Slack : uint8_t { kNone = 0, kOnePage = 1 };

// How many whole pages [start, start + length) takes; nullopt if the stream of the free list may
// not take all of it. O(words of the virtual pages, and nodes of two pages). pre: start is mapped.
std::optional<uint64_t> WholePagesAt(const FreeList& list, Placement start, Granules length);

// How many streams may take all of a page.
using TakersOf = std::function<uint32_t(PageId)>;

// Step 2: the oldest range where the block fits. With `takers`, equal places differ by how many
// streams may take their pages: the fewest win, so that other streams are left with more. Changes
// nothing but how exact run bounds are.
std::optional<Placement> FindMapped(FreeList& list, Granules length, Slack slack,
                                    const TakersOf& takers = {});

// The whole page to break up for a block below a page. Pages whose handle has no other page, or is
// in use already, come first, then pages of the smallest handle. Among these, with `takers`, the
// page that the fewest streams may take wins, then the one in the fewest ranges, which costs the
// fewest runs.
std::optional<PageId> WholePageToBreak(const FreeList& list, const TakersOf& takers = {});

// --- What to map ---

// The partials that a span of addresses begins and ends with.
struct PartialPair {
  std::optional<PartialHandle> tail;
  std::optional<PartialHandle> head;

  bool is_one() const { return tail.has_value() != head.has_value(); }
  uint64_t length() const { return (tail ? tail->length : 0) + (head ? head->length : 0); }
};

// Where a span of addresses may have a partial. An extension in front of a range begins with a
// tail, one behind it ends with a head, and a new range may have both.
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

// How many tails, the longest that are too short alone, are paired with a head.
inline constexpr int kTailsTried = 16;

// The partials that hold `length` and leave least: one, or a tail and a head of two handles. pre:
// `allowed` passes all handles if ends is kBoth.
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

// The most pages of a new handle in a pool of so many pages. The driver's price is per handle, but
// a handle that lies in the middle of a range is lost as a whole while one page of it is in use. It
// has at most half of `together`, the new pages for one block: else blocks of few pages would break
// larger handles.
uint64_t MostHandlePages(uint64_t pool_pages, uint64_t together);

// How many of the newest ranges are looked at, and how many of their ends, those with most free,
// are tried: enough to choose well in bounded time.
inline constexpr uint32_t kRangesLookedAt = 128;
inline constexpr std::size_t kEndsTried = 16;

// Adds handles of `pages` new pages in all, of at most `most` each.
void AppendNewHandles(uint64_t pages, uint64_t most, std::vector<PageId>& handles);

// What to map so that the block fits, and where it then starts: in granules from the first virtual
// page that the plan maps, or before it if negative.
struct GrowthPlan {
  MappingPlan mapping;
  int64_t start = 0;

  // Where the block lies once the plan is carried out, with `first` its first virtual page.
  Placement PlacementFrom(VirtualPage first, Granules page_size) const;

  // The same plan with up to so many pages more in its last new handle, behind all that the block
  // needs, so that its place stays. nullopt if something else comes last, the range has no room, or
  // the handle is as large as any.
  std::optional<MappingPlan> MappingAhead(const RangeTable& ranges, uint32_t most_pages) const;
};

GrowthPlan PlanGrowth(FreeList& list, Granules length, Slack slack, bool several_streams);

}  // namespace cgp
