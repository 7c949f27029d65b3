#include "testing/placement_validator.h"

#include <iterator>

#include "testing/text.h"

namespace cgp {
namespace {

constexpr uint64_t kAlignment = 512;

template <typename... Parts>
Finding Bad(Verdict verdict, const Parts&... parts) {
  return {verdict, Text(ToString(verdict), ": ", parts...)};
}

}  // namespace

const char* ToString(Verdict verdict) {
  switch (verdict) {
    case Verdict::kGood:
      return "good";
    case Verdict::kPageMadeTwice:
      return "page made twice";
    case Verdict::kBadPage:
      return "bad page";
    case Verdict::kUnknownPage:
      return "unknown page";
    case Verdict::kPageInUse:
      return "page in use";
    case Verdict::kBlockMadeTwice:
      return "block made twice";
    case Verdict::kEmptyBlock:
      return "empty block";
    case Verdict::kOutsidePage:
      return "outside its page";
    case Verdict::kPiecesDoNotAddUp:
      return "pieces do not add up";
    case Verdict::kMisaligned:
      return "misaligned";
    case Verdict::kAddressOverflow:
      return "address overflow";
    case Verdict::kSharedBytes:
      return "shared bytes";
    case Verdict::kSharedAddresses:
      return "shared addresses";
    case Verdict::kNotLive:
      return "not live";
    case Verdict::kReservedDiffers:
      return "reserved differs";
  }
  return "?";
}

Finding PlacementValidator::Apply(const PlacementEvent& event) {
  return std::visit([this](const auto& one) { return ApplyOne(one); }, event);
}

const PlacementValidator::Stretch* PlacementValidator::FindOverlap(const Stretches& stretches,
                                                                   uint64_t start, uint64_t end) {
  // Stretches do not overlap, so only the last one that starts before `end` can reach into [start,
  // end).
  auto after = stretches.lower_bound(end);
  if (after == stretches.begin()) return nullptr;
  const Stretch& last = std::prev(after)->second;
  return last.end > start ? &last : nullptr;
}

Finding PlacementValidator::ApplyOne(const PageMade& event) {
  if (event.bytes == 0) return Bad(Verdict::kBadPage, "page ", event.page, " has no bytes");
  const auto [it, made] = pages_.try_emplace(event.page);
  if (!made) return Bad(Verdict::kPageMadeTwice, "page ", event.page, " exists already");
  it->second.bytes = event.bytes;
  reserved_bytes_ += event.bytes;
  return {};
}

Finding PlacementValidator::ApplyOne(const PageGone& event) {
  const auto it = pages_.find(event.page);
  if (it == pages_.end()) return Bad(Verdict::kUnknownPage, "page ", event.page, " given back");
  if (!it->second.used.empty()) {
    return Bad(Verdict::kPageInUse, "page ", event.page, " given back under live block ",
               it->second.used.begin()->second.block);
  }
  reserved_bytes_ -= it->second.bytes;
  pages_.erase(it);
  return {};
}

Finding PlacementValidator::JudgeShape(const BlockPlaced& event) const {
  if (event.bytes == 0) return Bad(Verdict::kEmptyBlock, "block ", event.block, " has no bytes");
  if (event.address % kAlignment != 0 || event.bytes % kAlignment != 0) {
    return Bad(Verdict::kMisaligned, "block ", event.block, " of ", event.bytes, " bytes at ",
               event.address);
  }
  if (event.address + event.bytes < event.address) {
    return Bad(Verdict::kAddressOverflow, "block ", event.block, " of ", event.bytes, " bytes at ",
               event.address);
  }
  uint64_t sum = 0;
  for (const PlacedPiece& piece : event.pieces) {
    const auto page = pages_.find(piece.page);
    if (page == pages_.end()) {
      return Bad(Verdict::kUnknownPage, "block ", event.block, " lies in page ", piece.page);
    }
    if (piece.length == 0) {
      return Bad(Verdict::kEmptyBlock, "block ", event.block, " has an empty piece in page ",
                 piece.page);
    }
    if (piece.offset % kAlignment != 0 || piece.length % kAlignment != 0) {
      return Bad(Verdict::kMisaligned, "block ", event.block, " has a piece of ", piece.length,
                 " bytes at ", piece.offset, " of page ", piece.page);
    }
    if (piece.offset > page->second.bytes || piece.length > page->second.bytes - piece.offset) {
      return Bad(Verdict::kOutsidePage, "block ", event.block, " has a piece of ", piece.length,
                 " bytes at ", piece.offset, " of page ", piece.page, ", which has ",
                 page->second.bytes);
    }
    sum += piece.length;
  }
  if (sum != event.bytes) {
    return Bad(Verdict::kPiecesDoNotAddUp, "block ", event.block, " of ", event.bytes,
               " bytes has pieces of ", sum, " in all");
  }
  return {};
}

Finding PlacementValidator::JudgeSharing(const BlockPlaced& event) const {
  const Stretch* other = FindOverlap(addresses_, event.address, event.address + event.bytes);
  if (other != nullptr) {
    return Bad(Verdict::kSharedAddresses, "block ", event.block, " of ", event.bytes, " bytes at ",
               event.address, " meets live block ", other->block, ", which ends at ", other->end);
  }
  std::unordered_map<uint64_t, Stretches> own;
  for (const PlacedPiece& piece : event.pieces) {
    const uint64_t end = piece.offset + piece.length;
    other = FindOverlap(pages_.at(piece.page).used, piece.offset, end);
    if (other == nullptr) other = FindOverlap(own[piece.page], piece.offset, end);
    if (other != nullptr) {
      return Bad(Verdict::kSharedBytes, "block ", event.block, " takes bytes [", piece.offset, ", ",
                 end, ") of page ", piece.page, ", of which block ", other->block,
                 " holds those up to ", other->end);
    }
    own[piece.page].emplace(piece.offset, Stretch{end, event.block});
  }
  return {};
}

Finding PlacementValidator::ApplyOne(const BlockPlaced& event) {
  if (blocks_.contains(event.block)) {
    return Bad(Verdict::kBlockMadeTwice, "block ", event.block, " is live already");
  }
  if (Finding shape = JudgeShape(event); !shape.good()) return shape;
  if (Finding sharing = JudgeSharing(event); !sharing.good()) return sharing;
  for (const PlacedPiece& piece : event.pieces) {
    pages_.at(piece.page)
        .used.emplace(piece.offset, Stretch{piece.offset + piece.length, event.block});
  }
  addresses_.emplace(event.address, Stretch{event.address + event.bytes, event.block});
  blocks_.emplace(event.block, event);
  return {};
}

Finding PlacementValidator::ApplyOne(const BlockFreed& event) {
  const auto it = blocks_.find(event.block);
  if (it == blocks_.end()) return Bad(Verdict::kNotLive, "block ", event.block, " freed");
  for (const PlacedPiece& piece : it->second.pieces) {
    pages_.at(piece.page).used.erase(piece.offset);
  }
  addresses_.erase(it->second.address);
  blocks_.erase(it);
  return {};
}

Finding PlacementValidator::ApplyOne(const ReservedIs& event) {
  if (event.bytes != reserved_bytes_) {
    return Bad(Verdict::kReservedDiffers, "reserved is said to be ", event.bytes, " bytes, but ",
               pages_.size(), " pages hold ", reserved_bytes_);
  }
  return {};
}

Finding Judge(const std::vector<PlacementEvent>& events) {
  PlacementValidator validator;
  for (size_t i = 0; i < events.size(); ++i) {
    Finding finding = validator.Apply(events[i]);
    if (!finding.good()) {
      finding.description = "event " + std::to_string(i) + ": " + finding.description;
      return finding;
    }
  }
  return {};
}

}  // namespace cgp
