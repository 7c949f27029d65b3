// Pools as torch.cuda.memory_snapshot() shows memory: segments tiled by blocks.
#include <algorithm>
#include <map>
#include <set>
#include <utility>

#include "core/base/error.h"
#include "torch/device_pools.h"
#include "torch/observe/history.h"

namespace cgp {
namespace {

using c10::CachingDeviceAllocator::BlockInfo;
using c10::CachingDeviceAllocator::SegmentInfo;

// Bytes side by side, and the address that they are shown at.
struct Shown {
  Address address = 0;
  uint64_t bytes = 0;
  const Block* live = nullptr;  // the block that has them all; nullptr: free
};

// All bytes of the pool, in the order of the addresses that they are shown at.
std::vector<Shown> Arrange(const PoolSnapshot& pool) {
  std::vector<Shown> shown;
  std::vector<PhysicalPiece> pieces;  // that live blocks have, and for each page one where it ends
  for (const auto& [block, its_pieces] : pool.blocks) {
    shown.push_back({block.address, block.bytes, &block});
    pieces.insert(pieces.end(), its_pieces.begin(), its_pieces.end());
  }
  const std::set<PageId> gone(pool.gone.begin(), pool.gone.end());
  std::erase_if(pieces, [&](const PhysicalPiece& piece) { return gone.contains(piece.page); });
  const uint64_t page_bytes = pool.stats.page_bytes;
  std::map<PageId, Address> first_at;
  for (const auto& [address, pages] : pool.ranges) {
    for (size_t i = 0; i < pages.size(); ++i) {
      if (gone.contains(pages[i])) continue;
      if (!first_at.try_emplace(pages[i], address + i * page_bytes).second) continue;
      pieces.push_back({.page = pages[i], .offset_bytes = page_bytes, .length_bytes = 0});
    }
  }
  std::ranges::sort(pieces, {}, [](const PhysicalPiece& piece) {
    return std::pair(piece.page, piece.offset_bytes);
  });
  uint64_t free = 0;  // from there on, in the page of the next piece
  for (const auto& [page, offset, length] : pieces) {
    if (offset > free) shown.push_back({first_at.at(page) + free, offset - free, nullptr});
    free = offset == page_bytes ? 0 : offset + length;
  }
  std::ranges::sort(shown, {}, &Shown::address);
  return shown;
}

void AppendPool(c10::DeviceIndex device, PoolId id, const PoolSnapshot& pool,
                const History& history, std::vector<SegmentInfo>& segments) {
  Address end = 0;
  for (const auto& [address, bytes, live] : Arrange(pool)) {
    void* const stream = live == nullptr ? nullptr : reinterpret_cast<void*>(live->stream);
    // A segment is of one stream, that of its live blocks.
    if (address != end || (live != nullptr && segments.back().allocated_size != 0 &&
                           segments.back().stream != stream)) {
      SegmentInfo& made = segments.emplace_back();
      made.device = device;
      made.address = address;
      made.is_large = true;
      made.is_expandable = true;
      made.owner_private_pool_id = {id.first, id.second};
    }
    end = address + bytes;
    SegmentInfo& segment = segments.back();
    segment.total_size += bytes;
    if (live != nullptr || segment.blocks.empty() || segment.blocks.back().active) {
      segment.blocks.emplace_back();
    }
    BlockInfo& block = segment.blocks.back();
    block.size += bytes;
    if (live == nullptr) continue;
    block.requested_size = live->requested_bytes;
    block.allocated = true;
    block.active = true;
    block.context_when_allocated = history.ContextOf(address);
    segment.allocated_size += bytes;
    segment.active_size += bytes;
    segment.requested_size += live->requested_bytes;
    segment.stream = stream;
  }
}

}  // namespace

void DevicePools::AppendSegments(std::optional<PoolId> only, const History& history,
                                 std::vector<SegmentInfo>& segments) {
  for (const PoolId id : set.ids()) {
    if (only && *only != id) continue;
    for (const PoolId part : {id, PoolSet::LoanOf(id)}) {
      std::optional<PoolSnapshot> pool;
      try {
        pool = set.Snapshot(part);
      } catch (const UsageError&) {
        continue;  // there is no loan, or another thread has given it back meanwhile
      }
      AppendPool(device, part, *pool, history, segments);
    }
  }
}

}  // namespace cgp
