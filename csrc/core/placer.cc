#include "core/placer.h"

#include <algorithm>
#include <string>

#include "core/base/error.h"
#include "core/base/reserve.h"
#include "core/base/rules.h"
#include "core/placement/growth.h"

namespace cgp {
namespace {

// Blocks are placed without slack while the pages in use are more than three fifths of the most that
// ever lived, and more than this part of it is wasted in them.
constexpr uint64_t kWastedPart = 40;

// A pool that several streams make grow is given up to this part of its pages ahead of need, once
// that is more than one: the driver's price is per handle, and blocks of a few pages each would
// have it grow by a few pages each. What the pool holds in vain when it stops growing is no more
// than that.
constexpr uint32_t kPartAhead = 128;

// A block below a page is not stitched if that leaves less than this part of one over, which is not
// worth the mappings. Of several streams others take what is left over.
constexpr uint64_t kLeastLeft = 12;
constexpr uint64_t kLeastLeftOfSeveral = 8;

// Whether the device has as much at all is asked for no smaller block than one of so many pages.
constexpr uint64_t kManyPages = 1 << 16;

// Of several streams: enough to choose well, and a bound on the time. Of one, more of them would fit
// worse.
constexpr int kChainsLookedAt = 4;
constexpr int kChainsOfOne = 2;

bool IsExhausted(const DriverError& error) {
  return error.status() == DriverStatus::kOutOfMemory ||
         error.status() == DriverStatus::kOutOfAddresses;
}

}  // namespace

void Placer::Place(FreeView& view, LiveBlock& live, const PoolStats& stats) {
  const uint64_t asked = live.block.requested_bytes;
  const Granules length = live.length();
  // Refused here, it cannot fill the host's memory with a plan for its pages, nor overflow what
  // counts them.
  if (asked >= page_size().bytes() * kManyPages && asked > driver_.Info().total_bytes) {
    ThrowOutOfMemory("The device has less in all.", asked);
  }
  const KnownPlaces::Key key = known_.Again(length.count());
  KnownPlaces::Places& again = known_.At(key);
  KnownPlaces::Places* const alike =
      memory_.has_one_stream() ? &known_.Alike(SizeOf(length)) : nullptr;
  Found found;
  try {
    found = Find(view, length, stats, again, alike);
  } catch (const DriverError& error) {
    if (error.status() == DriverStatus::kOutOfMemory) ThrowOutOfMemory(error.what(), asked);
    throw;
  }
  live.capture = captures_;
  live.site = {.slot = found.start.slot,
               .offset = static_cast<uint32_t>(found.start.offset.count())};
  if (several_streams() && memory_.bytes().HasUntouchedPages(live.site, length)) {
    memory_.NoteGrowth(live);
  }
  memory_.bytes().Take(live.site, length, found.node);
  KnownPlaces::Add(again, found.start);
  known_.Advance(key);
  const bool in_one_page = found.start.offset + length <= page_size();
  if (alike && (length >= page_size() || !in_one_page)) KnownPlaces::Add(*alike, found.start);
}

Placer::Found Placer::Find(FreeView& view, Granules length, const PoolStats& stats,
                           const KnownPlaces::Places& again, const KnownPlaces::Places* alike) {
  for (const Placement place : again) {
    if (On("known-again") && WholePagesAt(view, place, length)) return {.start = place};
  }
  const auto takes_turns = [&](Placement place) { return TakesTurns(place, length); };
  if (On("apart") && std::ranges::any_of(again, takes_turns)) {
    if (const auto place = PlaceApart(view, length)) return {.start = *place};
  }
  const bool small = length < page_size();
  if (alike && On("known-alike")) {
    for (const Placement place : *alike) {
      const auto whole = WholePagesAt(view, place, length);
      if (whole && *whole <= (small ? 0 : PagesFor(length, page_size()))) return {.start = place};
    }
  }
  const Slack slack = SlackFor(view, length, stats);
  if (small) return FindSmall(view, length, slack);
  return {.start = Stitch(view, length, slack)};
}

// Whether a block of that length lives there that will be dropped when this one is made. So it was
// with the last one that an earlier capture than the last had made; of several streams it is taken
// for granted.
bool Placer::TakesTurns(Placement place, Granules length) {
  const Address address = ranges_.AddressOf(place.slot, place.offset);
  const LiveBlock* const live = blocks_.Find(address);
  if (live == nullptr || live->length() != length) return false;
  if (memory_.has_one_stream() && live->capture + 1 >= captures_) return false;
  like_ = address;
  return takes_turns_;
}

void Placer::BeginScope(ScopeKind kind) {
  known_.BeginScope();
  captures_ += kind == ScopeKind::kCapture ? 1 : 0;
}

// A block whose like of an earlier scope still lives: when that is dropped the two will go on
// taking turns. It lies behind the others of the kind, in pages of their own, so that all else finds
// its places free again, whichever of the two lives.
std::optional<Placement> Placer::PlaceApart(FreeView& view, Granules length) {
  const uint64_t any = PagesFor(length, page_size()) + 1;
  for (const RangeId range : apart_) {
    if (const auto place = FindInRange(view, length, range, any)) return place;
  }
  GrowthPlan growth;
  uint64_t pages = PagesFor(length, page_size());
  if (!apart_.empty()) {
    const RangeTable::Range& range = ranges_.range(apart_.back());
    const Granules reused = FreeAtEnd(view, apart_.back(), /*at_front=*/false);
    growth.start = -static_cast<int64_t>(reused.count());
    if (reused >= length) return growth.PlacementFrom(range.end(), page_size());
    const uint64_t fewer = PagesFor(length - reused, page_size());
    if (fewer <= range.room_back) {
      growth.mapping.range = apart_.back();
      pages = fewer;
    } else {
      growth.start = 0;
    }
  }
  AppendNewHandles(pages, MostHandlePages(ranges_.page_count() + pages, pages),
                   growth.mapping.handles);
  try {
    ReserveMore(apart_, 1);
    const SlotId first = memory_.bytes().Map(growth.mapping);
    if (!growth.mapping.range) apart_.push_back(ranges_.range_of(first));
    return growth.PlacementFrom(first, page_size());
  } catch (const DriverError& error) {
    if (!IsExhausted(error)) throw;
    return std::nullopt;
  }
}

Slack Placer::SlackFor(const FreeView& view, Granules length, const PoolStats& stats) const {
  if (!On("slack")) return Slack::kNone;
  const uint64_t live = stats.allocated_bytes + length.bytes();
  const uint64_t most_lived = std::max(stats.peak_allocated_bytes, live);
  const uint64_t pages =
      space().page_count() - view.whole_page_count() + PagesFor(length, page_size());
  const uint64_t used = pages * page_size().bytes();
  const bool wastes = On("no-slack") && (used - live) * kWastedPart > most_lived;
  return wastes && used * 5 > most_lived * 3 ? Slack::kNone : Slack::kOnePage;
}

// A block below a page lies in the best fit among pages in part use, so that small blocks gather
// and pages stay whole; else in a whole page; else it is stitched as a large one is. Without slack
// that comes before a whole page whose rest would be too short for another one like it; where several
// streams allocate, that saved nothing.
Placer::Found Placer::FindSmall(FreeView& view, Granules length, Slack slack) {
  const uint64_t least_left = several_streams() ? kLeastLeftOfSeveral : kLeastLeft;
  const bool stitched = On("small-stitched") && (page_size() - length) * least_left >= page_size();
  const bool breaks =
      !stitched || length * 2 <= page_size() || slack != Slack::kNone || several_streams();
  const auto find = [&]() -> std::optional<Found> {
    if (const std::optional<NodeId> chain = FindChain(view, length)) {
      const PageSpace::Node& node = space().node(*chain);
      return Found{.start = {ranges_.slots_of(node.page).front(), Granules(node.offset)},
                   .node = *chain};
    }
    const auto page = breaks ? WholePageToBreak(view, Takers()) : std::nullopt;
    if (!page) return std::nullopt;
    return Found{.start = {ranges_.slots_of(*page).front(), Granules(0)}};
  };
  std::optional<Found> found = find();
  if (!found && memory_.Poll()) found = find();
  if (found) return *found;
  if (stitched) return {.start = Stitch(view, length, slack)};
  const MappingPlan page{.range = ranges_.NewestWithRoom(1), .handles = {MappingPlan::kNewPage}};
  return {.start = {memory_.bytes().Map(page), Granules(0)}};
}

// The best fit. Of several streams the one among the first few that the fewest may take: what a
// stream takes of the others' they may not get back before the capture ends. Of one stream, in pages
// of small blocks, the one in the oldest page: so those that outlive their capture gather there.
std::optional<NodeId> Placer::FindChain(const FreeView& view, Granules length) const {
  const bool several = several_streams();
  std::optional<NodeId> best;
  std::ptrdiff_t least = 0;
  int left = several ? kChainsLookedAt : kChainsOfOne;
  view.ForEachFit(length, [&](NodeId chain) {
    const PageId page = space().node(chain).page;
    if (best && !several && space().holds_large(page)) return false;
    const std::ptrdiff_t harm = several ? memory_.bytes().CountTakers(chain) : Index(page);
    if (!best || harm < least) {
      best = chain;
      least = harm;
    }
    return --left > 0;
  });
  return best;
}

// How many streams may take all of a page, so that others are left with what more can use; nothing
// where one stream allocates, which may take all.
TakersOf Placer::Takers() const {
  if (!several_streams()) return {};
  return [this](PageId page) { return static_cast<uint32_t>(memory_.bytes().CountWhole(page)); };
}

// Steps 2 to 5 of design.md, section 4.
Placement Placer::Stitch(FreeView& view, Granules length, Slack slack) {
  auto found = FindMapped(view, length, slack, Takers());
  if (!found && memory_.Poll()) found = FindMapped(view, length, slack, Takers());
  if (found) return *found;
  const Streams streams = several_streams() ? Streams::kSeveral : Streams::kOne;
  const auto plan = [&] { return PlanGrowth(view, length, slack, streams); };
  GrowthPlan growth = plan();
  if (const auto ahead = growth.MappingAhead(ranges_, PagesAhead(view, length))) {
    try {
      return growth.PlacementFrom(memory_.bytes().Map(*ahead), page_size());
    } catch (const DriverError& error) {
      // There may be enough for what the block needs. Planned anew, because a range has no room any
      // more where something could not be undone.
      if (!IsExhausted(error)) throw;
      growth = plan();
    }
  }
  return growth.PlacementFrom(memory_.bytes().Map(growth.mapping), page_size());
}

// How many pages to make beyond what a block needs that no whole pages are left for, see
// kPartAhead. Whole pages that do not fit the block count as made ahead: so a pool that is in
// pieces does not grow faster than one that is full.
uint32_t Placer::PagesAhead(const FreeView& view, Granules length) const {
  if (!several_streams() || memory_.scope() != ScopeKind::kCapture) return 0;
  if (length < page_size() || !On("made-ahead")) return 0;  // they share pages
  const uint32_t most = ranges_.page_count() / kPartAhead;
  return most > std::max<uint32_t>(1, view.whole_page_count()) ? most - view.whole_page_count() : 0;
}

void Placer::ThrowOutOfMemory(std::string_view reason, uint64_t bytes) const {
  const auto mib = [](uint64_t amount) {
    return std::to_string((amount >> 20) + ((amount >> 19) & 1)) + " MiB";
  };
  std::string text = "cudagraph_pool: out of memory: a block of " + std::to_string(bytes) +
                     " bytes (" + mib(bytes) + ") needs new pages of " + mib(page_size().bytes()) +
                     "; the pool holds " + mib(space().page_count() * page_size().bytes()) +
                     " in " + std::to_string(space().page_count()) + " pages, of which " +
                     mib(space().free().bytes()) + " are free but do not fit; device " +
                     std::to_string(driver_.device());
  try {
    const MemoryInfo info = driver_.Info();
    text += " has " + mib(info.free_bytes) + " free of " + mib(info.total_bytes);
  } catch (const DriverError&) {
    text += " does not say what it has free";
  }
  throw OutOfMemoryError(text + ". " + std::string(reason), bytes);
}

}  // namespace cgp
