// All graph pools of one device, by id: who may allocate where, whose an address is, what may be
// given back.
//
// This is the core's front door. Every member may be called from any thread; one mutex per set
// orders them, and nothing is called back while it is held but the driver. Where it does not say
// otherwise a member throws as Pool does, with nothing changed.
//
// A block has one record, its pool's. Whose an address is follows from the reservation that it lies
// in: those are few, and each is one pool's.
#pragma once

#include <atomic>
#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "core/driver.h"
#include "core/pool_values.h"

namespace cgp {

// The value of torch's MempoolId_t.
struct PoolId {
  uint64_t first = 0;
  uint64_t second = 0;
  auto operator<=>(const PoolId&) const = default;
};

std::string ToString(PoolId id);

class PoolSet {
 public:
  // `driver` must outlive the set.
  explicit PoolSet(Driver& driver, PoolOptions options = {});
  ~PoolSet();

  PoolSet(const PoolSet&) = delete;
  PoolSet& operator=(const PoolSet&) = delete;

  // Holds a pool open under `id`, creating it if need be: it stays known when its last graph is
  // gone. Retain() and BeginScope() each add one user to the pool; Release() takes one away.
  void Retain(PoolId id);

  // Begins allocating to the pool, creating it if need be, and adds one user (a graph) to it.
  // Throws UsageError if a scope of this pool is open already: two captures cannot fill one pool at
  // once. `capturing`: a stream of the device is capturing that neither the set nor its driver
  // knows of. For what an eager scope may take see Pool.
  void BeginScope(PoolId id, ScopeKind kind, bool capturing = false);

  // Ends it. The user stays until Release(). Throws UsageError if no scope of this pool is open.
  // With `may_ask_device` it marks the device, if that may be, so as to know sooner what ran.
  void EndScope(PoolId id, bool may_ask_device = true);

  // Takes one user away. A pool without users is unused: Trim() gives back what no block lives in.
  // Throws UsageError if the pool is unknown or has no user.
  void Release(PoolId id);

  // A block of at least `bytes` (> 0) for work on `stream`, which is in `capture`, and of whole
  // pages if it is to share none (see Pool). Throws UsageError (unknown pool, no open scope),
  // OutOfMemoryError, DriverError.
  Block Allocate(PoolId id, uint64_t bytes, StreamId stream, std::optional<CaptureId> capture = {},
                 bool whole_pages = false);

  // Frees the block that starts at `address`. Throws UsageError if none does: never allocated here,
  // or freed before.
  void Free(Address address);
  // The same for whoever does not know whose the address is: returns the block that was freed, or
  // nothing if none of ours starts there.
  std::optional<Block> TryFree(Address address);

  // Notes that `stream` uses the block too: its memory is held until that is known to be over.
  // Throws UsageError if no block starts at `address`.
  void RecordUse(Address address, StreamId stream);
  // The same, but returns whether a block of ours starts there.
  bool TryRecordUse(Address address, StreamId stream);

  // See Pool. Both throw UsageError for an unknown pool and while a scope of it is open.
  PoolCheckpoint Checkpoint(PoolId id);
  RestoreDelta Restore(PoolId id, const PoolCheckpoint& checkpoint);

  // The live block that starts at `address`, and whose it is, if it is one of ours.
  struct Owned {
    PoolId id;
    Block block;
  };
  std::optional<Owned> At(Address address) const;
  // The live block that holds `address`, not only at its start. O(live blocks): for diagnostics.
  std::optional<Block> Find(Address address) const;
  // The physical bytes behind the live block that starts at `address`, in the order of its
  // addresses. Throws UsageError if none does.
  std::vector<PhysicalPiece> Pieces(Address address) const;

  // Whether `address` lies in a pool's memory, be it in no live block.
  bool HasReserved(Address address) const;

  // Gives back the memory of every unused pool, or of `only` if it is one, but for the handles in
  // which a block lives; returns the bytes given back. Waits for the device first if there is
  // anything to give. Not while any stream is capturing.
  // Throws with nothing changed if the device cannot be waited for, or the host's memory runs out.
  // Where the driver fails to take something back, all else is given back all the same, then the
  // first error is thrown: what is left counts as before, and the next Trim() tries it once more.
  uint64_t Trim(std::optional<PoolId> only = std::nullopt);
  // The bytes that Trim() would give back.
  uint64_t TrimmableBytes() const;

  // Lets `peer` access everything mapped, now and from now on. Where the driver fails it may have
  // access to a part: to call this again does the rest.
  void EnablePeer(int peer);

  bool Contains(PoolId id) const;
  // Whether a scope of it is open.
  bool InScope(PoolId id) const;
  // How many users (see Retain()) the pool has; 0 for an unknown pool.
  int UseCount(PoolId id) const;
  std::vector<PoolId> ids() const;

  // Throw UsageError for an unknown pool.
  PoolStats Stats(PoolId id) const;
  PoolSnapshot Snapshot(PoolId id) const;
  std::vector<CaptureStats> Captures(PoolId id) const;

  // What the pools hold, for the text of an error: in all, and each of the largest, the `first` one
  // before them. Nothing if they hold nothing.
  std::string Describe(std::optional<PoolId> first = std::nullopt) const;
  SetUsage Usage() const;
  // The bytes of physical memory that each pool has, and what it had: the last pools that are gone
  // are remembered.
  std::map<PoolId, Gauge> ReservedByPool() const;
  // Whether a peak of Usage(), but for what is free, has risen since this was asked last. Takes no
  // lock.
  bool TakeNewPeak() { return HasNewPeak() && new_peak_.exchange(false); }
  bool HasNewPeak() const { return new_peak_.load(std::memory_order_relaxed); }
  // As if one had.
  void NoteNewPeak() { new_peak_.store(true, std::memory_order_release); }
  // A peak of Usage() is what there is now, or that of `levels` if it is higher: who wants to know
  // only of what is above them resets to these.
  void ResetPeaks(SetUsage levels = {});
  void ResetPeaksByPool();
  void ResetTraffic();

  // Recomputes every invariant; throws InternalError. O(everything).
  void Check() const;

 private:
  struct Member;

  Member& Known(PoolId id) const;
  Member& KnownAtRest(PoolId id) const;
  Member& FindOrCreate(PoolId id);
  void AddUser(Member& member);
  // Counts what has changed in its pool. Returns whether what is reserved has a new peak.
  bool Count(Member& member);
  // Whose reservation the address lies in; nullptr: none's, or none that any block was in.
  Member* MemberAround(Address address) const;
  // The same, but nullptr where no live block starts.
  Member* FindOwner(Address address) const;
  // The member may have given addresses back.
  void DropFreedAddresses(const Member& member);
  [[noreturn]] void ThrowNoBlock(Address address) const;
  bool MayQuiesce() noexcept;
  bool HasMemory(const Member& member) const;
  bool CanTrim(const Member& member) const;
  void UnmapStale(Member& member);
  // Forgets a pool that has neither users nor a scope, blocks, memory or remains.
  void EraseIfGone(PoolId id);

  Driver& driver_;
  const PoolOptions options_;
  mutable std::mutex mutex_;
  // invariant: a member exists iff it has users, an open scope, live blocks or something not yet
  // trimmed.
  std::map<PoolId, std::unique_ptr<Member>> members_;
  // Those without users, so that who looks for them meets no others: each capture does, since torch
  // empties its cache then.
  std::set<PoolId> unused_;
  int captures_ = 0;  // capture scopes that are open
  struct Reservation {
    AddressSpan addresses;
    Member* member;
  };
  // Those that blocks are or were in, in the order of addresses. invariant: each is still its
  // member's, and each live block lies in one of its pool's.
  std::vector<Reservation> reservations_;
  // invariant: its current values are the sums of the members' Stats().
  SetUsage usage_;
  // invariant: the current value of a member's is its pool's reserved_bytes(), and others' is 0.
  std::map<PoolId, Gauge> reserved_bytes_;
  std::vector<PoolId> gone_;  // in that order; with room for one more
  std::atomic<bool> new_peak_{false};
};

}  // namespace cgp
