#include "torch/observe/snapshot.h"

#include <algorithm>
#include <map>
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

// The stretches [begin, end) of a page that live blocks have, in order.
using Stretches = std::vector<std::pair<uint64_t, uint64_t>>;

std::map<PageId, Stretches> UsedStretches(const PoolSnapshot& pool) {
  std::map<PageId, Stretches> used;
  for (const PoolSnapshot::LiveBlock& live : pool.blocks) {
    for (const PhysicalPiece& piece : live.pieces) {
      used[piece.page].emplace_back(piece.offset_bytes, piece.offset_bytes + piece.length_bytes);
    }
  }
  for (auto& [page, stretches] : used) std::ranges::sort(stretches);
  return used;
}

std::map<PageId, Address> FirstAddresses(const PoolSnapshot& pool) {
  std::map<PageId, Address> first;
  for (const PoolSnapshot::Range& range : pool.ranges) {
    for (size_t i = 0; i < range.pages.size(); ++i) {
      first.try_emplace(range.pages[i], range.address + i * pool.stats.page_bytes);
    }
  }
  return first;
}

// All of the pool's bytes, in the order of the addresses that they are shown at.
std::vector<Shown> Arrange(const PoolSnapshot& pool) {
  std::vector<Shown> shown;
  for (const PoolSnapshot::LiveBlock& live : pool.blocks) {
    shown.push_back({live.block.address, live.block.bytes, &live.block});
  }
  std::map<PageId, Stretches> used = UsedStretches(pool);
  for (const auto& [page, address] : FirstAddresses(pool)) {
    uint64_t end = 0;
    const auto add_free_to = [&, start = address](uint64_t begin) {
      if (begin > end) shown.push_back({start + end, begin - end, nullptr});
    };
    for (const auto& [begin, stretch_end] : used[page]) {
      add_free_to(begin);
      end = stretch_end;
    }
    add_free_to(pool.stats.page_bytes);
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

// A segment is of one stream, that of its live blocks.
bool BelongsTo(const SegmentInfo& segment, const Shown& part) {
  return part.live == nullptr || segment.allocated_size == 0 ||
         segment.stream == StreamOf(*part.live);
}

void AppendPool(c10::DeviceIndex device, PoolId id, const PoolSnapshot& pool,
                const History& history, std::vector<SegmentInfo>& segments) {
  Address end = 0;
  for (const Shown& part : Arrange(pool)) {
    if (part.address != end || !BelongsTo(segments.back(), part)) {
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
