// An independent judge of placements: whether a sequence of events could have come from a right
// allocator.
//
// It shares no code and no type with the allocator that it judges, so that a mistake there is not
// repeated here. It knows nothing of streams, scopes or policies: only that memory is not handed
// out twice and that the books are true.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <unordered_map>
#include <variant>
#include <vector>

namespace cgp {

enum class Verdict : uint8_t {
  kGood,
  kPageMadeTwice,     // a page number that exists already
  kBadPage,           // a page of no bytes
  kUnknownPage,       // a page that was never made, or that was given back
  kPageInUse,         // a page given back while a live block has bytes in it
  kBlockMadeTwice,    // a block number that is live already
  kEmptyBlock,        // a block of no bytes, or with an empty piece
  kOutsidePage,       // a piece that ends behind its page
  kPiecesDoNotAddUp,  // the pieces are not as long as the block
  kMisaligned,        // an address, offset or length that is no multiple of 512
  kAddressOverflow,   // a block that ends behind the last address
  kSharedBytes,       // two live blocks (or two pieces of one) on one byte of a page
  kSharedAddresses,   // two live blocks on one address
  kNotLive,           // the free of a block that is not live
  kReservedDiffers,   // reserved is not the sum of the pages
};

const char* ToString(Verdict verdict);

struct PlacedPiece {
  uint64_t page = 0;
  uint64_t offset = 0;
  uint64_t length = 0;
};

struct PageMade {
  uint64_t page = 0;
  uint64_t bytes = 0;
};
struct PageGone {
  uint64_t page = 0;
};
struct BlockPlaced {
  uint64_t block = 0;
  uint64_t bytes = 0;
  uint64_t address = 0;
  std::vector<PlacedPiece> pieces;  // in the order of the block's addresses
};
struct BlockFreed {
  uint64_t block = 0;
};
// Stands at the end, and wherever else the books are to be compared.
struct ReservedIs {
  uint64_t bytes = 0;
};
using PlacementEvent = std::variant<PageMade, PageGone, BlockPlaced, BlockFreed, ReservedIs>;

struct Finding {
  Verdict verdict = Verdict::kGood;
  std::string description;  // empty when good

  bool good() const { return verdict == Verdict::kGood; }
};

class PlacementValidator {
 public:
  // Takes the event in if it is good, else says why not and leaves everything as it was.
  Finding Apply(const PlacementEvent& event);

  uint64_t reserved_bytes() const { return reserved_bytes_; }
  size_t live_blocks() const { return blocks_.size(); }

 private:
  // Half-open stretches that do not overlap, by their start.
  struct Stretch {
    uint64_t end = 0;
    uint64_t block = 0;
  };
  using Stretches = std::map<uint64_t, Stretch>;

  struct Page {
    uint64_t bytes = 0;
    Stretches used;
  };

  static const Stretch* FindOverlap(const Stretches& stretches, uint64_t start, uint64_t end);

  Finding ApplyOne(const PageMade& event);
  Finding ApplyOne(const PageGone& event);
  Finding ApplyOne(const BlockPlaced& event);
  Finding ApplyOne(const BlockFreed& event);
  Finding ApplyOne(const ReservedIs& event);
  Finding JudgeShape(const BlockPlaced& event) const;
  Finding JudgeSharing(const BlockPlaced& event) const;

  std::unordered_map<uint64_t, Page> pages_;
  std::unordered_map<uint64_t, BlockPlaced> blocks_;
  Stretches addresses_;
  uint64_t reserved_bytes_ = 0;  // sum of pages_[*].bytes
};

// Judges a whole sequence; the finding of the first bad event names its index.
Finding Judge(const std::vector<PlacementEvent>& events);

}  // namespace cgp
