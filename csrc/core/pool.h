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
#include "core/leases/graph_needs.h"
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
  // only pages that eager work has made since the last capture. A scope apart takes no byte of a
  // page that a graph needs. One of a loan is behind all work too, and the device must be asked.
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

  // What GiveBack() would give back: all handles in which no live block has a byte, of this pool or
  // of one that borrows. O(pages).
  uint64_t spare_bytes() const;
  // Whether there are any, be they away.
  bool has_spare() const;
  bool has_pages() const { return ranges_.page_count() > 0; }
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
  //   left == mappings that captures and checkpoints need, those in which a block lives, and one
  //           for each other handle
  //   page_mappings <= max(512, 2 * left) + those of the allocation that is under way
  // It may be called only in eager scopes, with the device idle. Driver errors as in GiveBack().
  bool HasStaleMappings() const {
    return in_scope() && !in_capture_scope() && ranges_.mapping_count() > mapping_limit_;
  }
  void UnmapStale();

  // --- Leases (pool_leases.cc) ---
  //
  // A lease has handles of the pool, whose free bytes nobody gets meanwhile. See PoolSet for what
  // each does. pre, of all that change something: no scope is open; of those that take pages away:
  // the device is idle.

  static constexpr LeaseId kAsleep = 1;
  static constexpr LeaseId kLent = 2;  // other leases are of blocks, and have later numbers

  GraphNeeds& needs() { return needs_; }
  const GraphNeeds& needs() const { return needs_; }
  bool asleep() const { return asleep_; }
  // Whether any page is away or lent.
  bool has_leases() const { return memory_.bytes().has_leased(); }

  // Both leave a driver's first error in *error, and go on.
  Leased Sleep(bool keeps_live, std::exception_ptr* error);
  Leased Wake();
  Leased EvictBlocks(LeaseId lease, const std::vector<Address>& blocks, std::exception_ptr* error);
  Leased BringBack(LeaseId lease);
  Leased TrimToNeeds(std::exception_ptr* error);

  // A handle that goes from one pool to another.
  struct LentHandle {
    Handle physical{};
    uint32_t pages = 0;
    PageId first{};  // in the pool that was asked
  };
  // Present handles without a lease in which every byte is free and open, and nothing is that a
  // capture left.
  std::vector<LentHandle> FreeHandles() const;
  // The same, but whatever the free bytes hold, and whatever fence they are behind.
  std::vector<LentHandle> UnusedHandles() const { return WithoutLease({}); }
  // Those that a lease has.
  std::vector<LentHandle> HandlesOf(LeaseId lease) const;
  // Gives handles to a lease, or with kNoLease takes them back. ReserveLease() returns their pages,
  // and makes room, so that SetLease() does not throw as long as no page is added.
  IndexSet ReserveLease(const std::vector<LentHandle>& handles);
  void SetLease(const std::vector<LentHandle>& handles, const IndexSet& pages, LeaseId lease);
  // Maps handles of another pool as new ones. pre: the pool borrows.
  void Adopt(const std::vector<LentHandle>& handles);

  // Calls function(handle's first page, its pages, lease) for handles with a lease that the
  // capture's graph needs (see GraphNeeds::ForEach()). One may come several times.
  template <typename Function>
  void ForEachNeededLeased(uint64_t capture, Function&& function) const {
    const RangeTable::AddressIndex index = ranges_.ByAddress();
    needs_.ForEach(capture, [&](AddressSpan span) {
      ForEachVpage(span, index, [&](VirtualPage vpage) {
        const PageId page = ranges_.page_at(vpage);
        if (ranges_.lease_of(page) != kNoLease) {
          function(ranges_.handle_begin(page), ranges_.handle_pages(page), ranges_.lease_of(page));
        }
      });
    });
  }

  // Repeats Driver::SetAccess() for all that is mapped, after a peer was added.
  void RefreshAccess() { ranges_.RefreshAccess(); }

  uint64_t page_bytes() const { return ranges_.page_size().bytes(); }
  uint64_t reserved_bytes() const;  // Stats() says it too, at more cost
  // Of physical memory.
  uint64_t handles() const { return ranges_.handle_count() - lent_.handles; }
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
  AddressSpan PagesOf(const LiveBlock& live) const;
  Spans PagesOfLive() const;
  void List(LiveBlock&& live);
  void Unlist(const LiveBlock& live);
  uint64_t BytesOf(uint64_t pages) const { return pages * ranges_.page_size().bytes(); }

  // Calls function(vpage) for those of the span.
  template <typename Function>
  void ForEachVpage(AddressSpan span, const RangeTable::AddressIndex& index,
                    Function&& function) const {
    const uint64_t page = ranges_.page_size().bytes();
    VirtualPage vpage{};
    VirtualPage end{};  // of its range
    for (Address address = span.begin; address < span.end; address += page, ++vpage) {
      if (vpage == end) {
        vpage = ranges_.At(address, index).vpage;
        end = ranges_.range(ranges_.range_of(vpage)).end();
      }
      function(vpage);
    }
  }
  void KeepMapping(VirtualPage vpage, std::vector<bool>& keep) const;
  std::vector<bool> VpagesInUse() const;
  void AddNeeded(std::vector<bool>& keep) const;
  // Those that captures need, or left.
  template <Spans GraphNeeds::Needs::*which>
  IndexSet PagesIn() const {
    IndexSet pages;
    pages.Resize(ranges_.page_count());
    const RangeTable::AddressIndex index = ranges_.ByAddress();
    needs_.ForEachOfAll<which>([&](AddressSpan span) {
      ForEachVpage(span, index,
                   [&](VirtualPage vpage) { pages.Insert(Index(ranges_.page_at(vpage))); });
    });
    return pages;
  }
  std::exception_ptr Shrink();

  struct BytesOfHandle {
    uint64_t named = 0;
    uint64_t others = 0;
  };
  std::vector<LentHandle> WithoutLease(std::optional<FenceId> fence) const;
  std::vector<BytesOfHandle> LiveBytes(const std::vector<Address>& named) const;
  struct Count {
    uint64_t handles = 0;
    uint64_t pages = 0;
    bool operator==(const Count&) const = default;
  };
  Count CountLeased(LeaseId lease) const;
  void RequirePresent(const LiveBlock& live) const;
  void CheckLeases() const;
  template <typename Function>
  void ForEachHandle(Function&& function) const {
    for (PageId handle{0}; Index(handle) < ranges_.page_count();
         handle = ranges_.handle_end(handle)) {
      function(handle);
    }
  }
  // Whether the condition holds for all nodes of the handle's pages.
  template <typename Condition>
  bool AllNodes(PageId handle, Condition&& condition) const {
    const PageSpace& space = memory_.bytes().space();
    for (PageId page = handle; page < ranges_.handle_end(handle); ++page) {
      for (NodeId id = space.first(page); id != NodeId::kNone; id = space.node(id).next) {
        if (!condition(space.node(id))) return false;
      }
    }
    return true;
  }
  IndexSet PagesOf(const std::vector<LentHandle>& handles) const;
  bool IsSpare(PageId handle) const;
  LentHandle AsLent(PageId handle) const {
    return {ranges_.physical(handle), ranges_.handle_pages(handle), handle};
  }
  Leased Evict(const std::vector<LentHandle>& handles, LeaseId lease, std::exception_ptr* error);

  LiveBlocks blocks_;
  RangeTable ranges_;
  StreamMemory memory_;
  Placer placer_;
  GraphNeeds needs_;
  bool asleep_ = false;
  Count lent_;                                        // invariant: CountLeased(kLent)
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
