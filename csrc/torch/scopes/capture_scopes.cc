// Which pools are ours, and who allocates in them now: capture_scopes.h has the rules.
#include "torch/scopes/capture_scopes.h"

#include <algorithm>

#include "core/base/error.h"
#include "torch/errors.h"
#include "torch/observe/history.h"
#include "torch/runtime.h"

namespace cgp {
namespace {

// The capture that the calling thread has ended last.
struct Ended {
  const CaptureScopes* scopes = nullptr;
  DeviceIndex device = 0;
  PoolId pool;
  uint64_t place = 0;
  bool operator==(const Ended&) const = default;
};
constinit thread_local Ended last_ended;

}  // namespace

CaptureScopes::MemPool* CaptureScopes::FindMemPool(const ScopeKey& key, bool ours) {
  const auto found = mempools_.find(key);
  return found != mempools_.end() && found->second.ours == ours ? &found->second : nullptr;
}

std::optional<Target> CaptureScopes::FindOurs(DeviceIndex device, MempoolId_t id) const {
  const PoolId pool = PoolNamed(device, id);
  DevicePools* const pools = DevicePools::Find(device, owner_);
  if (pools == nullptr || !pools->set.Contains(pool)) return std::nullopt;
  return Target{.id = pool, .pools = pools};
}

bool CaptureScopes::BaseKnows(DeviceIndex device, MempoolId_t id) const {
  if (base_ == nullptr) return false;
  // The native allocator throws for an id that it never saw.
  return IfSupported([&] { return base_->getPoolUseCount(device, id); }) > 0;
}

void CaptureScopes::CountName(DeviceIndex device, MempoolId_t id, PoolId pool, int change) {
  if (pool != kShared) return;
  const std::lock_guard lock(names_mutex_);
  const auto uses = shared_uses_.try_emplace({device, id}).first;
  uses->second += change;
  if (uses->second <= 0) shared_uses_.erase(uses);
}

void CaptureScopes::Begin(DeviceIndex device, MempoolId_t id, StreamFilter filter) {
  const History::Telling telling(History::Get());
  std::unique_lock lock(mutex_);
  const cudaStream_t stream = CurrentStream(device);
  routes_.AwaitOthers(stream, lock);
  TakeAsFailed(/*own_alone=*/false, [&](const Route& route) { return route.origin == stream; });
  const bool capturing = IsCapturing(stream);
  const bool takes = takes_captures;
  const bool takes_current = filter(stream);
  const bool eager = takes_current && !capturing;

  // A capture cannot wait for another one that fills the shared pool: it gets a pool of its own.
  const bool shares = !eager && takes && shares_captures && IsAnonymous(id) &&
                      !FindOurs(device, id) && !BaseKnows(device, id) &&
                      !routes_.TargetOf(device, kShared);
  const PoolId pool = shares ? kShared : PoolNamed(device, id);
  TakeAsFailed(/*own_alone=*/true, [&](const Route& route) { return route.LeadsTo(device, pool); });
  const auto ours = FindOurs(device, {pool.first, pool.second});
  DevicePools* pools = ours ? ours->pools : nullptr;
  const ScopeKey key{device, pool};
  const MemPool* const mempool = FindMemPool(key);
  const bool apart = mempool != nullptr || graph_pools_.contains(key);
  const ScopeKind kind = !eager  ? ScopeKind::kCapture
                         : apart ? ScopeKind::kApart
                                 : ScopeKind::kEager;
  if (pools == nullptr && takes && !BaseKnows(device, id)) {
    pools = &DevicePools::For(device, owner_);
  }
  // The end of the scope before it has failed.
  if (ours && pools->set.InScope(pool) && !routes_.TargetOf(device, pool)) pools->EndScope(pool);
  if (ours) Rouse(*ours);

  Route route{
      {pool, kind, pools, mempool && mempool->whole_pages, stream}, device, id, std::move(filter)};
  route.nested = kind == ScopeKind::kCapture && takes_current;
  std::optional<PoolId> graphs;
  if (route.nested) {
    if (const auto graph = routes_.GraphOf(device, stream); graph && graph->id != pool) {
      graphs = graph->id;
      route.origin = graph->origin;  // within a body it lasts longer than that
    }
  }
  const auto hold = [&] {
    if (pools == nullptr) return;
    if (graphs) RetainFor(*pools, *graphs, pool);  // another capture may have begun the route
    Hold(*pools, id, pool);
  };
  if (kind == ScopeKind::kCapture && routes_.Resume(route, stream, graphs.has_value(), hold)) {
    if (pools != nullptr) return;
    return OrUndo([&] { base_->beginAllocateToPool(device, id, route.filter); },
                  [&] { routes_.Pause(device, pool); });
  }
  // While its stream captures, only a scope that goes on with that capture may begin. CUDA would
  // refuse as well, but by then torch would have left this route behind.
  TORCH_CHECK(pools == nullptr || !capturing || takes_current,
              "cannot begin a capture into graph pool " + ToString(pool) +
                  ": the current stream is capturing another graph already. Captures do not nest: "
                  "end that one first, or capture on another stream");
  routes_.ReserveOne();
  pools == nullptr ? base_->beginAllocateToPool(device, id, route.filter)
                   : BeginInOurs(route, capturing, graphs);
  if (kind == ScopeKind::kCapture && !route.nested) {
    ++(pools == nullptr ? counts.bases : counts.ours);
    if (pools == nullptr && !takes) ++counts.while_stopped;
    if (pools == nullptr && takes && FindMemPool(key, /*ours=*/false)) ++counts.in_mempools;
  }
  routes_.Add(std::move(route));
}

void CaptureScopes::BeginInOurs(const Route& route, bool capturing, std::optional<PoolId> graphs) {
  DevicePools& pools = *route.pools;
  const ScopeKey key{route.device, route.id};
  if (Exports()) exported_.insert(key);
  if (const auto known = graph_pools_.find(key); known != graph_pools_.end()) {
    known->second = std::min(known->second, ended_);
  }
  CountName(route.device, route.name, route.id, 1);
  OrUndo([&] { pools.set.BeginScope(route.id, route.kind, capturing); },
         [&] { CountName(route.device, route.name, route.id, -1); });
  bool is_retained = false;
  const auto tell = [&] {
    is_retained = graphs && RetainFor(pools, *graphs, route.id);
    if (route.kind == ScopeKind::kCapture) side_pools_.Begin(route.device, route.id);
  };
  OrUndo(tell, [&] {
    if (is_retained) retained_.erase({{route.device, *graphs}, route.id});
    if (is_retained) pools.set.Release(route.id);
    CountName(route.device, route.name, route.id, -1);
    pools.EndScope(route.id);
    pools.set.Release(route.id);
  });
}

void CaptureScopes::End(DeviceIndex device, MempoolId_t id) {
  const History::Telling telling(History::Get());
  const std::lock_guard lock(mutex_);
  const PoolId pool = PoolNamed(device, id);
  const std::optional<Target> target = routes_.TargetOf(device, pool);
  // While a capture goes on in the pool, an end that is still owed is that of the graph that failed
  // before. Were it the capture's own, around the body of a conditional node, the body's begin
  // would be refused: better than a capture that goes on without its pool.
  const auto late = std::ranges::find_if(
      late_ends_, [&](const Route& route) { return route.LeadsTo(device, pool); });
  if (late != late_ends_.end() && (!target || routes_.IsBeingCaptured(device, pool))) {
    late_ends_.erase(late);
    return;
  }
  if (routes_.Pause(device, pool)) {
    if (target->pools == nullptr) base_->endAllocateToPool(device, id);
    return;
  }
  if (target && target->pools != nullptr) {
    EndScope(*target->pools, pool, target->kind);
    if (target->kind == ScopeKind::kCapture) last_ended = {this, device, pool, ++ended_};
  } else if (base_ != nullptr) {
    base_->endAllocateToPool(device, id);
    routes_.Remove(device, pool);
  }
  // Nested scopes end with their capture; one that fails to, when the next scope begins.
  TryTwice("the end of what was nested in a capture",
           [&] { CloseAbandoned([](const Route&) { return false; }); });
}

void CaptureScopes::EndScope(DevicePools& pools, PoolId pool, ScopeKind kind) {
  routes_.Remove(pools.device, pool);
  // The capture is over, whatever the base says.
  const bool capture = kind == ScopeKind::kCapture;
  TryTwice("the allocator below it, told that a capture is over,", [&] {
    if (capture) side_pools_.End(pools.device, pool);
  });
  pools.EndScope(pool);
  if (capture) ReleaseUnused(pools, pool);
}

// --- Captures that nobody ended ---
//
// A capture that fails may never end its route. torch before 2.14 neither ends it nor releases the
// pool. From 2.14 on the graph does both late, at the latest when it is destroyed. But a route
// whose stream has stopped capturing looks the same while another thread is about to end it. So a
// capture that looks abandoned loses only its route, and its user stays. Some know that it has
// failed: a new capture begins on its stream or in its pool, or cudagraph_pool.graph saw it. They
// take it as failed and, before 2.14, remove its user.

void CaptureScopes::EndAbandoned() {
  const History::Telling telling(History::Get());
  const std::lock_guard lock(mutex_);
  CloseAbandoned(&Route::IsOwn);
}

void CaptureScopes::EndFailed(DeviceIndex device, MempoolId_t id) {
  const History::Telling telling(History::Get());
  const std::lock_guard lock(mutex_);
  const PoolId pool = PoolNamed(device, id);
  TakeAsFailed(/*own_alone=*/true, [&](const Route& route) { return route.LeadsTo(device, pool); });
}

void CaptureScopes::CloseAbandoned(const std::function<bool(const Route&)>& considered) {
  while (std::optional<Route> route = routes_.FindAbandoned(considered)) {
    if (route->pools == nullptr) {  // the base has its own books
      routes_.Remove(route->device, route->id, route->paused);
      continue;
    }
    route->failed = route->nested;
    // Only its thread ends a nested scope, and it will, if it has not done so.
    if (!route->nested || !route->paused) late_ends_.push_back(*route);
    EndScope(*route->pools, route->id, route->kind);
  }
}

void CaptureScopes::TakeAsFailed(bool own_alone, const std::function<bool(const Route&)>& failed) {
  CloseAbandoned(
      [&](const Route& route) { return failed(route) && (!own_alone || route.IsOwn()); });
  for (size_t i = late_ends_.size(); i-- > 0;) {
    Route& late = late_ends_[i];
    if (late.failed || !failed(late)) continue;
    EndHostRoute(late.name);
    late.failed = kGraphReleasesAbandonedPool;
    if (late.failed) continue;
    Drop(*late.pools, late.name, late.id);
    late_ends_.erase(late_ends_.begin() + static_cast<std::ptrdiff_t>(i));
  }
}

void CaptureScopes::Hold(DevicePools& pools, MempoolId_t id, PoolId pool) {
  CountName(pools.device, id, pool, 1);
  OrUndo([&] { pools.set.Retain(pool); }, [&] { CountName(pools.device, id, pool, -1); });
}

void CaptureScopes::Drop(DevicePools& pools, MempoolId_t id, PoolId pool) {
  pools.set.Release(pool);
  CountName(pools.device, id, pool, -1);
  ReleaseUnused(pools, pool);
}

void CaptureScopes::Release(DeviceIndex device, MempoolId_t id) {
  const History::Telling telling(History::Get());
  const std::lock_guard lock(mutex_);
  const auto ours = FindOurs(device, id);
  // Without a base, torch is not told by an error that it releases once too often.
  if (base_ == nullptr && (!ours || ours->pools->set.UseCount(ours->id) == 0)) return;
  if (ours && routes_.TakeResumption(device, ours->id)) return;
  if (ours) return Drop(*ours->pools, id, ours->id);
  base_->releasePool(device, id);
  // What is not dropped now is dropped the next time.
  WithWarnings("the allocator below it, asked for its pools,", [&] {
    if (BaseKnows(device, id)) return;
    const PoolId pool{id.first, id.second};
    mempools_.erase({device, pool});
    if (DevicePools* const known = DevicePools::Find(device)) ReleaseRetainedFor(*known, pool);
  });
}

void CaptureScopes::ReleaseUnused(DevicePools& pools, PoolId id) {
  if (routes_.TargetOf(pools.device, id)) return;
  if (UsersOf(pools, id) == 0) ReleaseRetainedFor(pools, id);
  if (pools.set.UseCount(id) > 0) return;
  mempools_.erase({pools.device, id});
  graph_pools_.erase({pools.device, id});
  TryTwice("the allocator below it, told that a pool's graphs are gone,",
           [&] { side_pools_.Release(pools.device, id); });
}

void CaptureScopes::Register(DeviceIndex device, PoolId id) {
  const std::lock_guard lock(mutex_);
  PoolSet& set = DevicePools::For(device, owner_).set;
  if (set.Contains(id) || BaseKnows(device, {id.first, id.second})) {
    throw UsageError("pool " + ToString(id) + " of device " + std::to_string(device) +
                     " is in use already");
  }
  const auto made = graph_pools_.try_emplace({device, id}, ~uint64_t{0}).first;
  OrUndo([&] { set.Retain(id); }, [&] { graph_pools_.erase(made); });
}

std::pair<uint64_t, uint64_t> CaptureScopes::NameCapture(DeviceIndex device, MempoolId_t id) {
  const std::lock_guard lock(mutex_);
  const auto ours = FindOurs(device, id);
  // The pool's last capture must be the caller's, whatever other threads do.
  if (!ours || last_ended != Ended{this, device, ours->id, ended_}) return {0, 0};
  return {ours->pools->set.NameCapture(ours->id), ended_};
}

}  // namespace cgp
