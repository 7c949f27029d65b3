#include "core/placer.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/base/error.h"

namespace cgp {
namespace {

// Blocks get no slack while the pages in use are more than three fifths of the most that ever
// lived, and more than this part of it is wasted in them.
constexpr uint64_t kWastedPart = 40;

// The part of its pages that a pool which several streams make grow is given ahead of need, once
// that is more than one page. The driver's price is per handle, and blocks of a few pages each
// would make the pool grow by a few pages each. What the pool holds in vain when it stops growing
// is no more than that.
constexpr uint32_t kPartAhead = 128;

// A block below a page is not stitched if less than this part of a page would be left over, which
// is not worth the mappings. If several streams allocate, others take what is left over.
constexpr uint64_t kLeastLeft = 12;
constexpr uint64_t kLeastLeftOfSeveral = 8;

// The device is asked whether it has enough at all for blocks from this many pages on.
constexpr uint64_t kManyPages = 1 << 16;

// With several streams, enough to choose well, and a bound on the time. With one, more would fit
// worse.
constexpr int kHolesLookedAt = 4;
constexpr int kHolesOfOne = 2;

bool IsExhausted(const DriverError& error) {
  return error.status() == DriverStatus::kOutOfMemory ||
         error.status() == DriverStatus::kOutOfAddresses;
}

}  // namespace

void Placer::Place(FreeList& list, LiveBlock& live, const PoolStats& stats) {
  const uint64_t asked = live.block.requested_bytes;
  const Granules length = live.length();
  // Refused here, it can neither fill the host's memory with a plan for its pages, nor overflow
  // their counts.
  if (asked >= page_size().bytes() * kManyPages && asked > driver_.Info().total_bytes) {
    ThrowOutOfMemory("The device has less in all.", asked);
  }
  const KnownPlaces::Key key = known_.Again(length.count());
  KnownPlaces::Places& again = known_.At(key);
  KnownPlaces::Places* const alike =
      memory_.has_one_stream() ? &known_.Alike(SizeOf(length)) : nullptr;
  live.key = static_cast<uint32_t>(key);
  if (memory_.scope() == ScopeKind::kCapture) ring_.Reclaim();
  try {
    live.site = Find(list, live, stats, again, alike);
  } catch (const DriverError& error) {
    // Others get the ring's free bytes when nothing else is left.
    if (IsExhausted(error) && alternates_) {
      memory_.DissolveRing();
      ring_.Clear();
      alternates_ = false;
      return Place(list, live, stats);
    }
    if (error.status() == DriverStatus::kOutOfMemory) ThrowOutOfMemory(error.what(), asked);
    throw;
  }
  const Placement place = live.site;
  if (On("leases") && several_streams() && memory_.bytes().HasUntouchedPages(live.site, length)) {
    memory_.NoteGrowth(live);
  }
  if (successor_ == 0) successor_ = ranges_.AddressOf(place);
  memory_.bytes().Take(live.site, length);
  known_.Advance(key);
  // One place in the ring says as much as many.
  const bool in_ring = InRing(place.vpage);
  if (in_ring) std::erase_if(again, [&](Placement known) { return InRing(known.vpage); });
  KnownPlaces::Add(again, place);
  const bool in_one_page = Granules(place.offset) + length <= page_size();
  if (alike && !in_ring && (length >= page_size() || !in_one_page)) {
    KnownPlaces::Add(*alike, place);
  }
}

Site Placer::Find(FreeList& list, LiveBlock& live, const PoolStats& stats,
                  KnownPlaces::Places& again, const KnownPlaces::Places* alike) {
  const Granules length = live.length();
  std::optional<Placement> free;
  const LiveBlock* like = nullptr;
  bool in_ring = false;
  for (const Placement place : again) {
    if (free && !alternates_) break;
    if (InRing(place.vpage)) {
      in_ring = true;
    } else if (!free && On("known-again") && WholePagesAt(list, place, length)) {
      free = place;
    } else if (like == nullptr) {
      like = LikeAt(place, live.key);
    }
  }
  const bool alternates = alternates_ && memory_.scope() == ScopeKind::kCapture && On("ring");
  if (alternates && (in_ring || like != nullptr)) {
    try {
      return {ring_.Place(list, length, /*is_first=*/like)};
    } catch (const DriverError& error) {
      if (!IsExhausted(error)) throw;
    }
  }
  // A place that is taken is of no use then: what lives there will alternate too.
  if (alternates_) {
    std::erase_if(again, [&](Placement place) { return !WholePagesAt(list, place, length); });
  }
  if (like != nullptr) {
    like_ = like->block.address;
    successor_ = 0;
  }
  if (free) return {*free};
  const bool small = length < page_size();
  if (alike && On("known-alike")) {
    for (const Placement place : *alike) {
      const auto whole = WholePagesAt(list, place, length);
      if (whole && *whole <= (small ? 0 : PagesFor(length, page_size()))) return {place};
    }
  }
  const Slack slack = SlackFor(list, length, stats);
  if (small) return FindSmall(list, length, slack);
  return {Stitch(list, length, slack)};
}

// The block that lives there, if it came behind the same sizes. Where each layer is a graph of its
// own, a block of the capture just before is the last layer's. One stream settles without the ring
// then, going to and fro between two places; several would map for ever.
const LiveBlock* Placer::LikeAt(Placement place, uint32_t key) const {
  const LiveBlock* const live = blocks_.Find(ranges_.AddressOf(place));
  const uint32_t newest = several_streams() ? before_ : before_last_;
  return live != nullptr && live->key == key && live->tenure <= newest ? live : nullptr;
}

// Blocks alternate with their likes from when one of the likes was freed while its successor lived
// on.
void Placer::BeginScope(ScopeKind kind) {
  known_.BeginScope();
  if (kind != ScopeKind::kCapture) return;
  before_last_ = std::exchange(before_, memory_.last_tenure());
  ring_.BeginCapture();
  if (!std::exchange(dropped_, false)) return;
  like_ = 0;
  if (blocks_.Find(successor_) != nullptr) alternates_ = true;
}

Slack Placer::SlackFor(const FreeList& list, Granules length, const PoolStats& stats) const {
  if (!On("slack")) return Slack::kNone;
  const uint64_t live = stats.allocated_bytes + length.bytes();
  const uint64_t most_lived = std::max(stats.peak_allocated_bytes, live);
  const uint64_t pages =
      space().page_count() - list.whole_page_count() + PagesFor(length, page_size());
  const uint64_t used = pages * page_size().bytes();
  const bool wastes = On("no-slack") && (used - live) * kWastedPart > most_lived;
  return wastes && used * 5 > most_lived * 3 ? Slack::kNone : Slack::kOnePage;
}

// A block below a page gets the best fit among partly used pages, so that small blocks gather and
// pages stay whole. Else it gets a whole page, else it is stitched as a large one. Without slack,
// stitching comes before a whole page whose rest is too short for a second such block, unless
// several streams allocate: there it saved nothing.
Site Placer::FindSmall(FreeList& list, Granules length, Slack slack) {
  const uint64_t least_left = several_streams() ? kLeastLeftOfSeveral : kLeastLeft;
  const bool stitched = On("small-stitched") && (page_size() - length) * least_left >= page_size();
  const bool breaks =
      !stitched || length * 2 <= page_size() || slack != Slack::kNone || several_streams();
  const auto find = [&]() -> std::optional<Site> {
    if (const std::optional<NodeId> hole = FindHole(list, length)) {
      const PageSpace::Node& node = space().node(*hole);
      return Site{{ranges_.vpages_of(node.page).front(), node.offset}, *hole};
    }
    const auto page = breaks ? WholePageToBreak(list, Takers()) : std::nullopt;
    if (!page) return std::nullopt;
    return Site{{ranges_.vpages_of(*page).front()}};
  };
  std::optional<Site> found = find();
  if (!found && memory_.Poll()) found = find();
  if (found) return *found;
  if (stitched) return {Stitch(list, length, slack)};
  const MappingPlan page{.range = ranges_.NewestWithRoom(1), .handles = {MappingPlan::kNewPage}};
  return {{memory_.bytes().Map(page)}};
}

// The best fit. With several streams: of the first few holes the one that fewest streams may take,
// since they may not get it back before the capture ends. With one stream, in pages of small
// blocks: the one in the oldest page, where blocks that outlive their capture gather.
std::optional<NodeId> Placer::FindHole(const FreeList& list, Granules length) const {
  const bool several = several_streams();
  std::optional<NodeId> best;
  uint32_t least = 0;
  int left = several ? kHolesLookedAt : kHolesOfOne;
  list.ForEachFit(length, [&](NodeId hole) {
    const PageId page = space().node(hole).page;
    if (best && !several && space().holds_large(page)) return false;
    const FenceId fence = space().node(hole).fence;
    const auto takes = [&](const FreeList& stream) { return stream.Passes(fence); };
    const uint32_t harm = several ? memory_.bytes().CountStreams(takes) : Index(page);
    if (!best || harm < least) {
      best = hole;
      least = harm;
    }
    return --left > 0;
  });
  return best;
}

// How many streams may take all of a page, so that others are left with what more can use. Nothing
// if one stream allocates, which may take all.
TakersOf Placer::Takers() const {
  if (!several_streams()) return {};
  return [this](PageId page) {
    return memory_.bytes().CountStreams([&](const FreeList& list) { return list.IsWhole(page); });
  };
}

// Steps 2 to 5 of design.md, section 4.
Placement Placer::Stitch(FreeList& list, Granules length, Slack slack) {
  auto found = FindMapped(list, length, slack, Takers());
  if (!found && memory_.Poll()) found = FindMapped(list, length, slack, Takers());
  if (found) return *found;
  const auto plan = [&] { return PlanGrowth(list, length, slack, several_streams()); };
  GrowthPlan growth = plan();
  if (const auto ahead = growth.MappingAhead(ranges_, PagesAhead(list, length))) {
    try {
      return growth.PlacementFrom(memory_.bytes().Map(*ahead), page_size());
    } catch (const DriverError& error) {
      // There may be enough for what the block needs. It is planned anew, since a range has no room
      // any more where something could not be undone.
      if (!IsExhausted(error)) throw;
      growth = plan();
    }
  }
  return growth.PlacementFrom(memory_.bytes().Map(growth.mapping), page_size());
}

// How many pages to make beyond what the block needs, if no whole pages are left for it (see
// kPartAhead). Whole pages that do not fit count as made ahead, so a fragmented pool grows no
// faster than a full one.
uint32_t Placer::PagesAhead(const FreeList& list, Granules length) const {
  if (!several_streams() || memory_.scope() != ScopeKind::kCapture) return 0;
  if (length < page_size() || !On("made-ahead")) return 0;  // they share pages
  const uint32_t most = ranges_.page_count() / kPartAhead;
  return most > std::max<uint32_t>(1, list.whole_page_count()) ? most - list.whole_page_count() : 0;
}

void Placer::ThrowOutOfMemory(std::string_view reason, uint64_t bytes) const {
  const std::string text =
      "cudagraph_pool: out of memory: a block of " + std::to_string(bytes) + " bytes (" +
      Size(bytes) + ") needs new pages of " + Size(page_size().bytes()) + "; the pool holds " +
      Size(space().page_count() * page_size().bytes()) + " in " +
      std::to_string(space().page_count()) + " pages, of which " + Size(space().free().bytes()) +
      " are free but do not fit; " + FreeMemoryOn(driver_);
  throw OutOfMemoryError(text + ". " + std::string(reason));
}

}  // namespace cgp
