#include "core/pool.h"

#include <algorithm>
#include <array>
#include <bit>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "core/error.h"
#include "core/fences.h"
#include "core/foresight.h"
#include "core/free_view.h"
#include "core/page_space.h"
#include "core/placement.h"
#include "core/pool_checkpoint.h"
#include "core/range_table.h"
#include "core/slab_map.h"

namespace cgp {
namespace {

// Pools of fewer pages than this place what lives at the peak without slack: a page they waste is
// more than 0.1 % of them. In larger pools it is not worth the mappings.
constexpr uint32_t kExactPages = 1000;

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

// Who but its stream works on a block.
struct Others {
  std::vector<StreamId> uses;   // recorded
  std::vector<FenceId> behind;  // its bytes, when a restore brought it back; those not open yet
};

// A cache line, since a free of one among many blocks has to fetch it.
struct alignas(64) LiveBlock {
  Block block;
  SlotId slot{};                // where it starts
  uint32_t offset = 0;          // granules into that slot
  NodeId node = NodeId::kNone;  // of a block that lies in one page
  // Some work on it was not captured: it was allocated in an eager scope, or another stream used it
  // outside of captures.
  bool eager = false;
  CaptureGuide::Ticket ticket;
  std::unique_ptr<Others> others;  // mostly none

  Others& GetOthers() {
    if (!others) others = std::make_unique<Others>();
    return *others;
  }
  void AddUse(StreamId stream) {
    if (stream == block.stream) return;
    std::vector<StreamId>& uses = GetOthers().uses;
    if (std::ranges::find(uses, stream) == uses.end()) uses.push_back(stream);
  }
  void Add(const PoolCheckpoint::Entry& known) {
    eager |= known.eager;
    for (const StreamId use : known.uses) AddUse(use);
  }
};

}  // namespace

struct Pool::State {
  State(Driver& the_driver, Granules size)
      : driver(the_driver),
        page_size(size),
        space(size),
        ranges(the_driver, size),
        fences(the_driver),
        foresight(space, ranges) {}

  LiveBlock& Known(Address address);
  FreeView* FindView(StreamId stream) const;
  FreeView& ViewFor(StreamId stream);
  void CheckAgainstDevice(Granules length) const;
  void PlaceSmall(FreeView& view, LiveBlock& live);
  void PlaceLarge(FreeView& view, LiveBlock& live, bool at_peak);
  std::optional<Placement> FollowAdvice(const Foresight::Advice& advice);
  Foresight::Advice Advise(uint64_t bytes, const FreeView& view);
  std::optional<RangeId> RangeWithRoom() const;
  void PlaceAt(Placement place, LiveBlock& live);
  Placement FindOrMap(FreeView& view, Granules length, Slack slack);
  SlotId Grow(const MappingPlan& mapping);
  bool PollFences();
  void SettlePages();
  NodeId TakePiece(NodeId within, Granules offset, Granules length);
  void GivePiece(NodeId node, FenceId fence);
  template <typename Function>
  void ForEachPiece(const LiveBlock& block, Function&& function) const;
  FenceId FenceFor(const LiveBlock& block);
  void GiveBlock(const LiveBlock& block, FenceId fence);
  void Drop(const LiveBlock& block, FenceId fence);
  void Revive(const PoolCheckpoint::Entry& entry);
  NodeId NodeAt(PageId page, Granules offset) const;
  [[noreturn]] void ThrowOutOfMemory(std::string_view reason, uint64_t bytes) const;

  Driver& driver;
  const Granules page_size;
  PageSpace space;
  RangeTable ranges;
  FenceTable fences;
  // One for each stream that has allocated in the open scope. Between scopes at most one, which
  // sees what is open: the next scope's first stream takes it over, so that a pool that one stream
  // fills never indexes anything anew.
  std::vector<std::unique_ptr<FreeView>> views;
  Foresight foresight;
  SlabMap<LiveBlock> blocks;
  std::optional<ScopeKind> scope;
  PoolStats stats;  // what Stats() does not derive
  // Its address is the pool's identity, of which checkpoints keep a weak reference.
  const std::shared_ptr<const char> identity = std::make_shared<const char>();
};

Pool::Pool(Driver& driver, PoolOptions options)
    : state_(std::make_unique<State>(driver, PageSize(driver, options))) {}

Pool::~Pool() = default;

bool Pool::in_scope() const { return state_->scope.has_value(); }

void Pool::BeginScope(ScopeKind kind) {
  State& s = *state_;
  CGP_CHECK(!s.scope);
  s.PollFences();
  s.scope = kind;
  if (kind == ScopeKind::kCapture) s.foresight.BeginCapture();
}

void Pool::EndScope() {
  State& s = *state_;
  CGP_CHECK(s.scope);
  // With one stream in a capture all that its view could take is open from now on: the view is
  // right as it is.
  const uint32_t fence_count = s.fences.scope_fence_count();
  const bool one_stream = *s.scope == ScopeKind::kCapture && fence_count == 1 &&
                          s.views.size() == 1 && s.views.front()->own_fence() != FenceId::kOpen;
  s.fences.EndScope();
  if (!s.fences.empty()) s.space.OpenFences(s.fences.Opened());
  s.fences.Clear();
  if (!s.views.empty()) {
    s.views.resize(1);
    FreeView& view = *s.views.front();
    view.Assign(view.stream(), FenceId::kOpen);
    if (fence_count > 0 && !one_stream) view.Rebuild();
  }
  s.SettlePages();
  if (*s.scope == ScopeKind::kCapture) s.foresight.EndCapture();
  s.scope.reset();
}

Block Pool::Allocate(uint64_t bytes, StreamId stream) {
  State& s = *state_;
  CGP_CHECK(s.scope && bytes > 0);
  const Granules length = Granules::FromBytesRoundedUp(bytes);
  if (bytes > kLargestBlock) s.ThrowOutOfMemory("No device has so many addresses.", bytes);
  s.blocks.ReserveOne();
  s.space.ReservePages(0);
  FreeView& view = s.ViewFor(stream);
  LiveBlock live;
  live.block = {.address = 0, .bytes = length.bytes(), .requested_bytes = bytes, .stream = stream};
  live.eager = *s.scope == ScopeKind::kEager;
  const Foresight::Advice advice = live.eager ? Foresight::Advice{} : s.Advise(bytes, view);
  try {
    if (const std::optional<Placement> place = s.FollowAdvice(advice)) {
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

  if (!live.eager) {
    const Granules held = Granules::FromBytesRoundedUp(s.stats.allocated_bytes + live.block.bytes);
    live.ticket = s.foresight.Allocated(advice, {live.slot, Granules(live.offset)}, bytes, held);
  }
  const Block block = live.block;
  s.blocks.Insert(block.address, std::move(live));
  s.stats.allocated_bytes += block.bytes;
  s.stats.requested_bytes += bytes;
  s.stats.peak_allocated_bytes = std::max(s.stats.peak_allocated_bytes, s.stats.allocated_bytes);
  ++s.stats.allocations;
  return block;
}

Block Pool::Free(Address address) {
  State& s = *state_;
  const LiveBlock& live = s.Known(address);
  const FenceId fence = s.FenceFor(live);
  const Block block = live.block;
  s.Drop(live, fence);
  return block;
}

void Pool::RecordUse(Address address, StreamId stream) {
  LiveBlock& live = state_->Known(address);
  live.AddUse(stream);
  // A capture that frees the block would otherwise let its end stand for the end of this use too.
  if (stream != live.block.stream && state_->scope != ScopeKind::kCapture) live.eager = true;
}

PoolCheckpoint Pool::Checkpoint() const {
  const State& s = *state_;
  CGP_CHECK(!s.scope);
  PoolCheckpoint checkpoint{.blocks = {}, .owner = s.identity};
  s.blocks.ForEach([&](Address, const LiveBlock& live) {
    checkpoint.blocks.push_back({live.block, live.slot, Granules(live.offset), live.eager,
                                 live.others ? live.others->uses : std::vector<StreamId>()});
  });
  std::ranges::sort(checkpoint.blocks, {}, [](const auto& entry) { return entry.block.address; });
  return checkpoint;
}

// A block that lives on keeps what was recorded of it.
RestoreDelta Pool::Restore(const PoolCheckpoint& checkpoint) {
  State& s = *state_;
  CGP_CHECK(!s.scope);
  if (checkpoint.owner.lock() != s.identity) {
    throw UsageError(
        "cudagraph_pool: the checkpoint was taken of another pool, or of one that is gone.");
  }
  s.PollFences();  // what is over is forgotten, not handed on
  RestoreDelta delta;
  std::vector<std::pair<Address, FenceId>> dropped;
  s.blocks.ForEach([&](Address address, const LiveBlock& live) {
    delta.freed.push_back(live.block);
    const auto same = std::ranges::lower_bound(
        checkpoint.blocks, address, {}, [](const auto& entry) { return entry.block.address; });
    if (same != checkpoint.blocks.end() && same->block == live.block) return;
    dropped.emplace_back(address, s.FenceFor(live));
  });

  // Nothing has changed so far but for fences that nothing stands behind, and nothing below calls
  // the driver.
  for (const auto& [address, fence] : dropped) s.Drop(s.Known(address), fence);
  for (const PoolCheckpoint::Entry& entry : checkpoint.blocks) {
    delta.allocated.push_back(entry.block);
    if (LiveBlock* const live = s.blocks.Find(entry.block.address)) {
      // Or it is a later one that is just like it: then both count.
      live->Add(entry);
    } else {
      s.Revive(entry);
    }
  }
  s.SettlePages();  // no peak: all of these have lived at once before
  return delta;
}

const Block* Pool::Find(Address address) const {
  const State& s = *state_;
  if (const LiveBlock* live = s.blocks.Find(address)) return &live->block;
  // Addresses inside a block are asked for by diagnostics only.
  const Block* found = nullptr;
  s.blocks.ForEach([&](Address start, const LiveBlock& live) {
    if (start <= address && address - start < live.block.bytes) found = &live.block;
  });
  return found;
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
  return state_->ranges.page_count() * state_->page_size.bytes();
}

uint64_t Pool::handles() const { return state_->ranges.handle_count(); }

uint64_t Pool::free_extents() const { return state_->space.free_extents(); }

PoolStats Pool::Stats() const {
  const State& s = *state_;
  PoolStats stats = s.stats;
  stats.page_bytes = s.page_size.bytes();
  stats.pages = s.ranges.page_count();
  stats.reserved_bytes = reserved_bytes();
  stats.peak_reserved_bytes = stats.reserved_bytes;  // a pool gives back all or nothing
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

  // Live blocks are exactly the used nodes.
  uint64_t pieces = 0;
  Granules used;
  s.blocks.ForEach([&](Address address, const LiveBlock& live) {
    CGP_CHECK(address == live.block.address);
    CGP_CHECK(s.ranges.AddressOf(live.slot, Granules(live.offset)) == address);
    s.ForEachPiece(live, [&](PageId page, Granules offset, Granules length) {
      const PageSpace::Node& node = s.space.node(s.NodeAt(page, offset));
      CGP_CHECK(node.used && node.offset == offset.count() && node.length == length.count());
      ++pieces;
      used += length;
    });
  });
  uint64_t used_nodes = 0;
  for (uint32_t p = 0; p < s.space.page_count(); ++p) {
    for (NodeId id = s.space.first(PageId{p}); id != NodeId::kNone; id = s.space.node(id).next) {
      used_nodes += s.space.node(id).used ? 1 : 0;
    }
  }
  CGP_CHECK(pieces == used_nodes && used.bytes() == s.stats.allocated_bytes);
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

// The view of a stream that has allocated in the open scope, else nullptr.
FreeView* Pool::State::FindView(StreamId stream) const {
  for (const auto& view : views) {
    if (view->stream() == stream && view->own_fence() != FenceId::kOpen) return view.get();
  }
  return nullptr;
}

FreeView& Pool::State::ViewFor(StreamId stream) {
  if (FreeView* const view = FindView(stream)) return *view;
  const FenceTable::StreamFence fence = fences.ForStream(stream, *scope == ScopeKind::kEager);
  if (views.size() == 1 && views.front()->own_fence() == FenceId::kOpen) {
    views.front()->Assign(stream, fence.id);
    if (fence.reused) views.front()->Rebuild();
    return *views.front();
  }
  return *views.emplace_back(std::make_unique<FreeView>(space, ranges, stream, fence.id));
}

// A block below a page lies in one page: the best fit among pages in part use, so that small blocks
// gather and pages stay whole; else a whole page.
void Pool::State::PlaceSmall(FreeView& view, LiveBlock& live) {
  const Granules length = Granules::FromBytesRoundedUp(live.block.bytes);
  const auto find = [&]() -> std::optional<NodeId> {
    if (const std::optional<NodeId> start = view.BestFit(length)) return start;
    const std::optional<PageId> page = LeastMappedWholePage(view, ranges);
    return page ? std::optional(space.first(*page)) : std::nullopt;
  };
  std::optional<NodeId> start = find();
  if (!start && PollFences()) start = find();
  if (!start)
    start = space.first(
        ranges.page_at(Grow({.range = RangeWithRoom(), .handles = {MappingPlan::kNewPage}})));
  live.offset = space.node(*start).offset;
  live.slot = ranges.slots_of(space.node(*start).page).front();
  live.node = TakePiece(*start, Granules(live.offset), length);
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
  // more, or if its like did so in the largest capture.
  at_peak |= stats.allocated_bytes + live.block.bytes >= stats.peak_allocated_bytes;
  const Slack slack = at_peak && space.page_count() < kExactPages ? Slack::kNone : Slack::kOnePage;
  PlaceAt(FindOrMap(view, length, slack), live);
}

Foresight::Advice Pool::State::Advise(uint64_t bytes, const FreeView& view) {
  return foresight.Advise(bytes, view, [this](const Foresight::PieceFunction& add) {
    blocks.ForEach([&](Address, const LiveBlock& block) {
      ForEachPiece(block, [&](PageId page, Granules offset, Granules length) {
        add(page, offset, length, block.ticket);
      });
    });
  });
}

std::optional<Placement> Pool::State::FollowAdvice(const Foresight::Advice& advice) {
  if (!advice.spot) return std::nullopt;
  if (!advice.spot->growth) return advice.spot->place;
  try {
    return advice.spot->growth->PlacementFrom(Grow(advice.spot->growth->mapping), page_size);
  } catch (const DriverError& error) {
    // A plan may want pages before they are needed, and addresses for more. Whether there is enough
    // for this block alone is for those to find out who place it without a plan.
    if (error.status() != DriverStatus::kOutOfMemory &&
        error.status() != DriverStatus::kOutOfAddresses)
      throw;
    foresight.GiveUpPlan();
    return std::nullopt;
  }
}

void Pool::State::PlaceAt(Placement place, LiveBlock& live) {
  live.slot = place.slot;
  live.offset = static_cast<uint32_t>(place.offset.count());
  int pieces = 0;
  ForEachPiece(live, [&](PageId page, Granules offset, Granules piece) {
    live.node = TakePiece(NodeAt(page, offset), offset, piece);
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
  auto found = FindMapped(view, ranges, page_size, length, slack);
  if (!found && PollFences()) found = FindMapped(view, ranges, page_size, length, slack);
  if (found && found->leftover == 0) return found->place;
  if (!found) CheckAgainstDevice(length);
  const GrowthPlan growth = PlanGrowth(view, ranges, page_size, length, slack);
  if (found && !SparesHandles(growth, *found)) return found->place;
  return growth.PlacementFrom(Grow(growth.mapping), page_size);
}

// Carries out the plan and makes the new mappings known. Throws with nothing changed.
SlotId Pool::State::Grow(const MappingPlan& mapping) {
  uint32_t new_pages = 0;
  for (const PageId handle : mapping.handles) {
    if (MappingPlan::IsNew(handle)) new_pages += MappingPlan::NewPages(handle);
  }
  const uint32_t count = ranges.PagesOf(mapping);
  space.ReservePages(new_pages);
  const uint32_t old_page_count = space.page_count();
  const SlotId first = ranges.Map(mapping);
  for (uint32_t i = 0; i < new_pages; ++i) space.AddPage();
  for (const auto& view : views) view->LearnMapping(first, count, old_page_count);
  return first;
}

bool Pool::State::PollFences() {
  if (fences.empty() || !fences.Poll()) return false;
  const std::vector<bool> opened = fences.Opened();
  space.OpenFences(opened);
  blocks.ForEach([&](Address, LiveBlock& live) {
    if (!live.others) return;
    std::erase_if(live.others->behind, [&](FenceId fence) { return opened[Index(fence)]; });
  });
  fences.Clear();
  for (const auto& view : views) view->Rebuild();
  return true;
}

// What lives at the end of a scope lives on.
void Pool::State::SettlePages() {
  std::vector<bool> settled(space.page_count());
  blocks.ForEach([&](Address, const LiveBlock& live) {
    if (live.node != NodeId::kNone) settled[Index(space.node(live.node).page)] = true;
  });
  for (uint32_t p = 0; p < space.page_count(); ++p) {
    const PageId page{p};
    if (space.settled(page) == settled[p]) continue;
    for (const auto& view : views) view->Forget(space.first(page), space.last(page));
    space.SetSettled(page, settled[p]);
    for (const auto& view : views) view->Learn(space.first(page), space.last(page));
  }
}

// pre: `within` holds the granule at `offset` of its page, and the view that chose the bytes sees
// them all as free.
NodeId Pool::State::TakePiece(NodeId within, Granules offset, Granules length) {
  NodeId last = within;
  while (Granules(space.node(last).offset + space.node(last).length) < offset + length) {
    last = space.node(last).next;
  }
  // The nodes beside it, which stay as they are, are forgotten and learned with it: a view may see
  // them without seeing what is taken.
  const NodeId before = space.node(within).prev;
  const NodeId behind = space.node(last).next;
  const NodeId from = before == NodeId::kNone ? within : before;
  for (const auto& view : views) view->Forget(from, behind == NodeId::kNone ? last : behind);
  const NodeId taken = space.Take(within, offset, length);
  const NodeId to = behind == NodeId::kNone ? space.last(space.node(taken).page) : behind;
  for (const auto& view : views) view->Learn(from, to);
  return taken;
}

void Pool::State::GivePiece(NodeId id, FenceId fence) {
  const PageSpace::Node node = space.node(id);
  const auto sees = [&](const FreeView& view) {
    return fence == FenceId::kOpen || fence == view.own_fence();
  };
  for (const auto& view : views) {
    if (!sees(*view)) continue;
    for (const NodeId beside : {node.prev, node.next}) {
      if (beside != NodeId::kNone && !space.node(beside).used) view->Forget(beside, beside);
    }
  }
  const NodeId given = space.Give(id, fence);
  for (const auto& view : views) {
    if (sees(*view)) view->Learn(given, given);
  }
}

// The node that holds a granule of a page. Searched from the page's end, where a block of several
// pages goes on; at offset 0, where it comes in, from the start.
NodeId Pool::State::NodeAt(PageId page, Granules offset) const {
  if (offset == Granules(0)) return space.first(page);
  NodeId id = space.last(page);
  while (Granules(space.node(id).offset) > offset) id = space.node(id).prev;
  return id;
}

template <typename Function>
void Pool::State::ForEachPiece(const LiveBlock& live, Function&& function) const {
  Granules left = Granules::FromBytesRoundedUp(live.block.bytes);
  Granules offset(live.offset);
  for (uint32_t slot = Index(live.slot); left > Granules(0); ++slot) {
    const Granules length = std::min(left, page_size - offset);
    function(ranges.page_at(SlotId{slot}), offset, length);
    left -= length;
    offset = Granules(0);
  }
}

void Pool::State::GiveBlock(const LiveBlock& live, FenceId fence) {
  if (live.node != NodeId::kNone) {
    GivePiece(live.node, fence);
    return;
  }
  bool first = true;
  ForEachPiece(live, [&](PageId page, Granules, Granules) {
    // A block of several pieces goes on at a page's end and comes in at a page's start.
    GivePiece(first ? space.last(page) : space.first(page), fence);
    first = false;
  });
}

// Takes the block out of the books.
void Pool::State::Drop(const LiveBlock& live, FenceId fence) {
  GiveBlock(live, fence);
  foresight.Freed(live.ticket);
  stats.allocated_bytes -= live.block.bytes;
  stats.requested_bytes -= live.block.requested_bytes;
  ++stats.frees;
  blocks.Erase(live.block.address);
}

// Brings a block back that lived where nothing lives now. Somebody may still be at work on the
// bytes: that is remembered until it is over, so that they stay protected when the block is freed.
void Pool::State::Revive(const PoolCheckpoint::Entry& entry) {
  blocks.ReserveOne();
  LiveBlock live;
  live.block = entry.block;
  live.slot = entry.slot;
  live.offset = static_cast<uint32_t>(entry.offset.count());
  live.Add(entry);
  ForEachPiece(live, [&](PageId page, Granules offset, Granules length) {
    space.ReservePages(0);
    for (NodeId id = NodeAt(page, offset); id != NodeId::kNone; id = space.node(id).next) {
      const PageSpace::Node& node = space.node(id);
      if (Granules(node.offset) >= offset + length) break;
      CGP_CHECK(!node.used);
      if (node.fence != FenceId::kOpen) live.GetOthers().behind.push_back(node.fence);
    }
  });
  PlaceAt({live.slot, entry.offset}, live);
  stats.allocated_bytes += live.block.bytes;
  stats.requested_bytes += live.block.requested_bytes;
  ++stats.allocations;
  const Address address = live.block.address;
  blocks.Insert(address, std::move(live));
}

// Behind what the bytes of a block that is freed now must stay.
FenceId Pool::State::FenceFor(const LiveBlock& live) {
  const StreamId stream = live.block.stream;
  if (scope == ScopeKind::kCapture && !live.eager && !live.others) {
    const FreeView* const view = FindView(stream);
    return view != nullptr ? view->own_fence() : fences.ForStream(stream, /*eager=*/false).id;
  }
  bool eager = live.eager;
  std::vector<StreamId> streams;
  if (live.others) {
    streams = live.others->uses;
    // No fence that outlives a scope waits for captured work.
    eager |= !live.others->behind.empty();
    for (const FenceId fence : live.others->behind) {
      for (const StreamId other : fences.StreamsBehind(fence)) {
        if (other != stream && std::ranges::find(streams, other) == streams.end())
          streams.push_back(other);
      }
    }
  }
  const bool used = !streams.empty();
  if (used || eager) streams.push_back(stream);
  if (!scope) return streams.empty() ? FenceId::kOpen : fences.After(streams);
  if (*scope == ScopeKind::kEager) {
    if (used) return fences.Held(streams, /*events=*/true);
    return fences.ForStream(stream, /*eager=*/true).id;
  }
  // Eager work on the block is not part of the capture: the capture's end says nothing of it.
  if (used || eager) return fences.Held(streams, /*events=*/eager);
  return fences.ForStream(stream, /*eager=*/false).id;
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
