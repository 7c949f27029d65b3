#include "core/pool.h"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

#include "core/base/error.h"
#include "core/base/reserve.h"
#include "core/pool_state.h"

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
    : state_(std::make_unique<State>(driver, PageSize(driver, options))) {}

Pool::~Pool() = default;

bool Pool::in_scope() const { return state_->memory.scope().has_value(); }

void Pool::BeginScope(ScopeKind kind, bool may_ask_device) {
  State& s = *state_;
  if (kind == ScopeKind::kCapture) ReserveMore(s.captures, 1);
  s.memory.BeginScope(kind, may_ask_device);
  s.stats.scope_peak_bytes = s.stats.allocated_bytes;
  s.reserved_before = reserved_bytes();
  s.capture = {.live_before_bytes = s.stats.allocated_bytes,
               .first_allocation = s.stats.allocations};
  if (kind == ScopeKind::kCapture) s.placer.BeginCapture();
}

void Pool::EndScope(bool may_ask_device) {
  State& s = *state_;
  const bool predicts = s.memory.captures_one_stream();
  const bool capture = s.memory.scope() == ScopeKind::kCapture;
  s.memory.EndScope(may_ask_device);
  if (capture) {
    if (s.captures.size() == kMaxCaptures) s.captures.erase(s.captures.begin());
    s.capture.added_bytes = reserved_bytes() - s.reserved_before;
    s.capture.peak_bytes = s.stats.scope_peak_bytes;
    s.capture.allocations = s.stats.allocations - s.capture.first_allocation;
    s.captures.push_back(s.capture);
  }
  if (predicts) s.placer.EndCapture();
}

Block Pool::Allocate(uint64_t bytes, StreamId stream, std::optional<CaptureId> capture) {
  State& s = *state_;
  CGP_CHECK(in_scope() && bytes > 0);
  s.blocks.ReserveOne();
  LiveBlock live;
  live.block = {.bytes = Granules::FromBytesRoundedUp(bytes).bytes(),
                .requested_bytes = bytes,
                .stream = stream};
  live.eager = s.memory.scope() == ScopeKind::kEager;
  s.placer.Place(s.memory.BeginTake(live, capture), live, s.stats);
  live.block.address = s.ranges.AddressOf(live.site.slot, Granules(live.site.offset));
  if (!live.eager) s.ranges.Pin(live.site.slot);
  const Block block = live.block;
  s.List(std::move(live));
  s.stats.peak_allocated_bytes = std::max(s.stats.peak_allocated_bytes, s.stats.allocated_bytes);
  s.stats.scope_peak_bytes = std::max(s.stats.scope_peak_bytes, s.stats.allocated_bytes);
  return block;
}

Block Pool::Free(Address address) {
  State& s = *state_;
  LiveBlock& live = s.Known(address);
  s.memory.Free(live);
  const Block block = live.block;
  s.Unlist(block, live.ticket);
  return block;
}

void Pool::RecordUse(Address address, StreamId stream) {
  state_->memory.RecordUse(state_->Known(address), stream);
}

const Block* Pool::At(Address address) const {
  const LiveBlock* const live = state_->blocks.Find(address);
  return live == nullptr ? nullptr : &live->block;
}

const Block* Pool::Find(Address address) const {
  const State& s = *state_;
  const Block* found = nullptr;
  s.blocks.ForEach([&](Address start, const LiveBlock& live) {
    if (start <= address && address - start < live.block.bytes) found = &live.block;
  });
  return found;
}

std::optional<AddressSpan> Pool::ReservationAround(Address address) const {
  return state_->ranges.ReservationAround(address);
}

std::vector<PhysicalPiece> Pool::Pieces(Address address) const {
  const LiveBlock& live = state_->Known(address);
  std::vector<PhysicalPiece> pieces;
  const auto add = [&](PageId page, Granules offset, Granules length) {
    pieces.push_back({page, offset.bytes(), length.bytes()});
  };
  state_->memory.bytes().ForEachPiece(live.site, live.length(), add);
  return pieces;
}

void Pool::RefreshAccess() { state_->ranges.RefreshAccess(); }

uint64_t Pool::reserved_bytes() const {
  const RangeTable& ranges = state_->ranges;
  return (ranges.page_count() + ranges.unreleased_pages()) *
         state_->memory.bytes().page_size().bytes();
}

uint64_t Pool::handles() const {
  return uint64_t{state_->ranges.handle_count()} + state_->ranges.unreleased_handles();
}

uint64_t Pool::live_blocks() const { return state_->blocks.size(); }

uint64_t Pool::free_extents() const { return state_->memory.bytes().space().free_extents(); }

PoolStats Pool::Stats() const {
  const State& s = *state_;
  PoolStats stats = s.stats;
  stats.page_bytes = s.memory.bytes().page_size().bytes();
  stats.pages = s.ranges.page_count();
  stats.reserved_bytes = reserved_bytes();
  stats.peak_reserved_bytes = std::max(stats.peak_reserved_bytes, stats.reserved_bytes);
  stats.live_blocks = s.blocks.size();
  stats.ranges = s.ranges.range_count();
  stats.page_mappings = s.ranges.mapping_count();
  return stats;
}

PoolSnapshot Pool::Snapshot() const {
  const State& s = *state_;
  PoolSnapshot snapshot;
  snapshot.stats = Stats();
  s.blocks.ForEach([&](Address address, const LiveBlock& live) {
    snapshot.blocks.push_back({live.block, Pieces(address)});
  });
  std::ranges::sort(snapshot.blocks, {}, [](const auto& entry) { return entry.block.address; });
  for (uint32_t r = 0; r < s.ranges.range_count(); ++r) {
    const RangeTable::Range& range = s.ranges.range(RangeId{r});
    PoolSnapshot::Range& entry = snapshot.ranges.emplace_back();
    entry.address = s.ranges.AddressOf(range.begin(), Granules(0));
    for (uint32_t slot = Index(range.begin()); slot < Index(range.end()); ++slot) {
      entry.pages.push_back(s.ranges.page_at(SlotId{slot}));
    }
  }
  return snapshot;
}

const std::vector<CaptureStats>& Pool::captures() const { return state_->captures; }

void Pool::Check() const {
  const State& s = *state_;
  s.ranges.Check();
  s.memory.Check();
  uint64_t allocated = 0;
  uint64_t requested = 0;
  s.blocks.ForEach([&](Address address, const LiveBlock& live) {
    CGP_CHECK(address == live.block.address);
    CGP_CHECK(address == s.ranges.AddressOf(live.site.slot, Granules(live.site.offset)));
    allocated += live.block.bytes;
    requested += live.block.requested_bytes;
  });
  CGP_CHECK(allocated == s.stats.allocated_bytes && requested == s.stats.requested_bytes);
}

LiveBlock& Pool::State::Known(Address address) {
  LiveBlock* live = blocks.Find(address);
  if (live == nullptr) {
    throw UsageError("cudagraph_pool: no live block starts at " + Hex(address) +
                     ": it was never allocated in this pool, or was freed before.");
  }
  return *live;
}

// Puts the block into the books, and takes it out. pre: there is room.
void Pool::State::List(LiveBlock&& live) {
  stats.allocated_bytes += live.block.bytes;
  stats.requested_bytes += live.block.requested_bytes;
  ++stats.allocations;
  const Address address = live.block.address;
  blocks.Insert(address, std::move(live));
}

void Pool::State::Unlist(const Block& block, Ticket ticket) {
  placer.Freed(ticket);
  stats.allocated_bytes -= block.bytes;
  stats.requested_bytes -= block.requested_bytes;
  ++stats.frees;
  blocks.Erase(block.address);
}

}  // namespace cgp
