#include "core/placer.h"

#include <algorithm>
#include <string>

#include "core/base/error.h"
#include "core/placement/growth.h"

namespace cgp {
namespace {

// Pools of fewer pages than this place what lives at the peak without slack: a page they waste is
// more than 0.1 % of them. In larger pools it is not worth the mappings.
constexpr uint32_t kExactPages = 1000;

// Pools of fewer pages than this, if one stream allocates, place everything without slack.
constexpr uint32_t kSmallPool = 64;

// What brings a pool within this part of the most that ever lived in it is placed as at the peak.
constexpr uint64_t kPartOfPeak = 4;

// A pool that several streams make grow is given up to this part of its pages ahead of need, once
// that is more than one: the driver's price is per handle, and blocks of a few pages each would
// have it grow by a few pages each. What the pool holds in vain when it stops growing is no more
// than that.
constexpr uint32_t kPartAhead = 128;

// As many addresses as CUDA has. Refused here, a larger block cannot fill the host's memory with a
// plan for its pages, nor overflow what counts them.
constexpr uint64_t kLargestBlock = uint64_t{1} << 47;

// A block below a page is not stitched if it is less than this part of one, or leaves less than
// that part over, which is not worth the mappings. PyTorch's own allocator packs longer ones no
// better, ten to 20 MiB. Of several streams others take what is left over.
constexpr uint64_t kLeastStitched = 8;
constexpr uint64_t kLeastLeft = 12;
constexpr uint64_t kLeastLeftOfSeveral = 8;

// Of several streams: enough to choose well, and a bound on the time.
constexpr int kChainsLookedAt = 4;

bool IsWorthStitching(Granules length, Granules page_size, bool several_streams) {
  const uint64_t least_left = several_streams ? kLeastLeftOfSeveral : kLeastLeft;
  return length * kLeastStitched >= page_size && (page_size - length) * least_left >= page_size;
}

bool IsExhausted(const DriverError& error) {
  return error.status() == DriverStatus::kOutOfMemory ||
         error.status() == DriverStatus::kOutOfAddresses;
}

}  // namespace

void Placer::Place(FreeView& view, LiveBlock& live, const PoolStats& stats) {
  const uint64_t asked = live.block.requested_bytes;
  if (asked > kLargestBlock) ThrowOutOfMemory("No device has so many addresses.", asked);
  if (!memory_.has_one_stream()) predictor_.Stop();
  const bool predicted = predictor_.is_active();
  Predictor::Advice advice;
  if (predicted) {
    predictor_.ReserveOne(asked);
    advice = predictor_.Advise(asked, view);
  }
  Found found;
  try {
    found = Find(view, live.length(), stats, advice);
  } catch (const DriverError& error) {
    if (error.status() == DriverStatus::kOutOfMemory) ThrowOutOfMemory(error.what(), asked);
    throw;
  }
  live.site = {.slot = found.start.slot,
               .offset = static_cast<uint32_t>(found.start.offset.count())};
  if (several_streams() && memory_.bytes().HasUntouchedPages(live.site, live.length())) {
    memory_.NoteGrowth(live);
  }
  memory_.bytes().Take(live.site, live.length(), found.node);
  if (!predicted) return;
  const Granules held = Granules::FromBytesRoundedUp(stats.allocated_bytes + live.block.bytes);
  live.ticket = predictor_.Allocated(advice, found.start, asked, held);
}

Placer::Found Placer::Find(FreeView& view, Granules length, const PoolStats& stats,
                           const Predictor::Advice& advice) {
  if (const std::optional<Placement> place = Follow(advice, length)) return {.start = *place};
  // What lives when the pool holds most decides what it costs: this block, if the pool never held
  // much more, or if its like did so in the largest capture.
  const uint64_t nearly = stats.peak_allocated_bytes - stats.peak_allocated_bytes / kPartOfPeak;
  const bool at_peak = advice.lives_at_peak || stats.allocated_bytes + length.bytes() >= nearly;
  const uint32_t exact_below = at_peak ? kExactPages : (several_streams() ? 0 : kSmallPool);
  const Slack slack = space().page_count() < exact_below ? Slack::kNone : Slack::kOnePage;
  if (length < page_size()) return FindSmall(view, length, slack);
  return {.start = Stitch(view, length, slack)};
}

std::optional<Placement> Placer::Follow(const Predictor::Advice& advice, Granules length) {
  if (!advice.spot) return std::nullopt;
  if (!advice.spot->growth) return advice.spot->place;
  const uint64_t most_pages = predictor_.MostPages(length);
  CGP_CHECK(space().page_count() + advice.spot->growth->mapping.new_pages() <= most_pages);
  try {
    return advice.spot->growth->PlacementFrom(memory_.bytes().Map(advice.spot->growth->mapping),
                                              page_size());
  } catch (const DriverError& error) {
    // A plan may want more pages than other places for the block do. Whether there is enough for it
    // is for those to find out who place it without a plan.
    if (!IsExhausted(error)) throw;
    predictor_.GiveUpPlan();
    return std::nullopt;
  }
}

// A block below a page lies in the best fit among pages in part use, so that small blocks gather
// and pages stay whole; else in a whole page; else, before a new one is made for it, it is stitched
// as a large one is. Without slack it is stitched rather than break a whole page whose rest would
// be too short for another one like it; where several streams allocate, that saved nothing.
Placer::Found Placer::FindSmall(FreeView& view, Granules length, Slack slack) {
  const bool stitched = IsWorthStitching(length, page_size(), several_streams());
  const bool wastes = stitched && length * 2 > page_size();
  const bool breaks = !wastes || slack != Slack::kNone || several_streams();
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
// stream takes of the others' they may not get back before the capture ends.
std::optional<NodeId> Placer::FindChain(const FreeView& view, Granules length) const {
  if (!several_streams()) return view.BestFit(length);
  std::optional<NodeId> best;
  std::ptrdiff_t least = 0;
  int left = kChainsLookedAt;
  view.ForEachFit(length, [&](NodeId chain) {
    const std::ptrdiff_t takers = memory_.bytes().CountTakers(chain);
    if (!best || takers < least) {
      best = chain;
      least = takers;
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

// A block larger than the device is refused before its pages are planned and made one by one, which
// takes long and fills the host's memory. Smaller ones are not worth the question.
void Placer::CheckAgainstDevice(Granules length) const {
  constexpr uint64_t kManyPages = 1 << 16;
  if (length < page_size() * kManyPages) return;
  if (length.bytes() > driver_.Info().total_bytes) {
    ThrowOutOfMemory("The device has less in all.", length.bytes());
  }
}

// Steps 2 to 4 of placement.h.
Placement Placer::Stitch(FreeView& view, Granules length, Slack slack) {
  // A block of very many pages takes what there is.
  constexpr uint64_t kChoosyPages = 32;
  const TakersOf takers = length < page_size() * kChoosyPages ? Takers() : TakersOf();
  auto found = FindMapped(view, length, slack, takers);
  if (!found && memory_.Poll()) found = FindMapped(view, length, slack, takers);
  if (found) return *found;
  CheckAgainstDevice(length);
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
  if (length < page_size()) return 0;  // they share pages
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
