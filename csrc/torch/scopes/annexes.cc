#include "torch/scopes/annexes.h"

#include "torch/observe/merged_stats.h"

namespace cgp {
namespace {

c10::MempoolId_t NameOf(PoolId pool) { return {pool.first, pool.second}; }

// No graph and no torch.cuda.MemPool is called so. The first numbers differ, since torch hashes a
// name by that number alone unless it is 0, and doubles its table of pools for each name that
// hashes as others do.
c10::MempoolId_t AnnexName(uint64_t number) { return {~number, ~0ULL}; }

}  // namespace

void Annexes::Begin(c10::DeviceIndex device, PoolId pool) {
  if (base_ == nullptr) return;
  std::unique_lock lock(mutex_);
  Annex& annex = annexes_[{device, pool}];
  if (annex.users == 0) annex.id = AnnexName(++made_);
  lock.unlock();
  base_->beginAllocateToPool(
      device, annex.id, [this, device, pool, used = annex.used](cudaStream_t stream) {
        const auto target = routes_.Match(device, stream);
        const bool takes = target && target->pools != nullptr && target->id == pool;
        if (takes) used->store(true, std::memory_order_relaxed);
        return takes;
      });
  ++annex.users;
}

void Annexes::End(c10::DeviceIndex device, PoolId pool) {
  if (base_ != nullptr) base_->endAllocateToPool(device, annexes_.at({device, pool}).id);
}

void Annexes::Release(c10::DeviceIndex device, PoolId pool) {
  const auto found = annexes_.find({device, pool});
  if (found == annexes_.end()) return;
  Annex& annex = found->second;
  // A user at a time, so that an error leaves to the next call what is left.
  for (; annex.users > 0; --annex.users) base_->releasePool(device, annex.id);
  const std::lock_guard lock(mutex_);
  if (*annex.used) past_owners_[annex.id] = NameOf(pool);
  annexes_.erase(found);
}

std::optional<c10::MempoolId_t> Annexes::Find(c10::DeviceIndex device, PoolId pool) const {
  const std::lock_guard lock(mutex_);
  const auto found = annexes_.find({device, pool});
  if (found == annexes_.end() || !*found->second.used) return std::nullopt;
  return found->second.id;
}

std::map<c10::MempoolId_t, c10::MempoolId_t> Annexes::Owners() const {
  const std::lock_guard lock(mutex_);
  auto owners = past_owners_;
  for (const auto& [key, annex] : annexes_) owners[annex.id] = NameOf(key.second);
  return owners;
}

void Annexes::Rename(c10::cuda::CUDACachingAllocator::SnapshotInfo& info) const {
  const auto owners = Owners();
  const auto rename = [&](c10::MempoolId_t& id) {
    if (const auto owner = owners.find(id); owner != owners.end()) id = owner->second;
  };
  for (auto& segment : info.segments) rename(segment.owner_private_pool_id);
  for (auto& trace : info.device_traces) {
    for (auto& entry : trace) rename(entry.mempool_);
  }
}

void Annexes::Rename(c10::CachingDeviceAllocator::DeviceStats& stats) const {
  for (const auto& [annex, owner] : Owners()) {
    MovePrivatePool(stats, annex, owner, AddHigherPeaks);
  }
}

}  // namespace cgp
