// GraphAllocator: torch.cuda.MemPools.
//
// One without an allocator of its own is a pool of ours, with the MemPool as a user.
// torch.cuda.use_mem_pool begins an eager scope in it, or, in a capture, a nested one: what is
// allocated there belongs to the graph under capture, but lies in the MemPool, which may be gone
// before the graph is. So it has one more user as long as the pool of the graph has any.
//
// ~MemPool calls setUseOnOOM(), releasePool() and emptyCache(id), and an error there ends the
// process. In a capture, of whichever thread, they leave the memory for later.
#include <optional>

#include "torch/errors.h"
#include "torch/graph_allocator.h"
#include "torch/runtime.h"

namespace cgp {

void GraphAllocator::createOrIncrefPool(DeviceIndex device, MempoolId_t id,
                                        std::shared_ptr<CUDAAllocator> allocator) {
  const std::lock_guard lock(scopes_mutex_);
  const ScopeKey key{device, {id.first, id.second}};
  if (const auto known = FindOurs(device, id)) {
    TORCH_CHECK(allocator == nullptr,
                "graph pool " + ToString(key.second) +
                    " already allocates by itself: it cannot be given another allocator");
    Hold(*known->pools, id, known->id);
    return;
  }
  const bool ours = allocator == nullptr && takes_captures() && takes_mempools_;
  if (ours && !BaseKnows(device, id)) {
    const auto mempool = mempools_.try_emplace(key).first;
    Undo noted([&] { mempools_.erase(mempool); });
    AsTorchErrors([&] { DevicePools::For(device).set().Retain(key.second); });
    noted.Keep();
    return;
  }
  const auto [mempool, is_new] = bases_mempools_.insert(key);
  Undo noted([&, is_new = is_new, mempool = mempool] {
    if (is_new) bases_mempools_.erase(mempool);
  });
  base_.createOrIncrefPool(device, id, std::move(allocator));
  noted.Keep();
}

bool GraphAllocator::IsMemPool(DeviceIndex device, PoolId id) const {
  const std::lock_guard lock(scopes_mutex_);
  return mempools_.contains({device, id});
}

int GraphAllocator::getPoolUseCount(DeviceIndex device, MempoolId_t id) {
  const auto ours = FindOurs(device, id);
  if (!ours) return base_.getPoolUseCount(device, id);
  if (ours->id == PoolNames::kShared) return names_.UseCount(device, id);
  const std::lock_guard lock(scopes_mutex_);
  return UsersOf(*ours->pools, ours->id);
}

void GraphAllocator::setUseOnOOM(DeviceIndex device, MempoolId_t id, bool use_on_oom) {
  const std::lock_guard lock(scopes_mutex_);
  const PoolId pool{id.first, id.second};
  if (const auto mempool = mempools_.find({device, pool}); mempool != mempools_.end()) {
    mempool->second.lends = use_on_oom;
    return;
  }
  if (!FindOurs(device, id)) return base_.setUseOnOOM(device, id, use_on_oom);
  // Graph pools never serve allocations outside captures, so "off" is how it is.
  TORCH_CHECK(!use_on_oom,
              "graph pool " + ToString(pool) +
                  " cannot serve other allocations when memory runs out: its graphs need it");
}

void GraphAllocator::setNoSplit(DeviceIndex device, MempoolId_t id) {
  const std::lock_guard lock(scopes_mutex_);
  const PoolId pool{id.first, id.second};
  if (const auto mempool = mempools_.find({device, pool}); mempool != mempools_.end()) {
    mempool->second.whole_pages = true;
    return;
  }
  TORCH_CHECK(!FindOurs(device, id),
              "graph pool " + ToString(pool) +
                  " has no segments that could be kept whole; use a torch.cuda.MemPool for that");
  base_.setNoSplit(device, id);
}

// All blocks of the pool are whole pages then, and so is all that is free in it.
size_t GraphAllocator::WholePages(DevicePools& pools, size_t bytes) {
  if (bytes > pools.total_bytes()) return bytes;  // for the error
  const uint64_t page = pools.driver().granularity();
  return (bytes + page - 1) / page * page;
}

bool GraphAllocator::EmptyOurs(MempoolId_t id) noexcept {
  bool ours = false;
  WithWarnings("giving back the memory of a MemPool", [&] {
    const std::lock_guard lock(scopes_mutex_);
    for (DevicePools* pools : DevicePools::All()) {
      const auto found = FindOurs(pools->device(), id);
      if (!found) continue;
      ours = true;
      if (routes_.capturing()) continue;
      BeforeOursChange(*pools);
      pools->Trim(found->id);
      LimitBase(*pools);
    }
  });
  return ours;
}

std::optional<Block> GraphAllocator::Lend(size_t bytes, cudaStream_t stream) {
  if (IsCapturing(stream)) return std::nullopt;  // no graph would keep it
  const History::Telling telling(history_);
  History::Context context = history_.Gather(History::When::STATE);
  const DeviceIndex device = CurrentDevice();
  DevicePools* const pools = DevicePools::Find(device);
  std::optional<Block> block;
  PoolId lender;
  {
    const std::lock_guard lock(scopes_mutex_);
    for (const auto& [key, mempool] : mempools_) {
      if (key.first != device || !mempool.lends || block) continue;
      lender = key.second;
      const size_t wanted = mempool.whole_pages ? WholePages(*pools, bytes) : bytes;
      block = LendFrom(*pools, lender, {lender, wanted, ToStreamId(stream)});
    }
  }
  if (block) Announce({pools, lender, *block}, std::move(context));
  return block;
}

// Only while the MemPool is its one user: graphs write to what is free, and another thread may be
// allocating there.
std::optional<Block> GraphAllocator::LendFrom(DevicePools& pools, PoolId pool,
                                              const Request& request) {
  PoolSet& set = pools.set();
  if (set.UseCount(pool) != 1) return std::nullopt;
  BeforeOursChange(pools);
  LimitOurs(pools);
  set.BeginScope(pool, ScopeKind::kEager, routes_.capturing());
  const auto end = [&] {
    pools.EndScope(pool);
    set.Release(pool);
  };
  Address lent = 0;  // no std::optional: g++ 12 has it engaged where what was to fill it threw
  Undo scope([&] {
    if (lent != 0) set.Free(lent);
    end();
  });
  const std::optional<Block> block = TryAllocate(pools, request);
  if (block) lent = block->address;
  end();
  scope.Keep();
  return block;
}

int GraphAllocator::UsersOf(DevicePools& pools, PoolId pool) const {
  const auto keeps = [&](const auto& kept) {
    return kept.first.first == pools.device() && kept.second == pool;
  };
  return pools.set().UseCount(pool) - static_cast<int>(std::ranges::count_if(kept_, keeps));
}

bool GraphAllocator::KeepFor(DevicePools& pools, PoolId of, PoolId nested) {
  const auto [kept, is_new] = kept_.insert({{pools.device(), of}, nested});
  if (is_new) pools.set().Retain(nested);
  return is_new;
}

void GraphAllocator::ReleaseKeptFor(DevicePools& pools, PoolId of) {
  const ScopeKey key{pools.device(), of};
  for (auto kept = kept_.lower_bound({key, {}}); kept != kept_.end() && kept->first == key;
       kept = kept_.lower_bound({key, {}})) {
    const PoolId nested = kept->second;
    kept_.erase(kept);
    pools.set().Release(nested);
    ReleaseUnused(pools, nested);
  }
}

}  // namespace cgp
