// One graph pool: pages, the ranges that map them, and the blocks handed out.
//
// Not thread-safe: PoolSet orders the calls. Each member either does all that it says or throws and
// changes nothing that can be asked for: UsageError, DriverError, OutOfMemoryError where the device
// has no memory left, std::bad_alloc where the host has none. What a call that failed may leave
// behind is that the pool has learned less of its captures, or holds freed bytes back for longer.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

#include "core/base/block.h"
#include "core/base/units.h"
#include "driver/driver.h"

namespace cgp {

struct PoolOptions {
  // Size of a page: a power-of-two multiple of the driver's granularity; 0 means the granularity
  // itself.
  uint64_t page_bytes = 0;
};

struct PoolStats {
  uint64_t page_bytes = 0;
  uint64_t pages = 0;
  uint64_t reserved_bytes =
      0;  // physical memory held: pages * page_bytes, however often a page is mapped
  uint64_t allocated_bytes = 0;  // sum of live blocks
  uint64_t requested_bytes = 0;  // what was asked for in live blocks
  uint64_t live_blocks = 0;
  uint64_t peak_reserved_bytes = 0;
  uint64_t peak_allocated_bytes = 0;
  uint64_t scope_peak_bytes = 0;  // of allocated_bytes, since the last scope began
  uint64_t ranges = 0;
  // Mappings that the driver was asked for: handles behind addresses now, each counted as often as
  // it is mapped. A handle is one page or, in a large pool, several.
  uint64_t page_mappings = 0;
  uint64_t allocations = 0;  // since the pool was made
  uint64_t frees = 0;        // since the pool was made
};

// What one capture scope took.
struct CaptureStats {
  uint64_t added_bytes = 0;        // physical memory that the pool got meanwhile
  uint64_t live_before_bytes = 0;  // allocated_bytes when it began
  uint64_t peak_bytes = 0;         // the most of allocated_bytes, with what lived before
  uint64_t first_allocation = 0;   // how many were made in the pool before
  uint64_t allocations = 0;
};

struct PoolSnapshot {
  struct LiveBlock {
    Block block;
    std::vector<PhysicalPiece> pieces;  // in the order of the block's addresses
  };
  struct Range {
    Address address = 0;        // of the first mapped page
    std::vector<PageId> pages;  // in the order of addresses
  };
  PoolStats stats;
  std::vector<LiveBlock> blocks;  // in the order of addresses
  std::vector<Range> ranges;
};

struct PoolCheckpoint;  // pool_checkpoint.h
struct RestoreDelta;

class Pool {
 public:
  // `driver` must outlive the pool. Throws UsageError for a page size that the driver cannot do.
  Pool(Driver& driver, PoolOptions options);

  // Unmaps and releases everything. pre: the device has finished with it (Driver::Quiesce()).
  // A driver error here leaks what it concerns: there is nobody left to tell.
  ~Pool();

  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  // pre: none is open. With `may_ask_device` the device may be marked (Driver::RecordDeviceEvent()):
  // the caller knows of no capture on it that the driver does not know of.
  //
  // An eager scope in a pool that had captures begins behind the replays of their graphs, since what
  // these captures freed is what the graphs still use: each stream that allocates waits, on the
  // device, for all that the device had been given when the scope began. A replay that is submitted
  // while the scope is open is not waited for; PyTorch forbids it too. Where the device may not be
  // asked the scope takes nothing that was free before, but new pages.
  void BeginScope(ScopeKind kind, bool may_ask_device = true);
  void EndScope(bool may_ask_device = true);  // pre: one is open
  bool in_scope() const;

  // pre: a scope is open, bytes > 0. `capture` is the one that the stream is in now, kNoCapture for
  // none. A capture of one stream asks the driver nothing, so this alone tells that the stream has
  // left it; nothing says that it is where it was.
  Block Allocate(uint64_t bytes, StreamId stream, std::optional<CaptureId> capture = {});

  // Both throw UsageError if no live block starts at `address`. Free() returns what the block was.
  Block Free(Address address);
  void RecordUse(Address address, StreamId stream);

  // What lives now, and going back to that: the blocks of the checkpoint live, at their addresses,
  // and no others. pre: no scope is open. Restore() throws UsageError for the checkpoint of another
  // pool.
  PoolCheckpoint Checkpoint();
  RestoreDelta Restore(const PoolCheckpoint& checkpoint);

  // The live block that starts at `address`, or that holds it (O(live blocks): for diagnostics), or
  // nullptr; valid until the next call that changes the pool.
  const Block* At(Address address) const;
  const Block* Find(Address address) const;
  // The addresses that the pool has reserved at once, `address` among them, if it has. All blocks lie
  // in such. They stay reserved until GiveBack() or UnmapStale(). O(reservations).
  std::optional<AddressSpan> ReservationAround(Address address) const;
  // The physical bytes behind a live block, in the order of its addresses. Throws UsageError as
  // Free() does.
  std::vector<PhysicalPiece> Pieces(Address address) const;

  // What GiveBack() would: the bytes of all handles that no live block has a byte of. O(pages).
  uint64_t spare_bytes() const;
  // Whether the driver failed to take back something that is of no use any more.
  bool has_remains() const;
  // Gives both back, and unmaps all but what live blocks need. Where the driver fails all else is given
  // back all the same, then its first error is thrown: the next GiveBack() tries what is left once
  // more. pre: no graph was captured into the pool that still lives, no scope is open, the device is
  // idle (Driver::Quiesce()), and PrepareGiveBack() was called last, which makes room for it.
  // Checkpoints of before are void.
  void PrepareGiveBack();
  void GiveBack();

  // Eager work that churns maps the same pages again and again. Whether it has mapped so much that
  // UnmapStale() is due, which leaves, and so bounds, what is mapped:
  //   left <= mappings of the ranges that captures and checkpoints need + 3 * pages + handles
  //   page_mappings <= max(512, 2 * left) + those of the allocation that is under way
  // since of what lives in a page two blocks at most reach beyond it, and the others share a mapping.
  // It may be called in eager scopes only, with the device idle. Errors of the driver as GiveBack().
  bool HasStaleMappings() const;
  void UnmapStale();

  // Repeats Driver::SetAccess() for all that is mapped: a peer was added.
  void RefreshAccess();

  uint64_t reserved_bytes() const;  // Stats() says it too, at more cost
  uint64_t handles() const;         // of physical memory
  uint64_t live_blocks() const;
  uint64_t free_extents()
      const;  // stretches of free bytes: parts of a page, or whole pages in a row
  PoolStats Stats() const;
  PoolSnapshot Snapshot() const;

  // Of the capture scopes that have ended, oldest first: the last kMaxCaptures.
  static constexpr std::size_t kMaxCaptures = 65'536;
  const std::vector<CaptureStats>& captures() const;

  // Recomputes every invariant; throws InternalError. O(everything).
  void Check() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace cgp
