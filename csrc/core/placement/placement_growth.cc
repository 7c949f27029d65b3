#include <algorithm>

#include "core/placement/placement.h"

namespace cgp {
namespace {

// The most pages of a handle, in a pool of any size.
constexpr uint64_t kMostHandlePages = 64;
static_assert(kMostHandlePages <= MappingPlan::kMaxNewPages);

// The handles that hold a span of granules side by side: the tail of one, existing whole ones, new
// ones, the head of one.
struct HandleSpan {
  std::vector<PageId> handles;
  uint64_t start = 0;  // of the granules, in the first handle
  uint64_t new_pages = 0;
  uint64_t whole = 0;  // whole pages taken, existing or new
};

class GrowthPlanner {
 public:
  GrowthPlanner(FreeList& list, Granules length, Slack slack, bool several_streams)
      : list_(list),
        ranges_(list.ranges()),
        page_(list.page_size().count()),
        length_(length.count()),
        several_streams_(several_streams),
        free_(list.Handles()),
        fresh_(Fill(length_, Ends::kBoth, std::nullopt)),
        most_whole_(fresh_.whole + static_cast<uint64_t>(slack)) {}

  GrowthPlan Plan() {
    const uint64_t longest = LongestPart();
    for (const End& end : FreeEnds()) {
      // The ends that follow have less free, so none of them needs fewer handles.
      const uint64_t least = (length_ - end.reused + longest - 1) / longest;
      if (best_ && least >= best_->mapping.handles.size()) break;
      if (On(end.at_front ? "extend-front" : "extend-back")) ConsiderExtending(end);
    }
    return best_ ? *best_ : StartRange();
  }

 private:
  // An end of a range where the block may go on or begin.
  struct End {
    RangeId range{};
    bool at_front = false;
    uint64_t reused = 0;  // granules of the block that are mapped there
    uint64_t whole = 0;   // whole pages among them
  };

  // Of the newest ranges, the ends with most free. Among equals the newest comes first, and its
  // back before its front.
  std::vector<End> FreeEnds() const {
    std::vector<End> ends;
    uint32_t left = kRangesLookedAt;
    for (uint32_t r = ranges_.range_count(); r-- > 0 && left-- > 0;) {
      for (const bool at_front : {false, true}) {
        const End end = EndOf(RangeId{r}, at_front);
        if (end.reused > 0 && end.reused < length_) ends.push_back(end);
      }
    }
    std::ranges::stable_sort(ends, std::greater(), &End::reused);
    if (ends.size() > kEndsTried) ends.resize(kEndsTried);
    return ends;
  }

  End EndOf(RangeId id, bool at_front) const {
    const RangeTable::Range& range = ranges_.range(id);
    const uint32_t vpages = list_.FreeAtEnd(id, at_front);
    uint64_t reused = vpages * page_;
    if (vpages < range.mapped()) {
      const Granules partial = at_front ? list_.Head(ranges_.page_at(range.begin() + vpages))
                                        : list_.Tail(ranges_.page_at(range.end() - 1 - vpages));
      reused += partial.count();
    }
    if (reused < length_) return {id, at_front, reused, reused / page_};
    // There is room enough, but FindMapped() refused a whole page for the remainder: a partial gets
    // it.
    return {id, at_front, length_ / page_ * page_, length_ / page_};
  }

  // What to map for `length` granules that the range does not show. Free whole handles are taken as
  // far as they fit, largest first. The rest goes to partials, else to a part of a whole handle,
  // else to new pages: as few as possible, with the partials that allow so few.
  HandleSpan Fill(uint64_t length, Ends ends, std::optional<RangeId> range) const {
    HandleSpan span;
    const auto allowed = [&](PageId handle) { return !range || !ranges_.Shows(*range, handle); };
    uint64_t rest = length;
    const std::set<WholeHandle>& wholes = free_.wholes;
    for (auto it = wholes.begin(); it != wholes.end() && rest > 0;) {
      const auto [pages, handle] = *it;
      if (rest < pages * page_) {
        it = wholes.lower_bound({.pages = rest / page_});
        continue;
      }
      ++it;
      if (!allowed(handle)) continue;
      span.handles.push_back(handle);
      span.whole += pages;
      rest -= pages * page_;
    }
    std::optional<PartialPair> partials = ChoosePartials(free_, rest, ends, allowed);
    const auto longer = partials ? std::nullopt : SmallestLeft(span.handles, allowed);
    if (longer) {
      const auto [pages, handle] = *longer;
      if (pages == PagesFor(rest)) {
        span.handles.push_back(handle);
        span.whole += pages;
        rest = 0;
        partials = PartialPair{};
      } else {
        const PartialHandle partial{.length = pages * page_, .handle = handle};
        partials = ends == Ends::kTail ? PartialPair{.tail = partial, .head = {}}
                                       : PartialPair{.tail = {}, .head = partial};
      }
    }
    if (!partials && rest > LongestPair()) {
      span.new_pages = (rest - LongestPair()) / page_;
      rest -= span.new_pages * page_;
      partials = ChoosePartials(free_, rest, ends, allowed);
    }
    while (!partials) {
      ++span.new_pages;
      rest -= std::min(rest, page_);
      partials = ChoosePartials(free_, rest, ends, allowed);
    }
    span.whole += span.new_pages;
    AppendNewHandles(span.new_pages, MostNewPages(span.new_pages), span.handles);
    TakePartials(*partials, rest, span);
    return span;
  }

  // The smallest whole handle that is not taken. It is longer than the rest to fill, since handles
  // were taken largest first.
  template <typename Allowed>
  std::optional<WholeHandle> SmallestLeft(const std::vector<PageId>& taken,
                                          Allowed&& allowed) const {
    auto last_taken = taken.rbegin();
    for (auto it = free_.wholes.rbegin(); it != free_.wholes.rend(); ++it) {
      if (last_taken != taken.rend() && *last_taken == it->handle) {
        ++last_taken;
      } else if (allowed(it->handle)) {
        return *it;
      }
    }
    return std::nullopt;
  }

  // A single partial is taken whole: its surplus is then left over at the block's other end, where
  // it is a partial again. Inside a page no large block could use it.
  void TakePartials(const PartialPair& partials, uint64_t rest, HandleSpan& span) const {
    const uint64_t spare = partials.length() - rest;
    const uint64_t shift = partials.is_one() && spare < page_ ? spare : 0;
    if (partials.tail) {
      const auto [length, handle] = *partials.tail;
      const uint64_t taken = std::min(rest, length);
      span.start = ranges_.handle_pages(handle) * page_ - taken - shift;
      span.whole += std::min(length / page_, PagesFor(taken));
      span.handles.insert(span.handles.begin(), handle);
      rest -= taken;
    }
    if (partials.head) {
      span.start += shift;
      span.whole += std::min(partials.head->length / page_, PagesFor(rest));
      span.handles.push_back(partials.head->handle);
    }
  }

  uint64_t PagesFor(uint64_t granules) const { return (granules + page_ - 1) / page_; }

  // An upper limit on the length of two partials.
  uint64_t LongestPair() const {
    const auto longest = [](const std::set<PartialHandle>& partials) {
      return partials.empty() ? 0 : partials.rbegin()->length;
    };
    return longest(free_.tails) + longest(free_.heads);
  }

  // An upper limit on what one handle holds of the block.
  uint64_t LongestPart() const {
    const std::set<WholeHandle>& wholes = free_.wholes;
    const uint64_t whole = wholes.empty() ? 0 : wholes.begin()->pages;
    return std::max(LongestPair(), std::max(whole, MostNewPages(PagesFor(length_))) * page_);
  }

  // The most pages of a new handle, from the pool's size and, with one stream, from the block's.
  uint64_t MostNewPages(uint64_t pages) const {
    const uint64_t pool_pages = ranges_.page_count() + pages;
    return MostHandlePages(pool_pages, several_streams_ ? pool_pages : pages);
  }

  // Among equals the end that was considered first wins.
  void ConsiderExtending(const End& end) {
    const RangeTable::Range& range = ranges_.range(end.range);
    const uint64_t missing = length_ - end.reused;
    HandleSpan span = Fill(missing, end.at_front ? Ends::kTail : Ends::kHead, end.range);
    if (best_ && span.handles.size() >= best_->mapping.handles.size()) return;
    if (end.whole + span.whole > most_whole_) return;
    // New pages are made only where a new range would have to make as many.
    if (span.new_pages > fresh_.new_pages) return;
    GrowthPlan plan{
        {.range = end.range, .at_front = end.at_front, .handles = std::move(span.handles)}};
    const uint64_t pages = ranges_.PagesOf(plan.mapping);
    if (pages > (end.at_front ? range.room_front : range.room_back)) return;
    plan.start = end.at_front ? static_cast<int64_t>(pages * page_) - static_cast<int64_t>(missing)
                              : -static_cast<int64_t>(end.reused);
    best_ = std::move(plan);
  }

  // Pages for blocks that share them stand side by side.
  GrowthPlan StartRange() const {
    GrowthPlan plan{{.range = {}, .handles = fresh_.handles}, static_cast<int64_t>(fresh_.start)};
    if (length_ < page_ && std::ranges::all_of(plan.mapping.handles, MappingPlan::IsNew)) {
      plan.mapping.range = ranges_.NewestWithRoom(static_cast<uint32_t>(fresh_.new_pages));
    }
    return plan;
  }

  FreeList& list_;
  const RangeTable& ranges_;
  const uint64_t page_;    // in granules
  const uint64_t length_;  // in granules
  const bool several_streams_;
  const FreeHandles& free_;
  const HandleSpan fresh_;  // a new range
  const uint64_t most_whole_;
  std::optional<GrowthPlan> best_;
};

}  // namespace

uint64_t MostHandlePages(uint64_t pool_pages, uint64_t together) {
  constexpr uint64_t kPartOfPool = 56;
  const uint64_t of_pool = std::min(pool_pages / kPartOfPool, kMostHandlePages);
  if (!On("large-handles")) return 1;
  return std::max<uint64_t>(1, std::min(of_pool, (together + 1) / 2));
}

// As few handles as possible, of about one size, so that blocks of one size can take each other's.
void AppendNewHandles(uint64_t pages, uint64_t most, std::vector<PageId>& handles) {
  while (pages > 0) {
    const uint64_t count = (pages + most - 1) / most;
    const uint64_t size = (pages + count - 1) / count;
    handles.push_back(MappingPlan::NewHandle(static_cast<uint32_t>(size)));
    pages -= size;
  }
}

Placement GrowthPlan::PlacementFrom(VirtualPage first, Granules page_size) const {
  const auto before = static_cast<int64_t>(Index(first) * page_size.count());
  return Placement::OfGranule(static_cast<uint64_t>(before + start), page_size);
}

std::optional<MappingPlan> GrowthPlan::MappingAhead(const RangeTable& ranges,
                                                    uint32_t most_pages) const {
  if (mapping.at_front || !MappingPlan::IsNew(mapping.handles.back())) return std::nullopt;
  const uint32_t pages = MappingPlan::NewPages(mapping.handles.back());
  const uint32_t most = kMostHandlePages;
  const uint32_t more = std::min(most_pages, most - std::min(most, pages));
  if (more == 0) return std::nullopt;
  if (mapping.range && ranges.PagesOf(mapping) + more > ranges.range(*mapping.range).room_back)
    return std::nullopt;
  MappingPlan ahead = mapping;
  ahead.handles.back() = MappingPlan::NewHandle(pages + more);
  return ahead;
}

GrowthPlan PlanGrowth(FreeList& list, Granules length, Slack slack, bool several_streams) {
  return GrowthPlanner(list, length, slack, several_streams).Plan();
}

}  // namespace cgp
