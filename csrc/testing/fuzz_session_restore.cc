// How a FuzzSession takes and restores checkpoints.
#include <algorithm>
#include <string>
#include <utility>
#include <vector>

#include "testing/fuzz_session.h"

namespace cgp {

std::string FuzzSession::Do(const CheckpointOp& op) {
  const PoolId id = IdOf(op.pool);
  PoolCheckpoint real;
  return Mirror(
      model_.Contains(id) && !model_.OpenScope(id), [&] { real = set_->Checkpoint(id); },
      [&] {
        checkpoints_[op.number] = {.real = std::move(real), .naive = model_.TakeCheckpoint(id)};
      });
}

std::string FuzzSession::Do(const RestoreOp& op) {
  const auto it = checkpoints_.find(op.number);
  if (it == checkpoints_.end()) return {};
  const PoolId id = IdOf(op.pool);
  const Kept& kept = it->second;
  RestoreDelta delta;
  std::string wrong;
  std::string complaint = Mirror(
      model_.MayRestore(id, kept.naive), [&] { delta = set_->Restore(id, kept.real); },
      [&] { wrong = Restored(id, kept.naive, delta); });
  return complaint.empty() ? wrong : complaint;
}

std::string FuzzSession::Restored(PoolId id, const PoolModel::Checkpoint& checkpoint,
                                  const RestoreDelta& delta) {
  const auto blocks_of = [](const std::vector<PoolModel::LiveBlock>& live) {
    std::vector<Block> blocks;
    blocks.reserve(live.size());
    for (const PoolModel::LiveBlock& one : live) blocks.push_back(one.block);
    return blocks;
  };
  const auto sorted = [](std::vector<Block> blocks) {
    std::ranges::sort(blocks, {}, &Block::address);
    return blocks;
  };
  if (sorted(delta.freed) != blocks_of(model_.TakeCheckpoint(id).blocks)) {
    return "a restore says it freed other blocks than lived";
  }
  const PoolModel::Restored restored = model_.Restore(checkpoint);
  if (sorted(delta.allocated) != blocks_of(model_.TakeCheckpoint(id).blocks)) {
    return "a restore says other blocks live than do";
  }
  for (const PoolModel::LiveBlock& dropped : restored.dropped) {
    std::erase(live_labels_, dropped.label);
    freed_labels_.push_back(dropped.label);
  }
  if (!restored.complaint.empty()) return restored.complaint;
  for (const PoolModel::LiveBlock& revived : restored.revived) {
    std::erase(freed_labels_, revived.label);
    live_labels_.push_back(revived.label);
    std::string complaint = JudgePieces(id, revived.block, set_->Pieces(revived.block.address));
    if (!complaint.empty()) return complaint;
    watch_.Submit(revived.block.stream);
    if (setup_.map_memory) KernelOf(revived.label, revived.block, /*writes=*/true).Run();
  }
  return {};
}

}  // namespace cgp
