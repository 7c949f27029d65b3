// GraphAllocator: whose pool is it, and who allocates in it now. The rules are in
// graph_allocator.h.
#include "torch/errors.h"
#include "torch/graph_allocator.h"
#include "torch/runtime.h"

namespace cgp {
namespace {

// The pools of `device` if the pool is one of them, else nullptr.
DevicePools* PoolsWith(PoolId pool, DeviceIndex device) {
  DevicePools* const pools = DevicePools::Find(device);
  return pools != nullptr && pools->set().Contains(pool) ? pools : nullptr;
}

}  // namespace

std::optional<GraphAllocator::OurPool> GraphAllocator::FindOurs(DeviceIndex device,
                                                                MempoolId_t id) const {
  const PoolId pool = names_.Find(device, id);
  DevicePools* const pools = PoolsWith(pool, device);
  return pools == nullptr ? std::nullopt : std::optional(OurPool{pools, pool});
}

bool GraphAllocator::BaseKnows(DeviceIndex device, MempoolId_t id) const {
  // For an id that it never saw the native allocator has no answer.
  return IfSupported([&] { return base_.getPoolUseCount(device, id); }).value_or(0) > 0;
}

bool GraphAllocator::IsUndecided(DevicePools& pools, PoolId id) const {
  const ScopeKey key{pools.device(), id};
  return !registered_.contains(key) && !mempools_.contains(key) &&
         !routes_.Contains(pools.device(), id) && pools.set().Stats(id).allocations == 0;
}

void GraphAllocator::BeginInBase(Route route, DevicePools* undecided) {
  const DeviceIndex device = route.device;
  const MempoolId_t id = route.name;
  routes_.ReserveOne();
  const int users = undecided == nullptr ? 0 : undecided->set().UseCount(route.id);
  const ScopeKey tree{device, route.id};
  int given = 0;
  bool is_new_tree = false;
  Undo undo([&] {
    if (is_new_tree) bases_trees_.erase(tree);
    NoteWhoServesTrees();
    for (; given > 0; --given) base_.releasePool(device, id);
  });
  for (; given < users; ++given) base_.createOrIncrefPool(device, id, nullptr);
  is_new_tree = route.kind == ScopeKind::kEager && !bases_mempools_.contains(tree) &&
                bases_trees_.insert(tree).second;
  NoteWhoServesTrees();
  base_.beginAllocateToPool(device, id, route.filter);
  undo.Keep();
  for (int user = 0; user < users; ++user) undecided->set().Release(route.id);
  if (undecided != nullptr) ReleaseUnused(*undecided, route.id);
  if (route.kind == ScopeKind::kCapture && !route.nested) {
    ++captures_of_base_;
    if (!takes_captures()) {
      ++captures_while_stopped_;
    } else if (bases_mempools_.contains({device, route.id})) {
      ++captures_in_mempools_;
    }
  }
  routes_.Add(std::move(route));
}

// A capture may not wait for another one that fills the shared pool: it gets a pool of its own
// then.
bool GraphAllocator::SharesPool(DeviceIndex device, MempoolId_t id) const {
  if (names_.UseCount(device, id) > 0) return true;
  return takes_captures() && shares_captures_ && PoolNames::IsAnonymous(id) &&
         !FindOurs(device, id) && !BaseKnows(device, id) &&
         !routes_.Contains(device, PoolNames::kShared);
}

void GraphAllocator::ReleaseUnused(DevicePools& pools, PoolId id) {
  if (routes_.Contains(pools.device(), id)) return;
  if (UsersOf(pools, id) == 0) ReleaseKeptFor(pools, id);
  if (pools.set().UseCount(id) > 0) return;
  mempools_.erase({pools.device(), id});
  our_trees_.erase({pools.device(), id});
  NoteWhoServesTrees();
  TryTwice("the allocator below it, told that a pool's graphs are gone,",
           [&] { annexes_.Release(pools.device(), id); });
}

void GraphAllocator::NoteWhoServesTrees() {
  base_serves_trees_.store(!bases_trees_.empty() && our_trees_.empty(), std::memory_order_release);
}

void GraphAllocator::ForgetBasesDeadTrees() {
  std::erase_if(bases_trees_, [this](const ScopeKey& key) {
    return !BaseKnows(key.first, {key.second.first, key.second.second});
  });
  NoteWhoServesTrees();
}

void GraphAllocator::beginAllocateToPool(DeviceIndex device, MempoolId_t id, StreamFilter filter) {
  const History::Telling telling(history_);
  std::unique_lock lock(scopes_mutex_);
  // Torch asked us before we were taken out, and will ask the base for the end.
  if (taken_out_) return base_.beginAllocateToPool(device, id, std::move(filter));
  const cudaStream_t stream = CurrentStream(device);
  routes_.AwaitOthers(stream, lock);
  TakeAsFailed(stream);
  const bool capturing = IsCapturing(stream);
  const bool takes_current = filter(stream);
  const ScopeKind kind = takes_current && !capturing ? ScopeKind::kEager : ScopeKind::kCapture;

  const bool shares = kind == ScopeKind::kCapture && SharesPool(device, id);
  const PoolId pool = shares ? PoolNames::kShared : names_.Find(device, id);
  TakeAsFailed(device, pool);
  DevicePools* pools = PoolsWith(pool, device);
  DevicePools* undecided = nullptr;
  if (kind == ScopeKind::kEager) {
    ForgetBasesDeadTrees();
    if (pools != nullptr && base_serves_trees_ && IsUndecided(*pools, pool)) {
      undecided = std::exchange(pools, nullptr);
    }
  }
  if (pools == nullptr && undecided == nullptr && takes_captures() &&
      (shares || !BaseKnows(device, id))) {
    pools = AsTorchErrors([&] { return &DevicePools::For(device); });
  }

  const auto mempool = mempools_.find({device, pool});
  Route route{.device = device,
              .id = pool,
              .name = id,
              .filter = std::move(filter),
              .kind = kind,
              .ours = pools != nullptr,
              .nested = kind == ScopeKind::kCapture && takes_current,
              .whole_pages = mempool != mempools_.end() && mempool->second.whole_pages,
              .origin = stream,
              .thread = std::this_thread::get_id()};
  std::optional<PoolId> graphs;
  if (route.nested) {
    if (const auto graph = routes_.GraphOf(device, stream); graph && graph->id != pool) {
      graphs = graph->id;
      route.origin = graph->origin;  // within a body it lasts longer than that
    }
  }
  const auto hold = [&] {
    if (pools == nullptr) return;
    if (graphs) KeepFor(*pools, *graphs, pool);  // another capture may have begun the route
    Hold(*pools, id, pool);
  };
  if (kind == ScopeKind::kCapture &&
      routes_.Resume(device, pool, stream, route.origin, route.filter, hold)) {
    if (pools != nullptr) return;
    Undo resumed([&] { routes_.Pause(device, pool); });
    base_.beginAllocateToPool(device, id, route.filter);
    resumed.Keep();
    return;
  }
  if (pools == nullptr) {
    BeginInBase(std::move(route), undecided);
    return;
  }
  // Only what goes on with a capture begins while its stream is capturing. CUDA would refuse as
  // well, but by then torch would have left this route behind.
  TORCH_CHECK(!capturing || takes_current,
              "cannot begin a capture into graph pool " + ToString(pool) +
                  ": the current stream is capturing another graph already. Captures do not nest: "
                  "end that one first, or capture on another stream");
  BeginInOurs(*pools, std::move(route), capturing, graphs);
}

void GraphAllocator::BeginInOurs(DevicePools& pools, Route route, bool capturing,
                                 std::optional<PoolId> graphs) {
  const bool capture = route.kind == ScopeKind::kCapture;
  routes_.ReserveOne();
  names_.Hold(route.device, route.name, route.id);
  Undo name([&] { names_.Release(route.device, route.name); });
  AsTorchErrors([&] { pools.set().BeginScope(route.id, route.kind, capturing); });
  Undo scope([&] {
    pools.EndScope(route.id);
    pools.set().Release(route.id);
  });
  const bool is_kept = graphs && KeepFor(pools, *graphs, route.id);
  Undo keep([&] {
    if (!is_kept) return;
    kept_.erase({{route.device, *graphs}, route.id});
    pools.set().Release(route.id);
  });
  const ScopeKey key{route.device, route.id};
  const bool is_tree = !capture && !mempools_.contains(key) && !registered_.contains(key);
  if (is_tree && !base_serves_trees_) our_trees_.insert(key);
  if (capture) annexes_.Begin(route.device, route.id);
  name.Keep();
  scope.Keep();
  keep.Keep();
  if (capture && !route.nested) ++captures_of_ours_;
  routes_.Add(std::move(route));
}

void GraphAllocator::Hold(DevicePools& pools, MempoolId_t id, PoolId pool) {
  names_.Hold(pools.device(), id, pool);
  Undo name([&] { names_.Release(pools.device(), id); });
  pools.set().Retain(pool);
  name.Keep();
}

void GraphAllocator::Drop(DevicePools& pools, MempoolId_t id, PoolId pool) {
  AsTorchErrors([&] { pools.set().Release(pool); });
  names_.Release(pools.device(), id);
  ReleaseUnused(pools, pool);
}

void GraphAllocator::endAllocateToPool(DeviceIndex device, MempoolId_t id) {
  const History::Telling telling(history_);
  const std::lock_guard lock(scopes_mutex_);
  const PoolId pool = names_.Find(device, id);
  // While a capture goes on in the pool, an end that is still owed is that of the graph that failed
  // before. Were it the capture's own, around the body of a conditional node, the body's begin
  // would be refused: better than a capture that goes on without its pool.
  if (routes_.IsBeingCaptured(device, pool) && TakeLateEnd(device, pool)) return;
  const std::optional<RouteTable::Target> target = routes_.TargetOf(device, pool);
  if (routes_.Pause(device, pool)) {
    if (!target->ours) base_.endAllocateToPool(device, id);
    return;
  }
  if (!target && TakeLateEnd(device, pool)) return;
  if (target && target->ours) {
    EndInOurs(device, pool, target->kind);
  } else {
    base_.endAllocateToPool(device, id);
    routes_.Remove(device, pool);
  }
  // What was nested in a capture ends with it; what fails to, when the next scope begins.
  TryTwice("the end of what was nested in a capture",
           [&] { CloseAbandoned([](const Route&) { return false; }); });
}

void GraphAllocator::EndInOurs(DeviceIndex device, PoolId pool, ScopeKind kind) {
  DevicePools& pools = DevicePools::For(device);
  // The scope first: who is told that it has not ended can end it again.
  AsTorchErrors([&] { pools.EndScope(pool); });
  routes_.Remove(device, pool);
  if (kind != ScopeKind::kCapture) return;
  // That the capture is over is so whatever the base says.
  TryTwice("the allocator below it, told that a capture is over,",
           [&] { annexes_.End(device, pool); });
  ReleaseUnused(pools, pool);
}

void GraphAllocator::releasePool(DeviceIndex device, MempoolId_t id) {
  const History::Telling telling(history_);
  const std::lock_guard lock(scopes_mutex_);
  const auto ours = FindOurs(device, id);
  if (!ours) {
    base_.releasePool(device, id);
    // What is not forgotten now is the next time.
    WithWarnings("the allocator below it, asked for its pools,", [&] {
      ForgetBasesDeadTrees();
      if (BaseKnows(device, id)) return;
      bases_mempools_.erase({device, {id.first, id.second}});
      if (DevicePools* const kept = DevicePools::Find(device)) {
        ReleaseKeptFor(*kept, {id.first, id.second});
      }
    });
    return;
  }
  Drop(*ours->pools, id, ours->id);
}

void GraphAllocator::RegisterPool(DeviceIndex device, PoolId id) {
  const std::lock_guard lock(scopes_mutex_);
  PoolSet& set = DevicePools::For(device).set();
  if (set.Contains(id) || BaseKnows(device, {id.first, id.second})) {
    throw UsageError("pool " + ToString(id) + " of device " + std::to_string(device) +
                     " is in use already");
  }
  const auto registered = registered_.insert({device, id}).first;
  Undo noted([&] { registered_.erase(registered); });
  set.Retain(id);
  noted.Keep();
}

void GraphAllocator::UnregisterPool(DeviceIndex device, PoolId id) {
  const History::Telling telling(history_);
  const std::lock_guard lock(scopes_mutex_);
  const auto registered = registered_.find({device, id});
  if (registered == registered_.end()) {
    throw UsageError("pool " + ToString(id) + " of device " + std::to_string(device) +
                     " is not registered");
  }
  DevicePools& pools = DevicePools::For(device);
  pools.set().Release(id);
  registered_.erase(registered);
  ReleaseUnused(pools, id);
}

void GraphAllocator::StopTakingCaptures(const std::function<void()>& uninstall) {
  const std::lock_guard lock(scopes_mutex_);
  const bool idle = !routes_.active() && DevicePools::All().empty();
  takes_captures_.store(false, std::memory_order_release);
  if (!idle) return;
  uninstall();
  taken_out_ = true;
}

}  // namespace cgp
