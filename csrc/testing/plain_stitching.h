// Edge stitching as docs/design.md §4 has it, steps 1 to 5, and nothing else: a handle for each page, no
// prediction, no index. It says how many pages that takes, as a measure for the pool, and shares no
// code with it.
#pragma once

#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

namespace cgp {

class PlainStitching {
 public:
  explicit PlainStitching(uint64_t page_bytes) : page_(page_bytes) {}

  // What was freed before may be taken by any stream; from then on only by that of the block.
  void BeginCapture();
  // pre: no such block lives; bytes > 0.
  void Allocate(uint64_t block, uint64_t bytes, uint64_t stream);
  // pre: the block lives.
  void Free(uint64_t block);

  uint64_t pages() const { return pages_.size(); }
  uint64_t mappings() const { return mappings_; }

 private:
  static constexpr uint64_t kAnybody = ~uint64_t{0};

  // Free bytes of a page, and which stream may take them.
  struct Extent {
    uint64_t begin;
    uint64_t end;
    uint64_t stream;
  };
  using Page = std::vector<Extent>;  // sorted, disjoint; those that touch have different streams
  // The bytes that one stream may take at a page's ends.
  struct Room {
    uint64_t head = 0;
    uint64_t tail = 0;
    bool whole = false;
  };
  struct Piece {
    uint32_t page;
    uint64_t begin;
    uint64_t end;
  };
  using Pieces = std::vector<Piece>;
  struct Block {
    Pieces pieces;
    uint64_t stream;
  };
  using Range = std::vector<uint32_t>;  // the pages mapped there, each once
  // What a new range for a block begins and ends with, and how many whole pages stand between.
  struct Stretch {
    std::optional<uint32_t> tail;
    std::optional<uint32_t> head;
    uint64_t whole = 0;
  };

  Piece PlaceSmall(uint64_t bytes, uint64_t stream);
  Pieces PlaceLarge(uint64_t bytes);
  Stretch Shortest(uint64_t bytes) const;
  Pieces FindMapped(uint64_t bytes, uint64_t most_whole) const;
  Pieces Extend(uint64_t bytes, uint64_t most_whole, uint64_t most_new);
  Pieces StartRange(uint64_t bytes, const Stretch& stretch);

  void LookAtRooms(uint64_t stream);
  std::vector<uint32_t> PartUsed(uint64_t Room::*edge) const;
  std::vector<uint32_t> WholePages(const Range& but) const;
  void Append(uint64_t whole, std::optional<uint32_t> head, Range& range);
  Pieces PiecesFrom(const Range& range, uint64_t start, uint64_t bytes) const;
  void Take(const Piece& piece);
  void Give(const Piece& piece, uint64_t stream);

  const uint64_t page_;
  std::vector<Page> pages_;
  std::vector<uint32_t> given_;  // pages that something was freed in since the capture began
  std::vector<Room> rooms_;      // of the pages, for the stream that asks
  std::vector<Range> ranges_;
  std::unordered_map<uint64_t, Block> blocks_;
  uint64_t mappings_ = 0;
};

}  // namespace cgp
