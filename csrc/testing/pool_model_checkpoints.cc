// Checkpoints in the model: what lived then, and lives again.
#include <algorithm>
#include <set>
#include <utility>

#include "testing/pool_model.h"

namespace cgp {

bool PoolModel::MayRestore(PoolId id, const Checkpoint& checkpoint) const {
  const ModelPool* const pool = Find(id);
  return pool != nullptr && !pool->scope && checkpoint.pool == id &&
         checkpoint.incarnation == pool->incarnation;
}

PoolModel::Checkpoint PoolModel::TakeCheckpoint(PoolId id) const {
  Checkpoint checkpoint{id, pools_.at(id).incarnation, {}};
  for (const auto& [address, live] : live_) {
    if (live.pool == id) checkpoint.blocks.push_back(live);
  }
  return checkpoint;
}

void PoolModel::KeepLive(PoolId id) {
  for (const LiveBlock& live : TakeCheckpoint(id).blocks) Touch(Known(id).kept, live);
}

// All that lives and did not live then is freed; then all that lived then and does not live now is
// taken again. A block that is just like one that lived then passes for it, and keeps its label.
PoolModel::Restored PoolModel::Restore(const Checkpoint& checkpoint, const PiecesOf& pieces_of) {
  ModelPool& pool = Known(checkpoint.pool);
  Restored restored;
  std::set<const Fence*> fresh;
  for (const LiveBlock& live : TakeCheckpoint(checkpoint.pool).blocks) {
    const auto same = std::ranges::find(checkpoint.blocks, live.block, &LiveBlock::block);
    if (same == checkpoint.blocks.end()) {
      restored.dropped.push_back(live);
      Free(live.block.address);
      const PhysicalPiece& piece = live.pieces.front();
      const std::vector<Granule>& page = pool.pages.at(Index(piece.page));
      fresh.insert(page[piece.offset_bytes / kGranuleBytes].fence.get());
    } else {
      LiveBlock& kept = live_.at(live.block.address);
      kept.uses.insert(same->uses.begin(), same->uses.end());
      kept.suspects.insert(same->suspects.begin(), same->suspects.end());
      kept.eager |= same->eager;
    }
  }
  for (LiveBlock then : checkpoint.blocks) {
    if (live_.contains(then.block.address)) continue;
    then.pieces = pieces_of(then.block.address);
    restored.revived.push_back(then);
    std::string complaint = Revive(pool, fresh, then);
    if (!complaint.empty()) restored.complaint = std::move(complaint);
  }
  return restored;
}

}  // namespace cgp
