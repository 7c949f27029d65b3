// Leases of a set's pools: sleep and wake, loans, leases of blocks, and what replays may do
// meanwhile.
//
// A loan is a pool of its own, which borrows whole free handles of the lender and maps them at
// addresses of its own. Each scope of it begins with a mark of the device, for which its streams
// wait. So what it borrows is behind the replays so far. Its handles go back as soon as a replay, a
// capture or eager work in the lender is about to begin, except those with a live block. They come
// again with the loan's next allocation.
//
//     lender    free ---- Lend() ----> lent ---- Withdraw() ----> free, a mark is due
//     loan      lent                   free, or in live blocks    lent
#include <algorithm>
#include <map>
#include <memory>
#include <string>
#include <utility>

#include "core/base/error.h"
#include "core/pool_set_member.h"

namespace cgp {
namespace {

using Handles = std::vector<Pool::LentHandle>;

// Those of `others` that are the same memory as one of `handles`.
Handles SameIn(const Handles& others, const Handles& handles) {
  std::map<Handle, Pool::LentHandle> by_memory;
  for (const Pool::LentHandle& other : others) by_memory.emplace(other.physical, other);
  Handles same;
  for (const Pool::LentHandle& handle : handles) {
    const auto found = by_memory.find(handle.physical);
    if (found != by_memory.end()) same.push_back(found->second);
  }
  return same;
}

}  // namespace

// --- What graphs need ---

uint64_t PoolSet::NameCapture(PoolId id) {
  const std::lock_guard lock(mutex_);
  return Known(id).pool.needs().NameLast();
}

void PoolSet::DropCapture(PoolId id, uint64_t capture) noexcept {
  const std::lock_guard lock(mutex_);
  const auto found = members_.find(id);
  if (found != members_.end()) found->second->pool.needs().Drop(capture);
}

// --- Sleep and wake ---

// The pool, which may give pages away now.
PoolSet::Member& PoolSet::KnownToLease(PoolId id, const char* what) {
  Member& member = Known(id);
  if (member.lender != nullptr) {
    throw UsageError("cudagraph_pool: pool " + ToString(id) + " is a loan, which cannot " + what +
                     ": ask pool " + ToString(member.lender->id) + ".");
  }
  const bool lends = member.loan != nullptr && member.loan->is_open();
  if (member.pool.in_scope() || lends) {
    throw UsageError("cudagraph_pool: pool " + ToString(id) + " cannot " + what + " now: a " +
                     (lends ? "lend" : "capture or use_pool") +
                     " block of it is open. End that first.");
  }
  if (!MayQuiesce()) {
    throw UsageError("cudagraph_pool: pool " + ToString(id) + " cannot " + what +
                     " now: a capture is under way on device " + std::to_string(driver_.device()) +
                     ", or on one that it works with. End it first.");
  }
  return member;
}

template <typename Step>
Leased PoolSet::Take(Member& member, Step step) {
  driver_.Quiesce();
  EndLoan(member);
  std::exception_ptr error;
  const Leased leased = step(member.pool, &error);
  DropFreedAddresses(member);
  Count(member);
  EraseIfGone(member.id);
  if (error) std::rethrow_exception(error);
  return leased;
}

template <typename Step>
Leased PoolSet::Bring(Member& member, Step step) {
  try {
    const Leased back = step(member.pool);
    if (Count(member)) NoteNewPeak();
    return back;
  } catch (const DriverError& error) {
    Count(member);
    if (error.status() != DriverStatus::kOutOfMemory) throw;
    throw OutOfMemoryError(
        "cudagraph_pool: out of memory: pool " + ToString(member.id) + " needs " +
        Size(member.pool.Stats().away_bytes) + " that it has given away; " + FreeMemoryOn(driver_) +
        ". The pool is as it was before: free memory and try again. " + error.what());
  } catch (...) {
    Count(member);
    throw;
  }
}

Leased PoolSet::Sleep(PoolId id, bool keeps_live) {
  const std::lock_guard lock(mutex_);
  return Take(KnownToLease(id, "sleep"),
              [&](Pool& pool, std::exception_ptr* error) { return pool.Sleep(keeps_live, error); });
}

Leased PoolSet::Wake(PoolId id) {
  const std::lock_guard lock(mutex_);
  return WakeIfAsleep(Known(id));
}

Leased PoolSet::WakeIfAsleep(Member& member) {
  if (!member.pool.asleep()) return {};
  return Bring(member, [](Pool& pool) { return pool.Wake(); });
}

Leased PoolSet::TrimToNeeds(PoolId id) {
  const std::lock_guard lock(mutex_);
  return Take(KnownToLease(id, "be trimmed"),
              [](Pool& pool, std::exception_ptr* error) { return pool.TrimToNeeds(error); });
}

// --- Leases of blocks ---

uint64_t PoolSet::Lease(PoolId id, const std::vector<Address>& blocks) {
  const std::lock_guard lock(mutex_);
  Member& member = Known(id);
  for (const Address address : blocks) {
    if (member.pool.At(address) != nullptr) continue;
    throw UsageError("cudagraph_pool: no live block of pool " + ToString(id) + " starts at " +
                     Hex(address) + ": lease tensors that were allocated in the pool.");
  }
  member.leased_blocks.emplace(member.last_lease + 1, blocks);
  return ++member.last_lease;
}

// The blocks of the lease.
const std::vector<Address>& PoolSet::KnownLease(const Member& member, uint64_t lease) {
  const auto found = member.leased_blocks.find(static_cast<LeaseId>(lease));
  if (found == member.leased_blocks.end()) {
    throw UsageError("cudagraph_pool: pool " + ToString(member.id) + " has no lease " +
                     std::to_string(lease) + ": it was ended before.");
  }
  return found->second;
}

Leased PoolSet::ReleaseLease(PoolId id, uint64_t lease) {
  const std::lock_guard lock(mutex_);
  Member& member = KnownToLease(id, "release a lease");
  const std::vector<Address>& blocks = KnownLease(member, lease);
  return Take(member, [&](Pool& pool, std::exception_ptr* error) {
    return pool.EvictBlocks(static_cast<LeaseId>(lease), blocks, error);
  });
}

Leased PoolSet::RestoreLease(PoolId id, uint64_t lease) {
  const std::lock_guard lock(mutex_);
  return BringLease(id, lease);
}

Leased PoolSet::BringLease(PoolId id, uint64_t lease) {
  Member& member = KnownAtRest(id);
  KnownLease(member, lease);
  return Bring(member, [&](Pool& pool) { return pool.BringBack(static_cast<LeaseId>(lease)); });
}

void PoolSet::EndLease(PoolId id, uint64_t lease) {
  const std::lock_guard lock(mutex_);
  BringLease(id, lease);
  Known(id).leased_blocks.erase(static_cast<LeaseId>(lease));
}

// --- Loans ---

PoolId PoolSet::BeginLoan(PoolId id) {
  const std::lock_guard lock(mutex_);
  Member& lender = KnownToLease(id, "lend");
  if (lender.pool.asleep()) {
    throw UsageError("cudagraph_pool: pool " + ToString(id) +
                     " is asleep: it has nothing to lend before wake().");
  }
  const PoolId loan_id = LoanOf(id);
  if (lender.loan == nullptr) {
    Member& loan = FindOrCreate(loan_id, /*borrows=*/true);
    loan.lender = &lender;
    lender.loan = &loan;
  }
  Member& loan = *lender.loan;
  try {
    Lend(lender);
    loan.pool.BeginScope(ScopeKind::kLoan);
  } catch (...) {
    Withdraw(lender);
    throw;
  }
  return loan_id;
}

// What is free and open in the lender becomes free in the loan.
void PoolSet::Lend(Member& lender) {
  Member& loan = *lender.loan;
  const Handles free = lender.pool.FreeHandles();
  const Handles again = SameIn(loan.pool.HandlesOf(Pool::kLent), free);
  Handles fresh = free;
  std::erase_if(fresh, [&](const Pool::LentHandle& handle) {
    return std::ranges::find(again, handle.physical, &Pool::LentHandle::physical) != again.end();
  });
  const IndexSet pages_of_free = lender.pool.ReserveLease(free);
  const IndexSet pages_of_fresh = lender.pool.ReserveLease(fresh);
  const IndexSet pages_of_again = loan.pool.ReserveLease(again);
  // Nothing has changed so far. A handle is nobody's before it is the other one's.
  lender.pool.SetLease(free, pages_of_free, Pool::kLent);
  loan.pool.SetLease(again, pages_of_again, kNoLease);
  try {
    loan.pool.Adopt(fresh);
  } catch (...) {
    lender.pool.SetLease(fresh, pages_of_fresh, kNoLease);
    Count(lender);
    Count(loan);
    throw;
  }
  Count(lender);
  if (Count(loan)) NoteNewPeak();
}

// What has no live block in the loan becomes free in the lender again. Not while eager work goes on
// there: that has waited only for what the device had been given when its scope began.
void PoolSet::Withdraw(Member& lender) {
  if (lender.loan == nullptr) return;
  if (lender.pool.in_scope() && !lender.pool.in_capture_scope()) return;
  Member& loan = *lender.loan;
  const Handles unused = loan.pool.UnusedHandles();
  if (unused.empty()) return;
  const Handles back = SameIn(lender.pool.HandlesOf(Pool::kLent), unused);
  const IndexSet pages_of_back = lender.pool.ReserveLease(back);
  loan.pool.SetLease(unused, loan.pool.ReserveLease(unused), Pool::kLent);
  lender.pool.SetLease(back, pages_of_back, kNoLease);
  Count(loan);
  if (Count(lender)) NoteNewPeak();
  lender.needs_mark = true;
  loan.is_withdrawn = loan.is_open();
}

// What cannot go back for lack of the host's memory goes back before the lender's next scope.
void PoolSet::EndLoanScope(Member& loan) noexcept {
  loan.is_withdrawn = false;
  try {
    Withdraw(*loan.lender);
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch)
  }
}

// The loan's mappings go, except those of live blocks. What the driver keeps of them the next call
// tries again; till then its memory is not to be given away. pre: the device is idle.
void PoolSet::EndLoan(Member& lender) {
  if (lender.loan == nullptr) return;
  Member& loan = *lender.loan;
  Withdraw(lender);
  loan.pool.PrepareGiveBack();
  std::exception_ptr error;
  try {
    loan.pool.GiveBack();
  } catch (const DriverError&) {
    error = std::current_exception();
  }
  DropFreedAddresses(loan);
  Count(loan);
  lender.needs_mark = false;
  lender.borrowers.reset();
  if (error) std::rethrow_exception(error);
  if (loan.pool.has_pages() || loan.pool.has_remains()) return;
  const PoolId id = loan.id;
  lender.loan = nullptr;
  loan.lender = nullptr;
  EraseIfGone(id);
}

// The lender took back what was free, while the loan's scope went on: it begins anew. Until it has
// begun, is_withdrawn says that it is open: what fails here is tried again.
void PoolSet::RenewLoan(Member& loan) {
  if (!MayQuiesce()) {
    throw UsageError("cudagraph_pool: pool " + ToString(loan.lender->id) +
                     " cannot lend now: a capture is under way on device " +
                     std::to_string(driver_.device()) + ". End it first.");
  }
  if (loan.pool.in_scope()) loan.pool.EndScope();
  if (!loan.lender->pool.in_scope()) Lend(*loan.lender);
  loan.pool.BeginScope(ScopeKind::kLoan);
  loan.is_withdrawn = false;
}

uint64_t PoolSet::LendableBytes(PoolId id) const {
  const std::lock_guard lock(mutex_);
  const Pool& pool = Known(id).pool;
  uint64_t pages = 0;
  for (const Pool::LentHandle& handle : pool.FreeHandles()) pages += handle.pages;
  return pages * pool.page_bytes();
}

std::vector<Block> PoolSet::Borrowed(PoolId id) const {
  const std::lock_guard lock(mutex_);
  std::vector<Block> blocks;
  const auto found = members_.find(id);
  if (found == members_.end() || found->second->loan == nullptr) return blocks;
  for (const PoolSnapshot::LiveBlock& live : found->second->loan->pool.Snapshot().blocks) {
    blocks.push_back(live.block);
  }
  return blocks;
}

// --- Replays ---

void PoolSet::BeginReplay(PoolId id, uint64_t capture, StreamId stream) {
  const std::lock_guard lock(mutex_);
  const auto found = members_.find(id);
  if (found == members_.end()) return;
  Member& member = *found->second;
  if (member.pool.asleep()) {
    throw UsageError("cudagraph_pool: the graph's pool " + ToString(id) +
                     " is asleep: call wake() before the replay.");
  }
  Withdraw(member);
  if (member.pool.has_leases()) RefuseReplay(member, capture);
  AwaitBorrowers(member, stream);
}

void PoolSet::RefuseReplay(const Member& member, uint64_t capture) const {
  uint64_t lent = 0;
  uint64_t away = 0;
  const uint64_t page = member.pool.page_bytes();
  std::set<PageId> seen;
  member.pool.ForEachNeededLeased(capture, [&](PageId handle, uint32_t pages, LeaseId lease) {
    if (seen.insert(handle).second) (lease == Pool::kLent ? lent : away) += pages * page;
  });
  if (away > 0) {
    throw UsageError("cudagraph_pool: the graph needs " + Size(away) + " of pool " +
                     ToString(member.id) +
                     " that a lease has released: call restore() before the replay.");
  }
  if (lent == 0) return;
  std::string text = "cudagraph_pool: the graph needs " + Size(lent) + " of pool " +
                     ToString(member.id) + " that is lent to live tensors";
  const PoolSnapshot snapshot = member.loan->pool.Snapshot();
  constexpr size_t kNamed = 3;
  for (size_t i = 0; i < std::min(kNamed, snapshot.blocks.size()); ++i) {
    const Block& block = snapshot.blocks[i].block;
    text += (i == 0 ? ": " : ", ") + Size(block.requested_bytes) + " at " + Hex(block.address);
  }
  if (snapshot.blocks.size() > kNamed) {
    text += " and " + std::to_string(snapshot.blocks.size() - kNamed) + " more";
  }
  throw UsageError(text + ". Free them before the replay.");
}

// The replay's stream waits for what the device was given until the lent bytes came back.
void PoolSet::AwaitBorrowers(Member& member, StreamId stream) {
  if (member.needs_mark) {
    if (!MayQuiesce()) {
      throw UsageError("cudagraph_pool: pool " + ToString(member.id) +
                       " has lent memory, so a replay has to wait for the borrowers. That would "
                       "break the capture under way: end it first.");
    }
    member.borrowers = std::make_shared<SharedEvent>(driver_);
    member.needs_mark = false;
  }
  if (member.borrowers == nullptr) return;
  if (driver_.EventDone(member.borrowers->get())) {
    member.borrowers.reset();
    return;
  }
  Frontier frontier;
  driver_.Capture(stream, &frontier);
  if (frontier.held) {
    throw UsageError("cudagraph_pool: pool " + ToString(member.id) +
                     " has lent memory, so a replay has to wait for the borrowers. A stream that "
                     "captures cannot: replay the graph on another one first.");
  }
  driver_.WaitEvent(stream, member.borrowers->get());
}

// Each handle that is lent is in the loan, and free in at most one of the two.
void PoolSet::CheckLoan(const Member& member) const {
  if (member.loan == nullptr) return;
  const Pool& loan = member.loan->pool;
  CGP_CHECK(member.loan->lender == &member);
  std::set<Handle> here;
  for (const Pool::LentHandle& one : member.pool.HandlesOf(Pool::kLent)) here.insert(one.physical);
  for (const Pool::LentHandle& one : loan.HandlesOf(kNoLease)) {
    CGP_CHECK(here.erase(one.physical) == 1);
  }
  CGP_CHECK(here.empty());
}

}  // namespace cgp
