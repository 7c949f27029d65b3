#include "torch/snapshot.h"

#include <algorithm>
#include <map>
#include <utility>

namespace cgp {
namespace {

using c10::CachingDeviceAllocator::BlockInfo;
using c10::CachingDeviceAllocator::SegmentInfo;

// A live block's bytes within one page.
struct Piece {
  uint64_t offset_bytes = 0;
  uint64_t length_bytes = 0;
  uint64_t requested_bytes =
      0;  // the whole request, with the block's first piece; 0 with the others
};

using PiecesByPage = std::map<PageId, std::vector<Piece>>;

PiecesByPage SortPieces(const PoolSnapshot& pool) {
  PiecesByPage by_page;
  for (const PoolSnapshot::LiveBlock& live : pool.blocks) {
    uint64_t requested_bytes = live.block.requested_bytes;
    for (const PhysicalPiece& piece : live.pieces) {
      by_page[piece.page].push_back({piece.offset_bytes, piece.length_bytes, requested_bytes});
      requested_bytes = 0;
    }
  }
  for (auto& [page, pieces] : by_page) std::ranges::sort(pieces, {}, &Piece::offset_bytes);
  return by_page;
}

void AppendFree(uint64_t bytes, SegmentInfo& segment) {
  if (bytes == 0) return;
  BlockInfo info;
  info.size = bytes;
  segment.blocks.push_back(std::move(info));
}

void AppendPage(const std::vector<Piece>& pieces, uint64_t page_bytes, SegmentInfo& segment) {
  uint64_t done = 0;
  for (const Piece& piece : pieces) {
    AppendFree(piece.offset_bytes - done, segment);
    BlockInfo info;
    info.size = piece.length_bytes;
    info.requested_size = piece.requested_bytes;
    info.allocated = true;
    info.active = true;
    segment.blocks.push_back(std::move(info));
    segment.allocated_size += piece.length_bytes;
    segment.active_size += piece.length_bytes;
    segment.requested_size += piece.requested_bytes;
    done = piece.offset_bytes + piece.length_bytes;
  }
  AppendFree(page_bytes - done, segment);
  segment.total_size += page_bytes;
}

void AppendPool(c10::DeviceIndex device, PoolId id, const PoolSnapshot& pool,
                std::vector<SegmentInfo>& segments) {
  const PiecesByPage pieces = SortPieces(pool);
  const uint64_t page_bytes = pool.stats.page_bytes;
  std::vector<bool> shown;
  for (const PoolSnapshot::Range& range : pool.ranges) {
    bool open = false;  // whether the last segment ends where this page begins
    for (size_t i = 0; i < range.pages.size(); ++i) {
      const size_t page = Index(range.pages[i]);
      if (page >= shown.size()) shown.resize(page + 1);
      if (shown[page]) {
        open = false;
        continue;
      }
      shown[page] = true;
      if (!open) {
        SegmentInfo segment;
        segment.device = device;
        segment.address = range.address + i * page_bytes;
        segment.is_large = true;
        segment.is_expandable = true;
        segment.owner_private_pool_id = {id.first, id.second};
        segments.push_back(std::move(segment));
        open = true;
      }
      const auto found = pieces.find(range.pages[i]);
      AppendPage(found == pieces.end() ? std::vector<Piece>{} : found->second, page_bytes,
                 segments.back());
    }
  }
}

}  // namespace

void AppendSegments(DevicePools& pools, std::optional<PoolId> only,
                    std::vector<SegmentInfo>& segments) {
  for (const PoolId id : pools.set().ids()) {
    if (only && *only != id) continue;
    AppendPool(pools.device(), id, pools.set().Snapshot(id), segments);
  }
}

}  // namespace cgp
