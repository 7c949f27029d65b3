#include "core/pool_checkpoint.h"

#include <algorithm>
#include <utility>

#include "core/error.h"
#include "core/pool_state.h"
#include "core/reserve.h"

namespace cgp {

PoolCheckpoint Pool::Checkpoint() {
  State& s = *state_;
  CGP_CHECK(!s.scope);
  PoolCheckpoint checkpoint{.blocks = {}, .owner = s.identity};
  s.blocks.ForEach([&](Address, const LiveBlock& live) {
    checkpoint.blocks.push_back(
        {live.block, live.eager, live.others ? live.others->uses : std::vector<StreamId>()});
  });
  s.blocks.ForEach([&](Address, const LiveBlock& live) { s.ranges.Pin(live.slot); });
  std::ranges::sort(checkpoint.blocks, {}, [](const auto& entry) { return entry.block.address; });
  return checkpoint;
}

// A block that lives on keeps what was recorded of it.
RestoreDelta Pool::Restore(const PoolCheckpoint& checkpoint) {
  State& s = *state_;
  CGP_CHECK(!s.scope);
  if (checkpoint.owner.lock() != s.identity) {
    throw UsageError(
        "cudagraph_pool: the checkpoint was taken of another pool, or of one whose memory has been "
        "given back since.");
  }
  s.PollFences();  // what is over is forgotten, not handed on
  RestoreDelta delta;
  std::vector<std::pair<Address, FenceId>> dropped;
  std::vector<bool> lives_on(checkpoint.blocks.size());
  s.blocks.ForEach([&](Address address, LiveBlock& live) {
    delta.freed.push_back(live.block);
    const auto same = std::ranges::lower_bound(
        checkpoint.blocks, address, {}, [](const auto& entry) { return entry.block.address; });
    if (same != checkpoint.blocks.end() && same->block == live.block) {
      lives_on[static_cast<std::size_t>(same - checkpoint.blocks.begin())] = true;
      if (!same->uses.empty()) ReserveMore(live.GetOthers().uses, same->uses.size());
      return;
    }
    dropped.emplace_back(address, s.FenceFor(live));
    s.space.ReserveFence(dropped.back().second);
  });

  std::vector<LiveBlock> revived;
  const RangeTable::AddressIndex ranges = s.ranges.ByAddress();
  for (std::size_t i = 0; i < checkpoint.blocks.size(); ++i) {
    delta.allocated.push_back(checkpoint.blocks[i].block);
    if (!lives_on[i]) revived.push_back(s.BlockOf(checkpoint.blocks[i], ranges));
  }
  s.blocks.Reserve(checkpoint.blocks.size());
  s.space.ReservePages(0, revived.size());
  for (const auto& view : s.views) view->MakeRoomForNodes();

  // Nothing has changed so far but for fences that nothing stands behind, and nothing below calls
  // the driver or allocates.
  for (const auto& [address, fence] : dropped) s.Drop(s.Known(address), fence);
  for (std::size_t i = 0; i < checkpoint.blocks.size(); ++i) {
    if (!lives_on[i]) continue;
    const PoolCheckpoint::Entry& entry = checkpoint.blocks[i];
    LiveBlock* const live = s.blocks.Find(entry.block.address);
    // Or it is a later one that is just like it: then both count.
    live->Add(entry);
  }
  for (LiveBlock& live : revived) s.Revive(std::move(live));
  return delta;
}

// The block that is to be brought back, with room for all fences that its bytes may be behind.
LiveBlock Pool::State::BlockOf(const PoolCheckpoint::Entry& entry,
                               const RangeTable::AddressIndex& index) const {
  LiveBlock live;
  live.block = entry.block;
  const auto [slot, start] = ranges.At(entry.block.address, index);
  live.slot = slot;
  live.offset = static_cast<uint32_t>(start.count());
  live.Add(entry);
  if (!fences.empty()) live.GetOthers().behind.reserve(fences.limit());
  return live;
}

// Brings a block back where nothing lives now. Somebody may still be at work on the bytes: that is
// remembered until it is over, so that they stay protected when the block is freed. pre: there is
// room for what changes.
void Pool::State::Revive(LiveBlock live) {
  ForEachPiece(live, [&](PageId page, Granules offset, Granules length) {
    for (NodeId id = NodeAt(page, offset); id != NodeId::kNone; id = space.node(id).next) {
      const PageSpace::Node& node = space.node(id);
      if (Granules(node.offset) >= offset + length) break;
      CGP_CHECK(!node.used());
      if (node.fence != FenceId::kOpen) live.others->AddBehind(node.fence);
    }
  });
  if (live.others && live.others->empty()) live.others.reset();
  PlaceAt({live.slot, Granules(live.offset)}, live);
  stats.allocated_bytes += live.block.bytes;
  stats.requested_bytes += live.block.requested_bytes;
  ++stats.allocations;
  const Address address = live.block.address;
  blocks.Insert(address, std::move(live));
}

}  // namespace cgp
