// GraphAllocator: whose pool is it, and who allocates in it now. The rules are in
// graph_allocator.h.
#include <c10/util/Exception.h>

#include <string>

#include "core/error.h"
#include "torch/errors.h"
#include "torch/graph_allocator.h"
#include "torch/host_route.h"
#include "torch/streams.h"

namespace cgp {
namespace {

// The pools of `device` if the pool is one of them, else nullptr.
DevicePools* PoolsWith(PoolId pool, DeviceIndex device) {
  DevicePools* const pools = DevicePools::Find(device);
  return pools != nullptr && pools->set().Contains(pool) ? pools : nullptr;
}

}  // namespace

DevicePools* GraphAllocator::OursOrNull(DeviceIndex device, MempoolId_t id) const {
  return PoolsWith(names_.Find(device, id), device);
}

bool GraphAllocator::BaseKnows(DeviceIndex device, MempoolId_t id) const {
  try {
    return base_.getPoolUseCount(device, id) > 0;
  } catch (const c10::Error&) {
    return false;  // what the native allocator answers for an id that it never saw
  }
}

bool GraphAllocator::IsUndecided(DevicePools& pools, PoolId id) const {
  return !registered_.contains({pools.device(), id}) && !routes_.Contains(pools.device(), id) &&
         pools.set().Stats(id).allocations == 0;
}

void GraphAllocator::HandToBase(DevicePools& pools, MempoolId_t id) {
  const PoolId pool{id.first, id.second};
  for (int users = pools.set().UseCount(pool); users > 0; --users) {
    base_.beginAllocateToPool(pools.device(), id, [](cudaStream_t) { return false; });
    base_.endAllocateToPool(pools.device(), id);
    pools.set().Release(pool);
  }
  ReleaseUnusedAnnex(pools, pool);
}

// A capture may not wait for another one that fills the shared pool: it gets a pool of its own then.
bool GraphAllocator::SharesPool(DeviceIndex device, MempoolId_t id) const {
  if (names_.UseCount(device, id) > 0) return true;
  return takes_captures() && shares_captures_ && PoolNames::IsAnonymous(id) &&
         OursOrNull(device, id) == nullptr && !BaseKnows(device, id) &&
         !routes_.Contains(device, PoolNames::kShared);
}

void GraphAllocator::ReleaseUnusedAnnex(DevicePools& pools, PoolId id) {
  if (pools.set().UseCount(id) > 0 || routes_.Contains(pools.device(), id)) return;
  WithWarnings("the allocator below it, told that a pool's graphs are gone,",
               [&] { annexes_.Release(pools.device(), id); });
}

void GraphAllocator::EndAnnexScope(DevicePools& pools, PoolId id) {
  WithWarnings("the allocator below it, told that a capture is over,",
               [&] { annexes_.End(pools.device(), id); });
  ReleaseUnusedAnnex(pools, id);
}

void GraphAllocator::NoteBasesTree(DeviceIndex device, PoolId id) {
  if (mempools_.contains({device, id})) return;
  bases_trees_.insert({device, id});
  base_serves_trees_.store(true, std::memory_order_release);
}

void GraphAllocator::ForgetBasesDeadTrees() {
  std::erase_if(bases_trees_, [this](const ScopeKey& key) {
    return !BaseKnows(key.first, {key.second.first, key.second.second});
  });
  base_serves_trees_.store(!bases_trees_.empty(), std::memory_order_release);
}

void GraphAllocator::beginAllocateToPool(DeviceIndex device, MempoolId_t id, StreamFilter filter) {
  const std::lock_guard lock(scopes_mutex_);
  const cudaStream_t stream = CurrentStream(device);
  EndAbandonedCaptures(stream);
  const bool capturing = IsCapturing(stream);
  const bool takes_current = filter(stream);
  const ScopeKind kind = takes_current && !capturing ? ScopeKind::kEager : ScopeKind::kCapture;

  const bool shares = kind == ScopeKind::kCapture && SharesPool(device, id);
  const PoolId pool = shares ? PoolNames::kShared : names_.Find(device, id);
  DevicePools* pools = PoolsWith(pool, device);
  if (kind == ScopeKind::kEager) {
    ForgetBasesDeadTrees();
    if (pools != nullptr && !bases_trees_.empty() && IsUndecided(*pools, pool)) {
      HandToBase(*pools, id);
      pools = nullptr;
    }
  }
  if (pools == nullptr && takes_captures() && (shares || !BaseKnows(device, id))) {
    pools = AsTorchErrors([&] { return &DevicePools::For(device); });
  }
  if (pools == nullptr && kind == ScopeKind::kEager) NoteBasesTree(device, pool);

  Route route{.device = device,
              .id = pool,
              .name = id,
              .filter = filter,
              .kind = kind,
              .ours = pools != nullptr,
              .origin = stream,
              .thread = std::this_thread::get_id()};
  if (pools == nullptr) {
    base_.beginAllocateToPool(device, id, std::move(filter));
    routes_.Add(std::move(route));
    if (kind == ScopeKind::kCapture) ++captures_of_base_;
    return;
  }
  if (kind == ScopeKind::kCapture && routes_.Resume(device, pool, stream, route.filter)) {
    pools->set().Retain(pool);
    if (pool == PoolNames::kShared) names_.Share(device, id);
    return;
  }
  // Only what goes on with a capture begins while its stream is capturing. CUDA would refuse as
  // well, but by then torch would have left this route behind.
  TORCH_CHECK(!capturing || takes_current,
              "cannot begin a capture into graph pool " + ToString(pool) +
                  ": the current stream is capturing another graph already. Captures do not nest: "
                  "end that one first, or capture on another stream");
  AsTorchErrors([&] { pools->set().BeginScope(pool, kind); });
  if (kind == ScopeKind::kCapture) {
    try {
      annexes_.Begin(device, pool);
    } catch (...) {
      pools->set().EndScope(pool);
      pools->set().Release(pool);
      throw;
    }
    ++captures_of_ours_;
  }
  routes_.Add(std::move(route));
  if (pool == PoolNames::kShared) names_.Share(device, id);
}

void GraphAllocator::endAllocateToPool(DeviceIndex device, MempoolId_t id) {
  const std::lock_guard lock(scopes_mutex_);
  const PoolId pool = names_.Find(device, id);
  // While a capture goes on in the pool, an end that is still owed is that of the graph that failed
  // before. Were it the capture's own, around the body of a conditional node, the body's begin would
  // be refused: better than a capture that goes on without its pool.
  if (routes_.IsBeingCaptured(device, pool) && TakeLateEnd(device, pool)) return;
  if (routes_.Pause(device, pool)) return;
  const auto route = routes_.Remove(device, pool);
  if (route && route->ours) {
    DevicePools& pools = DevicePools::For(device);
    AsTorchErrors([&] { pools.set().EndScope(pool); });
    if (route->kind == ScopeKind::kCapture) EndAnnexScope(pools, pool);
    return;
  }
  if (!route && TakeLateEnd(device, pool)) return;
  base_.endAllocateToPool(device, id);
}

bool GraphAllocator::TakeLateEnd(DeviceIndex device, PoolId pool) {
  const auto late = late_ends_.find({device, pool});
  if (late == late_ends_.end()) return false;
  if (--late->second == 0) late_ends_.erase(late);
  return true;
}

void GraphAllocator::releasePool(DeviceIndex device, MempoolId_t id) {
  const std::lock_guard lock(scopes_mutex_);
  DevicePools* pools = OursOrNull(device, id);
  if (pools == nullptr) {
    base_.releasePool(device, id);
    if (!BaseKnows(device, id)) mempools_.erase({device, {id.first, id.second}});
    ForgetBasesDeadTrees();
    return;
  }
  const PoolId pool = names_.Find(device, id);
  AsTorchErrors([&] { pools->set().Release(pool); });
  names_.Release(device, id);
  ReleaseUnusedAnnex(*pools, pool);
}

int GraphAllocator::getPoolUseCount(DeviceIndex device, MempoolId_t id) {
  DevicePools* pools = OursOrNull(device, id);
  if (pools == nullptr) return base_.getPoolUseCount(device, id);
  const PoolId pool = names_.Find(device, id);
  return pool == PoolNames::kShared ? names_.UseCount(device, id) : pools->set().UseCount(pool);
}

void GraphAllocator::createOrIncrefPool(DeviceIndex device, MempoolId_t id,
                                        std::shared_ptr<CUDAAllocator> allocator) {
  const std::lock_guard lock(scopes_mutex_);
  DevicePools* pools = OursOrNull(device, id);
  if (pools == nullptr) {
    base_.createOrIncrefPool(device, id, std::move(allocator));
    mempools_.insert({device, {id.first, id.second}});
    return;
  }
  TORCH_CHECK(allocator == nullptr,
              "graph pool " + ToString(PoolId{id.first, id.second}) +
                  " already allocates by itself: it cannot be given another allocator");
  const PoolId pool = names_.Find(device, id);
  pools->set().Retain(pool);
  if (pool == PoolNames::kShared) names_.Share(device, id);
}

void GraphAllocator::EndAbandonedCaptures() {
  const std::lock_guard lock(scopes_mutex_);
  EndAbandonedCaptures(std::nullopt);
}

void GraphAllocator::EndAbandonedCaptures(std::optional<cudaStream_t> origin) {
  for (const Route& route : routes_.RemoveAbandoned(origin)) {
    if (!route.ours) continue;  // the base keeps its own books
    DevicePools& pools = DevicePools::For(route.device);
    pools.set().EndScope(route.id);
    EndAnnexScope(pools, route.id);
    EndHostRoute(route.name);
    if (kGraphReleasesAbandonedPool) {
      ++late_ends_[{route.device, route.id}];
    } else {
      pools.set().Release(route.id);
      names_.Release(route.device, route.name);
    }
    ReleaseUnusedAnnex(pools, route.id);
  }
}

void GraphAllocator::RegisterPool(DeviceIndex device, PoolId id) {
  const std::lock_guard lock(scopes_mutex_);
  PoolSet& set = DevicePools::For(device).set();
  if (set.Contains(id) || BaseKnows(device, {id.first, id.second})) {
    throw UsageError("pool " + ToString(id) + " of device " + std::to_string(device) +
                     " is in use already");
  }
  set.Retain(id);
  registered_.insert({device, id});
}

void GraphAllocator::UnregisterPool(DeviceIndex device, PoolId id) {
  const std::lock_guard lock(scopes_mutex_);
  if (registered_.erase({device, id}) == 0) {
    throw UsageError("pool " + ToString(id) + " of device " + std::to_string(device) +
                     " is not registered");
  }
  DevicePools& pools = DevicePools::For(device);
  pools.set().Release(id);
  ReleaseUnusedAnnex(pools, id);
}

bool GraphAllocator::Idle() const { return !routes_.active() && DevicePools::All().empty(); }

}  // namespace cgp
