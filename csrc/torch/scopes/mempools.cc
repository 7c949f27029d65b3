// torch.cuda.MemPools.
//
// A MemPool without an allocator of its own is a pool of ours, with the MemPool as a user.
// torch.cuda.use_mem_pool begins an eager scope in it or, in a capture, a nested one. What is
// allocated there belongs to the graph under capture, but lies in the MemPool, which may be gone
// before the graph is. So the pool has one more user while the graph's pool has any.
//
// ~MemPool calls setUseOnOOM(), releasePool() and emptyCache(id), and an error there ends the
// process. While any thread captures, they leave the memory for later.
#include <algorithm>
#include <optional>
#include <utility>

#include "torch/errors.h"
#include "torch/observe/history.h"
#include "torch/scopes/capture_scopes.h"

namespace cgp {

void CaptureScopes::CreateOrIncref(DeviceIndex device, MempoolId_t id,
                                   std::shared_ptr<Base> allocator) {
  const std::lock_guard lock(mutex_);
  const ScopeKey key{device, {id.first, id.second}};
  if (const auto ours = FindOurs(device, id)) {
    TORCH_CHECK(allocator == nullptr,
                "graph pool " + ToString(key.second) +
                    " already allocates by itself: it cannot be given another allocator");
    return Hold(*ours->pools, id, ours->id);
  }
  const bool takes = allocator == nullptr && takes_captures && takes_mempools;
  const bool ours = takes && !BaseKnows(device, id);
  const bool is_new = mempools_.try_emplace(key, MemPool{.ours = ours}).second;
  const auto create = [&] {
    if (!ours) return base_->createOrIncrefPool(device, id, std::move(allocator));
    DevicePools::For(device, owner_).set.Retain(key.second);
  };
  OrUndo(create, [&] {
    if (is_new) mempools_.erase(key);
  });
}

int CaptureScopes::UseCount(DeviceIndex device, MempoolId_t id) const {
  const auto ours = FindOurs(device, id);
  if (!ours) return base_->getPoolUseCount(device, id);
  if (ours->id == kShared) return SharedUses(device, id);
  const std::lock_guard lock(mutex_);
  return UsersOf(*ours->pools, ours->id);
}

void CaptureScopes::SetUseOnOom(DeviceIndex device, MempoolId_t id, bool use_on_oom) {
  const std::lock_guard lock(mutex_);
  const auto ours = FindOurs(device, id);
  if (!ours) return base_->setUseOnOOM(device, id, use_on_oom);
  MemPool* const mempool = FindMemPool({device, ours->id});
  if (mempool != nullptr) mempool->use_on_oom = use_on_oom;
  // Graph pools never serve allocations outside captures, so "off" is how it is.
  TORCH_CHECK(mempool != nullptr || !use_on_oom,
              "graph pool " + ToString(ours->id) +
                  " cannot serve other allocations when memory runs out: its graphs need it");
}

void CaptureScopes::SetNoSplit(DeviceIndex device, MempoolId_t id) {
  const std::lock_guard lock(mutex_);
  const auto ours = FindOurs(device, id);
  if (!ours) return base_->setNoSplit(device, id);
  MemPool* const mempool = FindMemPool({device, ours->id});
  TORCH_CHECK(mempool != nullptr, "graph pool " + ToString(ours->id) +
                                      " has no segments that could be kept whole; use a "
                                      "torch.cuda.MemPool for that");
  mempool->whole_pages = true;
}

uint64_t CaptureScopes::Trim(std::optional<DeviceIndex> only, bool waits) {
  const History::Telling telling(History::Get());
  // While this is held, no capture of torch's begins.
  std::unique_lock lock(mutex_, std::defer_lock);
  if (waits) lock.lock();
  return (!waits && !lock.try_lock()) || routes_.capturing() ? 0 : TrimAll(only);
}

uint64_t CaptureScopes::TrimAll(std::optional<DeviceIndex> only) {
  uint64_t bytes = 0;
  for (const PoolsOwner owner : kPoolsOwners) {
    if (owner != owner_ && base_ == nullptr) continue;
    for (DevicePools* pools : DevicePools::All(owner)) {
      if (only && pools->device != *only) continue;
      // Memory of the C functions shares neither statistics nor a fraction with a base.
      bytes += pools->Trim(owner == kGraphAllocator ? base_ : nullptr);
    }
  }
  return bytes;
}

bool CaptureScopes::EmptyOurs(MempoolId_t id) noexcept {
  bool ours = false;
  WithWarnings("giving back the memory of a MemPool", [&] {
    const std::lock_guard lock(mutex_);
    for (DevicePools* pools : DevicePools::All(owner_)) {
      const auto found = FindOurs(pools->device, id);
      if (!found) continue;
      ours = true;
      if (!routes_.capturing()) pools->Trim(base_, found->id);
    }
  });
  return ours;
}

std::optional<DevicePools::Owned> CaptureScopes::AllocateOnOom(DeviceIndex device, uint64_t bytes,
                                                               const AllocateIn& allocate) {
  const std::lock_guard lock(mutex_);
  // Asks an open scope, and ends it.
  const auto ask = [&](const Target& target, const auto& end) -> std::optional<DevicePools::Owned> {
    const auto block = OrUndo([&] { return allocate(*target.pools, target); }, end);
    OrUndo(end, [&] {
      if (block) target.pools->set.Free(block->address);
      end();
    });
    if (!block) return std::nullopt;
    return DevicePools::Owned{target.pools, target.id, *block};
  };
  for (const auto& [key, mempool] : mempools_) {
    if (key.first != device || !mempool.use_on_oom) continue;
    const PoolId id = key.second;
    DevicePools& pools = DevicePools::For(device, owner_);
    // Only if the MemPool is its only user: graphs write to free bytes, and another thread may be
    // allocating there.
    if (pools.set.UseCount(id) != 1 || pools.set.Stats(id).asleep) continue;
    pools.set.BeginScope(id, ScopeKind::kEager, routes_.capturing());
    const auto end = [&] {
      pools.EndScope(id);
      pools.set.Release(id);
    };
    const Target target{.id = id, .pools = &pools, .whole_pages = mempool.whole_pages};
    if (auto owned = ask(target, end)) return owned;
  }
  DevicePools* const pools = DevicePools::Find(device, owner_);
  if (!lends_on_oom || pools == nullptr || routes_.capturing()) return std::nullopt;
  for (const auto& [lendable, id] : Lenders(*pools, bytes)) {
    leased_ = true;
    const Target loan{.id = pools->set.BeginLoan(id), .kind = ScopeKind::kLoan, .pools = pools};
    if (auto owned = ask(loan, [&] { pools->EndScope(loan.id); })) return owned;
  }
  return std::nullopt;
}

int CaptureScopes::UsersOf(DevicePools& pools, PoolId pool) const {
  const auto is_it = [&](const auto& entry) {
    return entry.first.first == pools.device && entry.second == pool;
  };
  return pools.set.UseCount(pool) - static_cast<int>(std::ranges::count_if(retained_, is_it));
}

bool CaptureScopes::RetainFor(DevicePools& pools, PoolId of, PoolId nested) {
  const auto [entry, is_new] = retained_.insert({{pools.device, of}, nested});
  if (is_new) pools.set.Retain(nested);
  return is_new;
}

void CaptureScopes::ReleaseRetainedFor(DevicePools& pools, PoolId of) {
  const ScopeKey key{pools.device, of};
  for (auto entry = retained_.lower_bound({key, {}});
       entry != retained_.end() && entry->first == key; entry = retained_.lower_bound({key, {}})) {
    const PoolId nested = entry->second;
    retained_.erase(entry);
    pools.set.Release(nested);
    ReleaseUnused(pools, nested);
  }
}

}  // namespace cgp
