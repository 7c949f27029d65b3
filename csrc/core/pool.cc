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
    : ranges_(driver, PageSize(driver, options)),
      memory_(driver, ranges_, blocks_),
      placer_(driver, ranges_, memory_, blocks_) {}

void Pool::BeginScope(ScopeKind kind, bool may_ask_device) {
  if (kind == ScopeKind::kCapture) ReserveMore(captures_, 1);
  memory_.BeginScope(kind, may_ask_device);
  stats_.scope_peak_bytes = stats_.allocated_bytes;
  reserved_before_ = reserved_bytes();
  capture_ = {.live_before_bytes = stats_.allocated_bytes, .first_allocation = stats_.allocations};
  placer_.BeginScope(kind);
}

void Pool::EndScope(bool may_ask_device) {
  const bool capture = in_capture_scope();
  memory_.EndScope(may_ask_device);
  if (capture) {
    if (captures_.size() == kMaxCaptures) captures_.erase(captures_.begin());
    capture_.added_bytes = reserved_bytes() - reserved_before_;
    capture_.peak_bytes = stats_.scope_peak_bytes;
    capture_.allocations = stats_.allocations - capture_.first_allocation;
    captures_.push_back(capture_);
    PinLive();
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
  LiveBlock live;
  live.block = {.bytes = Granules::FromBytesRoundedUp(rounded).bytes(),
                .requested_bytes = bytes,
                .stream = stream};
  live.eager = memory_.scope() == ScopeKind::kEager;
  placer_.Place(memory_.BeginTake(live, capture), live, stats_);
  live.block.address = ranges_.AddressOf(live.site);
  live.pinned = !live.eager;
  if (live.pinned) ranges_.Pin(live.site.vpage);
  const Block block = live.block;
  List(std::move(live));
  stats_.peak_allocated_bytes = std::max(stats_.peak_allocated_bytes, stats_.allocated_bytes);
  stats_.scope_peak_bytes = std::max(stats_.scope_peak_bytes, stats_.allocated_bytes);
  return block;
}

Block Pool::Free(Address address) {
  LiveBlock& live = Known(address);
  // The graph may read it: graph trees fill the inputs that died in a capture before each replay.
  if (in_capture_scope()) ranges_.Pin(live.site.vpage);
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

uint64_t Pool::reserved_bytes() const {
  return BytesOf(ranges_.page_count() + ranges_.unreleased_pages());
}

PoolStats Pool::Stats() const {
  PoolStats stats = stats_;
  stats.page_bytes = ranges_.page_size().bytes();
  stats.pages = ranges_.page_count();
  stats.reserved_bytes = reserved_bytes();
  stats.peak_reserved_bytes = std::max(stats.peak_reserved_bytes, stats.reserved_bytes);
  stats.live_blocks = blocks_.size();
  stats.ranges = ranges_.range_count();
  stats.page_mappings = ranges_.mapping_count();
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
  blocks_.ForEach([&](Address, const LiveBlock& live) { ranges_.Pin(live.site.vpage); });
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

uint64_t Pool::spare_bytes() const {
  const PageSpace& space = memory_.bytes().space();
  uint64_t pages = ranges_.unreleased_pages();
  for (PageId handle{0}; Index(handle) < ranges_.page_count();
       handle = ranges_.handle_end(handle)) {
    bool used = false;
    for (PageId page = handle; page < ranges_.handle_end(handle); ++page) {
      for (NodeId id = space.first(page); id != NodeId::kNone; id = space.node(id).next) {
        used |= space.node(id).used();
      }
    }
    if (!used) pages += ranges_.handle_pages(handle);
  }
  return BytesOf(pages);
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
  ranges_.UnpinAll();
  blocks_.ForEach([](Address, LiveBlock& live) { live.pinned = false; });
  unpinned_ = blocks_.size();
  identity_ = std::move(next_identity_);
  if (const std::exception_ptr error = Shrink()) std::rethrow_exception(error);
}

void Pool::UnmapStale() {
  CGP_CHECK(memory_.scope() == ScopeKind::kEager);
  memory_.DissolveRing();
  std::vector<bool> keep = VpagesInUse();
  uint64_t mapped = 0;
  for (PageId page{0}; Index(page) < ranges_.page_count(); ++page) {
    const std::vector<VirtualPage>& vpages = ranges_.vpages_of(page);
    mapped += vpages.size();
    bool any = false;
    for (const VirtualPage vpage : vpages) {
      if (ranges_.range(ranges_.range_of(vpage)).pinned) keep[Index(vpage)] = true;
      any |= keep[Index(vpage)];
    }
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

// Whether each virtual page, or another one of the same mapping, has a live block.
std::vector<bool> Pool::VpagesInUse() const {
  std::vector<bool> in_use(ranges_.vpage_limit());
  blocks_.ForEach([&](Address, const LiveBlock& live) {
    const Granules end = Granules(live.site.offset) + live.length();
    const uint32_t last =
        Index(live.site.vpage) + static_cast<uint32_t>((end - Granules(1)) / ranges_.page_size());
    for (uint32_t vpage = Index(live.site.vpage); vpage <= last;) {
      const PageId page = ranges_.page_at(VirtualPage{vpage});
      const uint32_t begin = vpage - (Index(page) - Index(ranges_.handle_begin(page)));
      const uint32_t pages = ranges_.handle_pages(page);
      std::fill_n(in_use.begin() + begin, pages, true);
      vpage = begin + pages;
    }
  });
  return in_use;
}

// Gives the new numbers to all that names virtual pages, or drops it. Does not throw: returns the
// driver's error. pre: `shrinking_` is prepared.
std::exception_ptr Pool::Shrink() {
  const RangeTable::Renumbering renumbering = memory_.bytes().Shrink(*shrinking_);
  shrinking_.reset();
  blocks_.ForEach(
      [&](Address, LiveBlock& live) { live.site.vpage = renumbering.Of(live.site.vpage); });
  placer_.Clear();
  return renumbering.error;
}

void Pool::Check() const {
  ranges_.Check();
  memory_.Check();
  uint64_t allocated = 0;
  uint64_t requested = 0;
  uint64_t unpinned = 0;
  blocks_.ForEach([&](Address address, const LiveBlock& live) {
    CGP_CHECK(address == live.block.address);
    CGP_CHECK(address == ranges_.AddressOf(live.site));
    allocated += live.block.bytes;
    requested += live.block.requested_bytes;
    unpinned += live.pinned ? 0 : 1;
    CGP_CHECK(!live.pinned || ranges_.range(ranges_.range_of(live.site.vpage)).pinned);
  });
  CGP_CHECK(allocated == stats_.allocated_bytes && requested == stats_.requested_bytes);
  CGP_CHECK(unpinned == unpinned_);
}

LiveBlock& Pool::Known(Address address) {
  LiveBlock* const live = blocks_.Find(address);
  if (live == nullptr) {
    throw UsageError("cudagraph_pool: no live block starts at " + Hex(address) +
                     ": it was never allocated in this pool, or was freed before.");
  }
  return *live;
}

// The graph may use what lives when its capture ends.
void Pool::PinLive() {
  if (std::exchange(unpinned_, 0) == 0) return;
  blocks_.ForEach([&](Address, LiveBlock& live) {
    ranges_.Pin(live.site.vpage);
    live.pinned = true;
  });
}

// Puts the block into the books, and takes it out. pre: there is room.
void Pool::List(LiveBlock&& live) {
  stats_.allocated_bytes += live.block.bytes;
  stats_.requested_bytes += live.block.requested_bytes;
  ++stats_.allocations;
  unpinned_ += live.pinned ? 0 : 1;
  const Address address = live.block.address;
  blocks_.Insert(address, std::move(live));
}

void Pool::Unlist(const LiveBlock& live) {
  placer_.Freed(live.block.address);
  stats_.allocated_bytes -= live.block.bytes;
  stats_.requested_bytes -= live.block.requested_bytes;
  ++stats_.frees;
  unpinned_ -= live.pinned ? 0 : 1;
  blocks_.Erase(live.block.address);
}

}  // namespace cgp
