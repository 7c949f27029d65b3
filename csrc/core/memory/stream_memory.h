// Who may take which bytes of a pool, and when: the scopes that are open, the fences that freed
// bytes stand behind, and what the graph under capture proves of them.
//
// In a capture of one stream its order protects what it frees, and nothing is asked of the driver.
// In a capture of several any of them may take what the graph proves to be over (proofs.h).
//
// A block's bytes are behind the frontiers that its streams have when it is freed. That is what a
// stream must come after to take them: later work of the same streams has nothing to do with them.
//
// invariants:
//   proofs_.stream_count() == 0  or  one of its streams for each free list, in their order
//   proofs_.stream_count() > 0  =>  a capture of several streams is under way
//   the free list of one of these streams passes a proof fence   =>  it is proven to the stream
//   it is proven to the stream, and its owner leases to that  =>  the free list passes it
//   no scope is open  =>  no stream has a free list, and no block waits to be given
//   the used nodes of the space  ==  those of live blocks and of freed ones that wait to be given
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <thread>
#include <vector>

#include "core/base/address_map.h"
#include "core/base/units.h"
#include "core/driver.h"
#include "core/memory/fences.h"
#include "core/memory/proofs.h"
#include "core/memory/range_table.h"
#include "core/memory/shared_space.h"

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

// A block that lives in a pool. A cache line, since a free of one among many blocks has to fetch
// it.
struct alignas(64) LiveBlock {
  Block block;
  Site site;
  // Names the stream that allocated it, in the scope in which it did (StreamMemory); 0: none.
  uint32_t tenure = 0;
  uint32_t key = 0;  // what had led to it (KnownPlaces), a part of that
  // Some work on it was not captured: it was allocated in an eager scope, or another stream used it
  // outside of captures.
  bool eager = false;
  bool pinned = true;              // its range is
  std::unique_ptr<Others> others;  // mostly none

  Granules length() const { return Granules::FromBytesRoundedUp(block.bytes); }
  // Whether no stream but its own works on it.
  bool is_alone() const { return !others || others->empty(); }
  bool is_behind() const { return others && !others->behind.empty(); }
  Others& GetOthers() {
    if (!others) others = std::make_unique<Others>();
    return *others;
  }
  // pre: not the block's own stream.
  void AddUse(StreamId stream) {
    std::vector<StreamId>& uses = GetOthers().uses;
    if (std::ranges::find(uses, stream) == uses.end()) uses.push_back(stream);
  }
  // What a checkpoint knows of it.
  void AddWork(bool some_was_eager, const std::vector<StreamId>& recorded_uses) {
    eager |= some_was_eager;
    for (const StreamId use : recorded_uses) AddUse(use);
  }
};
static_assert(sizeof(LiveBlock) == 64);

using LiveBlocks = AddressMap<LiveBlock>;  // by their addresses

class StreamMemory {
 public:
  // `blocks` are those that live in the pool.
  StreamMemory(Driver& driver, RangeTable& ranges, LiveBlocks& blocks)
      : driver_(driver), bytes_(ranges), fences_(driver), proofs_(driver), blocks_(blocks) {}

  SharedSpace& bytes() { return bytes_; }
  const SharedSpace& bytes() const { return bytes_; }

  // --- Scopes, see Pool ---

  std::optional<ScopeKind> scope() const { return scope_; }
  // Whether the scope under way has one stream, as far as is known.
  bool has_one_stream() const { return !several_streams_ && !bytes_.has_several_streams(); }
  void BeginScope(ScopeKind kind, bool may_ask_device);
  void EndScope(bool may_ask_device);

  // --- Blocks ---

  // What the block's stream, which is in that capture, may take for it now (Pool::Allocate()); the
  // block is told its free list. Room is made for one SharedSpace::Take(). pre: a scope is open.
  FreeList& BeginTake(LiveBlock& live, std::optional<CaptureId> in);

  // Behind what the bytes of a block must stay that is freed now; Give() does not throw then. pre:
  // no other thread captures.
  FenceId FenceFor(const LiveBlock& live);
  void Give(const LiveBlock& live, FenceId fence) {
    bytes_.ReserveFence(fence);
    fences_.Renew(fence);
    bytes_.Give(live.site, live.length(), fence);
  }
  // Frees the block, which may be moved from, but for `block`. `of_ring`: what is open then is the
  // ring's.
  void Free(LiveBlock& live, bool of_ring);
  void RecordUse(LiveBlock& live, StreamId stream);
  // The block, which is being placed, takes pages that nobody had in this capture.
  void NoteGrowth(const LiveBlock& live) {
    if (proofs_.stream_count() > 0) proofs_.NoteGrowth(FindTenure(live).value());
  }

  // So that Revive() of the block cannot throw, after SharedSpace::ReserveTake() of all of them.
  void ReserveRevive(LiveBlock& live) const;
  // Makes a block's bytes used where nothing lives now. Somebody may still be at work on them: that
  // is remembered until it is over, so that they stay protected when the block is freed.
  void Revive(LiveBlock& live);

  // --- Fences ---

  // Opens what the device has come to; returns whether that is anything.
  bool Poll();
  // The device is idle, and no graph is left: all that is free is everyone's. Does not throw after
  // ReserveOpening(). pre: no scope is open.
  void ReserveOpening() { bytes_.ReserveOpening(fences_.limit()); }
  void OpenAll();
  // What is free of the ring is everyone's. Throws with nothing changed.
  void DissolveRing();

  void Check() const;

 private:
  bool InOthersCapture() const {
    return scope_ == ScopeKind::kCapture && thread_ != std::this_thread::get_id();
  }
  std::optional<std::size_t> FindFreeList(StreamId stream, std::optional<CaptureId> in = {}) const;
  std::size_t FreeListFor(StreamId stream, std::optional<CaptureId> in);
  std::size_t AddFreeList(StreamId stream);
  std::optional<std::size_t> FindTenure(const LiveBlock& live) const;
  void WaitForReplays(StreamId stream);
  void HoldCaptured();
  bool OpenFences(FenceTable::Opened opened);

  // `may_ask`: no other thread may be ending the capture, so that the driver can be asked.
  std::optional<FenceId> ChooseFence(const LiveBlock& live, bool may_ask);
  FenceId InRing(FenceId fence);
  bool StaysInCapture(const LiveBlock& live) const;
  bool IsKnownToCapture(StreamId stream) const;
  CaptureId CaptureOfUse(StreamId stream);
  void GiveFreed();
  void GiveFreedAtEnd();

  // stream_memory_proofs.cc
  void ExpectSeveralStreams();
  std::size_t ProvenFreeList(StreamId stream);
  std::size_t AddProvenFreeList(StreamId stream);
  void Forfeit(std::size_t number);
  FenceId ProofFence(CaptureId of, std::optional<std::size_t> owner);
  CaptureId CollectFrontiers(const LiveBlock& live);
  void NoteCapture(CaptureId of);
  void DropProofs();
  void CheckProofs() const;

  Driver& driver_;
  SharedSpace bytes_;
  FenceTable fences_;
  ProofTable proofs_;
  LiveBlocks& blocks_;

  std::optional<ScopeKind> scope_;
  std::thread::id thread_;  // that began it
  // Graphs may run on what the pages before this one hold: those that there were when the last
  // capture ended, since a page's number only falls. In an eager scope `replays_` is what its
  // streams wait for.
  PageId captured_end_{0};
  std::shared_ptr<SharedEvent> replays_;

  // Whether a live block may be behind a fence.
  bool some_are_behind_ = false;

  // By free list: what names the stream in the blocks that it allocates. A tenure lasts until the
  // scope ends, or until the stream forfeits what it owns. None is used again, so that no block is
  // to be told when one is over.
  std::vector<uint32_t> tenures_;
  uint32_t last_tenure_ = 0;

  // Whether the pool's captures have several streams: its last one had, or the one under way has.
  // As long as they have one, its order is all that protects what is freed, and all of that is
  // behind one fence.
  bool several_streams_ = false;
  // While they have one: the capture that the stream is in, so far as it was told. Once that is
  // over, no order protects what the stream left there.
  std::optional<CaptureId> sole_capture_;
  // What the capture under way has several of, if bodies of conditional nodes are captured too.
  CaptureId capture_ = kNoCapture;
  bool several_captures_ = false;
  // What other threads than the one that began the capture have freed since its last allocation,
  // and whether they recorded a use. One of them may be freeing while another ends the capture, and
  // the driver crashes when it is asked of a capture meanwhile (Driver::Capture()). An allocation
  // is part of the capture, so it asks for them.
  std::vector<LiveBlock> freed_;
  bool expects_several_streams_ = false;
  // What is behind kRingLater would be behind this fence but for the ring; kOpen: nothing is.
  FenceId later_in_ring_ = FenceId::kOpen;
  // Kept for their memory.
  Frontier frontier_;
  std::vector<GraphNode> nodes_;
};

}  // namespace cgp
