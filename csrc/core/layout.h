// Offline packing: where blocks lie best whose sizes and lifetimes are known beforehand, in one
// stretch of addresses.
//
// This is dynamic storage allocation (Garey and Johnson, SR2): items that live at the same time
// must not share a byte, and all are to lie below a limit. First fit in the order of falling size
// comes out at or near the largest sum of live items for the programs that are captured in graphs.
// Where it does not, first fit in the order of falling size times lifetime is tried, and then again
// and again with the items first that found no place.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/conflicts.h"

namespace cgp {

struct LayoutItem {
  static constexpr uint64_t kNowhere = ~uint64_t{0};
  static constexpr uint32_t kForever = ~uint32_t{0};

  // Lives for the steps [begin, end).
  uint32_t begin = 0;
  uint32_t end = kForever;
  uint64_t length = 0;           // in granules
  uint64_t position = kNowhere;  // in granules
  uint64_t alignment = 1;        // of the position, in granules
  bool low = false;              // better at the bottom
};

class Layout {
 public:
  // `fixed` items lie where they lie; they may overlap each other.
  explicit Layout(std::span<const LayoutItem> fixed);

  // Places the items below `limit` as well as it can and sets their positions; kNowhere for those
  // that found no place. Where an item's position is known it says where its like lay before, which
  // is tried first: a layout that was good stays good when all sizes grow by the same factor.
  // Returns whether all found a place. O(items * (items + fixed)) for each of at most 32 attempts.
  bool Pack(std::vector<LayoutItem>& items, uint64_t limit);

  // The lowest position from `item.position` on at which it meets nothing.
  uint64_t FindGap(const LayoutItem& item) const;

  void Insert(const LayoutItem& item);
  // Takes out the item that begins at this step and lies at this position, if there is one.
  void Erase(uint32_t begin, uint64_t position);

  // The largest sum of the lengths of items that live at the same time.
  static uint64_t Peak(std::span<const LayoutItem> items, std::span<const LayoutItem> fixed);

 private:
  // Small, because what takes the time is to go through them.
  struct Placed {
    uint32_t begin = 0;
    uint32_t end = 0;
    uint64_t low = 0;
    uint64_t high = 0;
  };
  struct LiesLower {
    bool operator()(const Placed& a, const Placed& b) const { return a.low < b.low; }
  };
  static Placed Of(const LayoutItem& item);
  static uint64_t LowestGap(std::span<const Placed> placed, const LayoutItem& item);
  std::optional<Conflicts> FindConflicts(std::span<const LayoutItem> items) const;
  uint64_t Attempt(const std::vector<uint32_t>& order, const std::optional<Conflicts>& conflicts,
                   std::vector<LayoutItem>& items, uint64_t limit);
  void NumberAll(std::span<const LayoutItem> items);
  uint64_t GapBesideConflicts(const LayoutItem& item, uint32_t number, const Conflicts& conflicts);
  std::vector<Placed>::iterator Behind(uint64_t position);

  std::vector<Placed> placed_;  // by `low`
  std::vector<Placed>
      numbered_;              // in an attempt: as `conflicts` numbers them; not placed: kNowhere
  std::vector<Placed> near_;  // in an attempt: room for what GapBesideConflicts() goes through
};

}  // namespace cgp
