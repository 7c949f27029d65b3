// What a FuzzSession does with leases: pages go to the device or to borrowers, and come back, and
// graphs are replayed only where all that they need is there.
#include <algorithm>
#include <cstring>
#include <iterator>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "testing/fuzz_session.h"

namespace cgp {

using enum Step::Kind;
using Pages32 = PoolModel::Pages32;

void FuzzSession::DoLease(const Step& step) {
  const PoolId id = IdOf(step.pool);
  if (StaysForRemains(id)) return;
  if (step.kind == kBeginApart) return Begin(id, ScopeKind::kApart, step.amount > 0);
  if (step.kind == kBeginLoan) return Lend(id);
  if (step.kind == kSleep) return Sleep(id, step.amount == 0);
  if (step.kind == kWake) return Wake(id);
  if (step.kind == kTrimToNeeds) return TrimToNeeds(id);
  if (step.kind == kNameCapture) {
    uint64_t name = 0;
    Mirror(
        model_.Contains(id), [&] { name = set_.NameCapture(id); },
        [&] {
          if ((name != 0) != model_.MayName(id)) Complain("names a capture, or does not");
          if (name != 0) model_.Name(id, name);
        });
  } else if (step.kind == kDropCapture) {
    const std::vector<uint64_t> graphs = model_.Graphs(id);
    if (graphs.empty()) return;
    const uint64_t name = graphs[step.item % graphs.size()];
    set_.DropCapture(id, name);
    model_.Drop(id, name);
  } else {
    DoWithBlocks(step);
  }
}

std::vector<PoolId> FuzzSession::Ids() const {
  std::vector<PoolId> ids = set_.ids();
  for (const PoolId id : set_.ids()) {
    if (set_.Contains(PoolModel::LoanOf(id))) ids.push_back(PoolModel::LoanOf(id));
  }
  std::ranges::sort(ids);
  return ids;
}

// Each page is in some range.
uint64_t FuzzSession::PagesIn(const PoolSnapshot& snapshot) {
  uint64_t pages = 0;
  for (const auto& range : snapshot.ranges) {
    for (const PageId page : range.pages) pages = std::max<uint64_t>(pages, Index(page) + 1);
  }
  return pages;
}

// What must be as it was, wherever the driver fails: all but who has the pages.
std::string FuzzSession::Whole(bool with_ranges) const {
  try {
    set_.Check();
  } catch (const std::exception& error) {
    Complain("Check(): ", error.what());
  }
  std::string text;
  for (const PoolId id : set_.ids()) {
    const PoolSnapshot snapshot = set_.Snapshot(id);
    text += Text(ToString(id), " ", set_.UseCount(id), " ", snapshot.stats.allocated_bytes);
    for (const auto& range : snapshot.ranges) {
      if (with_ranges) text += Text("\n", range.address, range.pages.size());
    }
    for (const auto& live : snapshot.blocks) text += Text("\n", live.block.address);
  }
  return text;
}

bool FuzzSession::Move(bool allowed, const Action& call, const Describe& describe, bool may_run_out,
                       bool keeps_ranges) {
  const bool leaky = leaky_;
  const uint64_t reserved = set_.Usage().reserved_bytes.current;
  const uint64_t held = host_.usage().physical_bytes;
  const std::string before = Whole(keeps_ranges);
  std::optional<FaultKind> kind = SomeFault();
  if (!watch_.MayQuiesce()) kind.reset();
  if (may_run_out) kind = FaultKind::kAllocation;
  Result result = Call(call, allowed ? kind : std::nullopt, describe);
  const auto failed = [&] {
    return result.outcome == Outcome::kNoHeap ||
           (result.fault_fired && result.outcome != Outcome::kUsageError);
  };
  if (failed() && result.outcome != Outcome::kDone) {
    if (Whole(keeps_ranges) != before)
      Complain("a lease that failed (", result.text, ") lost something");
    Mend();
    result = Call(call, {});
  }
  leaky_ = leaky;
  if (result.outcome == Outcome::kOutOfMemory && may_run_out) result.fault_fired = true;
  JudgeFailure(result, allowed, world_.TakeBooks());
  if (result.outcome != Outcome::kDone) return false;
  const uint64_t now = set_.Usage().reserved_bytes.current;
  if (!leaky_ && reserved - now != held - host_.usage().physical_bytes) {
    Complain("reserved bytes fell by ", reserved - now, ", what the driver holds by ",
             held - host_.usage().physical_bytes);
  }
  return true;
}

void FuzzSession::MirrorMoving(PoolId id, bool allowed, const Action& call, const Action& then) {
  if (!model_.IsAsleep(id) && !model_.HasLoan(id)) return Mirror(allowed, call, then);
  const bool may_run_out = model_.PagesWith(id, PoolModel::kAsleep) > PagesLeft();
  LearnHandles(id);
  // Where memory runs out, it is an undo that would be made to fail.
  const FaultKind kind = may_run_out ? FaultKind::kAllocation : SomeFault();
  Result result = Call(call, kind, [&] { return Whole(); });
  if (result.outcome == Outcome::kOutOfMemory && may_run_out) result.fault_fired = true;
  Follow(id);
  if (result.outcome == Outcome::kDone && allowed) then();
  JudgeFailure(result, allowed, world_.TakeBooks());
}

void FuzzSession::LearnHandles(PoolId id) {
  std::map<uint32_t, uint32_t> first;
  for (const auto& range : set_.Snapshot(id).ranges) {
    for (size_t i = 0; i < range.pages.size(); ++i) {
      const auto place = watch_.At(range.address + i * setup_.page_bytes);
      const uint32_t page = Index(range.pages[i]);
      if (place)
        first[page] = page - static_cast<uint32_t>(place->offset_bytes / setup_.page_bytes);
    }
  }
  model_.LearnHandles(id, first);
}

// The handles of the pages that a lease has, as the driver knows them.
std::map<Handle, Pages32> FuzzSession::HandlesWith(PoolId id, uint64_t lease) const {
  std::map<Handle, Pages32> handles;
  for (const auto& range : set_.Snapshot(id).ranges) {
    for (size_t i = 0; i < range.pages.size(); ++i) {
      const uint32_t page = Index(range.pages[i]);
      const auto place = watch_.At(range.address + i * setup_.page_bytes);
      if (place && model_.LeaseOf(id, page) == lease) handles[place->handle].insert(page);
    }
  }
  return handles;
}

// The pages that stay lent when all is taken back that is free: of handles in which a block of the
// loan lives.
Pages32 FuzzSession::StillLent(PoolId id) const {
  Pages32 pages;
  if (!model_.HasLoan(id)) return pages;
  const auto lent = HandlesWith(id, PoolModel::kLent);
  for (const auto& [address, live] : model_.live()) {
    Address at = address;
    for (const PhysicalPiece& piece : live.pieces) {
      if (live.pool == PoolModel::LoanOf(id)) pages.merge(Pages32(lent.at(watch_.At(at)->handle)));
      at += piece.length_bytes;
    }
  }
  return pages;
}

void FuzzSession::Follow(PoolId id, bool all_away) {
  if (!model_.Contains(id)) return;
  if (!set_.Contains(id)) {
    model_.DropLoan(id);
    return model_.DropIfGone(id);
  }
  const PoolSnapshot snapshot = set_.Snapshot(id);
  if (model_.IsAsleep(id) && !snapshot.stats.asleep) model_.BringBack(id, PoolModel::kAsleep);
  Pages32 gone;
  for (const PageId page : snapshot.gone) gone.insert(Index(page));
  const PoolId loan = PoolModel::LoanOf(id);
  Judge(model_.FollowLender(id, gone));
  const uint64_t away = snapshot.stats.away_bytes / setup_.page_bytes;
  const uint64_t leased = model_.PagesWith(id, 0);
  // Memory that an undo failed to unmap stays until that goes.
  if (all_away && !leaky_ ? away != leased : away > leased)
    Complain("wrong pages are away: ", away, " of ", leased);
  model_.SetAway(id, away);
  if (!set_.Contains(loan)) return model_.DropLoan(id);
  const PoolSnapshot of_loan = set_.Snapshot(loan);
  Pages32 back;
  for (const PageId page : of_loan.gone) back.insert(Index(page));
  const uint64_t pages = PagesIn(of_loan);
  Judge(model_.FollowLoan(loan, pages, back, PiecesOf()));
  LearnHandles(loan);
  const auto lent = HandlesWith(id, PoolModel::kLent);
  if (!std::ranges::equal(lent, HandlesWith(loan, 0), {}, kKey, kKey)) {
    Complain("what is lent is not what is borrowed");
  }
}

void FuzzSession::ForgetContent(PoolId id) {
  for (const auto& [address, live] : model_.live()) {
    if (live.pool == id && model_.AnyAway(live)) filled_by_.erase(live.label);
  }
}

void FuzzSession::Sleep(PoolId id, bool keeps_live) {
  const bool allowed = model_.MayLease(id);
  const bool slept = model_.IsAsleep(id);
  if (model_.Contains(id)) LearnHandles(id);
  const Pages32 still_lent = allowed ? StillLent(id) : Pages32();
  const Describe wake = [&] {
    if (!slept && set_.Stats(id).asleep) set_.Wake(id);
    return Whole() + Text(host_.usage().physical_bytes, " ", set_.Stats(id).away_bytes);
  };
  const Describe whole = [&] { return Whole(); };
  if (!Move(
          allowed, [&] { set_.Sleep(id, keeps_live); }, slept ? whole : wake))
    return;
  model_.Quiesced(id);
  Judge(model_.FollowLender(id, still_lent));
  model_.Evict(
      id, model_.PagesOf(id, [&](const auto& labels) { return !keeps_live || labels.empty(); }),
      PoolModel::kAsleep);
  model_.SetAsleep(id, true);
  ForgetContent(id);
  Follow(id, model_.PagesWith(id, 0) == model_.PagesWith(id, PoolModel::kAsleep));
}

void FuzzSession::Wake(PoolId id) {
  const bool may_run_out =
      model_.Contains(id) && model_.PagesWith(id, PoolModel::kAsleep) > PagesLeft();
  const uint64_t away = model_.Contains(id) ? set_.Stats(id).away_bytes : 0;
  const Describe whole = [&] { return Whole() + Text(host_.usage().physical_bytes); };
  if (Move(
          model_.Contains(id), [&] { set_.Wake(id); }, whole, may_run_out)) {
    model_.BringBack(id, PoolModel::kAsleep);
  } else if (may_run_out && watch_.MayQuiesce() && set_.Stats(id).away_bytes < away) {
    Complain("a wake that failed keeps memory");
  }
  Follow(id);
}

void FuzzSession::TrimToNeeds(PoolId id) {
  const bool allowed = model_.MayLease(id);
  if (allowed) LearnHandles(id);
  const Pages32 still_lent = allowed ? StillLent(id) : Pages32();
  std::map<Address, std::optional<Handle>> needs;
  const auto handle_at = [&](Address address) {
    const auto place = watch_.At(address);
    return place ? std::optional(place->handle) : std::nullopt;
  };
  if (allowed) {
    for (const auto& [address, page] : model_.NeedsOf(id, {}, /*more=*/true)) {
      needs[address] = handle_at(address);
    }
  }
  if (!Move(
          allowed, [&] { set_.TrimToNeeds(id); }, [&] { return Whole(/*with_ranges=*/false); },
          /*may_run_out=*/false, /*keeps_ranges=*/false))
    return;
  model_.Quiesced(id);
  Judge(model_.Keep(id, /*has_graphs=*/true, still_lent, PiecesOf()));
  const bool is_gone = !set_.Contains(id);
  const PoolSnapshot snapshot = is_gone ? PoolSnapshot() : set_.Snapshot(id);
  const uint64_t pages = PagesIn(snapshot);
  if (pages != model_.Pages(id))
    Complain("a trim keeps ", pages, " pages, needs ", model_.Pages(id));
  for (const auto& [address, handle] : needs) {
    if (handle_at(address) != handle) Complain("a trim took what a graph needs at ", address);
  }
  Follow(id);
}

void FuzzSession::DoWithBlocks(const Step& step) {
  const PoolId id = IdOf(step.pool);
  if (step.kind == kLease) {
    std::vector<Address> addresses;
    std::set<uint64_t> labels;
    for (const auto& [address, live] : model_.live()) {
      if (live.pool != id || step.amount == 0 || live.label % step.amount != 0) continue;
      addresses.push_back(address);
      labels.insert(live.label);
    }
    if (step.amount == 0) addresses.push_back(1);
    uint64_t number = 0;
    return Mirror(
        model_.Contains(id) && step.amount > 0, [&] { number = set_.Lease(id, addresses); },
        [&] {
          model_.leases(id)[step.item] = {number, labels};
        });
  }
  const auto lease = model_.Contains(id) ? model_.leases(id).find(step.item)
                                         : decltype(model_.leases(id).find(0)){};
  const bool known = model_.Contains(id) && lease != model_.leases(id).end();
  const uint64_t number = known ? lease->second.first : 1000;
  const Describe whole = [&] { return Whole(); };
  if (step.kind == kLeaseOut) {
    const bool allowed = model_.MayLease(id) && known;
    if (allowed) LearnHandles(id);
    const Pages32 still_lent = allowed ? StillLent(id) : Pages32();
    if (!Move(
            allowed, [&] { set_.ReleaseLease(id, number); }, whole))
      return;
    model_.Quiesced(id);
    Judge(model_.FollowLender(id, still_lent));
    const auto is_due = [&](const std::set<uint64_t>& of) {
      return !of.empty() && std::ranges::includes(lease->second.second, of);
    };
    const bool others = model_.PagesWith(id, 0) != model_.PagesWith(id, number);
    model_.Evict(id, model_.PagesOf(id, is_due), number);
    ForgetContent(id);
    return Follow(id, !others);
  }
  const bool ends = step.kind == kLeaseEnd;
  const bool allowed = known && !model_.OpenScope(id);
  const bool may_run_out = known && model_.PagesWith(id, number) > PagesLeft();
  if (Move(
          allowed, [&] { ends ? set_.EndLease(id, number) : void(set_.RestoreLease(id, number)); },
          whole, may_run_out)) {
    model_.BringBack(id, number);
    if (ends) model_.leases(id).erase(step.item);
  }
  Follow(id);
}

void FuzzSession::Lend(PoolId id) {
  const bool allowed = model_.MayLease(id) && !model_.IsAsleep(id);
  if (!allowed)
    return Mirror(
        false, [&] { set_.BeginLoan(id); }, [] {});
  LearnHandles(id);
  // What nothing has been on since the pool knew that the device was done, nor is kept for blocks
  // that alternate, is lent.
  const uint64_t lendable = set_.LendableBytes(id);
  const uint64_t lent = model_.PagesWith(id, PoolModel::kLent);
  const bool heap = allocation_fault_.has_value();
  Result result = Call([&] { set_.BeginLoan(id); }, SomeFault(), [&] { return Whole(); });
  // A call that failed on the way took back what an earlier loan still had.
  if (setup_.fail_each) model_.NoteMoment(id, set_.Stats(id).peak_reserved_bytes);
  if (result.outcome != Outcome::kDone) {
    model_.NoteShared(id);  // for a moment
    Follow(id);
    return JudgeFailure(result, true, world_.TakeBooks());
  }
  if (result.fault_fired) Complain("a driver error was swallowed");
  Follow(id);
  const uint64_t more = model_.PagesWith(id, PoolModel::kLent) - lent;
  if (!heap && more * setup_.page_bytes != lendable) Complain("lends other bytes than it said");
  model_.BeginScope(PoolModel::LoanOf(id), ScopeKind::kLoan, /*may_mark=*/true);
  asked_for_[PoolModel::LoanOf(id)].sizes = asked_for_[PoolModel::LoanOf(id)].bytes = 0;
}

bool FuzzSession::Replay(PoolId id, StreamId stream, uint64_t number) {
  Frontier frontier;
  host_.Capture(stream, &frontier);
  const std::vector<uint64_t> graphs = model_.Graphs(id);
  if (graphs.empty() || frontier.held) return false;
  const uint64_t name = graphs[number % graphs.size()];
  const Result result =
      Call([&] { set_.BeginReplay(id, name, stream); }, SomeFault(), [&] { return Whole(); });
  Follow(id);
  const auto away = [&](bool more) {
    const auto needs = model_.NeedsOf(id, name, more);
    return model_.IsAsleep(id) ||
           std::ranges::any_of(
               needs, [&](uint32_t page) { return model_.LeaseOf(id, page) != 0; }, kValue);
  };
  if (result.outcome == Outcome::kDone && away(/*more=*/false)) {
    Complain("a graph is replayed without what it needs");
  }
  const bool breaks = !watch_.MayQuiesce() && (model_.HasLoan(id) || !model_.Borrowers(id).empty());
  if (result.outcome == Outcome::kUsageError && !away(/*more=*/true) && !breaks) {
    Complain("refused: " + result.text);
  }
  JudgeFailure(result, result.outcome != Outcome::kUsageError, world_.TakeBooks());
  if (result.outcome != Outcome::kDone) return false;
  for (const auto& [other, work] : model_.Borrowers(id)) {
    if (!watch_.IsBehind(stream, other, work)) Complain("a replay does not wait for a borrower");
  }
  watch_.MarkUsed();
  if (setup_.streams > 0) return true;
  Scratch scratch;
  for (const auto& [address, page] : model_.NeedsOf(id, name, /*more=*/false)) {
    scratch[{address, page}] = model_.Idle(id, page);
  }
  watch_.Submit(stream, [=, this] { Overwrite(id, scratch); });
  model_.Replay(id, stream);
  return true;
}

// As a graph overwrites the pages that it needs, where no block of its pool has lived since its
// launch, nor may work be under way.
void FuzzSession::Overwrite(PoolId id, const Scratch& scratch) {
  if (!setup_.map_memory || !model_.Contains(id)) return;
  for (const auto& [at, before] : scratch) {
    const auto& [address, page] = at;
    const auto place = watch_.At(address);
    if (!place || !place->accessible) Complain("what a replay needs is unmapped: page ", page);
    std::vector<std::pair<uint64_t, uint64_t>> idle;
    std::ranges::set_intersection(before, model_.Idle(id, page), std::back_inserter(idle));
    for (const auto& [granule, blocks] : idle) {
      // NOLINTNEXTLINE(performance-no-int-to-ptr): an address of the host driver is one
      auto* const bytes = reinterpret_cast<char*>(address + granule * kGranuleBytes);
      std::memset(bytes, 0x5A, kGranuleBytes);
    }
  }
}

// What the set says of pages is what the driver has: those of leases are unmapped wherever they
// are, and all others are mapped wherever they are, each as one handle.
void FuzzSession::CompareMappings(PoolId id) {
  if (!model_.Contains(id)) return;
  const bool all_away = model_.PagesWith(id, 0) == set_.Stats(id).away_bytes / setup_.page_bytes;
  std::map<uint32_t, std::pair<Handle, uint64_t>> places;
  for (const auto& range : set_.Snapshot(id).ranges) {
    for (size_t i = 0; i < range.pages.size(); ++i) {
      const uint32_t page = Index(range.pages[i]);
      const uint64_t lease = model_.LeaseOf(id, page);
      const bool present = lease == 0 || lease == PoolModel::kLent;
      const auto place = watch_.At(range.address + i * setup_.page_bytes);
      if (present ? !place || !place->accessible : all_away && place.has_value()) {
        Complain("page ", page, " of ", ToString(id), " is mapped or not");
      }
      if (!present) continue;
      const std::pair part{place->handle, place->offset_bytes};
      if (places.emplace(page, part).first->second != part) Complain("a page is two");
    }
  }
  if (!set_.Contains(PoolModel::LoanOf(id)) || PoolModel::IsLoan(id)) return;
  std::vector<Block> borrowed;
  for (const auto& live : model_.TakeCheckpoint(PoolModel::LoanOf(id)).blocks) {
    borrowed.push_back(live.block);
  }
  if (set_.Borrowed(id) != borrowed) Complain("other blocks are borrowed than it says");
}

// No byte of memory is two live blocks', of whatever pools.
void FuzzSession::CompareOwners() {
  std::map<std::pair<Handle, uint64_t>, std::pair<uint64_t, uint64_t>> owners;  // end and label
  for (const auto& [address, live] : model_.live()) {
    if (model_.AnyAway(live)) continue;
    Address at = address;
    for (const PhysicalPiece& piece : live.pieces) {
      const auto place = watch_.At(at);
      owners[{place->handle, place->offset_bytes}] = {place->offset_bytes + piece.length_bytes,
                                                      live.label};
      at += piece.length_bytes;
    }
  }
  for (auto it = owners.begin(); it != owners.end() && std::next(it) != owners.end(); ++it) {
    const auto& [next, of_next] = *std::next(it);
    if (next.first == it->first.first && next.second < it->second.first) {
      Complain("b", it->second.second, " and b", of_next.second, " share bytes");
    }
  }
}

}  // namespace cgp
