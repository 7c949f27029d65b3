// Which pools are ours, who uses them, and who allocates in them now, as torch says by
// beginAllocateToPool() and its relatives. Both allocators that torch can be given have one of
// these.
//
// Whose a pool id is:
//
// - Ids that the base knows are the base's: those of graphs captured and of MemPools made before
//   enable(), and of MemPools with an allocator of their own.
// - Any other id becomes ours when somebody begins to allocate in it (a capture, or a thread that
//   torch.compile's graph trees warm up on), or when a cudagraph_pool.GraphPool registers it or a
//   torch.cuda.MemPool is made, which tells the allocator before it uses its id.
//
// An id of ours stays ours until its pool is gone, even after disable(): its graphs need it. It
// names a pool of its own, unless captures that name no pool are to share one. torch gives each
// such capture an id, and all these stand for the device's shared pool.
//
// A scope is a capture's if its filter refuses the current stream while that is not capturing. For
// torch begins the route before the capture, and a graph's filter asks for its capture. It is also
// one if the current stream is already capturing. An eager scope stands apart from graphs, except
// in pools that are neither a GraphPool's nor a MemPool's: graph trees hand on what they warm up.
//
// Every call has strong exception safety, except the end of a scope. From then on nothing is routed
// to the pool, and what could not be ended is ended later (EndScope()).
//
// Locks, in the order they are taken: this mutex, then MergedStats', then the base's, then
// RouteTable's, then PoolSet's. So the base may call back only TryTrim(), which only tries the
// first lock, and questions about whose a pool is.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include <atomic>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "core/pool_set.h"
#include "torch/device_pools.h"
#include "torch/scopes/routes.h"
#include "torch/scopes/side_pools.h"

namespace cgp {

class CaptureScopes {
 public:
  // `base` must outlive this. It serves what is not the owner's; nullptr: the owner has all.
  CaptureScopes(PoolsOwner owner, Base* base) : owner_(owner), base_(base) {}

  // The shared pool of each device. torch never makes this id: it counts from 1.
  static constexpr PoolId kShared{~0ULL, 0};
  // Whether torch made the id for a capture that names no pool.
  static bool IsAnonymous(MempoolId_t id) { return id.first != 0 && id.second == 0; }

  RouteTable& routes() { return routes_; }
  const SidePools& side_pools() const { return side_pools_; }

  // torch's calls, under CUDAAllocator's names for them.
  void Begin(DeviceIndex device, MempoolId_t id, StreamFilter filter);
  void End(DeviceIndex device, MempoolId_t id);
  void Release(DeviceIndex device, MempoolId_t id);
  void CreateOrIncref(DeviceIndex device, MempoolId_t id, std::shared_ptr<Base> allocator);
  int UseCount(DeviceIndex device, MempoolId_t id) const;
  void SetUseOnOom(DeviceIndex device, MempoolId_t id, bool use_on_oom);
  void SetNoSplit(DeviceIndex device, MempoolId_t id);

  // The pool of ours that torch calls `id`, if any.
  std::optional<Target> FindOurs(DeviceIndex device, MempoolId_t id) const;

  // Makes `id` ours, with a user, who has to call Release(). Throws UsageError if it is in use.
  void Register(DeviceIndex device, PoolId id);
  // Whether the pool is ours and a torch.cuda.MemPool's.
  bool IsMemPool(DeviceIndex device, PoolId id) {
    const std::lock_guard lock(mutex_);
    return FindMemPool({device, id}) != nullptr;
  }

  // Whether later captures are ours, or the base's; pools that are ours go on working.
  std::atomic<bool> takes_captures{true};
  // Whether captures that name no pool share one, and whether MemPools are ours.
  std::atomic<bool> shares_captures{false};
  std::atomic<bool> takes_mempools{true};

  // How many captures have begun since the process did.
  struct Counts {
    std::atomic<uint64_t> ours{0};
    std::atomic<uint64_t> bases{0};
    // Why, of the base's. The others went to pools that the base had before.
    std::atomic<uint64_t> while_stopped{0};  // we took none
    std::atomic<uint64_t> in_mempools{0};    // of the base's
  } counts;

  // Closes the scopes of captures that the calling thread began, that are over, and that nobody
  // ended.
  void EndAbandoned();
  // The calling thread saw a capture into the pool fail, so nobody will end it.
  void EndFailed(DeviceIndex device, MempoolId_t id);

  // Give back the memory of unused pools, unless a capture is under way: of both owners, of all
  // devices or of `only` one. They wait for each device that has any, and return the bytes.
  // TryTrim() waits for no lock of ours, so the base may call it in an allocation. Of the base it
  // asks only statistics and a larger share of the memory, which the base's lock allows.
  uint64_t Trim(std::optional<DeviceIndex> only = std::nullopt, bool waits = true);
  uint64_t TryTrim(std::optional<DeviceIndex> only = std::nullopt) { return Trim(only, false); }
  // Gives back the memory of our pool, unless a capture is under way; returns whether the pool is
  // ours.
  bool EmptyOurs(MempoolId_t id) noexcept;
  // Asks each use_on_oom pool of the device for a block, then those that lend on OOM, until one has
  // it: for `bytes` that no route takes, and the base has no memory for.
  using AllocateIn = std::function<std::optional<Block>(DevicePools&, const Target&)>;
  std::optional<DevicePools::Owned> AllocateOnOom(DeviceIndex device, uint64_t bytes,
                                                  const AllocateIn& allocate);

  // --- Leases (leases.cc), for calls that do not come from torch ---
  //
  // PoolSet says what they do. They throw UsageError for a pool that is not ours or cannot lease,
  // and c10::OutOfMemoryError where memory does not suffice, although all caches were emptied.

  using Step = std::function<Leased(PoolSet&, PoolId)>;
  // Takes pages away, or brings them back.
  Leased Take(DeviceIndex device, MempoolId_t id, const Step& step);
  Leased Bring(DeviceIndex device, MempoolId_t id, const Step& step);
  // Without `keeps_live` the pool must be a GraphPool's. Graphs of any pool that were captured since
  // its first scope began are refused until NoteFilled(), and so are scopes of it: only the caller
  // can bring its content back, after Wake(), while nothing captures.
  Leased Sleep(DeviceIndex device, MempoolId_t id, bool keeps_live);
  Leased Wake(DeviceIndex device, MempoolId_t id);
  void NoteFilled(DeviceIndex device, PoolId id);
  // Wakes the pool if need be, for torch.
  void Rouse(DeviceIndex device, MempoolId_t id);

  // The calling thread's eager work borrows from the pool until EndLoan(), and so does work that
  // inherits its thread-local state: backward passes in autograd's threads. Returns the loan.
  PoolId BeginLoan(DeviceIndex device, MempoolId_t id);
  void EndLoan(DeviceIndex device, PoolId loan);
  // Whether eager work that runs out borrows from any pool that is idle.
  std::atomic<bool> lends_on_oom{false};

  // PoolSet::NameCapture() for the capture that the calling thread has ended last, and its place in
  // the order of all captures. Zeros if another capture has ended since, or it was not ours.
  std::pair<uint64_t, uint64_t> NameCapture(DeviceIndex device, MempoolId_t id);
  // The graph with that name and place, or one without (0, 0), is about to be replayed on the
  // current stream. `device` may be unknown.
  void BeginReplay(std::optional<DeviceIndex> device, MempoolId_t id, uint64_t capture,
                   uint64_t place);

 private:
  using ScopeKey = std::pair<DeviceIndex, PoolId>;

  // A torch.cuda.MemPool, if we saw it being made.
  struct MemPool {
    bool ours = false;  // or the base's
    bool use_on_oom = false;
    bool whole_pages = false;  // no_split
  };

  bool BaseKnows(DeviceIndex device, MempoolId_t id) const;
  // How many users of the shared pool use this id; 0 if the id stands for itself.
  int SharedUses(DeviceIndex device, MempoolId_t id) const {
    const std::lock_guard lock(names_mutex_);
    const auto found = shared_uses_.find({device, id});
    return found == shared_uses_.end() ? 0 : found->second;
  }
  PoolId PoolNamed(DeviceIndex device, MempoolId_t id) const {
    return SharedUses(device, id) > 0 ? kShared : PoolId{id.first, id.second};
  }
  // Adds a user of `pool` under this id (1), or removes one (-1), which never throws.
  void CountName(DeviceIndex device, MempoolId_t id, PoolId pool, int change);

  // pre, of all that follow: mutex_ is held.

  // The pool's MemPool, if it is one, of ours or of the base's, else nullptr.
  MemPool* FindMemPool(const ScopeKey& key, bool ours = true);
  // Trim() of all devices or of one. pre: also that no capture is under way.
  uint64_t TrimAll(std::optional<DeviceIndex> only);
  // The pool, if it may lease.
  Target Leasable(DeviceIndex device, MempoolId_t id) const;
  Leased BringTo(const Target& pool, const Step& step);
  void Rouse(const Target& pool);
  // What pools can lend now, if it is `least` bytes or more, the most first.
  std::vector<std::pair<uint64_t, PoolId>> Lenders(DevicePools& pools, uint64_t least) const;

  // Begins a scope. `graphs`: for a nested one, the pool of the graph under capture.
  void BeginInOurs(const Route& route, bool capturing, std::optional<PoolId> graphs);
  // Ends a scope of ours, for whatever reason; nothing else does. Its route is gone whatever
  // throws. If the scope cannot be ended, for lack of the host's memory, it ends before the pool's
  // next one.
  void EndScope(DevicePools& pools, PoolId pool, ScopeKind kind);

  // Add and remove a user of our pool, which torch calls `id`.
  void Hold(DevicePools& pools, MempoolId_t id, PoolId pool);
  void Drop(DevicePools& pools, MempoolId_t id, PoolId pool);
  // The pool of ours has lost a user, whatever the base says.
  void ReleaseUnused(DevicePools& pools, PoolId id);
  // How many users the pool has, without graphs that are captured into others.
  int UsersOf(DevicePools& pools, PoolId pool) const;
  // `nested` has memory of graphs in pool `of`, and is retained until that has no users. Returns
  // whether this is new.
  bool RetainFor(DevicePools& pools, PoolId of, PoolId nested);
  void ReleaseRetainedFor(DevicePools& pools, PoolId of);

  void CloseAbandoned(const std::function<bool(const Route&)>& considered);
  // The captures of these routes have failed, since a new one begins where they were. With
  // `own_alone`, routes of other threads stay open: these may be about to begin their captures.
  void TakeAsFailed(bool own_alone, const std::function<bool(const Route&)>& failed);

  const PoolsOwner owner_;
  Base* const base_;
  RouteTable routes_;
  SidePools side_pools_{base_, routes_};
  mutable std::mutex names_mutex_;  // taken last, also by callers without any other
  std::map<std::pair<DeviceIndex, MempoolId_t>, int> shared_uses_;

  // Orders begin, end and release of scopes, and lets no capture begin while memory is given back.
  mutable std::mutex mutex_;
  std::map<ScopeKey, MemPool> mempools_;
  // Of Register(): how many captures had ended when the pool's first scope began.
  std::map<ScopeKey, uint64_t> graph_pools_;
  std::set<ScopeKey> exported_;  // that were filled while Exports()
  uint64_t ended_ = 0;           // captures of ours
  // Asleep without its live blocks' content: as in graph_pools_.
  std::map<ScopeKey, uint64_t> dropped_;
  std::atomic<bool> leased_{false};  // a page has been away or lent since the process began
  // Pools of graphs, and other pools with memory of these graphs: one user for each of the latter.
  std::set<std::pair<ScopeKey, PoolId>> retained_;
  // The routes of our captures that looked abandoned. Their scopes are closed; their graphs may
  // still end them.
  std::vector<Route> late_ends_;
};

}  // namespace cgp
