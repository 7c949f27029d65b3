// Which allocations go to which pool: the scopes that are open now, in all pools of all devices.
//
// torch begins a scope with a filter on streams and asks for no pool when it allocates; so each
// allocation is matched against the open scopes, newest first. Those that the base serves are here
// too, so that nesting comes out right and everybody can ask whether a capture is under way.
//
// The filter of a torch.cuda.CUDAGraph holds a plain pointer to the graph. A graph whose capture
// failed may be gone while its route is still here (torch before 2.14 forgets to end it), so a
// capture route asks its filter only while the stream that the capture began on is capturing, and
// was not seen to be in another capture or in none: then the graph is alive. Where that is the
// per-thread default stream, which each thread calls by the same name, other threads ask its filter
// about streams that are in its capture, or in one that may be it.
//
// That takes up to two questions to CUDA besides the filter's own. But what the filters of torch
// say follows from the thread (those of pools that a thread allocates to) or from the id of the
// stream's capture (those of graphs and of the bodies of their conditional nodes). So within one
// capture each thread asks the filters once for each stream, however narrow or wide they are, and
// remembers the answer until a route comes or goes. That takes one question, for the id.
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
  DevicePools* pools = nullptr;    // whose the pool is; nullptr: the base allocator serves it
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
  // Begun by a thread that was capturing already (torch.cuda.use_mem_pool in a capture). It takes
  // what is captured alone, and lasts as long as that capture: where its end were a scope's end,
  // other streams of the capture would get what nothing has proven to be free for them.
  bool nested = false;
  std::thread::id thread = std::this_thread::get_id();  // which began it
  // Capture routes: that of `origin`, once it is known; whether it was seen to have begun, and to
  // be over.
  std::optional<CaptureId> origins_capture = std::nullopt;
  bool begun = false;
  bool over = false;
  bool paused = false;   // ended while its capture goes on: matches nothing until it is begun again
  bool resumed = false;  // begun again, by its graph or by use_mem_pool(): who releases it tells
  // Ended while its graph may still do so, and its capture is known to have failed: only since 2.14
  // does the graph end it then. Or nested: its thread does.
  bool failed = false;
};

class RouteTable {
 public:
  RouteTable() { NoteChange(); }
  ~RouteTable();

  // Whether a route of a capture is open, so that a capture may be under way.
  bool capturing() const { return captures_count_.load(std::memory_order_acquire) != 0; }

  // Add() fails no more after this, until the next one.
  void ReserveOne();
  void Add(Route route);

  // The newest route that takes allocations of the calling thread on `stream`.
  std::optional<Target> Match(DeviceIndex device, cudaStream_t stream);
  // The route of the graph that `stream` captures, paused or not, whatever is nested in that.
  std::optional<Target> GraphOf(DeviceIndex device, cudaStream_t stream);

  // Of the pool's route, if it has one.
  std::optional<Target> TargetOf(DeviceIndex device, PoolId id) const;
  // Whether a capture of ours fills the pool right now.
  bool IsBeingCaptured(DeviceIndex device, PoolId id) const;

  // Takes the route out, if there is one. Never throws.
  void Remove(DeviceIndex device, PoolId id, bool paused = false);

  // A capture may end its route and begin it again half-way (torch does so around the bodies of
  // conditional nodes). The scope goes on meanwhile, since the capture does. Pause() returns false
  // if there is no such route, or its capture is over; Resume() returns false if the route
  // is not paused, or if it is not its capture that wants it back: the filter does not take the
  // stream that it began on (a nested one's takes any), and `stream`, the calling thread's, is not
  // in it, nor captures (a body, then) in the thread that began the route. What is captured by
  // another graph never takes back a graph's. `anew` is as if begun now. `hold` adds a user to what
  // is nested, before the route is there again, which it is not if that throws: use_mem_pool()
  // releases it each time. A graph that goes on is the user that it was and releases its pool once.
  // What is not nested may be either, so TakeResumption() tells the release of a paused route's
  // pool, by the thread that had begun it again, whether it ends that and is no user's.
  bool Pause(DeviceIndex device, PoolId id);
  bool Resume(const Route& anew, cudaStream_t stream, bool of_another_graph,
              const std::function<void()>& hold);
  bool TakeResumption(DeviceIndex device, PoolId id);

  // Another thread that has a capture route on the stream while this does not capture is about to
  // begin the capture or to end the route, or it has failed. Waits, without the lock, until it has
  // done the one or the other, a tenth of a second at most: it does so within microseconds, unless
  // it waits for the lock or, where the caller holds Python's, for that.
  void AwaitOthers(cudaStream_t origin, std::unique_lock<std::mutex>& lock) const;

  // A capture route whose capture is over although nobody ended the route, of those for which
  // `counts` is true. Between the begin of a route and of its capture the stream is not capturing
  // yet, nor between the end of the capture and of the route. So who asks must know that the thread
  // which began the route has left both: it is the caller, or AwaitOthers() has waited for it.
  // Nested ones count always, since their capture had begun.
  std::optional<Route> FindAbandoned(const std::function<bool(const Route&)>& counts) const;

 private:
  // Match() without what was found before, among all routes or graphs' own. pre: mutex_ is held.
  std::optional<Target> AskFilters(DeviceIndex device, cudaStream_t stream,
                                   std::optional<CaptureId> capture, bool of_graphs = false);
  // The pool's route, or nullptr. A pool of the base has several where paused ones wait for their
  // captures: then one that is `paused` or not, if there is one. pre: mutex_ is held.
  Route* Find(DeviceIndex device, PoolId id, bool paused = false) const;
  // Makes every thread forget what it found in this table. pre: mutex_ is held, as for the next.
  void NoteChange();
  // The route comes (1) or goes (-1).
  void Count(const Route& route, int change);

  mutable std::mutex mutex_;
  mutable std::vector<Route> routes_;  // oldest first
  // Changes with the routes; no other table of the process has or had the same.
  std::atomic<uint64_t> version_;
  // invariant: the capture routes in routes_
  std::atomic<int> captures_count_{0};
};

}  // namespace cgp
