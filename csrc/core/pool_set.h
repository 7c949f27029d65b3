// All graph pools of one device, by id: who may allocate where, which pool an address belongs to,
// and what may be given back.
//
// This is the core's interface. Every member may be called from any thread: one mutex for each set
// orders them, and only the driver is called while it is held. Unless stated otherwise a member
// throws as Pool does, with nothing changed.
//
// A block has one record, in its pool. The pool of an address follows from its reservation: these
// are few, and each belongs to one pool.
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

  // Makes the pool, if need be, and adds a user, so that it stays known when its last graph is
  // gone. Retain() and BeginScope() each add one user; Release() takes one away.
  void Retain(PoolId id);

  // Begins allocating to the pool, which is made if need be, and adds one user (a graph). Throws
  // UsageError if a scope of this pool is open: two captures cannot fill one pool at once.
  // `capturing`: a stream of the device is capturing, and neither the set nor its driver knows.
  // Pool says what an eager scope may take.
  void BeginScope(PoolId id, ScopeKind kind, bool capturing = false);

  // Ends the scope; the user stays until Release(). Throws UsageError if no scope of this pool is
  // open. With `may_ask_device` it marks the device, if allowed, to know sooner what has run.
  void EndScope(PoolId id, bool may_ask_device = true);

  // Takes one user away. Trim() may give back all memory without a live block of a pool that has no
  // users. Throws UsageError if the pool is unknown or has no user.
  void Release(PoolId id);

  // Returns a block of at least `bytes` (> 0) for work on `stream`, which is in `capture`, and of
  // whole pages if `whole_pages` (see Pool). Throws UsageError (unknown pool, no open scope),
  // OutOfMemoryError, DriverError.
  Block Allocate(PoolId id, uint64_t bytes, StreamId stream, std::optional<CaptureId> capture = {},
                 bool whole_pages = false);

  // Frees the block that starts at `address`. Throws UsageError if there is none: it was never
  // allocated here, or was freed before.
  void Free(Address address);
  // The same for an address that may not be ours: returns the block that was freed, or nothing.
  std::optional<Block> TryFree(Address address);

  // Notes that `stream` uses the block too: its memory is held until that use is known to be over.
  // Throws UsageError if no block starts at `address`.
  void RecordUse(Address address, StreamId stream);
  // The same, but returns false if no block of ours starts there.
  bool TryRecordUse(Address address, StreamId stream);

  // See Pool. Both throw UsageError if the pool is unknown, or a scope of it is open.
  PoolCheckpoint Checkpoint(PoolId id);
  RestoreDelta Restore(PoolId id, const PoolCheckpoint& checkpoint);

  // The live block that starts at `address`, with its pool, if it is ours.
  struct Owned {
    PoolId id;
    Block block;
  };
  std::optional<Owned> At(Address address) const;
  // The live block that holds `address`, at its start or not. O(live blocks): for diagnostics.
  std::optional<Block> Find(Address address) const;
  // The physical bytes of the live block that starts at `address`, in the order of its addresses.
  // Throws UsageError if there is none.
  std::vector<PhysicalPiece> Pieces(Address address) const;

  // Whether `address` lies in a pool's reservation, in a live block or not.
  bool HasReserved(Address address) const;

  // Gives back the memory of every unused pool, or only of `only`, except for handles that have a
  // live block; returns the bytes given back. Waits for the device first if there is anything to
  // give back. Not to be called while any stream captures. Throws with nothing changed if the
  // device cannot be waited for, or the host's memory runs out. If the driver fails to take
  // something back, everything else is given back all the same, then its first error is thrown. The
  // rest counts as before, and the next Trim() tries it again.
  uint64_t Trim(std::optional<PoolId> only = std::nullopt);
  // The bytes that Trim() would give back.
  uint64_t TrimmableBytes() const;

  // --- Leases (pool_set_leases.cc) ---
  //
  // Pages go away for a time, and their addresses stay. What is said here of graphs is of those
  // whose capture scopes filled the pool. The caller refuses replays as BeginReplay() says.

  // Names the pool's last capture scope that has ended, whose graph the caller knows: it will call
  // DropCapture() once the graph is gone. 0 if there is none, or it is named already. Captures that
  // nobody names need their pages as long as the pool has users.
  uint64_t NameCapture(PoolId id);
  // Never throws; an unknown pool or capture is none of ours any more.
  void DropCapture(PoolId id, uint64_t capture) noexcept;

  // Waits for the device and gives it all handles of the pool without a live byte or, without
  // `keeps_live`, all handles. Addresses stay reserved, and blocks may be freed meanwhile. A pool
  // that is asleep may be put to sleep again. If the driver fails, what went stays away, and the
  // pool is asleep; then the first error is thrown. Throws UsageError if a scope of the pool is
  // open, or a capture is under way on the device.
  Leased Sleep(PoolId id, bool keeps_live);
  // Makes all that is away anew, behind the same addresses; what it held is undefined. No-op if
  // nothing is away. BeginScope() and Restore() do it first. Throws as Allocate(); the pool is
  // asleep and whole then.
  Leased Wake(PoolId id);

  // A lease of the bytes of some live blocks. Release() takes the handles away in which these
  // blocks have bytes, and no other live block. RestoreLease() brings them back, with undefined
  // content. Errors as in Sleep() and Wake(). Lease() throws UsageError if no live block starts at
  // an address, or they are not all of this pool. EndLease() brings all back, and forgets it.
  uint64_t Lease(PoolId id, const std::vector<Address>& blocks);
  Leased ReleaseLease(PoolId id, uint64_t lease);
  Leased RestoreLease(PoolId id, uint64_t lease);
  void EndLease(PoolId id, uint64_t lease);

  // Gives back what no live block, no checkpoint and no graph that is still there needs, although
  // the pool has users. Waits for the device. Errors as in Sleep(), but the pool stays awake.
  Leased TrimToNeeds(PoolId id);

  // Begins an eager scope in which the pool's free bytes are lent: blocks get whole free handles'
  // bytes at addresses of their own, behind all work that the device has been given. Returns the
  // pool of the loan, to which Allocate() and EndScope() go; Release() is not called for it.
  // Allocate() throws OutOfMemoryError if what is free does not suffice: nothing is made. Throws
  // UsageError if the pool is asleep or has an open scope, or a capture is under way on the device.
  PoolId BeginLoan(PoolId id);
  // What BeginLoan() returns. It is known while something of it is left, and not among ids(). No
  // other pool has it: torch counts its ids from 0 and, for some of ours, from the other end.
  static PoolId LoanOf(PoolId id) { return {id.first ^ uint64_t{1} << 63, id.second}; }

  // The capture's graph (0: any of the pool's graphs that nobody has named) is about to be replayed
  // on `stream`. Throws UsageError if the pool is asleep, or something that the graph needs is away
  // or is lent to a live block. Else takes back what is free again, and lets the stream wait, on
  // the device, for the work of those who borrowed.
  void BeginReplay(PoolId id, uint64_t capture, StreamId stream);
  // What BeginLoan() would lend now. O(pages).
  uint64_t LendableBytes(PoolId id) const;
  // The live blocks that borrow from the pool, for errors and reports.
  std::vector<Block> Borrowed(PoolId id) const;

  // Lets `peer` access everything that is mapped, now and later. If the driver fails, `peer` may
  // have access to a part: another call does the rest.
  void EnablePeer(int peer);

  bool Contains(PoolId id) const;
  // Whether a scope of it is open.
  bool InScope(PoolId id) const;
  // The number of users (see Retain()); 0 for an unknown pool.
  int UseCount(PoolId id) const;
  std::vector<PoolId> ids() const;

  // Throw UsageError for an unknown pool.
  PoolStats Stats(PoolId id) const;
  PoolSnapshot Snapshot(PoolId id) const;
  std::vector<CaptureStats> Captures(PoolId id) const;

  // What the pools hold, for an error's text: in all, and each of the largest, with the `first` one
  // before them. Empty if they hold nothing.
  std::string Describe(std::optional<PoolId> first = std::nullopt) const;
  SetUsage Usage() const;
  // The physical memory of each pool, now and before. The last pools that are gone are included.
  std::map<PoolId, Gauge> ReservedByPool() const;
  // Whether a peak of Usage(), except of free bytes, has risen since the last call. Takes no lock.
  bool TakeNewPeak() { return HasNewPeak() && new_peak_.exchange(false); }
  bool HasNewPeak() const { return new_peak_.load(std::memory_order_relaxed); }
  // As if one had.
  void NoteNewPeak() { new_peak_.store(true, std::memory_order_release); }
  // Resets the peaks of Usage() to what there is now, or to those of `levels` where these are
  // higher, for callers who want to know only of what exceeds them.
  void ResetPeaks(SetUsage levels = {});
  void ResetPeaksByPool();
  void ResetTraffic();

  // Recomputes every invariant; throws InternalError. O(everything).
  void Check() const;

 private:
  struct Member;

  Member& Known(PoolId id) const;
  Member& KnownAtRest(PoolId id) const;
  Member& FindOrCreate(PoolId id, bool borrows = false);
  void AddUser(Member& member);
  // Counts what has changed in its pool. Returns whether reserved_bytes or handles has a new peak.
  bool Count(Member& member);
  // The member whose reservation the address lies in; nullptr: none's, or one without a block so
  // far.
  Member* MemberAround(Address address) const;
  // The same, but nullptr if no live block starts there.
  Member* FindOwner(Address address) const;
  // The member may have given addresses back.
  void DropFreedAddresses(const Member& member);
  [[noreturn]] void ThrowNoBlock(Address address) const;
  bool MayQuiesce() noexcept;
  bool HasMemory(const Member& member) const;
  bool CanTrim(const Member& member) const;
  void UnmapStale(Member& member);

  // --- pool_set_leases.cc ---
  Member& KnownToLease(PoolId id, const char* what);
  // step(pool, &error) takes pages of the pool away, or brings them back (step(pool)).
  template <typename Step>
  Leased Take(Member& member, Step step);
  template <typename Step>
  Leased Bring(Member& member, Step step);
  Leased WakeIfAsleep(Member& member);
  Leased BringLease(PoolId id, uint64_t lease);
  void Lend(Member& lender);
  void Withdraw(Member& lender);
  void EndLoan(Member& lender);
  void RenewLoan(Member& loan);
  void EndLoanScope(Member& loan) noexcept;
  void RefuseReplay(const Member& member, uint64_t capture) const;
  void AwaitBorrowers(Member& member, StreamId stream);
  void CheckLoan(const Member& member) const;
  static const std::vector<Address>& KnownLease(const Member& member, uint64_t lease);
  // Erases a pool that has neither users nor a scope, blocks, memory or remains.
  void EraseIfGone(PoolId id);

  Driver& driver_;
  const PoolOptions options_;
  mutable std::mutex mutex_;
  // invariant: a member exists iff it has users, an open scope, live blocks or something not yet
  // trimmed.
  std::map<PoolId, std::unique_ptr<Member>> members_;
  // Those without users: each capture looks for them, since torch empties its cache then.
  std::set<PoolId> unused_;
  int captures_ = 0;  // capture scopes that are open
  struct Reservation {
    AddressSpan addresses;
    Member* member;
  };
  // Reservations that have or had a block, in the order of addresses. invariant: each is still its
  // member's, and each live block lies in one of its pool's.
  std::vector<Reservation> reservations_;
  // invariant: its current values are the sums of the members' Stats().
  SetUsage usage_;
  // invariant: the current value of a member is its pool's reserved_bytes(), that of others is 0.
  std::map<PoolId, Gauge> reserved_bytes_;
  std::vector<PoolId> gone_;  // oldest first; with room for one more
  std::atomic<bool> new_peak_{false};
};

}  // namespace cgp
