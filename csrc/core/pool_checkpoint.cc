#include "core/pool_checkpoint.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/pool_state.h"

namespace cgp {

PoolCheckpoint Pool::Checkpoint() const {
  const State& s = *state_;
  CGP_CHECK(!s.scope);
  PoolCheckpoint checkpoint{.blocks = {}, .owner = s.identity};
  s.blocks.ForEach([&](Address, const LiveBlock& live) {
    checkpoint.blocks.push_back({live.block, live.slot, Granules(live.offset), live.eager,
                                 live.others ? live.others->uses : std::vector<StreamId>()});
  });
  std::ranges::sort(checkpoint.blocks, {}, [](const auto& entry) { return entry.block.address; });
  return checkpoint;
}

// A block that lives on keeps what was recorded of it.
RestoreDelta Pool::Restore(const PoolCheckpoint& checkpoint) {
  State& s = *state_;
  CGP_CHECK(!s.scope);
  if (checkpoint.owner.lock() != s.identity) {
    throw UsageError(
        "cudagraph_pool: the checkpoint was taken of another pool, or of one that is gone.");
  }
  s.PollFences();  // what is over is forgotten, not handed on
  RestoreDelta delta;
  std::vector<std::pair<Address, FenceId>> dropped;
  s.blocks.ForEach([&](Address address, const LiveBlock& live) {
    delta.freed.push_back(live.block);
    const auto same = std::ranges::lower_bound(
        checkpoint.blocks, address, {}, [](const auto& entry) { return entry.block.address; });
    if (same != checkpoint.blocks.end() && same->block == live.block) return;
    dropped.emplace_back(address, s.FenceFor(live));
    s.space.ReserveFence(dropped.back().second);
  });

  // Nothing has changed so far but for fences that nothing stands behind, and nothing below calls
  // the driver.
  for (const auto& [address, fence] : dropped) s.Drop(s.Known(address), fence);
  for (const PoolCheckpoint::Entry& entry : checkpoint.blocks) {
    delta.allocated.push_back(entry.block);
    if (LiveBlock* const live = s.blocks.Find(entry.block.address)) {
      // Or it is a later one that is just like it: then both count.
      live->Add(entry);
    } else {
      s.Revive(entry);
    }
  }
  return delta;
}

// Brings a block back that lived where nothing lives now. Somebody may still be at work on the
// bytes: that is remembered until it is over, so that they stay protected when the block is freed.
void Pool::State::Revive(const PoolCheckpoint::Entry& entry) {
  blocks.ReserveOne();
  LiveBlock live;
  live.block = entry.block;
  live.slot = entry.slot;
  live.offset = static_cast<uint32_t>(entry.offset.count());
  live.Add(entry);
  ForEachPiece(live, [&](PageId page, Granules offset, Granules length) {
    space.ReservePages(0);
    for (NodeId id = NodeAt(page, offset); id != NodeId::kNone; id = space.node(id).next) {
      const PageSpace::Node& node = space.node(id);
      if (Granules(node.offset) >= offset + length) break;
      CGP_CHECK(!node.used());
      if (node.fence != FenceId::kOpen) live.GetOthers().behind.push_back(node.fence);
    }
  });
  PlaceAt({live.slot, entry.offset}, live);
  stats.allocated_bytes += live.block.bytes;
  stats.requested_bytes += live.block.requested_bytes;
  ++stats.allocations;
  const Address address = live.block.address;
  blocks.Insert(address, std::move(live));
}

}  // namespace cgp
