#include "torch/routes.h"

#include <algorithm>
#include <utility>

#include "torch/streams.h"

namespace cgp {

void RouteTable::Add(Route route) {
  const std::lock_guard lock(mutex_);
  const bool capture = route.kind == ScopeKind::kCapture;
  routes_.push_back(std::move(route));
  if (capture) captures_count_.fetch_add(1, std::memory_order_acq_rel);
  routes_count_.fetch_add(1, std::memory_order_acq_rel);
}

std::optional<RouteTable::Target> RouteTable::Match(c10::DeviceIndex device,
                                                    cudaStream_t stream) const {
  const std::lock_guard lock(mutex_);
  for (size_t i = routes_.size(); i-- > 0;) {
    const Route& route = routes_[i];
    if (route.device != device || route.paused) continue;
    if (route.kind == ScopeKind::kCapture && !IsCapturing(route.origin)) continue;
    if (route.filter(stream)) return Target{route.id, route.kind, route.ours};
  }
  return std::nullopt;
}

bool RouteTable::Contains(c10::DeviceIndex device, PoolId id) const {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(
      routes_, [&](const Route& route) { return route.device == device && route.id == id; });
}

bool RouteTable::AnyOurs() const {
  const std::lock_guard lock(mutex_);
  return std::ranges::any_of(routes_, &Route::ours);
}

std::optional<Route> RouteTable::Remove(c10::DeviceIndex device, PoolId id) {
  const std::lock_guard lock(mutex_);
  const Route* route = Find(device, id);
  if (route == nullptr) return std::nullopt;
  return TakeOut(static_cast<size_t>(route - routes_.data()));
}

bool RouteTable::Pause(c10::DeviceIndex device, PoolId id) {
  const std::lock_guard lock(mutex_);
  Route* route = Find(device, id);
  if (route == nullptr || !route->ours || route->kind != ScopeKind::kCapture) return false;
  if (!IsCapturing(route->origin)) return false;
  route->paused = true;
  return true;
}

bool RouteTable::Resume(c10::DeviceIndex device, PoolId id, StreamFilter filter) {
  const std::lock_guard lock(mutex_);
  Route* route = Find(device, id);
  if (route == nullptr || !route->paused) return false;
  route->filter = std::move(filter);
  route->paused = false;
  return true;
}

std::vector<Route> RouteTable::RemoveAbandoned(std::optional<cudaStream_t> origin) {
  const std::lock_guard lock(mutex_);
  std::vector<Route> abandoned;
  for (size_t i = routes_.size(); i-- > 0;) {
    const Route& route = routes_[i];
    if (route.kind != ScopeKind::kCapture) continue;
    // Between the begin of a route and of its capture the stream is not capturing yet; torch's code
    // between the two comes back here only through another thread.
    const bool settled = route.thread == std::this_thread::get_id() || route.origin == origin;
    if (settled && !IsCapturing(route.origin)) abandoned.push_back(TakeOut(i));
  }
  return abandoned;
}

Route* RouteTable::Find(c10::DeviceIndex device, PoolId id) {
  const auto found = std::ranges::find_if(
      routes_, [&](const Route& route) { return route.device == device && route.id == id; });
  return found == routes_.end() ? nullptr : &*found;
}

Route RouteTable::TakeOut(size_t index) {
  Route route = std::move(routes_[index]);
  routes_.erase(routes_.begin() + static_cast<std::ptrdiff_t>(index));
  if (route.kind == ScopeKind::kCapture) captures_count_.fetch_sub(1, std::memory_order_acq_rel);
  routes_count_.fetch_sub(1, std::memory_order_acq_rel);
  return route;
}

}  // namespace cgp
