// Side pools: memory of the base that graphs of our pools use.
//
// torch does not ask us for all that a capture allocates. A storage asks the allocator that made
// it. So a storage from before enable() that has to grow in a capture (out=, Tensor.resize_(),
// FSDP2's unsharded parameters) asks the base. What the base then hands out must stay for the graph
// too: the bytes of eager memory would be another owner's by the time of a replay.
//
// So while a capture scope of our pool is open, the base has a scope too, in a private pool of its
// own: the side pool of ours. It serves what our routes match to our pool. What we forward to the
// base matches none of our pools, so it never lands there. The base holds the side pool as long as
// ours has users. Eager scopes need none: eager work uses what the base hands out then.
//
// It has another use: while a route is open in the base, the base records and queries no events,
// and gives nothing back to the device. Any of these could break a capture.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <utility>

#include "core/pool_set.h"
#include "torch/observe/merged_stats.h"
#include "torch/scopes/routes.h"
#include "torch/torch_version.h"

namespace cgp {

class SidePools {
 public:
  // Both must outlive this. Without a base there are no side pools.
  SidePools(Base* base, RouteTable& routes) : base_(base), routes_(routes) {}

  // Begin and end a scope of the pool's side pool, which is made if need be. If the base throws,
  // nothing has changed. The caller orders these calls and Release().
  void Begin(DeviceIndex device, PoolId pool) {
    if (base_ == nullptr) return;
    std::unique_lock lock(mutex_);
    SidePool& side_pool = side_pools_[{device, pool}];
    if (side_pool.users == 0) side_pool.id = NewName();
    lock.unlock();
    base_->beginAllocateToPool(
        device, side_pool.id, [this, device, pool, used = side_pool.used](cudaStream_t stream) {
          const auto target = routes_.Match(device, stream);
          const bool takes = target && target->pools != nullptr && target->id == pool;
          if (takes) used->store(true, std::memory_order_relaxed);
          return takes;
        });
    ++side_pool.users;
  }
  void End(DeviceIndex device, PoolId pool) {
    if (base_ != nullptr) base_->endAllocateToPool(device, side_pools_.at({device, pool}).id);
  }

  // The pool has no users left, so its side pool, if any, loses its own. If the base throws,
  // another call goes on where this one ended. pre: no scope of it is open.
  void Release(DeviceIndex device, PoolId pool) {
    const auto found = side_pools_.find({device, pool});
    if (found == side_pools_.end()) return;
    SidePool& side_pool = found->second;
    // One user at a time, so that an error leaves the rest to the next call.
    for (; side_pool.users > 0; --side_pool.users) base_->releasePool(device, side_pool.id);
    const std::lock_guard lock(mutex_);
    if (*side_pool.used) past_owners_[side_pool.id] = NameOf(pool);
    side_pools_.erase(found);
  }

  // The base's id of the pool's side pool, if anything may have been allocated there.
  std::optional<MempoolId_t> Find(DeviceIndex device, PoolId pool) const {
    const std::lock_guard lock(mutex_);
    const auto found = side_pools_.find({device, pool});
    if (found == side_pools_.end() || !*found->second.used) return std::nullopt;
    return found->second.id;
  }

  // Replace the names of side pools by those of our pools, also of side pools that were given up
  // and may still hold memory.
  void Rename(c10::cuda::CUDACachingAllocator::SnapshotInfo& info) const {
    const auto owners = Owners();
    const auto rename = [&](MempoolId_t& id) {
      if (const auto owner = owners.find(id); owner != owners.end()) id = owner->second;
    };
    for (auto& segment : info.segments) rename(segment.owner_private_pool_id);
    for (auto& trace : info.device_traces) {
      for (auto& entry : trace) rename(entry.mempool_);
    }
  }
  void Rename(c10::CachingDeviceAllocator::DeviceStats& stats) const {
    auto* const pools = ReservedByPrivatePool(stats);
    if (pools == nullptr) return;
    for (const auto& [side_pool, owner] : Owners()) {
      const auto found = pools->find(side_pool);  // in a map of torch's own, which cannot extract
      if (found == pools->end()) continue;
      const c10::CachingAllocator::StatArray counts = found->second;
      pools->erase(found);
      AddHigherPeaks(counts, (*pools)[owner]);
    }
  }

 private:
  struct SidePool {
    MempoolId_t id;
    int users = 0;  // that the base counts: one for each Begin()
    // Whether the filter has ever taken an allocation.
    std::shared_ptr<std::atomic<bool>> used = std::make_shared<std::atomic<bool>>(false);
  };

  // The native allocator reopens no pool without a user, so no two side pools have one name; nor
  // has a graph or a torch.cuda.MemPool. The first numbers differ: torch hashes a name by that
  // number alone unless it is 0, and doubles its table of pools for each name with a known hash.
  MempoolId_t NewName() { return {~++made_, ~0ULL}; }
  static MempoolId_t NameOf(PoolId pool) { return {pool.first, pool.second}; }

  // The pool of ours that each side pool belongs to.
  std::map<MempoolId_t, MempoolId_t> Owners() const {
    const std::lock_guard lock(mutex_);
    auto owners = past_owners_;
    for (const auto& [key, side_pool] : side_pools_) owners[side_pool.id] = NameOf(key.second);
    return owners;
  }

  Base* const base_;
  RouteTable& routes_;
  // For readers whom the caller does not order. Never held while the base is called.
  mutable std::mutex mutex_;
  std::map<std::pair<DeviceIndex, PoolId>, SidePool> side_pools_;
  // Of side pools that were given up after use: few, since only old storages use them.
  std::map<MempoolId_t, MempoolId_t> past_owners_;
  uint64_t made_ = 0;
};

}  // namespace cgp
