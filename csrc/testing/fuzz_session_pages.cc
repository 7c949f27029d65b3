// How a FuzzSession follows which page is which: where blocks lie, what the driver has there, what
// a trim gives back, and what checkpoints bring back.
#include <algorithm>
#include <exception>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "testing/fuzz_session.h"

namespace cgp {
// That the pieces are what is really mapped there.
void FuzzSession::JudgePieces(PoolId id, const Block& block,
                              const std::vector<PhysicalPiece>& pieces) {
  const uint64_t numbering = model_.Numbering(id);
  Address address = block.address;
  for (const PhysicalPiece& piece : pieces) {
    const std::optional<DriverWatch::Place> place = watch_.At(address);
    if (!place) Complain("nothing is mapped at ", address);
    if (!place->accessible) Complain("no access at ", address);
    if (peers_settled_ && place->peers != watch_.peers()) Complain("no peer access at ", address);
    // A handle is one page or several.
    const uint64_t offset = place->offset_bytes % setup_.page_bytes;
    if (offset != piece.offset_bytes || place->left_bytes < piece.length_bytes) {
      Complain("address ", address, " is byte ", offset, " of its page, said to be ",
               piece.offset_bytes);
    }
    const std::pair page{numbering, Index(piece.page)};
    // What is lent is a page of the loan too.
    const uint64_t of_loan = PoolModel::IsLoan(id) ? uint64_t{1} << 63 : 0;
    const std::pair part{place->handle, place->offset_bytes / setup_.page_bytes | of_loan};
    // A pool that is gone, or has given back pages, has let go of its numbers.
    const auto known = std::exchange(page_of_part_.try_emplace(part, page).first->second, page);
    if (part_of_page_.emplace(page, part).first->second != part ||
        (known != page && model_.IsCurrent(known.first))) {
      Complain("address ", address, " is said to be page ", page.second, ", but another is mapped");
    }
    address += piece.length_bytes;
  }
}

void FuzzSession::Trim() {
  // "Not while any stream is capturing" is for the caller to see to.
  if (model_.AnyCaptureOpen()) return;
  const uint64_t expected = set_.TrimmableBytes();
  std::set<PoolId> had_loans;
  bool any_leased = false;
  for (const PoolId id : model_.ids()) {
    any_leased |= model_.HasLoan(id) || model_.PagesWith(id, 0) > 0;
    LearnHandles(id);
    if (model_.HasLoan(id)) had_loans.insert(id);
  }
  const uint64_t reserved = set_.Usage().reserved_bytes.current;
  const World::Books before = TakeBooks(/*allowed=*/true);
  const uint64_t calls_before = watch_.calls();
  const bool leaky = leaky_;
  // A trim that gives back what an undo had left also ends the checkpoints of that pool. Only the
  // pools know which one that is, so those of all unused pools are dropped.
  if (leaky) {
    std::erase_if(checkpoints_, [&](const auto& entry) {
      const PoolId id = entry.second.naive.pool;
      return set_.Contains(id) && set_.UseCount(id) == 0 && !model_.OpenScope(id);
    });
  }
  // What comes back of a loan stays so.
  const Describe whole = any_leased ? Describe([&] { return Whole(); }) : Describe();
  Result result = Call([&] { set_.Trim(); }, FaultKind::kAllocation, whole);
  if (result.outcome == Outcome::kDriverError && result.fault_fired) {
    // What the driver kept is not lost: it goes with the next trim.
    Mend();
    try {
      set_.Check();
    } catch (const std::exception& error) {
      Complain("Check() after a trim that failed: ", error.what());
    }
    result = Call([&] { set_.Trim(); }, FaultKind::kAllocation);
  }
  leaky_ = leaky;
  if (result.outcome == Outcome::kNoHeap) {
    for (const PoolId id : had_loans) Follow(id);
    return JudgeFailure(result, true, any_leased ? world_.TakeBooks() : before);
  }
  if (result.outcome != Outcome::kDone) Complain("a trim failed: " + result.text);
  if (result.fault_fired) Complain("a driver error was swallowed");
  const uint64_t given_back = reserved - set_.Usage().reserved_bytes.current;
  if (given_back != expected) Complain("trimmed ", given_back, ", expected ", expected);
  // Unless for what could not be undone.
  if (expected == 0 && watch_.calls() != calls_before && !leaky_ && !any_leased)
    Complain("a trim of nothing called the driver");
  for (const PoolId id : had_loans) {
    if (!set_.Contains(PoolModel::LoanOf(id))) Follow(id);
  }
  model_.Trim();
  std::erase_if(remained_, [&](PoolId id) { return !set_.Contains(id); });
  Shrunk(had_loans);
}

// Follows the pools in which blocks live through a trim: their pages have other numbers now.
void FuzzSession::Shrunk(const std::set<PoolId>& had_loans) {
  for (const PoolId id : model_.ids()) {
    if (!set_.Contains(id)) Complain(ToString(id) + " is gone, but blocks live in it");
    if (PoolModel::IsLoan(id)) continue;
    const PoolSnapshot snapshot = set_.Snapshot(id);
    const uint64_t pages = PagesIn(snapshot);
    const bool had_loan = had_loans.contains(id) && set_.UseCount(id) == 0 &&
                          !model_.OpenScope(id) && !model_.OpenScope(PoolModel::LoanOf(id));
    if (pages == model_.Pages(id) && !had_loan) continue;
    if (had_loan || model_.PagesWith(id, 0) > 0) {
      const auto still_lent = StillLent(id);
      model_.Quiesced(id);
      Judge(model_.Keep(id, /*has_graphs=*/false, still_lent, PiecesOf()));
      if (pages != model_.Pages(id)) Complain("keeps ", pages, " pages of ", model_.Pages(id));
      Follow(id);
    } else {
      Judge(model_.Shrink(id, pages, PiecesOf()));
    }
    for (const auto& [address, live] : model_.live()) {
      if (live.pool == id && !model_.AnyAway(live)) JudgePieces(id, live.block, live.pieces);
    }
  }
  SpareHandles();
}

// An unused pool keeps no handle after a trim in which nothing lives.
void FuzzSession::SpareHandles() {
  for (const PoolId id : set_.ids()) {
    if (set_.UseCount(id) > 0 || model_.OpenScope(id) || model_.OpenScope(PoolModel::LoanOf(id))) {
      continue;
    }
    std::set<Handle> used;
    for (const auto& [address, live] : model_.live()) {
      Address at = address;
      for (const PhysicalPiece& piece : live.pieces) {
        const auto place = watch_.At(at);
        const bool is_own = live.pool == id || live.pool == PoolModel::LoanOf(id);
        if (is_own && place) used.insert(place->handle);
        at += piece.length_bytes;
      }
    }
    for (const auto& range : set_.Snapshot(id).ranges) {
      for (uint64_t i = 0; i < range.pages.size(); ++i) {
        const auto place = watch_.At(range.address + i * setup_.page_bytes);
        const bool away = model_.Contains(id) && model_.LeaseOf(id, Index(range.pages[i])) != 0;
        if (!(away && !place) && (!place || !used.contains(place->handle)))
          Complain(ToString(id) + " keeps a spare handle");
      }
    }
  }
}

// Whether it is only there for what could not be undone, until that can be given back: the model
// knows no such pool.
bool FuzzSession::StaysForRemains(PoolId id) const {
  return leaky_ && !model_.Contains(id) && std::ranges::binary_search(set_.ids(), id);
}

void FuzzSession::Checkpoint(PoolId id, uint64_t number) {
  if (StaysForRemains(id)) return;
  PoolCheckpoint real;
  Mirror(
      model_.Contains(id) && !model_.OpenScope(id), [&] { real = set_.Checkpoint(id); },
      [&] {
        checkpoints_[number] = {.real = std::move(real), .naive = model_.TakeCheckpoint(id)};
        model_.KeepLive(id);
      });
}

void FuzzSession::Restore(PoolId id, uint64_t number) {
  const auto it = checkpoints_.find(number);
  if (it == checkpoints_.end() || StaysForRemains(id)) return;
  const Kept& kept = it->second;
  bool allowed = model_.MayRestore(id, kept.naive);
  // A pool that stayed for such remains until it was used again is the one that it was.
  if (leaky_ && !allowed && kept.naive.pool == id) return;
  if (allowed) {
    LearnHandles(id);
    const auto still_lent = StillLent(id);
    for (const PoolModel::LiveBlock& live : kept.naive.blocks) {
      const PoolModel::LiveBlock* const now = model_.LiveAt(live.block.address);
      if (now != nullptr && now->block == live.block) continue;
      for (const uint32_t page : model_.PagesAt(id, live)) {
        const uint64_t lease = model_.LeaseOf(id, page);
        const bool comes_back = lease == PoolModel::kLent && !still_lent.contains(page);
        allowed = allowed && (lease <= PoolModel::kAsleep || comes_back);
      }
    }
  }
  RestoreDelta delta;
  MirrorMoving(
      id, allowed, [&] { delta = set_.Restore(id, kept.real); },
      [&] { Restored(id, kept.naive, delta); });
}

void FuzzSession::Restored(PoolId id, const PoolModel::Checkpoint& checkpoint,
                           const RestoreDelta& delta) {
  const auto judge = [&](std::vector<Block> told, const char* complaint) {
    std::ranges::sort(told, {}, &Block::address);
    const std::vector<PoolModel::LiveBlock> live = model_.TakeCheckpoint(id).blocks;
    if (!std::ranges::equal(told, live, {}, {}, &PoolModel::LiveBlock::block)) Complain(complaint);
  };
  judge(delta.freed, "a restore says it freed other blocks than lived");
  const PoolModel::Restored restored = model_.Restore(checkpoint, PiecesOf());
  judge(delta.allocated, "a restore says other blocks live than do");
  for (const PoolModel::LiveBlock& dropped : restored.dropped) {
    std::erase(live_labels_, dropped.label);
    freed_labels_.push_back(dropped.label);
  }
  Judge(restored.complaint);
  for (const PoolModel::LiveBlock& revived : restored.revived) {
    std::erase(freed_labels_, revived.label);
    live_labels_.push_back(revived.label);
    JudgePieces(id, revived.block, set_.Pieces(revived.block.address));
    Refill(*model_.LiveAt(revived.block.address));
  }
}

}  // namespace cgp
