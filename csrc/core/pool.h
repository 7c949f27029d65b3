// One graph pool: pages, the ranges that map them, and the blocks handed out.
//
// Not thread-safe: PoolSet orders the calls. A member either does all that it says, or throws and
// changes nothing that can be asked for. It throws UsageError, DriverError, OutOfMemoryError if the
// device has no memory left, or std::bad_alloc if the host has none. After a failed call the pool
// may know fewer places, or hold freed bytes back for longer.
//
// It joins what is mapped (RangeTable), which stream may take it (StreamMemory), and where blocks
// go (Placer).
//
// invariants:
//   stats_.allocated_bytes   == sum of block.bytes over blocks_, requested_bytes likewise
//   live.block.address       == ranges_.AddressOf(live.site)
#pragma once

#include <cstddef>
#include <cstdint>
#include <exception>
#include <memory>
#include <optional>
#include <vector>

#include "core/base/units.h"
#include "core/driver.h"
#include "core/memory/range_table.h"
#include "core/memory/stream_memory.h"
#include "core/placer.h"
#include "core/pool_values.h"

namespace cgp {

class Pool {
 public:
  // `driver` must outlive the pool. Throws UsageError for a page size that the driver cannot do.
  //
  // The destructor unmaps and releases everything. pre: the device has finished with it
  // (Driver::Quiesce()). A driver error there leaks what it concerns, since there is nobody left to
  // tell.
  Pool(Driver& driver, PoolOptions options);

  // pre: no scope is open. `may_ask_device`: the device may be marked
  // (Driver::RecordDeviceEvent()), since the caller knows of no capture on it that the driver does
  // not know of.
  //
  // An eager scope in a pool that had captures begins behind the replays of their graphs, which
  // still use what these captures freed. So each stream that allocates waits, on the device, for
  // all work that the device had when the scope began. A replay submitted while the scope is open
  // is not waited for; PyTorch forbids that too. If the device must not be asked, the scope takes
  // only pages that eager work has made since the last capture.
  void BeginScope(ScopeKind kind, bool may_ask_device = true);
  void EndScope(bool may_ask_device = true);  // pre: one is open
  bool in_scope() const { return memory_.scope().has_value(); }
  bool in_capture_scope() const { return memory_.scope() == ScopeKind::kCapture; }

  // pre: a scope is open, bytes > 0. `capture` is the one that the stream is in now, kNoCapture for
  // none. In a capture of one stream only this says that the stream has left it, since the driver
  // is not asked; nullopt: it is where it was. With `whole_pages` the block shares no page.
  Block Allocate(uint64_t bytes, StreamId stream, std::optional<CaptureId> capture = {},
                 bool whole_pages = false);

  // Both throw UsageError if no live block starts at `address`. Free() returns what the block was.
  Block Free(Address address);
  void RecordUse(Address address, StreamId stream) { memory_.RecordUse(Known(address), stream); }

  // Checkpoint() returns what lives now. Restore() goes back to it: the blocks of the checkpoint
  // live, at their addresses, and no others. pre: no scope is open. Restore() throws UsageError for
  // the checkpoint of another pool.
  PoolCheckpoint Checkpoint();
  RestoreDelta Restore(const PoolCheckpoint& checkpoint);

  // The live block that starts at `address`, or nullptr. Find(): that holds it, O(live blocks), for
  // diagnostics. Valid until the next call that changes the pool.
  const Block* At(Address address) const;
  const Block* Find(Address address) const;
  // The pool's reservation around `address`, if any. All blocks lie in reservations, which stay
  // until GiveBack() or UnmapStale(). O(reservations).
  std::optional<AddressSpan> ReservationAround(Address address) const {
    return ranges_.ReservationAround(address);
  }
  // The physical bytes behind a live block, in the order of its addresses. Throws UsageError as
  // Free() does.
  std::vector<PhysicalPiece> Pieces(Address address) { return PiecesOf(Known(address)); }

  // What GiveBack() would give back: all handles in which no live block has a byte. O(pages).
  uint64_t spare_bytes() const;
  // Whether the driver failed to take back something that is of no use any more.
  bool has_remains() const { return ranges_.has_remains(); }
  // Gives both back, and unmaps all that live blocks do not need. If the driver fails, everything
  // else is given back all the same, then its first error is thrown. The next GiveBack() tries the
  // rest again. pre: no graph that was captured into the pool still lives, no scope is open, the
  // device is idle (Driver::Quiesce()), and PrepareGiveBack(), which makes room, was called last.
  // Earlier checkpoints are void.
  void PrepareGiveBack();
  void GiveBack();

  // Eager work that churns maps the same pages again and again. HasStaleMappings() says whether
  // UnmapStale() is due, which bounds what is mapped by what it leaves:
  //   left == mappings of the ranges that captures and checkpoints need, those in which a block
  //           lives, and one for each other handle
  //   page_mappings <= max(512, 2 * left) + those of the allocation that is under way
  // It may be called only in eager scopes, with the device idle. Driver errors as in GiveBack().
  bool HasStaleMappings() const {
    return memory_.scope() == ScopeKind::kEager && ranges_.mapping_count() > mapping_limit_;
  }
  void UnmapStale();

  // Repeats Driver::SetAccess() for all that is mapped, after a peer was added.
  void RefreshAccess() { ranges_.RefreshAccess(); }

  uint64_t reserved_bytes() const;  // Stats() says it too, at more cost
  // Of physical memory.
  uint64_t handles() const { return ranges_.handle_count(); }
  uint64_t live_blocks() const { return blocks_.size(); }
  // The number of spans of free bytes: parts of a page, or runs of whole pages.
  uint64_t free_extents() const { return memory_.bytes().space().free_extents(); }
  PoolStats Stats() const;
  PoolSnapshot Snapshot() const;

  // The last kMaxCaptures capture scopes that have ended, oldest first.
  static constexpr std::size_t kMaxCaptures = 65'536;
  const std::vector<CaptureStats>& captures() const { return captures_; }

  // Recomputes every invariant; throws InternalError. O(everything).
  void Check() const;

 private:
  static constexpr uint64_t kLeastMappingLimit = 512;

  LiveBlock& Known(Address address);
  std::vector<PhysicalPiece> PiecesOf(const LiveBlock& live) const;
  void PinLive();
  void List(LiveBlock&& live);
  void Unlist(const LiveBlock& live);
  uint64_t BytesOf(uint64_t pages) const { return pages * ranges_.page_size().bytes(); }

  std::vector<bool> VpagesInUse() const;
  std::exception_ptr Shrink();

  LiveBlocks blocks_;
  RangeTable ranges_;
  StreamMemory memory_;
  Placer placer_;
  uint64_t unpinned_ = 0;                             // live blocks that are not pinned
  uint64_t mapping_limit_ = kLeastMappingLimit;       // beyond which mappings are looked through
  std::shared_ptr<RangeTable::Shrinking> shrinking_;  // what is prepared
  PoolStats stats_;                                   // what Stats() does not derive
  std::vector<CaptureStats> captures_;                // in a capture scope, with room for one more
  uint64_t reserved_before_ = 0;                      // when the scope began
  CaptureStats capture_;                              // of the scope, what is known so far
  // Its address is the pool's identity, to which checkpoints have a weak reference.
  std::shared_ptr<const char> identity_ = std::make_shared<const char>();
  std::shared_ptr<const char> next_identity_;  // what it is after the GiveBack() that is prepared
};

}  // namespace cgp
