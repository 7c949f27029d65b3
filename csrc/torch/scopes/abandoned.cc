// Captures that nobody ended.
//
// A capture that fails may never end its route: torch before 2.14 forgets it, and forgets to
// release the pool as well; from 2.14 on the graph does both late, at the latest when it is
// destroyed. But a route whose stream has stopped capturing looks just so while another thread is
// about to end it. So a capture that looks abandoned loses its route alone, and its user stays. It
// is taken as failed, and before 2.14 its user is taken away, by whoever knows: a new capture
// begins on its stream or in its pool, or cudagraph_pool.graph saw it fail.
#include <utility>

#include "core/base/reserve.h"
#include "torch/errors.h"
#include "torch/observe/history.h"
#include "torch/runtime.h"
#include "torch/scopes/capture_scopes.h"
#include "torch/torch_version.h"

namespace cgp {

void CaptureScopes::EndAbandoned() {
  const History::Telling telling(History::Get());
  const std::lock_guard lock(mutex_);
  CloseAbandoned([](const Route& route) { return route.thread == std::this_thread::get_id(); });
}

void CaptureScopes::EndFailed(DeviceIndex device, MempoolId_t id) {
  const History::Telling telling(History::Get());
  const std::lock_guard lock(mutex_);
  const PoolId pool = PoolNamed(device, id);
  TakeAsFailed(/*own_alone=*/true, [&](const Route& route) { return route.LeadsTo(device, pool); });
}

void CaptureScopes::CloseAbandoned(const std::function<bool(const Route&)>& counts) {
  while (std::optional<Route> route = routes_.FindAbandoned(counts)) {
    if (route->pools == nullptr) {  // the base keeps its own books
      routes_.Remove(route->device, route->id, route->paused);
      continue;
    }
    ReserveMore(late_ends_, 1);
    EndScope(*route->pools, route->id, route->kind);
    // Nobody but its thread ends a nested scope, and it will, if it has not done so.
    if (route->closed || (route->nested && route->paused)) continue;
    route->failed = route->nested;
    late_ends_.push_back(std::move(*route));
  }
}

void CaptureScopes::TakeAsFailed(bool own_alone, const std::function<bool(const Route&)>& failed) {
  CloseAbandoned([&](const Route& route) {
    return failed(route) && (!own_alone || route.thread == std::this_thread::get_id());
  });
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

}  // namespace cgp
