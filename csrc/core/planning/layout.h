// Offline packing: where blocks lie best whose sizes and lifetimes are known beforehand, in one
// stretch of addresses.
//
// This is dynamic storage allocation (Garey and Johnson, SR2): items that live at the same time
// must not share a byte, and each is to lie below its limit. First fit in the order of falling size
// comes out at or near the largest sum of live items for the programs that are captured in graphs.
// Where it does not, it is tried again and again with the items first that found no place.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

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

// Places the items as well as it can beside `fixed` ones, which lie where they lie and may overlap
// each other, and sets their positions; kNowhere for those that found no place. Where an item's
// position is known it says where its like lay before, which is tried first: a layout that was good
// stays good when all sizes grow by the same factor. Returns whether all found a place. O(items *
// (items + fixed)) for each of at most 32 attempts.
bool PackItems(std::vector<LayoutItem>& items, std::span<const LayoutItem> fixed);

// By step, up to the last one at which an item begins: the largest sum of the lengths of items that
// live at the same time until then.
std::vector<uint64_t> PeaksOf(std::span<const LayoutItem> items, std::span<const LayoutItem> fixed);

}  // namespace cgp
