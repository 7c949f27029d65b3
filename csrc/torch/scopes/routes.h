// Which allocations go to which pool. A *route* is an open scope's filter, and the pool it leads
// to; this table has the routes of all devices.
//
// torch begins a scope with a filter on streams, and names no pool when it allocates. So each
// allocation is matched against the routes, newest first. Routes to pools of the base are here too,
// so that nesting comes out right, and everybody can ask whether a capture is under way.
//
// The filter of a torch.cuda.CUDAGraph holds a plain pointer to the graph. Before torch 2.14 a
// graph whose capture failed may be gone while its route is still here. So a capture route's filter
// is asked only while the capture's first stream is capturing, and was not seen in another capture
// or in none. Then the graph is alive. The per-thread default stream has one name in all threads.
// If the capture began on it, other threads ask the filter only about streams that are, or may be,
// in that capture.
//
// That takes up to two questions to CUDA beside the filter's own. But torch's filters go by the
// thread (for pools that a thread allocates to) or by the id of the stream's capture (for graphs,
// and bodies of their conditional nodes). So within a capture each thread asks the filters once for
// each stream, and reuses the answer until a route comes or goes. That takes one question, for the
// id.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>
#include <c10/core/Device.h>
#include <cuda_runtime_api.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <thread>
#include <vector>

#include "core/pool_set.h"
#include "torch/device_pools.h"
#include "torch/runtime.h"

namespace cgp {

using StreamFilter = std::function<bool(cudaStream_t)>;

// Where a route leads.
struct Target {
  PoolId id;
  ScopeKind kind = ScopeKind::kEager;
  DevicePools* pools = nullptr;    // that have the pool; nullptr: the base serves it
  bool whole_pages = false;        // no two blocks share a page
  cudaStream_t origin = nullptr;   // capture routes: the stream that the graph's capture begins on
  CaptureId capture = kNoCapture;  // that RouteTable::Match() found the stream in
};

struct Route : Target {
  bool LeadsTo(DeviceIndex to, PoolId pool) const { return device == to && id == pool; }
  bool IsOwn() const { return thread == std::this_thread::get_id(); }  // of the calling thread

  DeviceIndex device = 0;
  MempoolId_t name{0, 0};  // what torch calls the pool
  StreamFilter filter;
  // Begun by a thread that was already capturing (torch.cuda.use_mem_pool in a capture). It serves
  // captured streams only, and stays open until the capture ends. Ending earlier would open its
  // fences to streams that have no proof.
  bool nested = false;
  std::thread::id thread = std::this_thread::get_id();  // that began it
  // Capture routes: the capture of `origin`, once it is known, and whether it was seen to have
  // begun, and to be over.
  std::optional<CaptureId> origins_capture = std::nullopt;
  bool begun = false;
  bool over = false;
  bool paused = false;   // ended while its capture goes on: matches nothing until begun again
  bool resumed = false;  // begun again, by its graph or by use_mem_pool(): who releases it tells
  // Its capture is known to have failed, and it was ended although its graph may yet do that, which
  // only graphs since 2.14 do. A nested one is ended by its thread.
  bool failed = false;
};

class RouteTable {
 public:
  RouteTable() { NoteChange(); }
  ~RouteTable();

  // Whether a capture route is open, so that a capture may be under way.
  bool capturing() const { return captures_count_.load(std::memory_order_acquire) != 0; }

  // After this the next Add() cannot fail.
  void ReserveOne();
  void Add(Route route);

  // The newest route that serves allocations of the calling thread on `stream`.
  std::optional<Target> Match(DeviceIndex device, cudaStream_t stream);
  // The route of the graph that `stream` captures, paused or not, whatever is nested in it.
  std::optional<Target> GraphOf(DeviceIndex device, cudaStream_t stream);

  // The target of the pool's route, if it has one.
  std::optional<Target> TargetOf(DeviceIndex device, PoolId id) const;
  // Whether a capture of ours fills the pool right now.
  bool IsBeingCaptured(DeviceIndex device, PoolId id) const;

  // Removes the route, if there is one. Never throws.
  void Remove(DeviceIndex device, PoolId id, bool paused = false);

  // A capture may end its route and begin it again half-way, as torch does around the bodies of
  // conditional nodes. Its scope stays open meanwhile. Pause() returns false if there is no such
  // route, or its capture is over. Resume() returns false if the route is not paused, or another
  // capture asks. The same capture asks if the filter takes the stream that it began on, which says
  // nothing of a nested route, whose filter takes any. Or `stream`, the calling thread's, is in it,
  // or captures (a body) in the thread that began the route. Another graph's capture never resumes
  // a graph's route.
  //
  // `anew` is the route as begun now. `hold` adds a user of a nested route's pool before the route
  // is back, which it is not if that throws: use_mem_pool() releases one each time. A graph that
  // goes on is still the same user, and releases its pool once. A route that is not nested may be
  // either. So TakeResumption() says, when the thread that resumed a paused route releases its
  // pool, whether that ends the resumption and is no user's.
  bool Pause(DeviceIndex device, PoolId id);
  bool Resume(const Route& anew, cudaStream_t stream, bool of_another_graph,
              const std::function<void()>& hold);
  bool TakeResumption(DeviceIndex device, PoolId id);

  // Waits until no other thread has a capture route on the stream while that does not capture. Such
  // a thread is about to begin the capture or to end the route, or has failed. This waits without
  // the lock, a tenth of a second at most. The thread needs microseconds, unless it waits for the
  // lock, or for the GIL if the caller holds that.
  void AwaitOthers(cudaStream_t origin, std::unique_lock<std::mutex>& lock) const;

  // A capture route that nobody ended although its capture is over, of those for which `counts` is
  // true. Its stream does not capture either just after the route begins, or just before it ends.
  // So the caller must know that the route's thread is past both: it is the caller, or
  // AwaitOthers() has waited for it. Nested routes always count, since their capture had begun.
  std::optional<Route> FindAbandoned(const std::function<bool(const Route&)>& counts) const;

 private:
  // Match() without earlier answers, among all routes or only graphs' own. pre: mutex_ is held.
  std::optional<Target> AskFilters(DeviceIndex device, cudaStream_t stream,
                                   std::optional<CaptureId> capture, bool of_graphs = false);
  // The pool's route, or nullptr. A pool of the base has several if paused ones wait for their
  // captures: then preferably one that is `paused` or not. pre: mutex_ is held.
  Route* Find(DeviceIndex device, PoolId id, bool paused = false) const;
  // Makes all threads drop their answers from this table. pre: mutex_ is held, as for Count().
  void NoteChange();
  // Counts a route that comes (1) or goes (-1).
  void Count(const Route& route, int change);

  mutable std::mutex mutex_;
  mutable std::vector<Route> routes_;  // oldest first
  // Changes with the routes, and is unique among all tables of the process.
  std::atomic<uint64_t> version_;
  // invariant: the number of capture routes in routes_
  std::atomic<int> captures_count_{0};
};

}  // namespace cgp
