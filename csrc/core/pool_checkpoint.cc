// Back to what lived earlier.
#include <algorithm>
#include <utility>

#include "core/base/error.h"
#include "core/base/reserve.h"
#include "core/pool.h"

namespace cgp {

PoolCheckpoint Pool::Checkpoint() {
  CGP_CHECK(!in_scope());
  PoolCheckpoint checkpoint{.blocks = {}, .owner = identity_};
  blocks_.ForEach([&](Address, const LiveBlock& live) {
    checkpoint.blocks.push_back(
        {live.block, live.eager, live.others ? live.others->uses : std::vector<StreamId>()});
  });
  blocks_.ForEach([&](Address, const LiveBlock& live) { ranges_.Pin(live.site.slot); });
  std::ranges::sort(checkpoint.blocks, {}, [](const auto& entry) { return entry.block.address; });
  return checkpoint;
}

// A block that lives on keeps what was recorded of it.
RestoreDelta Pool::Restore(const PoolCheckpoint& checkpoint) {
  CGP_CHECK(!in_scope());
  if (checkpoint.owner.lock() != identity_) {
    throw UsageError(
        "cudagraph_pool: the checkpoint was taken of another pool, or of one whose memory has been "
        "given back since.");
  }
  memory_.Poll();  // what is over is forgotten, not handed on
  memory_.DissolveRing();
  RestoreDelta delta;
  std::vector<std::pair<Address, FenceId>> dropped;
  std::vector<bool> lives_on(checkpoint.blocks.size());
  blocks_.ForEach([&](Address address, LiveBlock& live) {
    delta.freed.push_back(live.block);
    const auto same = std::ranges::lower_bound(
        checkpoint.blocks, address, {}, [](const auto& entry) { return entry.block.address; });
    if (same != checkpoint.blocks.end() && same->block == live.block) {
      lives_on[static_cast<std::size_t>(same - checkpoint.blocks.begin())] = true;
      if (!same->uses.empty()) ReserveMore(live.GetOthers().uses, same->uses.size());
      return;
    }
    dropped.emplace_back(address, memory_.FenceFor(live));
  });

  std::vector<LiveBlock> revived;
  const RangeTable::AddressIndex ranges = ranges_.ByAddress();
  for (std::size_t i = 0; i < checkpoint.blocks.size(); ++i) {
    const PoolCheckpoint::Entry& entry = checkpoint.blocks[i];
    delta.allocated.push_back(entry.block);
    if (lives_on[i]) continue;
    LiveBlock& live = revived.emplace_back();
    live.block = entry.block;
    const auto [slot, start] = ranges_.At(entry.block.address, ranges);
    live.site = {.slot = slot, .offset = static_cast<uint32_t>(start.count())};
    live.AddWork(entry.eager, entry.uses);
    memory_.ReserveRevive(live);
  }
  blocks_.Reserve(checkpoint.blocks.size());
  memory_.bytes().ReserveTake(revived.size());

  // Nothing has changed so far but for fences that nothing stands behind, and nothing below calls
  // the driver or allocates.
  for (const auto& [address, fence] : dropped) {
    const LiveBlock& live = Known(address);
    memory_.Give(live, fence);
    unpinned_ -= live.pinned ? 0 : 1;
    Unlist(Block(live.block));
  }
  for (std::size_t i = 0; i < checkpoint.blocks.size(); ++i) {
    if (!lives_on[i]) continue;
    const PoolCheckpoint::Entry& entry = checkpoint.blocks[i];
    LiveBlock* const live = blocks_.Find(entry.block.address);
    // Or it is a later one that is just like it: then both count.
    live->AddWork(entry.eager, entry.uses);
  }
  for (LiveBlock& live : revived) {
    memory_.Revive(live);
    List(std::move(live));
  }
  return delta;
}

}  // namespace cgp
