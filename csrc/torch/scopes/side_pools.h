// Side pools: memory of the base for the graphs of our pools.
//
// torch does not ask us for all that a capture allocates. A storage asks the allocator that it was
// made by, so one from before enable() that has to grow in a capture (out=, Tensor.resize_(),
// FSDP2's unsharded parameters) asks the base. What the base then hands out must be kept for the
// graph too: eager memory would be somebody else's by the time the graph is replayed.
//
// So beside each capture scope of a pool of ours the base has a scope too, in a private pool of its
// own: the side pool of ours. It takes what our routes match to our pool. What we forward to the
// base matches none of our pools, so it never lands there. The base keeps the side pool as long as
// ours has users. Eager scopes need none: what the base hands out then is used by eager work.
//
// There is another use: as long as a route is open in the base it records and asks for no events
// and gives nothing back to the device, any of which could break a capture.
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

  // Begins and ends a scope of the pool's side pool, which is made if need be. If the base throws
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

  // The pool has no users left: nor has its side pool, if it has one. If the base throws, another
  // call goes on where this one ended. pre: no scope of it is open.
  void Release(DeviceIndex device, PoolId pool) {
    const auto found = side_pools_.find({device, pool});
    if (found == side_pools_.end()) return;
    SidePool& side_pool = found->second;
    // A user at a time, so that an error leaves to the next call what is left.
    for (; side_pool.users > 0; --side_pool.users) base_->releasePool(device, side_pool.id);
    const std::lock_guard lock(mutex_);
    if (*side_pool.used) past_owners_[side_pool.id] = NameOf(pool);
    side_pools_.erase(found);
  }

  // What the base calls the pool's side pool, if anything may have been allocated there.
  std::optional<MempoolId_t> Find(DeviceIndex device, PoolId pool) const {
    const std::lock_guard lock(mutex_);
    const auto found = side_pools_.find({device, pool});
    if (found == side_pools_.end() || !*found->second.used) return std::nullopt;
    return found->second.id;
  }

  // Put the names of our pools in the place of those of their side pools, also of side pools that
  // were given up and may hold memory yet.
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

  // The native allocator reopens no pool that nobody holds, so none is called like one before; nor
  // is a graph or a torch.cuda.MemPool. The first numbers differ, since torch hashes a name by that
  // number alone unless it is 0, and doubles its table of pools for each name with a known hash.
  MempoolId_t NewName() { return {~++made_, ~0ULL}; }
  static MempoolId_t NameOf(PoolId pool) { return {pool.first, pool.second}; }

  // Which pool each side pool belongs to.
  std::map<MempoolId_t, MempoolId_t> Owners() const {
    const std::lock_guard lock(mutex_);
    auto owners = past_owners_;
    for (const auto& [key, side_pool] : side_pools_) owners[side_pool.id] = NameOf(key.second);
    return owners;
  }

  Base* const base_;
  RouteTable& routes_;
  // For those whom the caller does not order. Never held while the base is called.
  mutable std::mutex mutex_;
  std::map<std::pair<DeviceIndex, PoolId>, SidePool> side_pools_;
  // Of those that were given up after they had been used: few, as only old storages use them.
  std::map<MempoolId_t, MempoolId_t> past_owners_;
  uint64_t made_ = 0;
};

}  // namespace cgp
