// How a FuzzSession follows which page is which: where blocks lie, what the driver has there, and what
// a trim gives back.
#include <exception>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "testing/fuzz_session.h"
#include "testing/text.h"

namespace cgp {
namespace {

// For the validator, to which all pools are one: they each number their pages from 0.
uint64_t PageNumber(uint64_t incarnation, uint64_t page) { return incarnation << 32 | page; }

}  // namespace

// That the pieces are what is really mapped there.
std::string FuzzSession::JudgePieces(PoolId id, const Block& block,
                                     const std::vector<PhysicalPiece>& pieces) {
  const uint64_t incarnation = model_.Incarnation(id);
  Address address = block.address;
  for (const PhysicalPiece& piece : pieces) {
    const std::optional<DriverWatch::Place> place = watch_.At(address);
    if (!place) return Text("nothing is mapped at ", address);
    if (!place->accessible) return Text("no access at ", address);
    if (peers_settled_ && place->peers != watch_.peers())
      return Text("no peer access at ", address);
    // A handle is one page or several.
    const uint64_t offset = place->offset_bytes % setup_.page_bytes;
    if (offset != piece.offset_bytes || place->left_bytes < piece.length_bytes) {
      return Text("address ", address, " is byte ", offset, " of its page, said to be ",
                  piece.offset_bytes);
    }
    const std::pair key{incarnation, Index(piece.page)};
    const std::pair part{place->handle, place->offset_bytes / setup_.page_bytes};
    if (part_of_page_.emplace(key, part).first->second != part ||
        page_of_part_.emplace(part, key).first->second != key) {
      return Text("address ", address, " is said to be page ", key.second,
                  ", but another is mapped");
    }
    address += piece.length_bytes;
  }
  return {};
}

std::string FuzzSession::JudgePlacement(uint64_t label, PoolId id, const Block& block,
                                        const std::vector<PhysicalPiece>& pieces) {
  const uint64_t incarnation = model_.Incarnation(id);
  BlockPlaced placed{label, block.bytes, block.address, {}};
  for (const PhysicalPiece& piece : pieces) {
    placed.pieces.push_back(
        {PageNumber(incarnation, Index(piece.page)), piece.offset_bytes, piece.length_bytes});
  }
  MakePages(id);
  Finding finding = validator_.Apply(placed);
  if (finding.good()) finding = validator_.Apply(ReservedIs{set_->TotalStats().reserved_bytes});
  return finding.description;
}

std::string FuzzSession::Do(const TrimOp&) {
  // "Not while any stream is capturing" is for the caller to see to.
  if (model_.AnyCaptureOpen()) return {};
  const uint64_t expected = set_->TrimmableBytes();
  const uint64_t reserved = set_->TotalStats().reserved_bytes;
  const Books before = TakeBooks(MayFail());
  const uint64_t calls_before = watch_.calls();
  const bool leaky = leaky_;
  Result result = Call([&] { set_->Trim(); }, FaultKind::kAllocation);
  if (result.outcome == Outcome::kDriverError && result.fault_fired) {
    // What the driver kept is not lost: it goes with the next trim.
    Do(MendOp{});
    try {
      set_->Check();
    } catch (const std::exception& error) {
      return Text("Check() after a trim that failed: ", error.what());
    }
    result = Call([&] { set_->Trim(); }, FaultKind::kAllocation);
  }
  leaky_ = leaky;
  if (result.outcome == Outcome::kNoHeap) return JudgeFailure(result, true, before);
  if (result.outcome != Outcome::kDone) return "a trim failed: " + result.text;
  if (result.fault_fired) return "a driver error was swallowed";
  const uint64_t given_back = reserved - set_->TotalStats().reserved_bytes;
  if (given_back != expected) return Text("trimmed ", given_back, ", expected ", expected);
  // Unless for what could not be undone.
  if (expected == 0 && watch_.calls() != calls_before && !leaky_)
    return "a trim of nothing called the driver";
  model_.Trim();
  return Shrunk();
}

// Follows the pools in which blocks live through a trim: their pages have other numbers now.
std::string FuzzSession::Shrunk() {
  std::set<PoolId> shrunk;
  for (const PoolId id : model_.ids()) {
    if (!set_->Contains(id)) return ToString(id) + " is gone, but blocks live in it";
    const uint64_t pages = set_->Stats(id).pages;
    if (pages == model_.Pages(id)) continue;
    model_.Shrink(id, pages, [this](Address address) { return set_->Pieces(address); });
    incarnations_[model_.Incarnation(id)] = id;
    shrunk.insert(id);
  }
  std::vector<PoolModel::LiveBlock> moved;
  for (const auto& [address, live] : model_.live()) {
    if (shrunk.contains(live.pool)) moved.push_back(live);
  }
  for (const PoolModel::LiveBlock& live : moved) validator_.Apply(BlockFreed{live.label});
  ForgetPagesOfGonePools();
  for (const PoolId id : shrunk) MakePages(id);
  for (const PoolModel::LiveBlock& live : moved) {
    std::string complaint = JudgePieces(live.pool, live.block, live.pieces);
    if (complaint.empty()) {
      complaint = JudgePlacement(live.label, live.pool, live.block, live.pieces);
    }
    if (!complaint.empty()) return complaint;
  }
  return SpareHandles();
}

// An unused pool keeps no handle after a trim in which nothing lives.
std::string FuzzSession::SpareHandles() {
  for (const PoolId id : set_->ids()) {
    if (set_->UseCount(id) > 0 || model_.OpenScope(id)) continue;
    std::set<Handle> used;
    for (const auto& [address, live] : model_.live()) {
      Address at = address;
      for (const PhysicalPiece& piece : live.pieces) {
        if (live.pool == id) used.insert(watch_.At(at)->handle);
        at += piece.length_bytes;
      }
    }
    for (const auto& range : set_->Snapshot(id).ranges) {
      for (uint64_t i = 0; i < range.pages.size(); ++i) {
        const auto place = watch_.At(range.address + i * setup_.page_bytes);
        if (!place || !used.contains(place->handle)) return ToString(id) + " keeps a spare handle";
      }
    }
  }
  return {};
}

void FuzzSession::MakePages(PoolId id) {
  const uint64_t incarnation = model_.Incarnation(id);
  uint64_t& made = pages_made_[incarnation];
  for (const uint64_t pages = model_.Pages(id); made < pages; ++made) {
    validator_.Apply(PageMade{PageNumber(incarnation, made), setup_.page_bytes});
  }
}

void FuzzSession::ForgetPagesOfGonePools() {
  std::erase_if(part_of_page_, [this](const auto& entry) {
    const auto& [key, part] = entry;
    const PoolId id = incarnations_.at(key.first);
    if (model_.Contains(id) && model_.Incarnation(id) == key.first) return false;
    page_of_part_.erase(part);
    return true;
  });
  std::erase_if(pages_made_, [this](const auto& entry) {
    const auto& [incarnation, pages] = entry;
    const PoolId id = incarnations_.at(incarnation);
    if (model_.Contains(id) && model_.Incarnation(id) == incarnation) return false;
    for (uint64_t page = 0; page < pages; ++page) {
      validator_.Apply(PageGone{PageNumber(incarnation, page)});
    }
    return true;
  });
}

}  // namespace cgp
