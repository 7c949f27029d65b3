// What a pool is inside, for the files that make it up:
//
//   pool.cc             the front: scopes, blocks that come and go, what is told of them
//   pool_placing.cc     where a block goes, and what is mapped for it
//   pool_streams.cc     who may take which bytes, and that all views know
//   pool_proofs.cc      the same in captures of several streams
//   pool_checkpoint.cc  back to what lived earlier
//   pool_give_back.cc   what nobody needs any more is unmapped
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "core/capture_guide.h"
#include "core/fences.h"
#include "core/foresight.h"
#include "core/free_view.h"
#include "core/page_space.h"
#include "core/placement.h"
#include "core/pool.h"
#include "core/pool_checkpoint.h"
#include "core/proofs.h"
#include "core/range_table.h"
#include "core/slab_map.h"
#include "core/units.h"
#include "driver/driver.h"

namespace cgp {

// Who but its stream works on a block.
struct Others {
  std::vector<StreamId> uses;   // recorded
  std::vector<FenceId> behind;  // its bytes, when a restore brought it back; those not open yet

  bool empty() const { return uses.empty() && behind.empty(); }
  void AddBehind(FenceId fence) {
    if (std::ranges::find(behind, fence) == behind.end()) behind.push_back(fence);
  }
};

// A cache line, since a free of one among many blocks has to fetch it.
struct alignas(64) LiveBlock {
  static constexpr uint16_t kNoView = 0xFFFF;

  Block block;
  SlotId slot{};                // where it starts
  uint32_t offset = 0;          // granules into that slot
  NodeId node = NodeId::kNone;  // of a block that lies in one page
  // Some work on it was not captured: it was allocated in an eager scope, or another stream used it
  // outside of captures.
  bool eager = false;
  // Of the stream that allocated it, in a capture of several streams that is under way.
  uint16_t view = kNoView;
  CaptureGuide::Ticket ticket;
  std::unique_ptr<Others> others;  // mostly none

  Others& GetOthers() {
    if (!others) others = std::make_unique<Others>();
    return *others;
  }
  // pre: not the block's own stream.
  void AddUse(StreamId stream) {
    std::vector<StreamId>& uses = GetOthers().uses;
    if (std::ranges::find(uses, stream) == uses.end()) uses.push_back(stream);
  }
  void Add(const PoolCheckpoint::Entry& known) {
    eager |= known.eager;
    for (const StreamId use : known.uses) AddUse(use);
  }
};

struct Pool::State {
  static constexpr uint64_t kLeastMappingLimit = 512;

  State(Driver& the_driver, Granules size)
      : driver(the_driver),
        page_size(size),
        space(size),
        ranges(the_driver, size),
        fences(the_driver),
        proofs(the_driver),
        foresight(space, ranges) {}

  // pool.cc
  LiveBlock& Known(Address address);
  void Drop(const LiveBlock& live, FenceId fence);
  void Unlist(const LiveBlock& live);
  [[noreturn]] void ThrowOutOfMemory(std::string_view reason, uint64_t bytes) const;

  // pool_placing.cc
  Foresight::Advice Advise(uint64_t bytes, const FreeView& view);
  std::optional<Placement> FollowAdvice(const Foresight::Advice& advice, Granules length);
  void PlaceSmall(FreeView& view, LiveBlock& live);
  NodeId LeastWanted(const FreeView& view, NodeId best) const;
  TakersOf Takers() const;
  void PlaceLarge(FreeView& view, LiveBlock& live, bool at_peak);
  void PlaceAt(Placement place, LiveBlock& live);
  Placement FindOrMap(FreeView& view, Granules length, Slack slack);
  uint32_t PagesAhead(const FreeView& view) const;
  void CheckAgainstDevice(Granules length) const;
  std::optional<RangeId> RangeWithRoom() const;
  SlotId Grow(const MappingPlan& mapping);
  NodeId NodeAt(PageId page, Granules offset) const;
  template <typename Function>
  void ForEachPiece(const LiveBlock& live, Function&& function) const;
  template <typename Function>
  void ForEachExtent(const LiveBlock& live, Function&& function) const;
  template <typename Function>
  void ForEachNode(const LiveBlock& live, Function&& function) const;

  // pool_streams.cc
  FreeView* FindView(StreamId stream) const;
  FreeView& ViewFor(StreamId stream, std::optional<CaptureId> in);
  FreeView& AddView(StreamId stream);
  void WaitForReplays(StreamId stream);
  void HoldAllFree();
  bool PollFences();
  void ForgetOpened();
  void ReserveForWaking();
  void OpenFences();
  NodeId TakePiece(NodeId within, PageId page, Granules offset, Granules length, bool large);
  NodeId TakePages(PageId page, Granules length);
  void GivePiece(NodeId id, FenceId fence, bool large);
  FenceId FenceFor(const LiveBlock& live);
  bool OrderProtects(const LiveBlock& live) const;
  bool AreCapturedTogether(const LiveBlock& live);
  bool InOthersCapture() const {
    return scope == ScopeKind::kCapture && thread != std::this_thread::get_id();
  }
  bool CanAskLater(const LiveBlock& live) const;
  bool IsKnownToCapture(StreamId stream) const;
  bool IsCapturedUse(StreamId stream);
  void GiveFreed();
  void GiveFreedAtEnd();
  void GiveLastFreed(FenceId fence);
  void GiveBlock(const LiveBlock& live, FenceId fence);

  // pool_proofs.cc
  void ExpectSeveralStreams();
  FreeView& ProvenView(StreamId stream);
  std::size_t AddProvenView(StreamId stream);
  std::optional<std::size_t> FindProvenView(StreamId stream, CaptureId of) const;
  uint16_t NumberOf(const FreeView& view) const;
  std::optional<FenceId> ProofFenceFor(const LiveBlock& live);
  bool CollectFrontiers(const LiveBlock& live);
  void AddProof(FenceId fence, std::optional<std::size_t> owner);
  void Wake(FreeView& view, std::span<const FenceId> proven);
  void NoteCapture(CaptureId of);
  void ForgetProofs();
  void CheckProofs() const;

  // pool_checkpoint.cc
  LiveBlock BlockOf(const PoolCheckpoint::Entry& entry,
                    const RangeTable::AddressIndex& index) const;
  void Revive(LiveBlock live);

  // pool_give_back.cc
  std::vector<bool> HandlesInUse() const;
  std::vector<bool> SlotsInUse() const;
  void PrepareShrink(std::vector<bool> keep);
  std::exception_ptr Shrink();

  Driver& driver;
  const Granules page_size;
  PageSpace space;
  RangeTable ranges;
  FenceTable fences;
  // Whether the pool's captures have several streams: its last one had, or the one under way has. As
  // long as they have one, its order is all that protects what is freed, and all of that is behind
  // one fence.
  bool several_streams = false;
  // While they have one: the capture that the stream is in, so far as it was told. Once that is over,
  // no order protects what the stream left there.
  std::optional<CaptureId> sole_capture;
  // What other threads than the one that began the capture have freed since its last allocation, and
  // whether they recorded a use. One of them may be freeing while another ends the capture, and the
  // driver crashes when it is asked of a capture meanwhile (Driver::Capture()). An allocation is part
  // of the capture, so it asks for them.
  std::vector<LiveBlock> freed;
  bool expects_several_streams = false;
  // In a capture of several streams there is one of its streams for each view, in their order.
  ProofTable proofs;
  // What the capture under way has several of, if bodies of conditional nodes are captured too.
  CaptureId capture = kNoCapture;
  bool several_captures = false;
  // Kept for their memory.
  Frontier frontier;
  std::vector<GraphNode> nodes;
  std::vector<NodeId> woken;
  std::vector<std::pair<NodeId, NodeId>> woken_spans;
  std::vector<FenceId> closed;
  // One for each stream that has allocated in the open scope. Between scopes at most one, which
  // sees what is open: the next scope's first stream takes it over, so that a pool that one stream
  // fills never indexes anything anew.
  std::vector<std::unique_ptr<FreeView>> views;
  Foresight foresight;
  SlabMap<LiveBlock> blocks;
  std::optional<ScopeKind> scope;
  std::thread::id thread;  // that began it
  // Whether graphs may run on what is free. In an eager scope then: what its streams wait for, or
  // that this is not known.
  bool captured = false;
  std::shared_ptr<SharedEvent> replays;
  bool replays_unknown = false;
  uint64_t mapping_limit = kLeastMappingLimit;       // beyond which mappings are looked through
  std::shared_ptr<RangeTable::Shrinking> shrinking;  // what is prepared
  PoolStats stats;                                   // what Stats() does not derive
  // Its address is the pool's identity, of which checkpoints keep a weak reference.
  std::shared_ptr<const char> identity = std::make_shared<const char>();
  std::shared_ptr<const char> next_identity;  // what it is after the GiveBack() that is prepared
};

// The pages that a block has a part of, in the order of its addresses.
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

// The same, but whole pages that follow one another are one.
template <typename Function>
void Pool::State::ForEachExtent(const LiveBlock& live, Function&& function) const {
  Granules left = Granules::FromBytesRoundedUp(live.block.bytes);
  Granules offset(live.offset);
  for (uint32_t slot = Index(live.slot); left > Granules(0);) {
    const PageId page = ranges.page_at(SlotId{slot});
    const uint64_t most = offset == Granules(0) ? left / page_size : 0;
    uint32_t pages = 1;
    while (pages < most && Index(ranges.page_at(SlotId{slot + pages})) == Index(page) + pages) {
      ++pages;
    }
    const Granules length = most > 0 ? page_size * pages : std::min(left, page_size - offset);
    function(page, offset, length);
    slot += pages;
    left -= length;
    offset = Granules(0);
  }
}

// The nodes of a block that is in use. Of an extent there are several where pages between them are
// gone.
template <typename Function>
void Pool::State::ForEachNode(const LiveBlock& live, Function&& function) const {
  if (live.node != NodeId::kNone) {
    function(live.node);
    return;
  }
  ForEachExtent(live, [&](PageId page, Granules offset, Granules length) {
    if (length < page_size) {
      // A block of several pieces goes on at a page's end and comes in at a page's start.
      function(offset == Granules(0) ? space.first(page) : space.last(page));
      return;
    }
    const PageId end{Index(page) + static_cast<uint32_t>(length / page_size)};
    while (page < end) {
      const NodeId id = space.first(page);
      page = space.end(id);
      function(id);
    }
  });
}

}  // namespace cgp
