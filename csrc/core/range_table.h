// What is mapped where: the pool's physical pages, and the ranges of addresses behind which they
// stand.
//
// A range is one reservation of addresses, cut into slots of one page each; a run of its slots is
// mapped, and it may grow at both ends until the reservation is used up. Slots are numbered through
// all ranges, so that one flat table says which page a slot shows:
//
//     slots      0 ........ 63 | 64 ............... 191 | ...
//     range      r0            | r1                     |
//     mapped        [p0 p1]    |       [p1 p2 p0 p3]    |   (a page may stand in several)
//
// invariants:
//   page_at(s) == p  <=>  s is in slots_of(p)  <=>  s is mapped
//   the mapped slots of a range are consecutive
//   no page stands twice in one range, so a block never meets itself
//   mapping_count() == sum of |slots_of(p)| == sum of the ranges' mapped lengths
// This is a resource: it only grows while a graph uses the pool, and the destructor unmaps it all.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/units.h"
#include "driver/driver.h"

namespace cgp {

// Which pages to map where. kNewPage stands for a page that does not exist yet.
struct MappingPlan {
  static constexpr PageId kNewPage{~uint32_t{0}};

  std::optional<RangeId> range;  // none: a new range
  bool at_front = false;         // before the range's first page rather than behind its last
  std::vector<PageId> pages;     // in the order of addresses, each not yet in the range
};

class RangeTable {
 public:
  struct Range {
    Address address = 0;    // of slot `first`
    SlotId first{};         // the first slot of the reservation
    uint32_t capacity = 0;  // slots reserved
    // [mapped_begin, mapped_end) of them are mapped, counted from `first`.
    uint32_t mapped_begin = 0;
    uint32_t mapped_end = 0;

    // How many more may be mapped at either end: what the reservation has left, or none where an
    // undo failed and something may still be mapped.
    uint32_t room_front = 0;
    uint32_t room_back = 0;

    uint32_t mapped() const { return mapped_end - mapped_begin; }
    SlotId begin() const { return SlotId{Index(first) + mapped_begin}; }
    SlotId end() const { return SlotId{Index(first) + mapped_end}; }
  };

  // Slots are handed to ranges in groups, so that a bit per slot can be kept in words that belong
  // to one range only.
  static constexpr uint32_t kSlotGroup = 64;

  RangeTable(Driver& driver, Granules page_size);
  ~RangeTable();
  RangeTable(const RangeTable&) = delete;
  RangeTable& operator=(const RangeTable&) = delete;

  // Makes the new pages of the plan (numbered from page_count() on, in the order of the plan) and
  // maps all its pages. Returns the slot of the first. A failing driver call throws, with all that
  // came before it undone.
  SlotId Map(const MappingPlan& plan);

  // Repeats the driver's SetAccess() for all that is mapped.
  void RefreshAccess();

  uint32_t page_count() const { return static_cast<uint32_t>(pages_.size()); }
  uint32_t range_count() const { return static_cast<uint32_t>(ranges_.size()); }
  uint64_t mapping_count() const { return mapping_count_; }
  uint32_t slot_limit() const { return static_cast<uint32_t>(page_at_.size()); }

  const Range& range(RangeId id) const { return ranges_[Index(id)]; }
  RangeId range_of(SlotId slot) const { return range_of_group_[Index(slot) / kSlotGroup]; }
  // pre: the slot is mapped.
  PageId page_at(SlotId slot) const { return page_at_[Index(slot)]; }
  // The slots that show the page, oldest first; never empty.
  const std::vector<SlotId>& slots_of(PageId page) const { return pages_[Index(page)].slots; }
  bool Shows(RangeId range, PageId page) const;

  Address AddressOf(SlotId slot, Granules offset) const;

  // Recomputes the invariants; throws InternalError.
  void Check() const;

 private:
  struct Page {
    Handle handle{};
    std::vector<SlotId> slots;
  };

  class Undo;

  RangeId ReserveRange(uint32_t pages, Undo& undo);

  Driver& driver_;
  const uint64_t page_bytes_;
  std::vector<Page> pages_;
  std::vector<Range> ranges_;
  std::vector<PageId> page_at_;          // by slot
  std::vector<RangeId> range_of_group_;  // by slot / kSlotGroup
  uint64_t mapping_count_ = 0;
};

}  // namespace cgp
