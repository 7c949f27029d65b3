// Pages that are away for a time while their addresses stay: to the device, or to eager work.
// PoolSet decides which. Here it is said which pools can, and who makes room when they come back.
//
// Two kinds of pools cannot. Another process may have pages of those that were filled while memory
// was exportable. And whoever tracks allocations may have registered any page: NCCL does that, and
// its captured kernels go on using the registration, whatever a tracker is told later.
#include <c10/util/ThreadLocalDebugInfo.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "torch/errors.h"
#include "torch/observe/history.h"
#include "torch/scopes/capture_scopes.h"
#include "torch/workspaces.h"

namespace cgp {
namespace {

using Slots = c10::ThreadLocalDebugInfo;

// What tells a thread's allocations that they borrow. torch's autograd carries it into its threads.
struct LoanInfo final : c10::DebugInfoBase {
  PoolId loan;
};

// torch uses this slot in its own tests alone, and since 2.14 it is no enumerator.
c10::DebugInfoKind LoanSlot() { return c10::DebugInfoKind::TEST_INFO_2; }

bool Borrows(PoolId loan) {
  const auto* const info = dynamic_cast<LoanInfo*>(Slots::get(LoanSlot()));
  return info != nullptr && info->loan == loan;
}

// Changes what lies below a profiler's entry, which may be on top, and begin or end at any time: it
// takes away only what is on top.
template <typename Change>
void BelowProfiler(const Change& change) {
  const auto slot = c10::DebugInfoKind::PROFILER_STATE;
  std::shared_ptr<c10::DebugInfoBase> profiler;
  try {
    if (Slots::get(slot) != nullptr) profiler = Slots::_pop(slot);
  } catch (const c10::Error&) {  // NOLINT(bugprone-empty-catch): something else is on top
  }
  const auto put_back = [&] {
    if (profiler != nullptr) Slots::_push(slot, profiler);
  };
  OrUndo(change, put_back);
  put_back();
}

}  // namespace

Target CaptureScopes::Leasable(DeviceIndex device, MempoolId_t id) const {
  const std::string name = ToString(PoolId{id.first, id.second});
  const auto ours = FindOurs(device, id);
  if (!ours) {
    throw UsageError("pool " + name + " of GPU " + std::to_string(device) +
                     " is none of cudagraph_pool's, or is gone: nothing of it can be leased");
  }
  if (exported_.contains({device, ours->id})) {
    throw UsageError("graph pool " + name +
                     " was filled while enable(exportable=True) was on: other processes may have "
                     "its pages, so these stay. Capture into a pool made without it");
  }
  if (History::Get().HasTrackers()) {
    throw UsageError("graph pool " + name +
                     " cannot lease pages: a library that follows allocations, as NCCL does "
                     "when it registers memory, may have registered them");
  }
  return *ours;
}

Leased CaptureScopes::Take(DeviceIndex device, MempoolId_t id, const Step& step) {
  const History::Telling telling(History::Get());
  const std::lock_guard lock(mutex_);
  CloseAbandoned(&Route::IsOwn);
  const Target pool = Leasable(device, id);
  leased_ = true;
  pool.pools->stats.BeforeChange(*base_);
  const Leased gone = [&] {
    const RelaxedCaptureMode relaxed;
    return step(pool.pools->set, pool.id);
  }();
  pool.pools->stats.AfterChange(*base_);
  return gone;
}

Leased CaptureScopes::Bring(DeviceIndex device, MempoolId_t id, const Step& step) {
  const History::Telling telling(History::Get());
  const std::lock_guard lock(mutex_);
  const auto pool = FindOurs(device, id);
  return pool ? BringTo(*pool, step) : Leased{};  // of a pool that is gone
}

Leased CaptureScopes::BringTo(const Target& pool, const Step& step) {
  DevicePools& pools = *pool.pools;
  const auto attempt = [&] {
    const History::Purpose purpose(pool.id, StreamId{});
    MeteredDriver::ClearRefusals();
    return IfMemorySuffices([&] { return step(pools.set, pool.id); });
  };
  pools.stats.BeforeChange(*base_);
  std::optional<Leased> back = attempt();
  if (!back && MeteredDriver::LimitRefused()) {
    pools.stats.CatchUp(*base_);
    back = attempt();
  }
  // As for an allocation (GraphAllocator::AllocateInPool()).
  if (!back && !routes_.capturing()) {
    TrimAll(pools.device);
    base_->emptyCache({0, 0});
    ++pools.stats.retries;
    pools.stats.CatchUp(*base_);
    back = attempt();
  }
  if (!back) {
    ++pools.stats.ooms;
    const MemoryInfo info = pools.driver.Info();
    const std::string text =
        "CUDA out of memory. Graph pool " + ToString(pool.id) + " of GPU " +
        std::to_string(pools.device) + " has " + Size(pools.set.Stats(pool.id).away_bytes) +
        " away. Free on the GPU: " + Size(info.free_bytes) + " of " + Size(info.total_bytes) +
        pools.stats.DescribeShare() +
        ". Nothing of the pool is lost: free tensors, or let other pools sleep, and try again.";
    TORCH_CHECK_WITH(OutOfMemoryError, false, text);
  }
  pools.stats.AfterChange(*base_);
  return *back;
}

Leased CaptureScopes::Sleep(DeviceIndex device, MempoolId_t id, bool keeps_live) {
  return Take(device, id, [&](PoolSet& set, PoolId pool) {
    if (keeps_live) return set.Sleep(pool, keeps_live);
    const auto known = graph_pools_.find({device, pool});
    if (known == graph_pools_.end()) {
      throw UsageError("pool " + ToString(pool) +
                       " is not a GraphPool: its live tensors must stay. Use keep='live'");
    }
    const auto dropped = dropped_.emplace(known->first, known->second).first;
    return OrUndo([&] { return set.Sleep(pool, keeps_live); },
                  [&] {
                    if (!set.Stats(pool).asleep) dropped_.erase(dropped);
                  });
  });
}

Leased CaptureScopes::Wake(DeviceIndex device, MempoolId_t id) {
  return Bring(device, id, [&](PoolSet& set, PoolId pool) {
    if (dropped_.contains({device, pool}) && routes_.capturing()) {
      throw UsageError("graph pool " + ToString(pool) +
                       " sleeps without its live tensors: what copies them back would break the "
                       "capture that is under way. End it first");
    }
    return set.Wake(pool);
  });
}

void CaptureScopes::NoteFilled(DeviceIndex device, PoolId id) {
  const std::lock_guard lock(mutex_);
  dropped_.erase({device, id});
}

void CaptureScopes::Rouse(DeviceIndex device, MempoolId_t id) {
  const History::Telling telling(History::Get());
  const std::lock_guard lock(mutex_);
  if (const auto pool = FindOurs(device, id)) Rouse(*pool);
}

void CaptureScopes::Rouse(const Target& pool) {
  if (!leased_) return;
  if (dropped_.contains({pool.pools->device, pool.id})) {
    throw UsageError("graph pool " + ToString(pool.id) +
                     " sleeps without its live tensors: call its wake() first");
  }
  BringTo(pool, [](PoolSet& set, PoolId id) { return set.Wake(id); });
}

PoolId CaptureScopes::BeginLoan(DeviceIndex device, MempoolId_t id) {
  const History::Telling telling(History::Get());
  const std::lock_guard lock(mutex_);
  CloseAbandoned(&Route::IsOwn);
  const Target pool = Leasable(device, id);
  const auto info = std::make_shared<LoanInfo>();
  routes_.ReserveOne();
  leased_ = true;
  const PoolId loan = info->loan = pool.pools->set.BeginLoan(pool.id);
  OrUndo([&] { BelowProfiler([&] { Slots::_push(LoanSlot(), info); }); },
         [&] { pool.pools->EndScope(loan); });
  routes_.Add({{.id = loan, .kind = ScopeKind::kLoan, .pools = pool.pools},
               device,
               {loan.first, loan.second},
               // A later loan has the same id, while who left this one elsewhere is still marked.
               [mark = info.get()](cudaStream_t) { return Slots::get(LoanSlot()) == mark; }});
  return loan;
}

void CaptureScopes::EndLoan(DeviceIndex device, PoolId loan) {
  const History::Telling telling(History::Get());
  std::unique_lock lock(mutex_);
  DevicePools& pools = DevicePools::For(device, owner_);
  routes_.Remove(device, loan);
  if (Borrows(loan)) {
    try {
      BelowProfiler([] { Slots::_pop(LoanSlot()); });
    } catch (const c10::Error&) {  // NOLINT(bugprone-empty-catch): it may stay, its loan is over
    }
  }
  // A thread's first product makes a workspace, which nobody would free, and no replay could begin.
  // A free may ask for Python's lock, and so for none of ours.
  lock.unlock();
  FreeWorkspaces([&](uintptr_t address) {
    const auto owned = pools.set.At(address);
    return owned && owned->id == loan;
  });
  lock.lock();
  pools.EndScope(loan);
}

std::vector<std::pair<uint64_t, PoolId>> CaptureScopes::Lenders(DevicePools& pools,
                                                                uint64_t least) const {
  std::vector<std::pair<uint64_t, PoolId>> lenders;
  if (History::Get().HasTrackers()) return lenders;
  for (const PoolId id : pools.set.ids()) {
    if (exported_.contains({pools.device, id}) || pools.set.Stats(id).asleep) continue;
    if (pools.set.InScope(id) || pools.set.InScope(PoolSet::LoanOf(id))) continue;
    const uint64_t bytes = pools.set.LendableBytes(id);
    if (bytes >= least) lenders.emplace_back(bytes, id);
  }
  std::ranges::sort(lenders, std::greater());
  return lenders;
}

void CaptureScopes::BeginReplay(std::optional<DeviceIndex> device, MempoolId_t id, uint64_t capture,
                                uint64_t place) {
  if (!leased_) return;
  const History::Telling telling(History::Get());
  const std::lock_guard lock(mutex_);
  for (DevicePools* pools : DevicePools::All(owner_)) {
    if (device && pools->device != *device) continue;
    const auto ours = FindOurs(pools->device, id);
    if (!ours) continue;
    const StreamId stream = ToStreamId(CurrentStream(pools->device));
    pools->set.BeginReplay(ours->id, capture, stream);
    const ScopeKey key{pools->device, ours->id};
    for (auto nested = retained_.lower_bound({key, {}});
         nested != retained_.end() && nested->first == key; ++nested) {
      pools->set.BeginReplay(nested->second, 0, stream);
    }
  }
  std::erase_if(dropped_, [&](const auto& entry) {  // the pool is gone
    return !DevicePools::For(entry.first.first, owner_).set.Contains(entry.first.second);
  });
  for (const auto& [key, began] : dropped_) {
    if (place != 0 && place <= began) continue;
    throw UsageError("a graph of pool " + ToString(PoolId{id.first, id.second}) +
                     " may read live tensors of graph pool " + ToString(key.second) +
                     ", which sleeps without them: call the wake() of that pool first");
  }
}

}  // namespace cgp
