// Free bytes for blocks that take turns. Captures that are made again one by one find alive what
// they kept the time before; that is dropped behind them. So such blocks are freed in the order in
// which they were allocated, and each goes behind the last one, around and around:
//
//     | this time's |  free  |    the last time's    |
//                   ^ next_
//
// For everyone else what is free here is used: all else finds its places free, wherever in the ring
// these blocks are. Once it has room for all of them, and for those of one capture twice, captures
// that are made again map nothing.
//
// invariants:
//   each extent is used in the space as a block is, and no block's; no two of a range adjoin
//   were it free, it would be open (FenceId::kOpen)
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/base/units.h"
#include "core/memory/range_table.h"
#include "core/memory/shared_space.h"

namespace cgp {

class Ring {
 public:
  Ring(const RangeTable& ranges, SharedSpace& bytes) : ranges_(ranges), bytes_(bytes) {}

  bool empty() const { return !part_; }
  // Of the ring's ranges the one to extend.
  std::optional<RangeId> part() const { return part_; }

  void BeginCapture() { placed_ = 0; }

  // A block is to be placed: how many pages are missing. The first of its kind brings room for
  // those of one capture beside the ones before, and for what a block leaves where it does not fit.
  uint64_t Seek(Granules length, bool first_of_kind);
  // These pages, which are open, are the ring's. pre: they were missing, and are mapped behind
  // part(), or in a new range and hold the block. Does not throw.
  void Grow(SlotId first, uint64_t pages);
  // Where the block goes that was sought: the bytes are open until it takes them. pre: nothing is
  // missing. Does not throw.
  Site Take(Granules length);

  // What a block of the ring leaves is the ring's. pre: it would be open. Does not throw after
  // ReserveAdd() of all such blocks.
  void ReserveAdd(std::size_t blocks);
  void Add(const Site& site, Granules length);
  // A block of the ring is freed, and what it leaves is not the ring's.
  void Lose() { has_lost_ = true; }
  // The ring is no more: what it has is open. Does not throw.
  void Dissolve();
  // Whether others have got what was the ring's.
  bool has_lost() const { return has_lost_; }

  // Calls function(site, length) for all that is free.
  template <typename Function>
  void ForEachExtent(Function&& function) const {
    for (const Extent& extent : extents_) function(extent.site, Granules(extent.length()));
  }

 private:
  struct Extent {
    // In granules from the first slot.
    uint64_t begin = 0;
    uint64_t end = 0;
    Site site;

    uint64_t length() const { return end - begin; }
  };

  std::optional<uint64_t> Fit(uint64_t length);
  void Keep(uint64_t begin, uint64_t end);
  std::vector<Extent>::iterator Give(std::vector<Extent>::iterator extent);  // returns the next
  Site SiteAt(uint64_t granule) const;
  uint64_t page() const { return bytes_.page_size().count(); }

  const RangeTable& ranges_;
  SharedSpace& bytes_;
  std::vector<Extent> extents_;  // in order
  std::optional<RangeId> part_;
  bool has_lost_ = false;
  uint64_t next_ = 0;              // behind the last block
  std::optional<uint64_t> place_;  // where the block fits that is sought
  uint64_t placed_ = 0;            // in this capture, in granules
  uint64_t most_placed_ = 0;       // in any
  uint64_t largest_ = 0;           // block
};

}  // namespace cgp
