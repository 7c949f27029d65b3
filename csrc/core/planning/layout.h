// Offline packing: where blocks lie best whose sizes and lifetimes are known beforehand, in one
// stretch of addresses.
//
// This is dynamic storage allocation (Garey and Johnson, SR2): items that live at the same time
// must not share a byte, and each is to lie below its limit. First fit in the order of falling size
// comes out at or near the largest sum of live items for the programs that are captured in graphs.
// Where it does not, it is tried again and again with the items first that found no place.
#pragma once

#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include "core/planning/conflicts.h"

namespace cgp {

struct LayoutItem {
  static constexpr uint64_t kNowhere = ~uint64_t{0};
  static constexpr uint32_t kForever = ~uint32_t{0};

  // Lives for the steps [begin, end).
  uint32_t begin = 0;
  uint32_t end = kForever;
  uint64_t length = 0;           // in granules
  uint64_t position = kNowhere;  // in granules
  uint64_t limit = kNowhere;     // of position + length, in granules
};

class Layout {
 public:
  // `fixed` items lie where they lie; they may overlap each other.
  explicit Layout(std::span<const LayoutItem> fixed);

  // Places the items as well as it can and sets their positions; kNowhere for those that found no
  // place. Where an item's position is known it says where its like lay before, which
  // is tried first: a layout that was good stays good when all sizes grow by the same factor.
  // Returns whether all found a place. O(items * (items + fixed)) for each of at most 32 attempts.
  bool Pack(std::vector<LayoutItem>& items);

  // By step, up to the last one at which an item begins: the largest sum of the lengths of items
  // that live at the same time until then.
  static std::vector<uint64_t> Peaks(std::span<const LayoutItem> items,
                                     std::span<const LayoutItem> fixed);

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
  uint64_t LowestGap(const LayoutItem& item) const;
  std::optional<Conflicts> FindConflicts(std::span<const LayoutItem> items) const;
  uint64_t Attempt(const std::vector<uint32_t>& order, const std::optional<Conflicts>& conflicts,
                   std::vector<LayoutItem>& items);
  void NumberAll(std::span<const LayoutItem> items);
  uint64_t GapBesideConflicts(const LayoutItem& item, uint32_t number, const Conflicts& conflicts);

  std::vector<Placed> placed_;  // by `low`
  std::vector<Placed>
      numbered_;              // in an attempt: as `conflicts` numbers them; not placed: kNowhere
  std::vector<Placed> near_;  // in an attempt: room for what GapBesideConflicts() goes through
};

}  // namespace cgp
