// Annexes: memory of the base for the graphs of our pools.
//
// torch does not ask us for all that a capture allocates. A storage asks the allocator that it was
// made by, so one from before enable() that has to grow in a capture (out=, Tensor.resize_(),
// FSDP2's unsharded parameters) asks the base. What the base then hands out must be kept for the
// graph too: eager memory would be somebody else's by the time the graph is replayed.
//
// So beside each capture scope of a pool of ours the base has a scope too, in a private pool of its
// own: the annex of ours. It takes what our routes match to our pool. What we forward to the base
// matches none of our pools, so it never lands there. The base keeps the annex as long as ours has
// users. Eager scopes need none: what the base hands out then is used by eager work.
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
#include "torch/scopes/routes.h"
#include "torch/torch_version.h"

namespace cgp {

class Annexes {
 public:
  // Both must outlive this. Without a base there are no annexes.
  Annexes(Base* base, RouteTable& routes) : base_(base), routes_(routes) {}

  // Begins and ends a scope of the pool's annex, which is made if need be. If the base throws
  // nothing has changed. The caller orders these calls and Release().
  void Begin(c10::DeviceIndex device, PoolId pool);
  void End(c10::DeviceIndex device, PoolId pool);
  // The pool has no users left: nor has its annex, if it has one. If the base throws, another call
  // goes on where this one ended. pre: no scope of it is open.
  void Release(c10::DeviceIndex device, PoolId pool);

  // What the base calls the pool's annex, if anything may have been allocated there.
  std::optional<c10::MempoolId_t> Find(c10::DeviceIndex device, PoolId pool) const;

  // Put the names of our pools in the place of those of their annexes, also of annexes that were
  // given up and may hold memory yet.
  void Rename(c10::cuda::CUDACachingAllocator::SnapshotInfo& info) const;
  void Rename(c10::CachingDeviceAllocator::DeviceStats& stats) const;

 private:
  struct Annex {
    // The native allocator reopens no pool that nobody holds, so none is called like one before.
    c10::MempoolId_t id;
    int users = 0;  // that the base counts: one for each Begin()
    // Whether the filter has ever taken an allocation.
    std::shared_ptr<std::atomic<bool>> used = std::make_shared<std::atomic<bool>>(false);
  };

  // Which pool each annex belongs to.
  std::map<c10::MempoolId_t, c10::MempoolId_t> Owners() const;

  Base* const base_;
  RouteTable& routes_;
  // For those whom the caller does not order. Never held while the base is called.
  mutable std::mutex mutex_;
  std::map<std::pair<c10::DeviceIndex, PoolId>, Annex> annexes_;
  // Of those that were given up after they had been used: few, as only old storages use them.
  std::map<c10::MempoolId_t, c10::MempoolId_t> past_owners_;
  uint64_t made_ = 0;
};

}  // namespace cgp
