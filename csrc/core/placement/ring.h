// A ring buffer for blocks that alternate. Captures that are made again one by one find alive what
// they made the time before, which is dropped after them. So such blocks are freed in the order in
// which they were allocated. Each goes behind the last one, around and around through one range:
//
//     | this time's |  free  |    the last time's    |
//                   ^ next_
//
// Its free bytes are behind FenceId::kRing, which no stream passes. So all other blocks find their
// places free, wherever in the ring these blocks are. Once the ring has room for all of them, and
// for those of one capture twice, captures that are made again map nothing.
#pragma once

#include <cstdint>
#include <optional>

#include "core/base/units.h"
#include "core/memory/free_list.h"
#include "core/memory/range_table.h"
#include "core/memory/stream_memory.h"

namespace cgp {

class Ring {
 public:
  Ring(const RangeTable& ranges, StreamMemory& memory) : ranges_(ranges), memory_(memory) {}

  // Whether bytes there are the ring's once they are free and open.
  bool Holds(VirtualPage vpage) const { return range_ && ranges_.range_of(vpage) == *range_; }

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
    next_ = 0;
  }

  // Returns where a block goes. The first of its kind (`is_first`) makes room for all of one
  // capture beside the earlier ones, and for what a block that does not fit leaves over.
  // `takes_whole`: whole open pages are taken before new ones are made. A failed driver call throws
  // with nothing changed.
  Placement Place(FreeList& list, Granules length, bool is_first, bool takes_whole);

 private:
  // Bytes up to `end` that are behind one fence.
  struct Span {
    FenceId fence;
    uint64_t end;
  };

  Span SpanAt(uint64_t place) const;
  void Claim(uint64_t begin, uint64_t end);
  uint64_t Fit(uint64_t from, uint64_t length) const;
  void Grow(FreeList& list, uint64_t pages, bool takes_whole);
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
  // In granules; places are counted through all virtual pages.
  uint64_t next_ = 0;         // behind the last block
  uint64_t placed_ = 0;       // in this capture
  uint64_t most_placed_ = 0;  // in any
  uint64_t largest_ = 0;      // block
  bool has_reclaimed_ = true;
};

}  // namespace cgp
