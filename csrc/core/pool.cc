#include "core/pool.h"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

#include "core/base/error.h"

namespace cgp {
namespace {

Granules PageSize(const Driver& driver, const PoolOptions& options) {
  const uint64_t granularity = driver.granularity();
  const uint64_t bytes = options.page_bytes == 0 ? granularity : options.page_bytes;
  constexpr uint64_t kMost = uint64_t{1} << 40;  // whose granules 32 bits count
  if (!std::has_single_bit(bytes) || bytes % granularity != 0 || bytes < kGranuleBytes ||
      bytes > kMost) {
    throw UsageError("cudagraph_pool: a page of " + std::to_string(bytes) +
                     " bytes is not a power-of-two multiple of the driver's granularity of " +
                     std::to_string(granularity) + " bytes, up to " + std::to_string(kMost) + ".");
  }
  return Granules(bytes / kGranuleBytes);
}

}  // namespace

Pool::Pool(Driver& driver, PoolOptions options)
    : ranges_(driver, PageSize(driver, options), options.borrows),
      memory_(driver, ranges_, blocks_),
      placer_(driver, ranges_, memory_, blocks_) {}

void Pool::BeginScope(ScopeKind kind, bool may_ask_device) {
  const bool capture = kind == ScopeKind::kCapture;
  GraphNeeds::Needs unnamed;
  if (capture) {
    ReserveMore(captures_, 1);
    needs_.ReserveTouch(blocks_.size());
    unnamed = needs_.PrepareCapture();
  }
  const bool apart = kind == ScopeKind::kApart;
  const IndexSet needed = apart ? PagesIn<&GraphNeeds::Needs::needs>() : IndexSet();
  memory_.BeginScope(kind, may_ask_device, needed);
  if (capture) {
    needs_.BeginCapture(std::move(unnamed));
    blocks_.ForEach([&](Address, const LiveBlock& live) { needs_.Touch(PagesOf(live)); });
  }
  stats_.scope_peak_bytes = stats_.allocated_bytes;
  reserved_before_ = reserved_bytes();
  capture_ = {.live_before_bytes = stats_.allocated_bytes, .first_allocation = stats_.allocations};
  placer_.BeginScope(kind);
}

void Pool::EndScope(bool may_ask_device) {
  const bool capture = in_capture_scope();
  Spans left = capture ? PagesOfLive() : Spans();
  memory_.EndScope(may_ask_device);
  if (capture) {
    needs_.EndCapture(std::move(left));
    if (captures_.size() == kMaxCaptures) captures_.erase(captures_.begin());
    capture_.added_bytes = reserved_bytes() - reserved_before_;
    capture_.peak_bytes = stats_.scope_peak_bytes;
    capture_.allocations = stats_.allocations - capture_.first_allocation;
    captures_.push_back(capture_);
  }
}

Block Pool::Allocate(uint64_t bytes, StreamId stream, std::optional<CaptureId> capture,
                     bool whole_pages) {
  CGP_CHECK(in_scope() && bytes > 0);
  const uint64_t page = ranges_.page_size().bytes();
  // No device has as much as is too large to be rounded.
  const bool rounds = whole_pages && bytes <= ~uint64_t{0} - page;
  const uint64_t rounded = rounds ? (bytes + page - 1) / page * page : bytes;
  blocks_.Reserve(blocks_.size() + 1);
  if (in_capture_scope()) needs_.ReserveTouch(1);
  LiveBlock live;
  live.block = {.bytes = Granules::FromBytesRoundedUp(rounded).bytes(),
                .requested_bytes = bytes,
                .stream = stream};
  live.eager = !in_capture_scope();
  placer_.Place(memory_.BeginTake(live, capture), live, stats_);
  live.block.address = ranges_.AddressOf(live.site);
  if (in_capture_scope()) needs_.Touch(PagesOf(live));
  const Block block = live.block;
  List(std::move(live));
  stats_.peak_allocated_bytes = std::max(stats_.peak_allocated_bytes, stats_.allocated_bytes);
  stats_.scope_peak_bytes = std::max(stats_.scope_peak_bytes, stats_.allocated_bytes);
  return block;
}

Block Pool::Free(Address address) {
  LiveBlock& live = Known(address);
  memory_.Free(live, placer_.InRing(live.site.vpage));
  const Block block = live.block;
  Unlist(live);
  return block;
}

const Block* Pool::At(Address address) const {
  const LiveBlock* const live = blocks_.Find(address);
  return live == nullptr ? nullptr : &live->block;
}

const Block* Pool::Find(Address address) const {
  const Block* found = nullptr;
  blocks_.ForEach([&](Address start, const LiveBlock& live) {
    if (start <= address && address - start < live.block.bytes) found = &live.block;
  });
  return found;
}

std::vector<PhysicalPiece> Pool::PiecesOf(const LiveBlock& live) const {
  std::vector<PhysicalPiece> pieces;
  const auto add = [&](PageId page, Granules offset, Granules length) {
    pieces.push_back({page, offset.bytes(), length.bytes()});
  };
  memory_.bytes().ForEachPiece(live.site, live.length(), add);
  return pieces;
}

AddressSpan Pool::PagesOf(const LiveBlock& live) const {
  const Address begin = ranges_.AddressOf({live.site.vpage});
  const uint64_t page = ranges_.page_size().bytes();
  const Address end = live.block.address + live.block.bytes;
  return {begin, begin + (end - begin + page - 1) / page * page};
}

Spans Pool::PagesOfLive() const {
  Spans spans;
  spans.reserve(blocks_.size());
  blocks_.ForEach([&](Address, const LiveBlock& live) { spans.push_back(PagesOf(live)); });
  return spans;
}

uint64_t Pool::reserved_bytes() const {
  return BytesOf(ranges_.page_count() + ranges_.unreleased_pages() - ranges_.away_pages() -
                 lent_.pages);
}

PoolStats Pool::Stats() const {
  PoolStats stats = stats_;
  stats.page_bytes = ranges_.page_size().bytes();
  stats.pages = ranges_.page_count() - ranges_.away_pages() - lent_.pages;
  stats.reserved_bytes = reserved_bytes();
  stats.peak_reserved_bytes = std::max(stats.peak_reserved_bytes, stats.reserved_bytes);
  stats.live_blocks = blocks_.size();
  stats.ranges = ranges_.range_count();
  stats.page_mappings = ranges_.mapping_count();
  stats.asleep = asleep_;
  stats.away_bytes = BytesOf(ranges_.away_pages());
  stats.unnamed_captures = needs_.unnamed();
  return stats;
}

PoolSnapshot Pool::Snapshot() const {
  PoolSnapshot snapshot;
  snapshot.stats = Stats();
  blocks_.ForEach([&](Address, const LiveBlock& live) {
    snapshot.blocks.push_back({live.block, PiecesOf(live)});
  });
  std::ranges::sort(snapshot.blocks, {}, [](const auto& entry) { return entry.block.address; });
  const PageSpace& space = memory_.bytes().space();
  for (const FenceId fence : {FenceId::kRing, FenceId::kRingLater}) {
    space.ForEachBehind(fence, [&](NodeId id) {
      const PageSpace::Node& node = space.node(id);
      snapshot.ring.push_back(
          {node.page, Granules(node.offset).bytes(), Granules(node.length).bytes()});
    });
  }
  for (PageId page{0}; Index(page) < ranges_.page_count(); ++page) {
    if (ranges_.lease_of(page) == kLent || !ranges_.is_present(page)) snapshot.gone.push_back(page);
  }
  for (uint32_t r = 0; r < ranges_.range_count(); ++r) {
    const RangeTable::Range& range = ranges_.range(RangeId{r});
    PoolSnapshot::Range& entry = snapshot.ranges.emplace_back();
    entry.address = ranges_.AddressOf({range.begin()});
    for (VirtualPage vpage = range.begin(); vpage < range.end(); ++vpage) {
      entry.pages.push_back(ranges_.page_at(vpage));
    }
  }
  return snapshot;
}

PoolCheckpoint Pool::Checkpoint() {
  CGP_CHECK(!in_scope());
  PoolCheckpoint checkpoint{.blocks = {}, .owner = identity_};
  blocks_.ForEach([&](Address, const LiveBlock& live) {
    checkpoint.blocks.push_back(
        {live.block, live.eager, live.others ? live.others->uses : std::vector<StreamId>()});
  });
  needs_.Keep(PagesOfLive());
  std::ranges::sort(checkpoint.blocks, {}, [](const auto& entry) { return entry.block.address; });
  return checkpoint;
}

// What was recorded of a block that lives on stays.
RestoreDelta Pool::Restore(const PoolCheckpoint& checkpoint) {
  CGP_CHECK(!in_scope());
  if (checkpoint.owner.lock() != identity_) {
    throw UsageError(
        "cudagraph_pool: the checkpoint was taken of another pool, or of one whose memory has been "
        "given back since.");
  }
  memory_.Poll();  // what is over is dropped, not handed on
  memory_.DissolveRing();
  RestoreDelta delta;
  std::vector<std::pair<Address, FenceId>> dropped;
  std::vector<bool> lives_on(checkpoint.blocks.size());
  blocks_.ForEach([&](Address address, LiveBlock& live) {
    delta.freed.push_back(live.block);
    const auto same = std::ranges::lower_bound(
        checkpoint.blocks, address, {}, [](const auto& entry) { return entry.block.address; });
    if (same != checkpoint.blocks.end() && same->block == live.block) {
      lives_on[static_cast<std::size_t>(same - checkpoint.blocks.begin())] = true;
      if (!same->uses.empty()) ReserveMore(live.GetOthers().uses, same->uses.size());
      return;
    }
    dropped.emplace_back(address, memory_.FenceFor(live));
  });

  std::vector<LiveBlock> revived;
  const RangeTable::AddressIndex ranges = ranges_.ByAddress();
  for (std::size_t i = 0; i < checkpoint.blocks.size(); ++i) {
    const PoolCheckpoint::Entry& entry = checkpoint.blocks[i];
    delta.allocated.push_back(entry.block);
    if (lives_on[i]) continue;
    LiveBlock& live = revived.emplace_back();
    live.block = entry.block;
    live.site = {ranges_.At(entry.block.address, ranges)};
    RequirePresent(live);
    live.AddWork(entry.eager, entry.uses);
    memory_.ReserveRevive(live);
  }
  blocks_.Reserve(checkpoint.blocks.size());
  memory_.bytes().ReserveTake(revived.size());

  // Nothing has changed so far but fences that nothing stands behind. Nothing below calls the
  // driver or allocates.
  for (const auto& [address, fence] : dropped) {
    const LiveBlock& live = Known(address);
    memory_.Give(live, fence);
    Unlist(live);
  }
  for (std::size_t i = 0; i < checkpoint.blocks.size(); ++i) {
    if (!lives_on[i]) continue;
    const PoolCheckpoint::Entry& entry = checkpoint.blocks[i];
    LiveBlock* const live = blocks_.Find(entry.block.address);
    // It may be a later block that is just like it: then both count.
    live->AddWork(entry.eager, entry.uses);
  }
  for (LiveBlock& live : revived) {
    memory_.Revive(live);
    List(std::move(live));
  }
  return delta;
}

bool Pool::IsSpare(PageId handle) const {
  return ranges_.lease_of(handle) != kLent &&
         AllNodes(handle, [](const PageSpace::Node& node) { return !node.used(); });
}

uint64_t Pool::spare_bytes() const {
  uint64_t pages = ranges_.unreleased_pages();
  ForEachHandle([&](PageId handle) {
    if (IsSpare(handle) && !ranges_.is_released(handle)) pages += ranges_.handle_pages(handle);
  });
  return BytesOf(pages);
}

bool Pool::has_spare() const {
  bool any = false;
  ForEachHandle([&](PageId handle) { any = any || IsSpare(handle); });
  return any;
}

void Pool::PrepareGiveBack() {
  CGP_CHECK(!in_scope());
  memory_.DissolveRing();
  next_identity_ = std::make_shared<const char>();
  memory_.ReserveOpening();
  shrinking_ = memory_.bytes().PrepareShrink(VpagesInUse());
}

void Pool::GiveBack() {
  CGP_CHECK(!in_scope() && shrinking_);
  stats_.peak_reserved_bytes = std::max(stats_.peak_reserved_bytes, reserved_bytes());
  memory_.OpenAll();
  needs_.Clear();
  identity_ = std::move(next_identity_);
  if (const std::exception_ptr error = Shrink()) std::rethrow_exception(error);
}

void Pool::UnmapStale() {
  CGP_CHECK(in_scope() && !in_capture_scope());
  memory_.DissolveRing();
  std::vector<bool> keep = VpagesInUse();
  AddNeeded(keep);
  uint64_t mapped = 0;
  for (PageId page{0}; Index(page) < ranges_.page_count(); ++page) {
    const std::vector<VirtualPage>& vpages = ranges_.vpages_of(page);
    mapped += vpages.size();
    bool any = false;
    for (const VirtualPage vpage : vpages) any |= keep[Index(vpage)];
    // The oldest mapping is in the range that shows most.
    if (!any) keep[Index(vpages.front())] = true;
  }
  std::exception_ptr error;
  if (static_cast<uint64_t>(std::ranges::count(keep, true)) < mapped) {
    shrinking_ = memory_.bytes().PrepareShrink(std::move(keep));
    error = Shrink();
  }
  mapping_limit_ = std::max(kLeastMappingLimit, 2 * ranges_.mapping_count());
  if (error) std::rethrow_exception(error);
}

// Whether each virtual page, or another one of the same mapping, has a live block. Of a lent handle
// one mapping stays, since another pool has live blocks there.
std::vector<bool> Pool::VpagesInUse() const {
  std::vector<bool> in_use(ranges_.vpage_limit());
  blocks_.ForEach([&](Address, const LiveBlock& live) {
    const Granules end = Granules(live.site.offset) + live.length();
    const uint32_t last =
        Index(live.site.vpage) + static_cast<uint32_t>((end - Granules(1)) / ranges_.page_size());
    for (uint32_t vpage = Index(live.site.vpage); vpage <= last; ++vpage) {
      KeepMapping(VirtualPage{vpage}, in_use);
    }
  });
  for (PageId page{0}; !ranges_.borrows() && Index(page) < ranges_.page_count(); ++page) {
    if (ranges_.lease_of(page) == kLent) KeepMapping(ranges_.vpages_of(page).front(), in_use);
  }
  return in_use;
}

// All virtual pages of the mapping stay.
void Pool::KeepMapping(VirtualPage vpage, std::vector<bool>& keep) const {
  if (keep[Index(vpage)]) return;
  const PageId page = ranges_.page_at(vpage);
  const uint32_t begin = Index(vpage) - (Index(page) - Index(ranges_.handle_begin(page)));
  std::fill_n(keep.begin() + begin, ranges_.handle_pages(page), true);
}

// What graphs and checkpoints need stays.
void Pool::AddNeeded(std::vector<bool>& keep) const {
  const RangeTable::AddressIndex index = ranges_.ByAddress();
  needs_.ForEachOfAll([&](AddressSpan span) {
    ForEachVpage(span, index, [&](VirtualPage vpage) { KeepMapping(vpage, keep); });
  });
}

// Gives the new numbers to all that names virtual pages, or drops it. Does not throw: returns the
// driver's error. pre: `shrinking_` is prepared.
std::exception_ptr Pool::Shrink() {
  const RangeTable::Renumbering renumbering = memory_.bytes().Shrink(*shrinking_);
  shrinking_.reset();
  blocks_.ForEach(
      [&](Address, LiveBlock& live) { live.site.vpage = renumbering.Of(live.site.vpage); });
  placer_.Clear();
  lent_ = CountLeased(kLent);
  asleep_ = asleep_ && CountLeased(kAsleep).pages > 0;
  return renumbering.error;
}

void Pool::Check() const {
  ranges_.Check();
  memory_.Check();
  uint64_t allocated = 0;
  uint64_t requested = 0;
  blocks_.ForEach([&](Address address, const LiveBlock& live) {
    CGP_CHECK(address == live.block.address);
    CGP_CHECK(address == ranges_.AddressOf(live.site));
    allocated += live.block.bytes;
    requested += live.block.requested_bytes;
  });
  CGP_CHECK(allocated == stats_.allocated_bytes && requested == stats_.requested_bytes);
  needs_.Check();
  CheckLeases();
}

LiveBlock& Pool::Known(Address address) {
  LiveBlock* const live = blocks_.Find(address);
  if (live == nullptr) {
    throw UsageError("cudagraph_pool: no live block starts at " + Hex(address) +
                     ": it was never allocated in this pool, or was freed before.");
  }
  return *live;
}

// Puts the block into the books, and takes it out. pre: there is room.
void Pool::List(LiveBlock&& live) {
  stats_.allocated_bytes += live.block.bytes;
  stats_.requested_bytes += live.block.requested_bytes;
  ++stats_.allocations;
  const Address address = live.block.address;
  blocks_.Insert(address, std::move(live));
}

void Pool::Unlist(const LiveBlock& live) {
  placer_.Freed(live.block.address);
  stats_.allocated_bytes -= live.block.bytes;
  stats_.requested_bytes -= live.block.requested_bytes;
  ++stats_.frees;
  blocks_.Erase(live.block.address);
}

}  // namespace cgp
