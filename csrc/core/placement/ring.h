// A ring buffer for blocks that alternate. Captures that are made again one by one find alive what
// they made the time before, which is dropped after them. So such blocks are freed in the order in
// which they were allocated. Each goes behind the last one, around and around through one range:
//
//     | this time's |  free  |    the last time's    |
//                   ^ next_
//
// Another range, the seam, shows the ring's end before its begin, for a block that lies across.
// The ring's free bytes are behind FenceId::kRing, which no stream passes. So all other blocks find
// their places free, wherever in the ring these blocks are. Once the ring has room for all of them,
// and for those of one capture twice, captures that are made again map nothing.
#pragma once

#include <algorithm>
#include <cstdint>
#include <optional>
#include <vector>

#include "core/base/units.h"
#include "core/memory/free_list.h"
#include "core/memory/range_table.h"
#include "core/memory/stream_memory.h"

namespace cgp {

class Ring {
 public:
  Ring(const RangeTable& ranges, StreamMemory& memory) : ranges_(ranges), memory_(memory) {}

  // Whether bytes there are the ring's once they are free and open.
  bool Holds(VirtualPage vpage) const {
    if (!range_) return false;
    const RangeId range = ranges_.range_of(vpage);
    return range == *range_ || std::ranges::find(seams_, range) != seams_.end();
  }

  void BeginCapture() {
    placed_ = 0;
    has_reclaimed_ = false;
  }
  // Takes in what is open of the range, once in a capture, before anything else is taken: what was
  // freed behind a fence is open only once the fence is.
  void Reclaim();
  // The ring is gone, except for its free bytes.
  void Clear() {
    range_.reset();
    seams_.clear();
    next_ = 0;
    seam_ = 0;
    lacks_seam_ = false;
  }

  // Returns where a block goes. Where the ring is too small, the first of its kind (`is_first`)
  // makes room for itself, and another one for all that one capture places. A failed driver call
  // throws with nothing changed.
  Placement Place(FreeList& list, Granules length, bool is_first);

 private:
  // Bytes up to `end` that are behind one fence.
  struct Span {
    FenceId fence;
    uint64_t end;
  };

  Span SpanAt(uint64_t place) const;
  void Claim(uint64_t begin, uint64_t end);
  uint64_t Fit(uint64_t from, uint64_t length) const;
  bool SeamHas(uint64_t tail, uint64_t head) const;
  void MapSeam(uint64_t tail, uint64_t head);
  uint64_t MissingForCapture(uint64_t granules) const;
  void NotePlaced(uint64_t end, uint64_t granules);
  void Grow(FreeList& list, uint64_t pages);
  const PageSpace& space() const { return memory_.bytes().space(); }
  uint64_t page() const { return space().page_size().count(); }
  VirtualPage VpageAt(uint64_t place) const {
    return VirtualPage{static_cast<uint32_t>(place / page())};
  }
  uint64_t Begin() const { return range_ ? Index(ranges_.range(*range_).begin()) * page() : 0; }
  uint64_t End() const { return range_ ? Index(ranges_.range(*range_).end()) * page() : 0; }

  const RangeTable& ranges_;
  StreamMemory& memory_;
  std::optional<RangeId> range_;
  // Show the ring's end before its begin: the last one, or earlier ones before the ring grew.
  std::vector<RangeId> seams_;
  // In granules; places are counted through all virtual pages.
  uint64_t next_ = 0;         // behind the last block
  uint64_t largest_ = 0;      // block
  uint64_t seam_ = 0;         // the ring's begin in seams_.back(); 0: the ring has grown since
  uint64_t placed_ = 0;       // in this capture
  uint64_t most_placed_ = 0;  // in any
  bool lacks_seam_ = false;   // that is of use: the ring has grown for all that a capture places
  bool has_reclaimed_ = true;
};

}  // namespace cgp
