// Which stream may take which bytes of a pool, and when. This follows from the open scope, the
// fences of freed bytes, and what the graph under capture proves of them.
//
// In a capture of one stream, its order protects what it frees, and nothing is asked of the driver.
// In a capture of several, any of them may take what the graph proves to be over (proofs.h).
//
// A freed block's bytes are behind the frontiers that its streams had at the free. Whatever takes
// them must come after those; later work of the same streams does not matter.
//
// invariants:
//   proofs_.stream_count() == 0  or  one of its streams for each free list, in their order
//   proofs_.stream_count() > 0  =>  a capture of several streams is under way
//   the free list of one of these streams passes a proof fence  =>  it is proven to the stream
//   it is proven and leased to the stream  =>  the free list passes it
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

// What other streams do with a block.
struct Others {
  std::vector<StreamId> uses;   // recorded
  std::vector<FenceId> behind;  // not open yet, of its bytes when a restore brought it back

  bool empty() const { return uses.empty() && behind.empty(); }
  void AddBehind(FenceId fence) {
    if (std::ranges::find(behind, fence) == behind.end()) behind.push_back(fence);
  }
};

// A live block of a pool. It is one cache line, since a free among many blocks has to fetch it.
struct alignas(64) LiveBlock {
  Block block;
  Site site;
  // Names the stream that allocated it, in the scope in which it did (tenures_); 0: none.
  uint32_t tenure = 0;
  uint32_t key = 0;  // the low bits of its key in KnownPlaces
  // Some work on it was not captured: it is of an eager scope, or another stream used it outside of
  // captures.
  bool eager = false;
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
  // Adds what a checkpoint knows of it.
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
  // Whether the open scope has one stream, as far as is known.
  bool has_one_stream() const { return !several_streams_ && !bytes_.has_several_streams(); }
  // `needed`: the pages that graphs need, with room for all.
  void BeginScope(ScopeKind kind, bool may_ask_device, const IndexSet& needed = {});
  void EndScope(bool may_ask_device);

  // --- Blocks ---

  // The free list of the block's stream, which is in capture `in`, with all that it may take now
  // (Pool::Allocate()); notes the tenure in the block. Makes room for one SharedSpace::Take(). pre:
  // a scope is open.
  FreeList& BeginTake(LiveBlock& live, std::optional<CaptureId> in);
  uint32_t last_tenure() const { return last_tenure_; }  // that a block may have

  // The fence behind which the bytes of a block that is freed now must stay; Give() does not throw
  // then. pre: no other thread captures.
  FenceId FenceFor(const LiveBlock& live);
  void Give(const LiveBlock& live, FenceId fence) {
    bytes_.ReserveFence(fence);
    fences_.Renew(fence);
    bytes_.Give(live.site, live.length(), fence);
  }
  // Frees the block, which may be moved from, except its `block`. `of_ring`: its bytes are the
  // ring's once they are open.
  void Free(LiveBlock& live, bool of_ring);
  void RecordUse(LiveBlock& live, StreamId stream);
  // Notes that the block, which is being placed, takes pages that nobody had in this capture.
  void NoteGrowth(const LiveBlock& live) {
    if (proofs_.stream_count() > 0) proofs_.NoteGrowth(FindTenure(live).value());
  }

  // Makes room, so that Revive() of the block cannot throw, after SharedSpace::ReserveTake() for
  // all of them.
  void ReserveRevive(LiveBlock& live) const;
  // Makes free bytes a live block's again. Work on them may go on: its fences are noted in the
  // block, so that the bytes stay protected when the block is freed.
  void Revive(LiveBlock& live);

  // --- Fences ---

  // Opens fences that the device has passed; returns whether there are any.
  bool Poll();
  // Gives everyone all free bytes, since the device is idle and no graph is left. Does not throw
  // after ReserveOpening(). pre: no scope is open.
  void ReserveOpening() { bytes_.ReserveOpening(fences_.limit()); }
  void OpenAll();
  // Gives everyone the ring's free bytes. Throws with nothing changed.
  void DissolveRing();
  // Gives everyone what is behind a fence, since the device is idle. Throws with nothing changed.
  // pre: no scope is open.
  void OpenIdle();
  // Whether the device may be waited for, so that nothing captures.
  bool MayQuiesce() const noexcept { return driver_.MayQuiesce(); }
  // Others have the pages from now on, or had them, so eager scopes begin behind all that the
  // device has been given, as they do behind replays.
  void NoteShared() { captured_end_ = PageId{bytes_.space().page_count()}; }

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
  void HoldFromEager(const IndexSet& pages);
  bool OpenFences(FenceTable::Opened opened);

  // `may_ask`: the driver may be asked, since no other thread may be ending the capture.
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
  // Pages below this existed when the last capture ended, so graphs may use them: a page's number
  // only falls. The streams of a scope that is no capture wait for `replays_`.
  PageId captured_end_{0};
  std::shared_ptr<SharedEvent> replays_;

  // Whether a live block may be behind a fence.
  bool some_are_behind_ = false;

  // By free list: what names the stream in blocks that it allocates. A tenure lasts until the scope
  // ends, or until the stream forfeits what it owns. None is used again, so no block needs to know
  // when one is over.
  std::vector<uint32_t> tenures_;
  uint32_t last_tenure_ = 0;

  // Whether the pool's captures have several streams: the last one had, or the open one has. As
  // long as they have one, its order alone protects what is freed, and all of that is behind one
  // fence.
  bool several_streams_ = false;
  // While they have one: the capture that the stream is in, as far as is known. Once that is over,
  // no order protects what the stream freed in it.
  std::optional<CaptureId> sole_capture_;
  // The open scope's capture, and whether there are several: bodies of conditional nodes are
  // captured too.
  CaptureId capture_ = kNoCapture;
  bool several_captures_ = false;
  // Blocks that other threads than the capturing one have freed since its last allocation, and
  // whether they recorded a use. Such a thread may free while the capture ends, and the driver
  // crashes if it is asked of the capture then (Driver::Capture()). An allocation is part of the
  // capture, so it does the asking.
  std::vector<LiveBlock> freed_;
  bool expects_several_streams_ = false;
  // The fence that bytes behind kRingLater would have without the ring; kOpen: there are none.
  FenceId later_in_ring_ = FenceId::kOpen;
  // These only reuse their memory.
  Frontier frontier_;
  std::vector<GraphNode> nodes_;
};

}  // namespace cgp
