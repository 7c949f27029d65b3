#include "core/placement/placement.h"

#include <algorithm>
#include <array>
#include <tuple>

namespace cgp {
namespace {

// How many ranges a search looks at for a run whose partials hold the remainder. Then it settles
// for one whole page more, which every range with a long enough run has. This bounds the time.
constexpr int kPartialSearches = 64;

// If one stream has more partials than this, blocks begin in those in front of a run: else what is
// left of last pages adds up to many pages.
constexpr std::size_t kManyPartials = 12;

// In how many ranges a block looks for the place that other streams can use least.
constexpr int kRangesForTakers = 8;

// Where in a run a block may go, and what it costs there.
struct Choice {
  uint64_t start = 0;   // in granules, counted through all virtual pages
  uint64_t whole = 0;   // whole pages taken
  uint64_t takers = 0;  // of these, summed

  bool BetterThan(const Choice& other) const {
    return std::tuple(whole, takers) < std::tuple(other.whole, other.takers);
  }
};

// The best choice in the range, of at most `most_whole` whole pages. Among equals, `in_partial`
// prefers one that begins in a partial.
std::optional<Choice> ChooseInRange(FreeList& list, uint64_t length, RangeId id,
                                    uint64_t most_whole, bool in_partial, const TakersOf& takers) {
  const RangeTable& ranges = list.ranges();
  const uint64_t page = list.page_size().count();
  const RangeTable::Range& range = ranges.range(id);
  std::optional<Choice> best;
  for (const FreeRun& run : list.Runs(id)) {
    if (run.length < length / page) continue;
    const uint64_t first = Index(run.begin) * page;
    const uint64_t last = Index(run.end()) * page;
    uint64_t low = first;
    if (run.begin != range.begin()) low -= list.Tail(ranges.page_at(run.begin - 1)).count();
    uint64_t high = last;
    if (run.end() != range.end()) high += list.Head(ranges.page_at(run.end())).count();
    if (high - low < length) continue;
    const auto behind = [&](uint64_t end) { return (std::min(end, last) + page - 1) / page; };
    const auto consider = [&](uint64_t start) {
      if (start < low || start > high - length) return;
      const uint64_t end = start + length;
      Choice choice{.start = start};
      choice.whole = behind(end) - std::max(start, first) / page;
      if (choice.whole > most_whole) return;
      for (uint64_t vpage = std::max(start, first) / page; takers && vpage < behind(end); ++vpage) {
        choice.takers += takers(ranges.page_at(VirtualPage{static_cast<uint32_t>(vpage)}));
      }
      if (!best || !best->BetterThan(choice)) best = choice;
    };
    // Starts in the partial before the run, ends in the partial behind it, or starts at the run's
    // first page. The last wins among equals: it leaves partials to blocks that need them.
    std::array starts{low, high - length, std::min(first, high - length)};
    if (in_partial) std::ranges::reverse(starts);
    for (const uint64_t start : starts) consider(start);
  }
  return best;
}

}  // namespace

std::optional<uint64_t> WholePagesAt(const FreeList& list, Placement start, Granules length) {
  // A part of a first page, full pages, and a part of a last page.
  const RangeTable& ranges = list.ranges();
  const uint64_t page = list.page_size().count();
  const uint64_t offset = start.offset;
  const uint64_t head = offset > 0 ? std::min(length.count(), page - offset) : 0;
  const uint64_t full = (length.count() - head) / page;
  const uint64_t tail = (length.count() - head) % page;
  const uint64_t first_full = Index(start.vpage) + (head > 0 ? 1 : 0);
  const uint64_t behind_full = first_full + full;
  const RangeTable::Range& range = ranges.range(ranges.range_of(start.vpage));
  if (behind_full + (tail > 0 ? 1 : 0) > Index(range.end())) return std::nullopt;

  const auto vpage = [](uint64_t index) { return VirtualPage{static_cast<uint32_t>(index)}; };
  if (!list.AllFree(vpage(first_full), vpage(behind_full))) return std::nullopt;
  uint64_t whole = full;
  const auto take_part = [&](VirtualPage of, uint64_t from, uint64_t part) {
    if (part == 0) return true;
    const PageId id = ranges.page_at(of);
    whole += list.IsWhole(id) ? 1 : 0;
    return list.IsFree(id, Granules(from), Granules(part));
  };
  if (!take_part(start.vpage, offset, head) || !take_part(vpage(behind_full), 0, tail))
    return std::nullopt;
  return whole;
}

std::optional<Placement> FindMapped(FreeList& list, Granules length, Slack slack,
                                    const TakersOf& takers) {
  const auto many_partials = [&] {
    const FreeHandles& handles = list.Handles();
    return handles.heads.size() + handles.tails.size() > kManyPartials;
  };
  // Asking brings the handles up to date, so blocks that need no answer do not ask.
  const bool in_partial =
      length < list.page_size() || (!takers && On("partial") && many_partials());
  const auto whole_pages = static_cast<uint32_t>(length / list.page_size());
  const uint64_t remainder = (length % list.page_size()).count();
  uint64_t most_whole = whole_pages + (remainder != 0 ? 1 : 0);
  if (remainder != 0 && slack == Slack::kNone &&
      ChoosePartials(list.Handles(), remainder, Ends::kBoth, [](PageId) { return true; }))
    --most_whole;

  uint32_t threshold = whole_pages;
  int searches_left = kPartialSearches;
  RangeId from{0};
  int ranges_left = takers ? kRangesForTakers : 0;
  std::optional<Choice> best;
  while (!best || ranges_left > 0) {
    --ranges_left;
    const std::optional<RangeId> id = list.OldestMayHold(threshold, from);
    if (!id) break;
    const auto choice = ChooseInRange(list, length.count(), *id, most_whole, in_partial, takers);
    if (choice && (!best || choice->BetterThan(*best))) best = choice;
    from = *id + 1;
    if (remainder != 0 && --searches_left == 0) {
      if (most_whole == whole_pages) break;
      threshold = whole_pages + 1;
    }
  }
  if (!best) return std::nullopt;
  return Placement::OfGranule(best->start, list.page_size());
}

std::optional<PageId> WholePageToBreak(const FreeList& list, const TakersOf& takers) {
  const RangeTable& ranges = list.ranges();
  constexpr int kPagesLookedAt = 64;  // enough to choose well, and a bound on the time
  std::optional<PageId> best;
  std::tuple<uint32_t, uint32_t, std::size_t> least;
  int left = kPagesLookedAt;
  for (auto page = list.NextWhole(PageId{0}); page && left > 0; --left) {
    const PageId end = ranges.handle_end(*page);
    const uint32_t pages = ranges.handle_pages(*page);
    const bool breaks = pages > 1 && list.AreWhole(ranges.handle_begin(*page), end);
    const std::tuple harm{breaks ? pages : 0, takers ? takers(*page) : 0,
                          ranges.vpages_of(*page).size()};
    if (!best || harm < least) {
      best = page;
      least = harm;
    }
    page = list.NextWhole(breaks ? end : *page + 1);
  }
  return best;
}

}  // namespace cgp
