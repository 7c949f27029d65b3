#include "torch/observe/snapshot.h"

#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "core/base/error.h"

namespace cgp {
namespace {

using c10::CachingDeviceAllocator::BlockInfo;
using c10::CachingDeviceAllocator::SegmentInfo;

// Bytes side by side that are shown at an address.
struct Shown {
  Address address = 0;
  uint64_t bytes = 0;
  const Block* live = nullptr;  // the block whose they all are; nullptr: free
};

// All of the pool's bytes, in the order of the addresses that they are shown at.
std::vector<Shown> Arrange(const PoolSnapshot& pool) {
  std::vector<Shown> shown;
  // The stretches [begin, end) of each page that live blocks have; then one where it ends.
  std::map<PageId, std::vector<std::pair<uint64_t, uint64_t>>> used;
  for (const auto& [block, pieces] : pool.blocks) {
    shown.push_back({block.address, block.bytes, &block});
    for (const PhysicalPiece& piece : pieces) {
      used[piece.page].emplace_back(piece.offset_bytes, piece.offset_bytes + piece.length_bytes);
    }
  }
  const uint64_t page_bytes = pool.stats.page_bytes;
  std::set<PageId> seen;
  for (const PoolSnapshot::Range& range : pool.ranges) {
    Address address = range.address;
    for (const PageId page : range.pages) {
      if (seen.insert(page).second) {
        auto& stretches = used[page];
        stretches.emplace_back(page_bytes, page_bytes);
        std::ranges::sort(stretches);
        uint64_t free = 0;
        for (const auto& [begin, end] : stretches) {
          if (begin > free) shown.push_back({address + free, begin - free, nullptr});
          free = end;
        }
      }
      address += page_bytes;
    }
  }
  std::ranges::sort(shown, {}, &Shown::address);
  return shown;
}

void* StreamOf(const Block& live) { return reinterpret_cast<void*>(live.stream); }

void Append(const Shown& part, const History& history, SegmentInfo& segment) {
  segment.total_size += part.bytes;
  if (part.live == nullptr) {
    if (segment.blocks.empty() || segment.blocks.back().active) segment.blocks.emplace_back();
    segment.blocks.back().size += part.bytes;
    return;
  }
  BlockInfo& block = segment.blocks.emplace_back();
  block.size = part.bytes;
  block.requested_size = part.live->requested_bytes;
  block.allocated = true;
  block.active = true;
  block.context_when_allocated = history.ContextOf(part.address);
  segment.allocated_size += part.bytes;
  segment.active_size += part.bytes;
  segment.requested_size += part.live->requested_bytes;
  segment.stream = StreamOf(*part.live);
}

void AppendPool(c10::DeviceIndex device, PoolId id, const PoolSnapshot& pool,
                const History& history, std::vector<SegmentInfo>& segments) {
  Address end = 0;
  for (const Shown& part : Arrange(pool)) {
    // A segment is of one stream, that of its live blocks.
    const auto is_others = [&](const SegmentInfo& last) {
      return part.live != nullptr && last.allocated_size != 0 &&
             last.stream != StreamOf(*part.live);
    };
    if (part.address != end || is_others(segments.back())) {
      SegmentInfo& segment = segments.emplace_back();
      segment.device = device;
      segment.address = part.address;
      segment.is_large = true;
      segment.is_expandable = true;
      segment.owner_private_pool_id = {id.first, id.second};
    }
    Append(part, history, segments.back());
    end = part.address + part.bytes;
  }
}

}  // namespace

void AppendSegments(DevicePools& pools, std::optional<PoolId> only, const History& history,
                    std::vector<SegmentInfo>& segments) {
  for (const PoolId id : pools.set.ids()) {
    if (only && *only != id) continue;
    std::optional<PoolSnapshot> pool;
    try {
      pool = pools.set.Snapshot(id);
    } catch (const UsageError&) {
      continue;  // another thread has given it back meanwhile
    }
    AppendPool(pools.device, id, *pool, history, segments);
  }
}

}  // namespace cgp
