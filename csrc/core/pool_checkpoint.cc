#include "core/pool_checkpoint.h"

#include <algorithm>
#include <utility>

#include "core/base/error.h"
#include "core/base/reserve.h"
#include "core/pool_state.h"

namespace cgp {

PoolCheckpoint Pool::Checkpoint() {
  State& s = *state_;
  CGP_CHECK(!in_scope());
  PoolCheckpoint checkpoint{.blocks = {}, .owner = s.identity};
  s.blocks.ForEach([&](Address, const LiveBlock& live) {
    checkpoint.blocks.push_back(
        {live.block, live.eager, live.others ? live.others->uses : std::vector<StreamId>()});
  });
  s.blocks.ForEach([&](Address, const LiveBlock& live) { s.ranges.Pin(live.site.slot); });
  std::ranges::sort(checkpoint.blocks, {}, [](const auto& entry) { return entry.block.address; });
  return checkpoint;
}

// A block that lives on keeps what was recorded of it.
RestoreDelta Pool::Restore(const PoolCheckpoint& checkpoint) {
  State& s = *state_;
  CGP_CHECK(!in_scope());
  if (checkpoint.owner.lock() != s.identity) {
    throw UsageError(
        "cudagraph_pool: the checkpoint was taken of another pool, or of one whose memory has been "
        "given back since.");
  }
  s.memory.Poll();  // what is over is forgotten, not handed on
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
    dropped.emplace_back(address, s.memory.FenceFor(live));
  });

  std::vector<LiveBlock> revived;
  const RangeTable::AddressIndex ranges = s.ranges.ByAddress();
  for (std::size_t i = 0; i < checkpoint.blocks.size(); ++i) {
    delta.allocated.push_back(checkpoint.blocks[i].block);
    if (!lives_on[i]) revived.push_back(s.BlockOf(checkpoint.blocks[i], ranges));
  }
  s.blocks.Reserve(checkpoint.blocks.size());
  s.memory.bytes().ReserveTake(revived.size());

  // Nothing has changed so far but for fences that nothing stands behind, and nothing below calls
  // the driver or allocates.
  for (const auto& [address, fence] : dropped) {
    const LiveBlock& live = s.Known(address);
    s.memory.Give(live, fence);
    s.Unlist(Block(live.block), live.ticket);
  }
  for (std::size_t i = 0; i < checkpoint.blocks.size(); ++i) {
    if (!lives_on[i]) continue;
    const PoolCheckpoint::Entry& entry = checkpoint.blocks[i];
    LiveBlock* const live = s.blocks.Find(entry.block.address);
    // Or it is a later one that is just like it: then both count.
    live->AddWork(entry.eager, entry.uses);
  }
  for (LiveBlock& live : revived) {
    s.memory.Revive(live);
    s.List(std::move(live));
  }
  return delta;
}

// The block that is to be brought back, with room for all fences that its bytes may be behind.
LiveBlock Pool::State::BlockOf(const PoolCheckpoint::Entry& entry,
                               const RangeTable::AddressIndex& index) const {
  LiveBlock live;
  live.block = entry.block;
  const auto [slot, start] = ranges.At(entry.block.address, index);
  live.site = {.slot = slot, .offset = static_cast<uint32_t>(start.count())};
  live.AddWork(entry.eager, entry.uses);
  memory.ReserveRevive(live);
  return live;
}

}  // namespace cgp
