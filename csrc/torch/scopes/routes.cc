#include "torch/scopes/routes.h"

#include <algorithm>
#include <array>
#include <chrono>
#include <utility>

#include "core/base/error.h"

namespace cgp {
namespace {

// The result of one Match() of this thread in a capture.
struct Answer {
  uint64_t version = 0;  // of the table; none has this one
  cudaStream_t stream = nullptr;
  DeviceIndex device = 0;
  Target target;
};

// A thread allocates on few streams at a time. Two streams with one entry only cost time.
constinit thread_local std::array<Answer, 8> answers{};

// Whether the calling thread can ask about the stream that the capture began on: under the name of
// the per-thread default stream it would ask about its own.
bool KnowsOrigin(const Route& route) {
  return route.origin != cudaStreamPerThread || route.IsOwn();
}

// Whether the route's capture is under way, as far as its stream tells.
bool OriginCaptures(const Route& route) { return !KnowsOrigin(route) || IsCapturing(route.origin); }

// Notes whether the capture has begun, or is over. Returns whether it is under way.
bool NoteProgress(Route& route) {
  const bool capturing = OriginCaptures(route);
  if (!KnowsOrigin(route)) return capturing;
  route.over |= route.begun && !capturing;
  route.begun |= capturing;
  return capturing;
}

// Whether the filter of a capture route may be asked about `stream`, which is in `capture`. Another
// thread may be about to end the route's capture. So CUDA is not asked which capture its first
// stream is in, unless the calling thread allocates on that stream.
bool IsUnderWay(Route& route, cudaStream_t stream, std::optional<CaptureId> capture) {
  const bool capturing = NoteProgress(route);
  if (!KnowsOrigin(route)) {
    return capture && !route.over && capture == route.origins_capture.value_or(*capture);
  }
  if (stream == route.origin && capture) {
    if (!route.origins_capture) route.origins_capture = capture;
    route.over |= route.origins_capture != capture;
  }
  return capturing && !route.over;
}

bool MayResume(const Route& route, cudaStream_t stream, const Route& anew) {
  if (!route.nested && anew.filter(route.origin)) return true;
  if (!IsCapturing(stream) || (route.nested && anew.origin != route.origin)) return false;
  if (route.IsOwn()) return true;
  const std::optional<CaptureId> capture = CaptureOf(stream);
  return capture && capture == route.origins_capture;
}

}  // namespace

RouteTable::~RouteTable() {
  Gate::CountScopes(-static_cast<int>(routes_.size()));
  MeteredDriver::CountCaptures(-captures_count_);
}

void RouteTable::NoteChange() {
  static constinit std::atomic<uint64_t> last_version{0};
  version_.store(last_version.fetch_add(1, std::memory_order_relaxed) + 1,
                 std::memory_order_release);
}

void RouteTable::ReserveOne() {
  const std::lock_guard lock(mutex_);
  ReserveMore(routes_, 1);
}

void RouteTable::Add(Route route) {
  const std::lock_guard lock(mutex_);
  // Routes that are over are noted before the new capture can come to their streams.
  for (Route& other : routes_) NoteProgress(other);
  routes_.push_back(std::move(route));
  Count(routes_.back(), 1);
}

void RouteTable::Count(const Route& route, int change) {
  NoteChange();
  if (route.kind == ScopeKind::kCapture) {
    captures_count_.fetch_add(change, std::memory_order_acq_rel);
    MeteredDriver::CountCaptures(change);
  }
  Gate::CountScopes(change);
}

std::optional<Target> RouteTable::Match(DeviceIndex device, cudaStream_t stream) {
  const bool captures = captures_count_.load(std::memory_order_acquire) != 0;
  const std::optional<CaptureId> capture = captures ? CaptureOf(stream) : std::nullopt;
  Answer& answer = answers[(reinterpret_cast<uintptr_t>(stream) * 0x9E3779B97F4A7C15ull) >> 61];
  // The capture of the answer is not over, since the stream is in it: no other capture has its id.
  if (capture == answer.target.capture && answer.stream == stream && answer.device == device &&
      answer.version == version_.load(std::memory_order_acquire)) {
    return answer.target;
  }
  const std::lock_guard lock(mutex_);
  std::optional<Target> target = AskFilters(device, stream, capture);
  if (capture && target) {
    target->capture = *capture;
    answer = {version_.load(std::memory_order_relaxed), stream, device, *target};
  }
  return target;
}

std::optional<Target> RouteTable::AskFilters(DeviceIndex device, cudaStream_t stream,
                                             std::optional<CaptureId> capture, bool of_graphs) {
  for (size_t i = routes_.size(); i-- > 0;) {
    Route& route = routes_[i];
    const bool graphs = route.kind == ScopeKind::kCapture && !route.nested;
    if (route.device != device || (of_graphs ? !graphs : route.paused)) continue;
    // A graph cannot keep what is lent.
    if (route.kind == ScopeKind::kLoan && capture) continue;
    // Uncaptured work has no order with captured work.
    if (route.nested && route.pools != nullptr && !capture) continue;
    if (route.kind == ScopeKind::kCapture && !IsUnderWay(route, stream, capture)) continue;
    if (route.filter(stream)) return route;
  }
  return std::nullopt;
}

std::optional<Target> RouteTable::GraphOf(DeviceIndex device, cudaStream_t stream) {
  const std::optional<CaptureId> capture = CaptureOf(stream);
  const std::lock_guard lock(mutex_);
  return AskFilters(device, stream, capture, /*of_graphs=*/true);
}

bool RouteTable::IsBeingCaptured(DeviceIndex device, PoolId id) const {
  const std::lock_guard lock(mutex_);
  const Route* const route = Find(device, id);
  return route != nullptr && route->pools != nullptr && route->kind == ScopeKind::kCapture &&
         OriginCaptures(*route);
}

std::optional<Target> RouteTable::TargetOf(DeviceIndex device, PoolId id) const {
  const std::lock_guard lock(mutex_);
  const Route* const route = Find(device, id);
  return route == nullptr ? std::nullopt : std::optional<Target>(*route);
}

void RouteTable::Remove(DeviceIndex device, PoolId id, bool paused) {
  const std::lock_guard lock(mutex_);
  const Route* const route = Find(device, id, paused);
  if (route == nullptr) return;
  Count(*route, -1);
  routes_.erase(routes_.begin() + (route - routes_.data()));
}

bool RouteTable::Pause(DeviceIndex device, PoolId id) {
  const std::lock_guard lock(mutex_);
  Route* const route = Find(device, id);
  if (route == nullptr || route->kind != ScopeKind::kCapture) return false;
  if (!OriginCaptures(*route)) return false;
  if (!route->origins_capture) route->origins_capture = CaptureOf(route->origin);
  route->paused = true;
  NoteChange();
  return true;
}

bool RouteTable::Resume(const Route& anew, cudaStream_t stream, bool of_another_graph,
                        const std::function<void()>& hold) {
  const std::lock_guard lock(mutex_);
  Route* const route = Find(anew.device, anew.id);
  if (route == nullptr || !route->paused) return false;
  if (of_another_graph && !route->nested) return false;
  if (!MayResume(*route, stream, anew)) return false;
  StreamFilter filter = anew.filter;
  if (route->nested) hold();
  route->resumed = !route->nested;
  route->filter.swap(filter);
  route->paused = false;
  // A nested route goes before routes that began meanwhile, of another capture of the thread say.
  if (route->nested) {
    const auto at = routes_.begin() + (route - routes_.data());
    std::rotate(at, at + 1, routes_.end());
  }
  NoteChange();
  return true;
}

bool RouteTable::TakeResumption(DeviceIndex device, PoolId id) {
  const std::lock_guard lock(mutex_);
  Route* const route = Find(device, id, /*paused=*/true);
  return route != nullptr && route->paused && route->IsOwn() &&
         std::exchange(route->resumed, false);
}

void RouteTable::AwaitOthers(cudaStream_t origin, std::unique_lock<std::mutex>& lock) const {
  const auto is_another = [&](const Route& route) {
    return route.kind == ScopeKind::kCapture && route.origin == origin && !route.IsOwn() &&
           !OriginCaptures(route);
  };
  const auto are_there = [&] {
    const std::lock_guard table_lock(mutex_);
    return std::ranges::any_of(routes_, is_another);
  };
  for (int waits = 0; waits < 100 && are_there(); ++waits) {
    lock.unlock();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
    lock.lock();
  }
}

std::optional<Route> RouteTable::FindAbandoned(
    const std::function<bool(const Route&)>& counts) const {
  const std::lock_guard lock(mutex_);
  const auto found = std::ranges::find_if(routes_, [&](const Route& route) {
    return route.kind == ScopeKind::kCapture && (route.nested || counts(route)) &&
           (!OriginCaptures(route) || (route.over && !route.nested));
  });
  return found == routes_.end() ? std::nullopt : std::optional(*found);
}

Route* RouteTable::Find(DeviceIndex device, PoolId id, bool paused) const {
  Route* found = nullptr;
  for (Route& route : routes_) {
    if (!route.LeadsTo(device, id)) continue;
    if (found == nullptr || route.paused == paused) found = &route;
  }
  return found;
}

}  // namespace cgp
