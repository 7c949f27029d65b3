// GraphAllocator: checkpoints, which are how torch.compile's graph trees go back to the end of an
// earlier graph to record another one from there.
#include <optional>

#include "torch/errors.h"
#include "torch/graph_allocator.h"
#include "torch/observe/block_events.h"

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
  const auto ours = scopes_.FindOurs(device, id);
  if (!ours) return base_.getCheckpointState(device, id);
  const auto state = std::make_shared<CheckpointOfOurs>();
  state->id = ours->id;
  state->checkpoint = AsTorchErrors([&] { return ours->pools->set.Checkpoint(ours->id); });
  state->annex = scopes_.annexes().Find(device, ours->id);
  if (state->annex) state->of_annex = base_.getCheckpointState(device, *state->annex);
  return state;
}

cca::CheckpointDelta GraphAllocator::setCheckpointPoolState(
    DeviceIndex device, std::shared_ptr<cca::AllocatorState> state) {
  const auto* const ours = dynamic_cast<const CheckpointOfOurs*>(state.get());
  if (ours == nullptr) return base_.setCheckpointPoolState(device, std::move(state));
  DevicePools& pools = AsTorchErrors([&]() -> DevicePools& { return DevicePools::For(device); });
  const History::Telling telling(history_);
  // Trees go back after a graph that failed too.
  scopes_.EndFailed(device, {ours->id.first, ours->id.second});
  // Asked first, as the base could refuse only when ours has been restored.
  TORCH_CHECK(!ours->annex || ours->annex == scopes_.annexes().Find(device, ours->id),
              "the checkpoint is of graph pool " + ToString(ours->id) +
                  " as it was before all its graphs were reset: take another one");
  pools.stats.BeforeChange(base_);
  // No other thread may use the pool now: torch goes back in it. The base goes first, since what it
  // throws then leaves ours as it was.
  cca::CheckpointDelta delta;
  if (ours->annex) delta = base_.setCheckpointPoolState(device, ours->of_annex);
  // What goes wrong now may not free what the caller's tensors still have.
  Undo disown([&] {
    for (c10::DataPtr& data : delta.dataptrs_allocd) data.release_context();
  });
  const RestoreDelta restored = AsTorchErrors([&] {
    const uint64_t live = pools.set.Stats(ours->id).live_blocks;
    delta.ptrs_freed.reserve(delta.ptrs_freed.size() + live);
    delta.dataptrs_allocd.reserve(delta.dataptrs_allocd.size() + ours->checkpoint.blocks.size());
    return pools.set.Restore(ours->id, ours->checkpoint);
  });
  disown.Keep();
  // The caller has to know what was restored, whatever others say of it.
  WithWarnings("the statistics", [&] { pools.stats.AfterGrowth(base_); });
  if (history_.active()) {
    WithWarnings("a tracker of allocations",
                 [&] { NoteRestored(base_, pools, ours->id, restored); });
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
