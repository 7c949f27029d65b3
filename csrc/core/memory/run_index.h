// Where free pages stand side by side: the runs of wholly free slots in each range, as one stream
// sees them.
//
// A page that is taken or freed flips one bit for each slot that shows it, which is cheap; what a
// range's longest run has become is worked out only when a search comes by. Until then the range
// has an upper bound:
//
//     bound(r) >= length of the longest run of free slots in r (invariant)
//
// Taking a page leaves it valid, freeing one raises it to the range's whole length, looking at the
// range makes it exact. So each time a search looks at a range in vain, an earlier free has paid
// for it.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <vector>

#include "core/base/index_set.h"
#include "core/base/units.h"
#include "core/memory/range_table.h"

namespace cgp {

// Consecutive mapped slots of one range whose pages are wholly free; maximal: its neighbours are
// not.
struct FreeRun {
  SlotId begin{};
  uint32_t length = 0;

  SlotId end() const { return begin + length; }
};

class RunIndex {
 public:
  explicit RunIndex(const RangeTable& ranges) : ranges_(ranges) {}

  // The table has grown: makes room for its new ranges and slots, none of them free yet.
  void Grow() { MakeRoom(ranges_.slot_limit(), ranges_.range_count()); }
  // The same for a table that is about to grow to so much at most: what follows cannot throw then,
  // nor can anything else here but Runs().
  void MakeRoom(uint32_t slots, uint32_t ranges);

  // No slot is free any more.
  void Clear();

  // All slots of these pages become free or taken. O(rows of them (RangeTable::RowEnd()), and words
  // of the slots that show them).
  void SetFree(PageId begin, PageId end);
  void SetTaken(PageId begin, PageId end);
  // One slot that was just mapped shows a free page.
  void SetFree(SlotId slot);

  // The oldest range, numbered at least `from`, that may hold a run of at least `pages`.
  std::optional<RangeId> OldestMayHold(uint32_t pages, RangeId from) const;

  // The runs of the range in the order of addresses; makes the range's bound exact.
  const std::vector<FreeRun>& Runs(RangeId range);

  // The free slots at the range's front and back: the lengths of the runs that touch its ends.
  uint32_t FreeAtFront(RangeId range) const;
  uint32_t FreeAtBack(RangeId range) const;
  // Whether all slots of [begin, end) are free. O(words of them).
  bool AllFree(SlotId begin, SlotId end) const {
    return free_.NextMissing(Index(begin), Index(end)) >= Index(end);
  }

  // Recomputes the invariant against `is_free`; throws InternalError.
  void Check(const std::function<bool(PageId)>& is_free) const;

 private:
  uint32_t leaf_count() const { return static_cast<uint32_t>(bounds_.size() / 2); }
  template <typename Function>
  void ForEachRow(PageId begin, PageId end, Function&& function);
  void RaiseBound(RangeId range);
  void SetBound(RangeId range, uint32_t bound);

  const RangeTable& ranges_;
  IndexSet free_;  // by slot; none where nothing is mapped
  // A binary tree of maxima: node i over 2i and 2i + 1, leaves from leaf_count() on.
  std::vector<uint32_t> bounds_;
  std::vector<FreeRun> found_;  // what Runs() returned last
};

}  // namespace cgp
