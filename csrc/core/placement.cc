#include "core/placement.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "core/error.h"

namespace cgp {
namespace {

// How many ranges a search may look at for a run whose edges hold the remainder, before it settles
// for one whole page more, which every range with a long enough run has. Keeps the search from
// looking at all ranges.
constexpr int kEdgeSearches = 64;

// A free page head or tail.
struct Edge {
  uint32_t length = 0;
  PageId page{};
  bool operator<(const Edge& other) const { return length < other.length; }
};

// The free heads and tails of partly used pages, shortest first.
struct Edges {
  std::vector<Edge> heads;
  std::vector<Edge> tails;
};

Edges CollectEdges(const FreeView& view) {
  Edges edges;
  for (auto page = view.NextPartial(PageId{0}); page;
       page = view.NextPartial(PageId{Index(*page) + 1})) {
    const auto head = static_cast<uint32_t>(view.Head(*page).count());
    const auto tail = static_cast<uint32_t>(view.Tail(*page).count());
    if (head > 0) edges.heads.push_back({head, *page});
    if (tail > 0) edges.tails.push_back({tail, *page});
  }
  std::stable_sort(edges.heads.begin(), edges.heads.end());
  std::stable_sort(edges.tails.begin(), edges.tails.end());
  return edges;
}

// The shortest edge of at least `length` whose page passes `allowed`.
template <typename Allowed>
std::optional<PageId> ShortestEdge(const std::vector<Edge>& edges, uint64_t length,
                                   Allowed&& allowed) {
  auto it =
      std::lower_bound(edges.begin(), edges.end(), Edge{static_cast<uint32_t>(length), PageId{}});
  for (; it != edges.end(); ++it) {
    if (allowed(it->page)) return it->page;
  }
  return std::nullopt;
}

// Which edges a block's remainder may go to: one, or a tail and a head of two pages together.
struct EdgePair {
  std::optional<PageId> tail;
  std::optional<PageId> head;
  uint64_t tail_length = 0;  // granules the block takes of the tail

  bool any() const { return tail || head; }
};

EdgePair ChooseEdges(const Edges& edges, uint64_t remainder) {
  if (remainder == 0) return {};
  const Edge wanted{static_cast<uint32_t>(remainder), PageId{}};
  const auto tail = std::lower_bound(edges.tails.begin(), edges.tails.end(), wanted);
  const auto head = std::lower_bound(edges.heads.begin(), edges.heads.end(), wanted);
  const bool has_tail = tail != edges.tails.end();
  const bool has_head = head != edges.heads.end();
  if (has_tail && (!has_head || tail->length <= head->length)) {
    return {.tail = tail->page, .head = {}, .tail_length = remainder};
  }
  if (has_head) return {.tail = {}, .head = head->page};
  // The longest of each, or the longest but one of either where both are of one page.
  const auto try_pair = [&](std::size_t t, std::size_t h) -> std::optional<EdgePair> {
    if (t >= edges.tails.size() || h >= edges.heads.size()) return std::nullopt;
    const Edge& a = edges.tails[edges.tails.size() - 1 - t];
    const Edge& b = edges.heads[edges.heads.size() - 1 - h];
    if (a.page == b.page || uint64_t{a.length} + b.length < remainder) return std::nullopt;
    return EdgePair{.tail = a.page, .head = b.page, .tail_length = a.length};
  };
  for (const auto& [t, h] : {std::pair{0, 0}, std::pair{0, 1}, std::pair{1, 0}}) {
    const auto pair = try_pair(static_cast<std::size_t>(t), static_cast<std::size_t>(h));
    if (pair) return *pair;
  }
  return {};
}

class GrowthPlanner {
 public:
  GrowthPlanner(const FreeView& view, const RangeTable& ranges, Granules page_size, Granules length,
                Slack slack)
      : view_(view),
        ranges_(ranges),
        page_(page_size.count()),
        length_(length.count()),
        edges_(CollectEdges(view)),
        chosen_(ChooseEdges(edges_, length_ % page_)),
        ideal_(length_ / page_ + (length_ % page_ != 0 && !chosen_.any() ? 1 : 0)),
        most_whole_(ideal_ + static_cast<uint64_t>(slack)) {}

  GrowthPlan Plan() {
    for (uint32_t r = ranges_.range_count(); r-- > 0;) {
      ConsiderExtending(RangeId{r}, /*at_front=*/false);
      ConsiderExtending(RangeId{r}, /*at_front=*/true);
    }
    return best_.cost != kNone ? Extend() : StartRange();
  }

 private:
  static constexpr uint64_t kNone = ~uint64_t{0};

  // Extending a range at one end.
  struct Extension {
    uint64_t cost = kNone;  // pages to map
    uint64_t reused = 0;    // granules of the block in slots mapped before
    uint64_t whole = 0;     // whole pages to map, existing or new
    std::optional<PageId> edge;
    RangeId range{};
    bool at_front = false;
  };

  void ConsiderExtending(RangeId id, bool at_front) {
    const RangeTable::Range& range = ranges_.range(id);
    const RunIndex& runs = view_.runs();
    const uint64_t free_slots = at_front ? runs.FreeAtFront(id) : runs.FreeAtBack(id);
    uint64_t edge = 0;  // free granules next to these slots
    if (free_slots < range.mapped()) {
      const auto distance = static_cast<uint32_t>(free_slots);
      edge = at_front
                 ? view_.Head(ranges_.page_at(SlotId{Index(range.begin()) + distance})).count()
                 : view_.Tail(ranges_.page_at(SlotId{Index(range.end()) - 1 - distance})).count();
    }
    ConsiderReusing(id, at_front, free_slots, edge);
  }

  // As above, with the block reaching `edge` granules into the page next to the free slots.
  void ConsiderReusing(RangeId id, bool at_front, uint64_t free_slots, uint64_t edge) {
    uint64_t reused = free_slots * page_ + edge;
    if (reused >= length_) {
      // Room enough, but FindMapped() refused a whole page for the remainder: that goes to an edge.
      free_slots = length_ / page_;
      reused = free_slots * page_;
    }
    if (reused == 0 || reused >= length_) return;
    const uint64_t missing = length_ - reused;
    Extension extension{.reused = reused,
                        .whole = (missing + page_ - 1) / page_,
                        .edge = {},
                        .range = id,
                        .at_front = at_front};
    extension.cost = extension.whole;
    if (extension.cost > best_.cost) return;
    if (missing % page_ != 0) {
      extension.edge = ShortestEdge(at_front ? edges_.tails : edges_.heads, missing % page_,
                                    [&](PageId page) { return !ranges_.Shows(id, page); });
      if (extension.edge) --extension.whole;
    }
    if (free_slots + extension.whole > most_whole_) return;
    const RangeTable::Range& range = ranges_.range(id);
    if (extension.cost > (at_front ? range.room_front : range.room_back)) return;

    const uint64_t available = view_.whole_page_count() - view_.runs().FreeSlots(id);
    if (available < extension.whole) {
      // New pages are made only where even the ideal placement would have to make as many.
      const uint64_t whole = view_.whole_page_count();
      if (whole >= ideal_ || extension.whole - available > ideal_ - whole) return;
    }
    if (extension.cost < best_.cost || extension.reused > best_.reused) best_ = extension;
  }

  GrowthPlan Extend() const {
    GrowthPlan plan;
    plan.mapping.range = best_.range;
    plan.mapping.at_front = best_.at_front;
    if (best_.at_front && best_.edge) plan.mapping.pages.push_back(*best_.edge);
    AppendWholePages(best_.whole, plan.mapping);
    if (!best_.at_front && best_.edge) plan.mapping.pages.push_back(*best_.edge);
    const auto mapped = static_cast<int64_t>(plan.mapping.pages.size() * page_);
    const auto reused = static_cast<int64_t>(best_.reused);
    plan.start = best_.at_front ? mapped + reused - static_cast<int64_t>(length_) : -reused;
    return plan;
  }

  GrowthPlan StartRange() const {
    GrowthPlan plan;
    if (chosen_.tail) {
      plan.mapping.pages.push_back(*chosen_.tail);
      plan.start = static_cast<int64_t>(page_ - chosen_.tail_length);
    }
    const uint64_t rest = length_ - chosen_.tail_length;
    AppendWholePages(chosen_.head ? rest / page_ : (rest + page_ - 1) / page_, plan.mapping);
    if (chosen_.head) plan.mapping.pages.push_back(*chosen_.head);
    return plan;
  }

  // Whole pages that the range does not show yet, then new ones.
  void AppendWholePages(uint64_t count, MappingPlan& plan) const {
    for (auto page = view_.NextWhole(PageId{0}); page && count > 0;
         page = view_.NextWhole(PageId{Index(*page) + 1})) {
      if (plan.range && ranges_.Shows(*plan.range, *page)) continue;
      plan.pages.push_back(*page);
      --count;
    }
    plan.pages.insert(plan.pages.end(), count, MappingPlan::kNewPage);
  }

  const FreeView& view_;
  const RangeTable& ranges_;
  const uint64_t page_;    // in granules
  const uint64_t length_;  // in granules
  const Edges edges_;
  const EdgePair chosen_;
  const uint64_t ideal_;
  const uint64_t most_whole_;
  Extension best_;
};

// Where in the range a block takes the fewest whole pages, and at most `most_whole`.
std::optional<Placement> FindInRange(FreeView& view, const RangeTable& ranges, uint64_t page,
                                     uint64_t length, RangeId id, uint64_t most_whole) {
  const RangeTable::Range& range = ranges.range(id);
  uint64_t fewest = most_whole;
  std::optional<uint64_t> best;  // in granules, counted through all slots
  for (const FreeRun& run : view.runs().Runs(id)) {
    if (run.length < length / page) continue;
    const uint64_t first = Index(run.begin) * page;
    const uint64_t last = Index(run.end()) * page;
    uint64_t low = first;
    if (run.begin != range.begin())
      low -= view.Tail(ranges.page_at(SlotId{Index(run.begin) - 1})).count();
    uint64_t high = last;
    if (run.end() != range.end()) high += view.Head(ranges.page_at(run.end())).count();
    if (high - low < length) continue;
    // From the edge before the run, up to the edge behind it, or from the run's first page:
    // whichever takes the fewest whole pages; the last of equals, since it leaves the edges to
    // blocks that need them.
    for (const uint64_t start : {low, high - length, std::min(first, high - length)}) {
      const uint64_t whole =
          (std::min(start + length, last) + page - 1) / page - std::max(start, first) / page;
      if (whole > fewest) continue;
      fewest = whole;
      best = start;
    }
  }
  if (!best) return std::nullopt;
  return Placement{SlotId(static_cast<uint32_t>(*best / page)), Granules(*best % page)};
}

}  // namespace

bool FitsAt(const FreeView& view, const RangeTable& ranges, Granules page_size, Placement start,
            Granules length) {
  const RangeTable::Range& range = ranges.range(ranges.range_of(start.slot));
  Granules offset = start.offset;
  for (SlotId slot = start.slot; length > Granules(0); slot = SlotId{Index(slot) + 1}) {
    if (slot >= range.end()) return false;
    const PageId page = ranges.page_at(slot);
    const Granules piece = std::min(length, page_size - offset);
    const bool free = view.IsWhole(page) ||
                      (offset > Granules(0) ? view.Tail(page) >= piece : view.Head(page) >= piece);
    if (!free) return false;
    length -= piece;
    offset = Granules(0);
  }
  return true;
}

std::optional<Placement> FindMapped(FreeView& view, const RangeTable& ranges, Granules page_size,
                                    Granules length, Slack slack) {
  const uint64_t page = page_size.count();
  const auto whole_pages = static_cast<uint32_t>(length / page_size);
  const uint64_t remainder = (length % page_size).count();
  uint64_t most_whole = whole_pages + (remainder != 0 ? 1 : 0);
  if (remainder != 0 && slack == Slack::kNone && ChooseEdges(CollectEdges(view), remainder).any())
    --most_whole;

  uint32_t threshold = whole_pages;
  int searches_left = kEdgeSearches;
  RangeId before{ranges.range_count()};
  for (;;) {
    const std::optional<RangeId> id = view.runs().NewestMayHold(threshold, before);
    if (!id) return std::nullopt;
    if (const auto place = FindInRange(view, ranges, page, length.count(), *id, most_whole))
      return place;
    before = *id;
    if (remainder != 0 && --searches_left == 0) {
      if (most_whole == whole_pages) return std::nullopt;
      threshold = whole_pages + 1;
    }
  }
}

Placement GrowthPlan::PlacementFrom(SlotId first, Granules page_size) const {
  const auto page = static_cast<int64_t>(page_size.count());
  const int64_t granule = static_cast<int64_t>(Index(first)) * page + start;
  return {SlotId(static_cast<uint32_t>(granule / page)),
          Granules(static_cast<uint64_t>(granule % page))};
}

GrowthPlan PlanGrowth(const FreeView& view, const RangeTable& ranges, Granules page_size,
                      Granules length, Slack slack) {
  return GrowthPlanner(view, ranges, page_size, length, slack).Plan();
}

std::optional<PageId> LeastMappedWholePage(const FreeView& view, const RangeTable& ranges) {
  constexpr int kPagesLookedAt = 64;  // enough to choose well, and a bound on the time
  std::optional<PageId> best;
  int left = kPagesLookedAt;
  for (auto page = view.NextWhole(PageId{0}); page && left > 0;
       page = view.NextWhole(PageId{Index(*page) + 1}), --left) {
    if (!best || ranges.slots_of(*page).size() < ranges.slots_of(*best).size()) best = page;
  }
  return best;
}

}  // namespace cgp
