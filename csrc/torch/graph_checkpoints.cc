// GraphAllocator: checkpoints, which are how torch.compile's graph trees go back to the end of an
// earlier graph to record another one from there.
#include <optional>
#include <unordered_map>

#include "torch/errors.h"
#include "torch/graph_allocator.h"

namespace cgp {
namespace {

struct CheckpointOfOurs final : cca::AllocatorState {
  PoolId id;
  PoolCheckpoint checkpoint;
  // The pool's annex, if it was in use, and the base's checkpoint of it.
  std::optional<MempoolId_t> annex;
  std::shared_ptr<cca::AllocatorState> of_annex;
};

}  // namespace

std::shared_ptr<cca::AllocatorState> GraphAllocator::getCheckpointState(DeviceIndex device,
                                                                        MempoolId_t id) {
  const auto ours = FindOurs(device, id);
  if (!ours) return base_.getCheckpointState(device, id);
  const auto state = std::make_shared<CheckpointOfOurs>();
  state->id = ours->id;
  state->checkpoint = AsTorchErrors([&] { return ours->pools->set().Checkpoint(ours->id); });
  state->annex = annexes_.Find(device, ours->id);
  if (state->annex) state->of_annex = base_.getCheckpointState(device, *state->annex);
  return state;
}

void GraphAllocator::NoteRestored(DevicePools& pools, PoolId id, const RestoreDelta& delta) {
  // Blocks that live on are in both. Of one list no two have the same address.
  const auto note = [&](History::Action action, const std::vector<Block>& blocks,
                        const std::vector<Block>& others) {
    std::unordered_map<Address, Block> known(others.size());
    for (const Block& other : others) known.emplace(other.address, other);
    for (const Block& block : blocks) {
      const auto same = known.find(block.address);
      if (same == known.end() || same->second != block) Note(action, {&pools, id, block});
    }
  };
  note(History::Action::FREE_REQUESTED, delta.freed, delta.allocated);
  note(History::Action::ALLOC, delta.allocated, delta.freed);
}

cca::CheckpointDelta GraphAllocator::setCheckpointPoolState(
    DeviceIndex device, std::shared_ptr<cca::AllocatorState> state) {
  const auto* const ours = dynamic_cast<const CheckpointOfOurs*>(state.get());
  if (ours == nullptr) return base_.setCheckpointPoolState(device, std::move(state));
  DevicePools& pools = AsTorchErrors([&]() -> DevicePools& { return DevicePools::For(device); });
  const History::Telling telling(history_);
  {
    // Trees go back after a graph that failed too.
    const std::lock_guard lock(scopes_mutex_);
    TakeAsFailed(device, ours->id);
  }
  // Asked first, as the base could refuse only when ours has been restored.
  TORCH_CHECK(!ours->annex || ours->annex == annexes_.Find(device, ours->id),
              "the checkpoint is of graph pool " + ToString(ours->id) +
                  " as it was before all its graphs were reset: take another one");
  BeforeOursChange(pools);
  // No other thread may use the pool now: torch goes back in it. The base goes first, since what it
  // throws then leaves ours as it was.
  cca::CheckpointDelta delta;
  if (ours->annex) delta = base_.setCheckpointPoolState(device, ours->of_annex);
  // What goes wrong now may not free what the caller's tensors still have.
  Undo disown([&] {
    for (c10::DataPtr& data : delta.dataptrs_allocd) data.release_context();
  });
  const RestoreDelta restored = AsTorchErrors([&] {
    const uint64_t live = pools.set().Stats(ours->id).live_blocks;
    delta.ptrs_freed.reserve(delta.ptrs_freed.size() + live);
    delta.dataptrs_allocd.reserve(delta.dataptrs_allocd.size() + ours->checkpoint.blocks.size());
    return pools.set().Restore(ours->id, ours->checkpoint);
  });
  disown.Keep();
  // The caller has to know what was restored, whatever others say of it.
  WithWarnings("the statistics", [&] { pools.stats().OursGrew(base_); });
  if (history_.active()) {
    WithWarnings("a tracker of allocations", [&] { NoteRestored(pools, ours->id, restored); });
  }
  for (const Block& block : restored.freed) {
    delta.ptrs_freed.push_back(reinterpret_cast<void*>(block.address));
  }
  for (const Block& block : restored.allocated) {
    void* const pointer = reinterpret_cast<void*>(block.address);
    delta.dataptrs_allocd.emplace_back(pointer, pointer, &FreeMemory,
                                       c10::Device(c10::kCUDA, device));
  }
  return delta;
}

}  // namespace cgp
