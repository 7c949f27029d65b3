#include "core/memory/run_index.h"

#include <algorithm>
#include <bit>

#include "core/base/error.h"

namespace cgp {

void RunIndex::MakeRoom(uint32_t slots, uint32_t ranges) {
  free_.Resize(slots);
  // One leaf more than there are ranges, so that "before the newest" is a leaf too.
  if (ranges < leaf_count()) return;
  const uint32_t leaves = std::bit_ceil(ranges + 1);
  std::vector<uint32_t> old(2 * std::size_t{leaves});
  old.swap(bounds_);
  const auto old_leaves = static_cast<uint32_t>(old.size() / 2);
  for (uint32_t r = 0; r < old_leaves; ++r) SetBound(RangeId{r}, old[old_leaves + r]);
}

void RunIndex::Clear() {
  free_.Clear();
  bounds_.assign(bounds_.size(), 0);
  Grow();
}

// Calls function(slot, count) for all slots that show the pages, side by side as they are.
template <typename Function>
void RunIndex::ForEachRow(PageId begin, PageId end, Function&& function) {
  while (begin < end) {
    const PageId stop = std::min(end, ranges_.RowEnd(begin));
    for (const SlotId slot : ranges_.slots_of(begin)) function(slot, Index(stop) - Index(begin));
    begin = stop;
  }
}

void RunIndex::SetFree(PageId begin, PageId end) {
  ForEachRow(begin, end, [this](SlotId slot, uint32_t count) {
    free_.InsertRange(Index(slot), Index(slot) + count);
    RaiseBound(ranges_.range_of(slot));
  });
}

void RunIndex::SetFree(SlotId slot) {
  free_.Insert(Index(slot));
  RaiseBound(ranges_.range_of(slot));
}

void RunIndex::SetTaken(PageId begin, PageId end) {
  ForEachRow(begin, end, [this](SlotId slot, uint32_t count) {
    free_.EraseRange(Index(slot), Index(slot) + count);
  });
}

void RunIndex::RaiseBound(RangeId range) {
  const uint32_t most = ranges_.range(range).mapped();
  if (bounds_[leaf_count() + Index(range)] < most) SetBound(range, most);
}

std::optional<RangeId> RunIndex::OldestMayHold(uint32_t pages, RangeId from) const {
  const uint32_t leaves = leaf_count();
  if (Index(from) >= ranges_.range_count()) return std::nullopt;
  uint32_t i = leaves + Index(from);
  while (bounds_[i] < pages) {
    // Up from right children, then to the sibling on the right; 0 is behind the root.
    while (i % 2 == 1) i /= 2;
    if (i == 0) return std::nullopt;
    ++i;
  }
  while (i < leaves) {
    i *= 2;
    if (bounds_[i] < pages) ++i;
  }
  return i - leaves < ranges_.range_count() ? std::optional(RangeId{i - leaves}) : std::nullopt;
}

const std::vector<FreeRun>& RunIndex::Runs(RangeId id) {
  const RangeTable::Range& range = ranges_.range(id);
  const uint32_t limit = Index(range.end());
  found_.clear();
  uint32_t longest = 0;
  for (auto slot = free_.Next(Index(range.begin())); slot && *slot < limit;) {
    const uint32_t end = free_.NextMissing(*slot, limit);
    found_.push_back({SlotId{*slot}, end - *slot});
    longest = std::max(longest, end - *slot);
    slot = free_.Next(end);
  }
  SetBound(id, longest);
  return found_;
}

uint32_t RunIndex::FreeAtFront(RangeId id) const {
  const RangeTable::Range& range = ranges_.range(id);
  return free_.NextMissing(Index(range.begin()), Index(range.end())) - Index(range.begin());
}

uint32_t RunIndex::FreeAtBack(RangeId id) const {
  const RangeTable::Range& range = ranges_.range(id);
  return Index(range.end()) - free_.LastRun(Index(range.begin()), Index(range.end()));
}

void RunIndex::SetBound(RangeId range, uint32_t bound) {
  std::size_t i = leaf_count() + Index(range);
  if (bounds_[i] == bound) return;
  bounds_[i] = bound;
  for (i /= 2; i > 0; i /= 2) {
    const uint32_t most = std::max(bounds_[2 * i], bounds_[2 * i + 1]);
    if (bounds_[i] == most) return;
    bounds_[i] = most;
  }
}

void RunIndex::Check(const std::function<bool(PageId)>& is_free) const {
  for (uint32_t r = 0; r < ranges_.range_count(); ++r) {
    const RangeTable::Range& range = ranges_.range(RangeId{r});
    const uint32_t end = Index(range.first) + range.capacity;
    uint32_t run = 0;
    for (uint32_t slot = Index(range.first); slot < end; ++slot) {
      const bool mapped = slot >= Index(range.begin()) && slot < Index(range.end());
      CGP_CHECK(free_.Contains(slot) == (mapped && is_free(ranges_.page_at(SlotId{slot}))));
      run = free_.Contains(slot) ? run + 1 : 0;
      CGP_CHECK(run <= bounds_[leaf_count() + r]);
    }
  }
  for (std::size_t i = 1; i < leaf_count(); ++i) {
    CGP_CHECK(bounds_[i] == std::max(bounds_[2 * i], bounds_[2 * i + 1]));
  }
}

}  // namespace cgp
