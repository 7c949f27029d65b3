#include "core/pool.h"

#include <algorithm>
#include <bit>
#include <string>
#include <utility>

#include "core/error.h"
#include "core/pool_state.h"
#include "core/reserve.h"

namespace cgp {
namespace {

// As many addresses as CUDA has. Refused here, a larger block cannot fill the host's memory with a
// plan for its pages, nor overflow what counts them.
constexpr uint64_t kLargestBlock = uint64_t{1} << 47;

Granules PageSize(const Driver& driver, const PoolOptions& options) {
  const uint64_t granularity = driver.granularity();
  const uint64_t bytes = options.page_bytes == 0 ? granularity : options.page_bytes;
  if (!std::has_single_bit(bytes) || bytes % granularity != 0 || bytes < kGranuleBytes) {
    throw UsageError("cudagraph_pool: a page of " + std::to_string(bytes) +
                     " bytes is not a power-of-two multiple of the driver's granularity of " +
                     std::to_string(granularity) + " bytes.");
  }
  return Granules(bytes / kGranuleBytes);
}

}  // namespace

Pool::Pool(Driver& driver, PoolOptions options)
    : state_(std::make_unique<State>(driver, PageSize(driver, options))) {}

Pool::~Pool() = default;

bool Pool::in_scope() const { return state_->scope.has_value(); }

void Pool::BeginScope(ScopeKind kind, bool may_ask_device) {
  State& s = *state_;
  CGP_CHECK(!s.scope);
  may_ask_device = may_ask_device && s.driver.MayQuiesce();
  const bool behind_replays = kind == ScopeKind::kEager && s.captured;
  std::shared_ptr<SharedEvent> mark;
  if (may_ask_device && (behind_replays || s.fences.NeedsMark())) mark = s.fences.Mark();
  s.PollFences();
  if (behind_replays && !mark) s.HoldAllFree();
  s.replays_unknown = behind_replays && !mark;
  if (behind_replays) s.replays = std::move(mark);
  s.stats.scope_peak_bytes = s.stats.allocated_bytes;
  s.scope = kind;
  s.thread = std::this_thread::get_id();
  if (kind == ScopeKind::kCapture) s.foresight.BeginCapture();
}

void Pool::EndScope(bool may_ask_device) {
  State& s = *state_;
  CGP_CHECK(s.scope);
  const bool captured = *s.scope == ScopeKind::kCapture;
  s.GiveFreedAtEnd();
  const bool eager_fences = !captured && s.fences.scope_fence_count() > 0;
  s.ReserveForWaking();
  // Known now, the end of what ran here is known sooner than when the next scope begins.
  if (!captured && s.fences.NeedsMark() && may_ask_device && s.driver.MayQuiesce()) s.fences.Mark();
  // Nothing throws from here on.
  s.fences.EndScope();
  if (!s.views.empty()) s.views.resize(1);
  s.OpenFences();
  if (!s.views.empty()) {
    FreeView& view = *s.views.front();
    view.Assign(view.stream(), FenceId::kOpen);
    if (eager_fences) view.Rebuild();
  }
  if (captured) {
    if (!s.several_streams) s.foresight.EndCapture();
    s.ForgetProofs();
    s.captured = true;
  }
  s.replays.reset();
  s.scope.reset();
}

Block Pool::Allocate(uint64_t bytes, StreamId stream, std::optional<CaptureId> capture) {
  State& s = *state_;
  CGP_CHECK(s.scope && bytes > 0);
  const Granules length = Granules::FromBytesRoundedUp(bytes);
  if (bytes > kLargestBlock) s.ThrowOutOfMemory("No device has so many addresses.", bytes);
  s.GiveFreed();
  s.blocks.ReserveOne();
  s.space.ReservePages(0);
  FreeView& view = s.ViewFor(stream, capture);
  for (const auto& other : s.views) other->MakeRoomForNodes();
  LiveBlock live;
  live.block = {.address = 0, .bytes = length.bytes(), .requested_bytes = bytes, .stream = stream};
  live.eager = *s.scope == ScopeKind::kEager;
  const bool foretold = !live.eager && !s.several_streams;
  if (foretold) s.foresight.ReserveOne();
  const Foresight::Advice advice = foretold ? s.Advise(bytes, view) : Foresight::Advice{};
  try {
    if (const std::optional<Placement> place = s.FollowAdvice(advice, length)) {
      s.PlaceAt(*place, live);
    } else if (length < s.page_size) {
      s.PlaceSmall(view, live);
    } else {
      s.PlaceLarge(view, live, advice.lives_at_peak);
    }
  } catch (const DriverError& error) {
    if (error.status() == DriverStatus::kOutOfMemory) s.ThrowOutOfMemory(error.what(), bytes);
    throw;
  }
  live.block.address = s.ranges.AddressOf(live.slot, Granules(live.offset));

  if (!live.eager) s.ranges.Pin(live.slot);
  if (s.proofs.stream_count() > 0) live.view = s.NumberOf(view);
  if (foretold) {
    const Granules held = Granules::FromBytesRoundedUp(s.stats.allocated_bytes + live.block.bytes);
    live.ticket = s.foresight.Allocated(advice, {live.slot, Granules(live.offset)}, bytes, held);
  }
  const Block block = live.block;
  s.blocks.Insert(block.address, std::move(live));
  s.stats.allocated_bytes += block.bytes;
  s.stats.requested_bytes += bytes;
  s.stats.peak_allocated_bytes = std::max(s.stats.peak_allocated_bytes, s.stats.allocated_bytes);
  s.stats.scope_peak_bytes = std::max(s.stats.scope_peak_bytes, s.stats.allocated_bytes);
  ++s.stats.allocations;
  return block;
}

Block Pool::Free(Address address) {
  State& s = *state_;
  LiveBlock& live = s.Known(address);
  const Block block = live.block;
  const bool others = s.InOthersCapture();
  if (others && s.CanAskLater(live)) {
    ReserveMore(s.freed, 1);
    s.freed.push_back(std::move(live));
    s.Unlist(s.freed.back());
    return block;
  }
  const FenceId fence = others ? s.fences.Held(/*eager=*/true) : s.FenceFor(live);
  s.space.ReserveFence(fence);
  s.Drop(live, fence);
  return block;
}

void Pool::RecordUse(Address address, StreamId stream) {
  State& s = *state_;
  LiveBlock& live = s.Known(address);
  if (stream == live.block.stream) return;
  // Then the driver knows of the device, and marks it too.
  if (DeviceOf(stream)) s.driver.Capture(stream, &s.frontier);
  const bool captured = s.IsCapturedUse(stream);
  if (s.InOthersCapture()) {
    s.expects_several_streams = true;
  } else if (s.scope == ScopeKind::kCapture) {
    s.ExpectSeveralStreams();
  }
  live.AddUse(stream);
  // A capture that frees the block would otherwise let its end stand for the end of this use too.
  if (!captured) live.eager = true;
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
  std::vector<PhysicalPiece> pieces;
  state_->ForEachPiece(state_->Known(address), [&](PageId page, Granules offset, Granules length) {
    pieces.push_back({page, offset.bytes(), length.bytes()});
  });
  return pieces;
}

void Pool::RefreshAccess() { state_->ranges.RefreshAccess(); }

uint64_t Pool::reserved_bytes() const {
  const RangeTable& ranges = state_->ranges;
  return (ranges.page_count() + ranges.unreleased_pages()) * state_->page_size.bytes();
}

uint64_t Pool::handles() const {
  return uint64_t{state_->ranges.handle_count()} + state_->ranges.unreleased_handles();
}

uint64_t Pool::live_blocks() const { return state_->blocks.size(); }

uint64_t Pool::free_extents() const { return state_->space.free_extents(); }

PoolStats Pool::Stats() const {
  const State& s = *state_;
  PoolStats stats = s.stats;
  stats.page_bytes = s.page_size.bytes();
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

void Pool::Check() const {
  const State& s = *state_;
  s.space.Check();
  s.ranges.Check();
  CGP_CHECK(s.space.page_count() == s.ranges.page_count());
  for (const auto& view : s.views) view->Check();
  CGP_CHECK(s.scope || s.views.size() <= 1);
  CGP_CHECK(s.scope == ScopeKind::kCapture || (s.freed.empty() && !s.expects_several_streams));
  s.CheckProofs();

  // Live blocks, and freed ones whose bytes are not free yet, are exactly the used nodes.
  uint64_t pieces = 0;
  Granules used;
  const auto check = [&](const LiveBlock& live) {
    CGP_CHECK(s.ranges.AddressOf(live.slot, Granules(live.offset)) == live.block.address);
    uint64_t of_block = 0;
    s.ForEachNode(live, [&](NodeId id) {
      CGP_CHECK(s.space.node(id).used());
      of_block += s.space.node(id).length;
      ++pieces;
    });
    CGP_CHECK(of_block == Granules::FromBytesRoundedUp(live.block.bytes).count());
    s.ForEachPiece(live, [&](PageId page, Granules offset, Granules length) {
      const NodeId id = s.NodeAt(page, offset);
      const PageSpace::Node& node = s.space.node(id);
      CGP_CHECK(node.used() && node.offset == offset.count());
      CGP_CHECK(s.space.IsOfWholePages(id) ? length == s.page_size : node.length == length.count());
      used += length;
    });
  };
  Granules freed;
  for (const LiveBlock& live : s.freed) {
    check(live);
    freed += Granules::FromBytesRoundedUp(live.block.bytes);
  }
  s.blocks.ForEach([&](Address address, const LiveBlock& live) {
    CGP_CHECK(address == live.block.address);
    check(live);
  });
  uint64_t used_nodes = 0;
  s.space.ForEachNode([&](NodeId id) { used_nodes += s.space.node(id).used() ? 1 : 0; });
  CGP_CHECK(pieces == used_nodes && (used - freed).bytes() == s.stats.allocated_bytes);
  CGP_CHECK(used + s.space.free() == s.page_size * s.space.page_count());
}

LiveBlock& Pool::State::Known(Address address) {
  LiveBlock* live = blocks.Find(address);
  if (live == nullptr) {
    throw UsageError("cudagraph_pool: no live block starts at " + Hex(address) +
                     ": it was never allocated in this pool, or was freed before.");
  }
  return *live;
}

// pre: PageSpace::ReserveFence(fence).
void Pool::State::Drop(const LiveBlock& live, FenceId fence) {
  GiveBlock(live, fence);
  Unlist(live);
}

// Takes the block out of the books.
void Pool::State::Unlist(const LiveBlock& live) {
  foresight.Freed(live.ticket);
  stats.allocated_bytes -= live.block.bytes;
  stats.requested_bytes -= live.block.requested_bytes;
  ++stats.frees;
  blocks.Erase(live.block.address);
}

void Pool::State::ThrowOutOfMemory(std::string_view reason, uint64_t bytes) const {
  const auto mib = [](uint64_t amount) {
    return std::to_string((amount + (1 << 19)) >> 20) + " MiB";
  };
  std::string text = "cudagraph_pool: out of memory: a block of " + std::to_string(bytes) +
                     " bytes (" + mib(bytes) + ") needs new pages of " + mib(page_size.bytes()) +
                     "; the pool holds " + mib(space.page_count() * page_size.bytes()) + " in " +
                     std::to_string(space.page_count()) + " pages, of which " +
                     mib(space.free().bytes()) + " are free but do not fit; device " +
                     std::to_string(driver.device());
  try {
    const MemoryInfo info = driver.Info();
    text += " has " + mib(info.free_bytes) + " free of " + mib(info.total_bytes);
  } catch (const DriverError&) {
    text += " does not say what it has free";
  }
  throw OutOfMemoryError(text + ". " + std::string(reason), bytes);
}

}  // namespace cgp
