#include "core/pool_set.h"

#include <algorithm>
#include <exception>
#include <functional>
#include <iterator>
#include <utility>

#include "core/base/error.h"
#include "core/pool_set_member.h"

namespace cgp {

namespace {

// A program that makes pools forever must neither fill the host's memory nor wait for statistics of
// all.
constexpr size_t kGonePoolsRemembered = 100;

constexpr auto kBegin = [](const auto& reservation) { return reservation.addresses.begin; };

}  // namespace

std::string ToString(PoolId id) {
  return "(" + std::to_string(id.first) + ", " + std::to_string(id.second) + ")";
}

PoolSet::PoolSet(Driver& driver, PoolOptions options) : driver_(driver), options_(options) {
  gone_.reserve(kGonePoolsRemembered + 1);
}

PoolSet::~PoolSet() {
  try {
    const bool any = std::ranges::any_of(
        members_, [this](const auto& entry) { return HasMemory(*entry.second); });
    if (any) driver_.Quiesce();
  } catch (const std::exception&) {  // NOLINT(bugprone-empty-catch): the device is gone, or dead
  }
}

void PoolSet::Retain(PoolId id) {
  const std::lock_guard lock(mutex_);
  AddUser(FindOrCreate(id));
}

void PoolSet::BeginScope(PoolId id, ScopeKind kind, bool capturing) {
  const std::lock_guard lock(mutex_);
  Member& member = FindOrCreate(id);
  if (member.pool.in_scope()) {
    throw UsageError("cudagraph_pool: pool " + ToString(id) +
                     " is already being allocated to. End the capture (or use_pool block) that "
                     "fills it before another one begins, or give each a pool of its own.");
  }
  try {
    WakeIfAsleep(member);
    const bool may_ask = !capturing && MayQuiesce();
    // What was lent is safe for eager work only behind a mark.
    if (kind == ScopeKind::kCapture || may_ask) Withdraw(member);
    member.pool.BeginScope(kind, may_ask);
  } catch (...) {
    EraseIfGone(id);
    throw;
  }
  member.told_of_capture = capturing;
  AddUser(member);
  if (kind == ScopeKind::kCapture) ++captures_;
}

void PoolSet::EndScope(PoolId id, bool may_ask_device) {
  const std::lock_guard lock(mutex_);
  Member& member = Known(id);
  if (!member.is_open()) {
    throw UsageError("cudagraph_pool: nothing is being allocated to pool " + ToString(id) +
                     ", so there is nothing to end.");
  }
  const bool capture = member.pool.in_capture_scope();
  if (member.pool.in_scope()) member.pool.EndScope(may_ask_device && MayQuiesce());
  Count(member);
  if (capture) --captures_;
  if (member.lender != nullptr) EndLoanScope(member);
  EraseIfGone(id);
}

void PoolSet::Release(PoolId id) {
  const std::lock_guard lock(mutex_);
  Member& member = Known(id);
  if (member.users == 0) {
    throw UsageError("cudagraph_pool: pool " + ToString(id) +
                     " has no users left: it was released more often than it was retained.");
  }
  if (--member.users == 0) unused_.insert(std::move(member.unused));
  EraseIfGone(id);
}

Block PoolSet::Allocate(PoolId id, uint64_t bytes, StreamId stream,
                        std::optional<CaptureId> capture, bool whole_pages) {
  const std::lock_guard lock(mutex_);
  Member& member = Known(id);
  if (!member.is_open()) {
    throw UsageError("cudagraph_pool: nothing may be allocated to pool " + ToString(id) +
                     " now: no capture and no use_pool block that fills it is open.");
  }
  if (bytes == 0) throw UsageError("cudagraph_pool: a block of 0 bytes was asked for.");
  if (member.is_withdrawn) RenewLoan(member);
  UnmapStale(member);
  ReserveMore(reservations_, 1);
  Block block;
  try {
    block = member.pool.Allocate(bytes, stream, capture, whole_pages);
  } catch (...) {
    if (Count(member)) NoteNewPeak();  // by what an undo failed to give back
    throw;
  }
  if (MemberAround(block.address) == nullptr) {
    const AddressSpan addresses = *member.pool.ReservationAround(block.address);
    const auto behind = std::ranges::upper_bound(reservations_, addresses.begin, {}, kBegin);
    reservations_.insert(behind, {addresses, &member});
  }
  bool raised = Count(member);
  raised |= usage_.Allocated(block);
  if (raised) NoteNewPeak();
  return block;
}

void PoolSet::Free(Address address) {
  if (!TryFree(address)) ThrowNoBlock(address);
}

std::optional<Block> PoolSet::TryFree(Address address) {
  const std::lock_guard lock(mutex_);
  Member* const member = FindOwner(address);
  if (member == nullptr) return std::nullopt;
  const Block block = member->pool.Free(address);
  member->Forget(address);
  Count(*member);
  usage_.Freed(block);
  return block;
}

void PoolSet::RecordUse(Address address, StreamId stream) {
  if (!TryRecordUse(address, stream)) ThrowNoBlock(address);
}

bool PoolSet::TryRecordUse(Address address, StreamId stream) {
  const std::lock_guard lock(mutex_);
  Member* const member = FindOwner(address);
  if (member == nullptr) return false;
  member->pool.RecordUse(address, stream);
  return true;
}

PoolCheckpoint PoolSet::Checkpoint(PoolId id) {
  const std::lock_guard lock(mutex_);
  return KnownAtRest(id).pool.Checkpoint();
}

RestoreDelta PoolSet::Restore(PoolId id, const PoolCheckpoint& checkpoint) {
  const std::lock_guard lock(mutex_);
  Member& member = KnownAtRest(id);
  WakeIfAsleep(member);
  Withdraw(member);
  RestoreDelta delta = member.pool.Restore(checkpoint);  // what follows does not throw
  Count(member);
  for (const Block& block : delta.freed) {
    usage_.Freed(block);
    const bool leases = !member.leased_blocks.empty();
    if (leases && std::ranges::count(delta.allocated, block) == 0) member.Forget(block.address);
  }
  for (const Block& block : delta.allocated) {
    if (usage_.Allocated(block)) NoteNewPeak();
  }
  return delta;
}

std::optional<PoolSet::Owned> PoolSet::At(Address address) const {
  const std::lock_guard lock(mutex_);
  const Member* const owner = FindOwner(address);
  if (owner == nullptr) return std::nullopt;
  return Owned{owner->id, *owner->pool.At(address)};
}

std::optional<Block> PoolSet::Find(Address address) const {
  const std::lock_guard lock(mutex_);
  const Member* const member = MemberAround(address);
  const Block* const block = member == nullptr ? nullptr : member->pool.Find(address);
  return block == nullptr ? std::nullopt : std::optional(*block);
}

std::vector<PhysicalPiece> PoolSet::Pieces(Address address) const {
  const std::lock_guard lock(mutex_);
  Member* const owner = FindOwner(address);
  if (owner == nullptr) ThrowNoBlock(address);
  return owner->pool.Pieces(address);
}

bool PoolSet::HasReserved(Address address) const {
  const std::lock_guard lock(mutex_);
  return MemberAround(address) != nullptr;
}

// Whether the device may be waited for and marked: no capture is known that this would break.
bool PoolSet::MayQuiesce() noexcept { return captures_ == 0 && driver_.MayQuiesce(); }

// Whether the pool has anything from the driver, or has given it away.
bool PoolSet::HasMemory(const Member& member) const {
  return member.pool.has_pages() || member.pool.has_remains() || member.loan != nullptr;
}

bool PoolSet::CanTrim(const Member& member) const {
  const bool lends = member.loan != nullptr && member.loan->is_open();
  return member.users == 0 && !member.pool.in_scope() && !lends && member.lender == nullptr;
}

void PoolSet::EraseIfGone(const PoolId id) {
  const auto it = members_.find(id);
  const Member& member = *it->second;
  if (!CanTrim(member) || member.pool.live_blocks() > 0 || HasMemory(member)) return;
  members_.erase(it);
  unused_.erase(id);
  reserved_bytes_.at(id).Set(0);
  gone_.push_back(id);
  if (gone_.size() <= kGonePoolsRemembered) return;
  const PoolId oldest = gone_.front();
  gone_.erase(gone_.begin());
  if (!members_.contains(oldest)) reserved_bytes_.erase(oldest);  // else it has come back
}

uint64_t PoolSet::Trim(std::optional<PoolId> only) {
  const std::lock_guard lock(mutex_);
  std::vector<Member*> due;
  for (const PoolId id : unused_) {
    if (only && id != *only) continue;
    Member& member = Known(id);
    const Pool& pool = member.pool;
    // A trim that failed may have ended the loan of a pool that has nothing else.
    const bool is_due =
        pool.live_blocks() == 0 || pool.has_spare() || pool.has_remains() || member.loan != nullptr;
    if (CanTrim(member) && is_due) due.push_back(&member);
  }
  if (due.empty()) return 0;
  // Work that was submitted before may still use the pages.
  driver_.Quiesce();
  uint64_t bytes = 0;
  std::exception_ptr error;
  std::erase_if(due, [&](Member* member) {
    try {
      EndLoan(*member);
      return false;
    } catch (const DriverError&) {
      error = std::current_exception();
      return true;
    }
  });
  for (Member* const member : due) member->pool.PrepareGiveBack();
  // Nothing has changed so far but loans, and nothing below throws but the driver.
  for (Member* const member : due) {
    const uint64_t reserved = member->pool.reserved_bytes();
    try {
      member->pool.GiveBack();
    } catch (const std::exception&) {
      if (!error) error = std::current_exception();
    }
    DropFreedAddresses(*member);
    bytes += reserved - member->pool.reserved_bytes();
    Count(*member);
    EraseIfGone(member->id);
  }
  if (error) std::rethrow_exception(error);
  return bytes;
}

void PoolSet::UnmapStale(Member& member) {
  if (!member.pool.HasStaleMappings() || member.told_of_capture || !MayQuiesce()) return;
  try {
    driver_.Quiesce();
    member.pool.UnmapStale();
  } catch (const DriverError&) {  // NOLINT(bugprone-empty-catch): what is left is for the next time
  }
  DropFreedAddresses(member);
  Count(member);  // it may have released what the driver had failed to, and the allocation may fail
}

uint64_t PoolSet::TrimmableBytes() const {
  const std::lock_guard lock(mutex_);
  uint64_t bytes = 0;
  for (const PoolId id : unused_) {
    const Member& member = Known(id);
    if (!CanTrim(member)) continue;
    bytes += member.pool.spare_bytes();
    if (member.loan == nullptr) continue;
    for (const Pool::LentHandle& handle : member.loan->pool.UnusedHandles()) {
      bytes += handle.pages * member.pool.page_bytes();
    }
  }
  return bytes;
}

void PoolSet::EnablePeer(int peer) {
  const std::lock_guard lock(mutex_);
  driver_.AddPeer(peer);
  for (const auto& [id, member] : members_) member->pool.RefreshAccess();
}

bool PoolSet::Contains(PoolId id) const {
  const std::lock_guard lock(mutex_);
  return members_.contains(id);
}

bool PoolSet::InScope(PoolId id) const {
  const std::lock_guard lock(mutex_);
  const auto it = members_.find(id);
  return it != members_.end() && it->second->is_open();
}

int PoolSet::UseCount(PoolId id) const {
  const std::lock_guard lock(mutex_);
  const auto it = members_.find(id);
  return it == members_.end() ? 0 : it->second->users;
}

std::vector<PoolId> PoolSet::ids() const {
  const std::lock_guard lock(mutex_);
  std::vector<PoolId> ids;
  for (const auto& [id, member] : members_) {
    if (member->lender == nullptr) ids.push_back(id);
  }
  return ids;
}

PoolStats PoolSet::Stats(PoolId id) const {
  const std::lock_guard lock(mutex_);
  const Member& member = Known(id);
  PoolStats stats = member.pool.Stats();
  if (member.loan != nullptr) stats.lent_bytes = member.loan->pool.Stats().allocated_bytes;
  return stats;
}

PoolSnapshot PoolSet::Snapshot(PoolId id) const {
  const std::lock_guard lock(mutex_);
  return Known(id).pool.Snapshot();
}

std::vector<CaptureStats> PoolSet::Captures(PoolId id) const {
  const std::lock_guard lock(mutex_);
  return Known(id).pool.captures();
}

std::string PoolSet::Describe(std::optional<PoolId> first) const {
  constexpr size_t kNamed = 3;
  const std::lock_guard lock(mutex_);
  std::vector<const Member*> holding;
  for (const auto& [id, member] : members_) {
    if (member->pool.reserved_bytes() > 0) holding.push_back(member.get());
  }
  if (holding.empty()) return "";
  std::ranges::sort(holding, std::greater(), [&](const Member* member) {
    return std::pair(member->id == first, member->pool.reserved_bytes());
  });
  const auto amounts = [](uint64_t reserved, uint64_t live) {
    return Size(reserved) + " (" + Size(live) + " in live blocks, " + Size(reserved - live) +
           " free)";
  };
  std::string text = "cudagraph_pool: graph pools of GPU " + std::to_string(driver_.device()) +
                     " hold " + amounts(usage_.reserved_bytes.current, usage_.all.bytes.current);
  for (size_t i = 0; i < std::min(kNamed, holding.size()); ++i) {
    const PoolStats stats = holding[i]->pool.Stats();
    text += (i == 0 ? ": pool " : "; pool ") + ToString(holding[i]->id) + " holds " +
            amounts(stats.reserved_bytes, stats.allocated_bytes) + " for " +
            std::to_string(holding[i]->users) + " user(s)";
  }
  if (holding.size() > kNamed) text += "; " + std::to_string(holding.size() - kNamed) + " more";
  return text +
         ". Users are graphs and objects such as GraphPool: once they are gone a pool gives back "
         "what it holds. cudagraph_pool.report() says what each graph takes";
}

SetUsage PoolSet::Usage() const {
  const std::lock_guard lock(mutex_);
  return usage_;
}

std::map<PoolId, Gauge> PoolSet::ReservedByPool() const {
  const std::lock_guard lock(mutex_);
  return reserved_bytes_;
}

void PoolSet::ResetPeaks(SetUsage levels) {
  const std::lock_guard lock(mutex_);
  usage_.ForEachPair(levels, [](Gauge& gauge, const Gauge& level) {
    gauge.peak = std::max(gauge.current, level.peak);
  });
}

void PoolSet::ResetPeaksByPool() {
  const std::lock_guard lock(mutex_);
  for (auto& [id, reserved] : reserved_bytes_) reserved.ResetPeak();
}

void PoolSet::ResetTraffic() {
  const std::lock_guard lock(mutex_);
  usage_.ForEachPair(usage_, [](Gauge& gauge, const Gauge&) { gauge.ResetTraffic(); });
  for (auto& [id, reserved] : reserved_bytes_) reserved.ResetTraffic();
}

void PoolSet::Check() const {
  const std::lock_guard lock(mutex_);
  PoolStats sum;
  uint64_t handles = 0;
  uint64_t extents = 0;
  size_t unused = 0;
  for (const auto& [id, member] : members_) {
    member->pool.Check();
    const PoolStats stats = member->pool.Stats();
    sum.reserved_bytes += stats.reserved_bytes;
    sum.allocated_bytes += stats.allocated_bytes;
    sum.requested_bytes += stats.requested_bytes;
    sum.live_blocks += stats.live_blocks;
    CGP_CHECK(member->reserved_bytes == &reserved_bytes_.at(id));
    CGP_CHECK(member->pool.reserved_bytes() == member->reserved_bytes->current);
    handles += member->pool.handles();
    extents += member->free_extents;
    unused += member->users == 0;
    CGP_CHECK(unused_.contains(id) == (member->users == 0));
    CheckLoan(*member);
  }
  CGP_CHECK(unused == unused_.size());
  for (const auto& [id, reserved] : reserved_bytes_) {
    CGP_CHECK(reserved.current == 0 || members_.contains(id));
  }
  CGP_CHECK(gone_.size() <= kGonePoolsRemembered);
  CGP_CHECK(sum.live_blocks == usage_.all.count.current);
  CGP_CHECK(sum.allocated_bytes == usage_.all.bytes.current);
  CGP_CHECK(sum.requested_bytes == usage_.all.requested_bytes.current);
  CGP_CHECK(sum.reserved_bytes == usage_.reserved_bytes.current);
  CGP_CHECK(usage_.free_bytes.current ==
            sum.reserved_bytes - std::min(sum.reserved_bytes, sum.allocated_bytes));
  CGP_CHECK(handles == usage_.handles.current);
  CGP_CHECK(extents == usage_.free_extents.current);
  Address end = 0;
  for (const auto& [addresses, member] : reservations_) {
    CGP_CHECK(members_.at(member->id).get() == member && addresses.begin >= end);
    CGP_CHECK(member->pool.ReservationAround(addresses.begin)->end == addresses.end);
    end = addresses.end;
  }
}

PoolSet::Member& PoolSet::Known(PoolId id) const {
  const auto it = members_.find(id);
  if (it == members_.end()) {
    throw UsageError("cudagraph_pool: there is no pool " + ToString(id) + " on device " +
                     std::to_string(driver_.device()) +
                     ": it was never made here, or was released and its memory given back.");
  }
  return *it->second;
}

PoolSet::Member& PoolSet::KnownAtRest(PoolId id) const {
  Member& member = Known(id);
  if (member.pool.in_scope()) {
    throw UsageError("cudagraph_pool: pool " + ToString(id) +
                     " is being allocated to; a checkpoint is taken or restored before that begins "
                     "or after it has ended.");
  }
  return member;
}

PoolSet::Member& PoolSet::FindOrCreate(PoolId id, bool borrows) {
  if (const auto known = members_.find(id); known != members_.end()) return *known->second;
  PoolOptions options = options_;
  options.borrows = borrows;
  auto member = std::make_unique<Member>(id, driver_, options);
  const auto [reserved, is_new] = reserved_bytes_.try_emplace(id);
  member->reserved_bytes = &reserved->second;
  try {
    unused_.insert(id);
    return *members_.emplace(id, std::move(member)).first->second;
  } catch (...) {
    unused_.erase(id);
    if (is_new) reserved_bytes_.erase(reserved);
    throw;
  }
}

void PoolSet::AddUser(Member& member) {
  if (member.users++ == 0) member.unused = unused_.extract(member.id);
}

bool PoolSet::Count(Member& member) {
  const Pool& pool = member.pool;
  const uint64_t handles = std::exchange(member.handles, pool.handles());
  const uint64_t extents = std::exchange(member.free_extents, pool.free_extents());
  const uint64_t bytes = member.reserved_bytes->current;
  member.reserved_bytes->Set(pool.reserved_bytes());
  usage_.free_extents.Set(usage_.free_extents.current - extents + member.free_extents);
  return usage_.SetReserved(usage_.handles.current - handles + member.handles,
                            usage_.reserved_bytes.current - bytes + pool.reserved_bytes());
}

PoolSet::Member* PoolSet::MemberAround(Address address) const {
  const auto behind = std::ranges::upper_bound(reservations_, address, {}, kBegin);
  if (behind == reservations_.begin()) return nullptr;
  const Reservation& before = *std::prev(behind);
  return address < before.addresses.end ? before.member : nullptr;
}

PoolSet::Member* PoolSet::FindOwner(Address address) const {
  Member* const member = MemberAround(address);
  return member != nullptr && member->pool.At(address) != nullptr ? member : nullptr;
}

void PoolSet::DropFreedAddresses(const Member& member) {
  std::erase_if(reservations_, [&](const Reservation& reservation) {
    return reservation.member == &member &&
           !member.pool.ReservationAround(reservation.addresses.begin);
  });
}

void PoolSet::ThrowNoBlock(Address address) const {
  throw UsageError("cudagraph_pool: no live block of device " + std::to_string(driver_.device()) +
                   " starts at " + Hex(address) +
                   ": it was never allocated here, or was freed before.");
}

}  // namespace cgp
