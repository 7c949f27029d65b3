// Bytes for blocks that take turns. Captures that are made again one by one find alive what they
// kept the time before; that is dropped behind them. So such blocks are freed in the order in which
// they were allocated, and each goes behind the last one, around and around through one range:
//
//     | this time's |  free  |    the last time's    |
//                   ^ next_
//
// What is free there is behind FenceId::kRing, which no stream passes: all else finds its places
// free, wherever in the ring these blocks are. Once it has room for all of them, and for those of
// one capture twice, captures that are made again map nothing.
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

  // Whether what is open there is the ring's once it is freed.
  bool Holds(VirtualPage vpage) const { return range_ && ranges_.range_of(vpage) == *range_; }

  void BeginCapture() {
    placed_ = 0;
    has_reclaimed_ = false;
  }
  // Once in a capture, before it takes anything: what is open of the range is the ring's. What was
  // freed behind a fence is so once that has opened.
  void Reclaim();
  // There is no ring any more, but for what is free of it.
  void Clear() {
    range_.reset();
    next_ = 0;
  }

  // Where a block goes. The first of its kind brings room for those of one capture beside the ones
  // before, and for what a block leaves where it does not fit. `takes_whole`: pages that are open
  // as a whole come before new ones. A failing driver call throws with nothing changed.
  Placement Place(FreeList& list, Granules length, bool is_first, bool takes_whole);

 private:
  // Bytes from one place to another.
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
  // In granules, places counted through all virtual pages.
  uint64_t next_ = 0;         // behind the last block
  uint64_t placed_ = 0;       // in this capture
  uint64_t most_placed_ = 0;  // in any
  uint64_t largest_ = 0;      // block
  bool has_reclaimed_ = true;
};

}  // namespace cgp
