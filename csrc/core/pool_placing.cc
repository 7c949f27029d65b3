// Where a block goes, and what is mapped for it.
#include <algorithm>
#include <optional>

#include "core/error.h"
#include "core/pool_state.h"

namespace cgp {
namespace {

// Pools of fewer pages than this place what lives at the peak without slack: a page they waste is
// more than 0.1 % of them. In larger pools it is not worth the mappings.
constexpr uint32_t kExactPages = 1000;

// What brings a pool within this part of the most that ever lived in it is placed as at the peak.
constexpr uint64_t kPartOfPeak = 4;

// A pool that several streams make grow is given up to this part of its pages ahead of need, once
// that is more than one: the driver's price is per handle, and blocks of a few pages each would have
// it grow by a few pages each. What the pool holds in vain when it stops growing is no more than
// that. (In a simulation of 24 programs of several streams that need some 1,600 pages each it saved
// two fifths of the mappings, and cost 0.6 % of memory.)
constexpr uint32_t kPartAhead = 128;

bool IsExhausted(const DriverError& error) {
  return error.status() == DriverStatus::kOutOfMemory ||
         error.status() == DriverStatus::kOutOfAddresses;
}

}  // namespace

Foresight::Advice Pool::State::Advise(uint64_t bytes, const FreeView& view) {
  const auto for_each = [this](const Foresight::PieceFunction& add) {
    blocks.ForEach([&](Address, const LiveBlock& block) {
      ForEachPiece(block, [&](PageId page, Granules offset, Granules length) {
        add(page, offset, length, block.ticket);
      });
    });
  };
  return foresight.Advise(bytes, view, {.count = blocks.size(), .for_each = for_each});
}

std::optional<Placement> Pool::State::FollowAdvice(const Foresight::Advice& advice,
                                                   Granules length) {
  if (!advice.spot) return std::nullopt;
  if (!advice.spot->growth) return advice.spot->place;
  const uint64_t most_pages = foresight.MostPages(length);
  CGP_CHECK(space.page_count() + advice.spot->growth->new_pages <= most_pages);
  try {
    return advice.spot->growth->PlacementFrom(Grow(advice.spot->growth->mapping), page_size);
  } catch (const DriverError& error) {
    // A plan may want more pages than other places for the block do. Whether there is enough for it
    // is for those to find out who place it without a plan.
    if (!IsExhausted(error)) throw;
    foresight.GiveUpPlan();
    return std::nullopt;
  }
}

// A block below a page lies in one page: the best fit among pages in part use, so that small blocks
// gather and pages stay whole; else a whole page; else a new one.
void Pool::State::PlaceSmall(FreeView& view, LiveBlock& live) {
  const Granules length = Granules::FromBytesRoundedUp(live.block.bytes);
  std::optional<NodeId> chain;
  const auto find = [&]() -> std::optional<PageId> {
    chain = view.BestFit(length);
    if (!chain) return WholePageToBreak(view, ranges, Takers());
    chain = LeastWanted(view, *chain);
    return space.node(*chain).page;
  };
  std::optional<PageId> page = find();
  if (!page && PollFences()) page = find();
  if (!page) {
    page = ranges.page_at(Grow({.range = RangeWithRoom(), .handles = {MappingPlan::kNewPage}}));
  }
  const NodeId start = chain ? *chain : space.first(*page);
  live.offset = space.node(start).offset;
  live.slot = ranges.slots_of(*page).front();
  live.node = TakePiece(start, *page, Granules(live.offset), length, /*large=*/false);
}

// Of the chains as good as `best` the one whose bytes the fewest streams may take: the others are
// left with more.
NodeId Pool::State::LeastWanted(const FreeView& view, NodeId best) const {
  if (views.size() < 2) return best;
  constexpr int kLookedAt = 16;
  const auto takers = [&](NodeId chain) {
    return std::ranges::count_if(
        views, [&](const auto& other) { return other->Passes(space.node(chain).fence); });
  };
  auto fewest = takers(best);
  std::optional<NodeId> chain = view.NextAsGood(best);
  for (int i = 1; chain && i < kLookedAt; ++i, chain = view.NextAsGood(*chain)) {
    const auto count = takers(*chain);
    if (count >= fewest) continue;
    fewest = count;
    best = *chain;
  }
  return best;
}

// How many streams may take all of a page; nothing where one stream allocates, which may take all.
TakersOf Pool::State::Takers() const {
  if (views.size() < 2) return {};
  return [this](PageId page) {
    return static_cast<uint32_t>(
        std::ranges::count_if(views, [&](const auto& view) { return view->IsWhole(page); }));
  };
}

std::optional<RangeId> Pool::State::RangeWithRoom() const {
  if (ranges.page_count() == 0) return std::nullopt;
  const RangeId newest = ranges.range_of(ranges.slots_of(PageId{ranges.page_count() - 1}).front());
  if (ranges.range(newest).room_back == 0) return std::nullopt;
  return newest;
}

// A block of a page or more: see placement.h.
void Pool::State::PlaceLarge(FreeView& view, LiveBlock& live, bool at_peak) {
  const Granules length = Granules::FromBytesRoundedUp(live.block.bytes);
  // What lives when the pool holds most decides what it costs: this block, if the pool never held
  // much more, or if its like did so in the largest capture.
  const uint64_t nearly = stats.peak_allocated_bytes - stats.peak_allocated_bytes / kPartOfPeak;
  at_peak |= stats.allocated_bytes + live.block.bytes >= nearly;
  const Slack slack = at_peak && space.page_count() < kExactPages ? Slack::kNone : Slack::kOnePage;
  PlaceAt(FindOrMap(view, length, slack), live);
}

void Pool::State::PlaceAt(Placement place, LiveBlock& live) {
  live.slot = place.slot;
  live.offset = static_cast<uint32_t>(place.offset.count());
  int pieces = 0;
  const bool large = live.block.bytes >= page_size.bytes();
  ForEachExtent(live, [&](PageId page, Granules offset, Granules piece) {
    live.node = piece < page_size ? TakePiece(NodeAt(page, offset), page, offset, piece, large)
                                  : TakePages(page, piece);
    ++pieces;
  });
  if (pieces > 1) live.node = NodeId::kNone;
}

// A block larger than the device is refused before its pages are planned and made one by one, which
// takes long and fills the host's memory. Smaller ones are not worth the question.
void Pool::State::CheckAgainstDevice(Granules length) const {
  constexpr uint64_t kManyPages = 1 << 16;
  if (length < page_size * kManyPages) return;
  if (length.bytes() > driver.Info().total_bytes) {
    ThrowOutOfMemory("The device has less in all.", length.bytes());
  }
}

// Steps 2 to 4 of placement.h.
Placement Pool::State::FindOrMap(FreeView& view, Granules length, Slack slack) {
  // A block of very many pages takes what there is.
  constexpr uint64_t kChoosyPages = 32;
  const TakersOf takers = length < page_size * kChoosyPages ? Takers() : TakersOf();
  auto found = FindMapped(view, ranges, page_size, length, slack, takers);
  if (!found && PollFences()) found = FindMapped(view, ranges, page_size, length, slack, takers);
  if (found) return *found;
  CheckAgainstDevice(length);
  const Streams streams = views.size() > 1 ? Streams::kSeveral : Streams::kOne;
  const auto plan = [&] { return PlanGrowth(view, ranges, page_size, length, slack, streams); };
  GrowthPlan growth = plan();
  if (const auto ahead = growth.MappingAhead(ranges, PagesAhead(view))) {
    try {
      return growth.PlacementFrom(Grow(*ahead), page_size);
    } catch (const DriverError& error) {
      // There may be enough for what the block needs. Planned anew, because a range has no room any
      // more where something could not be undone.
      if (!IsExhausted(error)) throw;
      growth = plan();
    }
  }
  return growth.PlacementFrom(Grow(growth.mapping), page_size);
}

// How many pages to make beyond what a block needs that no whole pages are left for, see kPartAhead.
// Whole pages that do not fit the block count as made ahead: so a pool that is in pieces does not
// grow faster than one that is full.
uint32_t Pool::State::PagesAhead(const FreeView& view) const {
  if (views.size() < 2 || *scope != ScopeKind::kCapture) return 0;
  const uint32_t most = ranges.page_count() / kPartAhead;
  return most > std::max<uint32_t>(1, view.whole_page_count()) ? most - view.whole_page_count() : 0;
}

// Carries out the plan and makes the new mappings known. Throws with nothing changed.
SlotId Pool::State::Grow(const MappingPlan& mapping) {
  uint32_t new_pages = 0;
  for (const PageId handle : mapping.handles) {
    if (MappingPlan::IsNew(handle)) new_pages += MappingPlan::NewPages(handle);
  }
  const uint32_t count = ranges.PagesOf(mapping);
  space.ReservePages(new_pages);
  for (const auto& view : views) {
    view->MakeRoomForMapping(new_pages, ranges.MostSlotsAfter(mapping), ranges.range_count() + 1);
  }
  const uint32_t old_page_count = space.page_count();
  const SlotId first = ranges.Map(mapping);
  for (uint32_t i = 0; i < new_pages; ++i) space.AddPage();
  for (const auto& view : views) view->LearnMapping(first, count, old_page_count);
  return first;
}

// The node that holds a granule of a page. Searched from the page's end, where a block of several
// pages goes on; at offset 0, where it comes in, from the start.
NodeId Pool::State::NodeAt(PageId page, Granules offset) const {
  if (offset == Granules(0)) return space.first(page);
  NodeId id = space.last(page);
  while (Granules(space.node(id).offset) > offset) id = space.node(id).prev;
  return id;
}

}  // namespace cgp
