// Allocating, freeing and running out, and what differs from the base only for our pointers and
// pools. The header has what only the base does.
#include "torch/graph_allocator.h"

#include <c10/core/impl/GPUTrace.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime_api.h>

#include <algorithm>
#include <iterator>

#include "core/base/error.h"
#include "torch/install.h"
#include "torch/runtime.h"

// Texts are put together before torch's macros get them: these format several parts with
// std::ostream, which crashes in a module whose compiler linked a libstdc++ of its own.
namespace cgp {
namespace {

// Memory of pools, as torch gets it.
DataPtr ToData(void* pointer, DeviceIndex device) {
  return {pointer, pointer, &GraphAllocator::FreeMemory, c10::Device(c10::kCUDA, device)};
}
DataPtr ToData(const Block& block, DeviceIndex device) {
  return ToData(reinterpret_cast<void*>(block.address), device);
}

// Whether the driver has mapped `pointer`. Memory of a pool without a live block is no memory of
// cudaMalloc either, and a graph may still use it.
bool IsMapped(const void* pointer) {
  const auto has_it = [&](DevicePools& pools) {
    return pools.set.HasReserved(reinterpret_cast<Address>(pointer));
  };
  return std::ranges::any_of(
      kPoolsOwners, [&](PoolsOwner owner) { return DevicePools::FindFirst(owner, has_it); });
}

// With checkpoints torch.compile's graph trees go back to the end of an earlier graph, to record
// another one from there.
struct CheckpointOfOurs final : cca::AllocatorState {
  PoolId id;
  PoolCheckpoint checkpoint;
  // The pool's side pool, if it was in use, and the base's checkpoint of it.
  std::optional<MempoolId_t> side_pool;
  std::shared_ptr<cca::AllocatorState> of_side_pool;
};

std::optional<Block> TryAllocate(DevicePools& pools, const Request& request) {
  return IfMemorySuffices([&] {
    return pools.set.Allocate(request.id, request.bytes, request.stream, request.capture,
                              request.whole_pages);
  });
}

// What `ask` returns, or nothing if it fails: then the base's answer is the one to give.
template <typename Ask>
auto UnlessItFails(const Ask& ask) -> decltype(ask()) {
  try {
    return ask();
  } catch (const DriverError&) {
    return std::nullopt;
  } catch (const UsageError&) {  // somebody captures without torch, or the loan has just ended
    return std::nullopt;
  }
}

}  // namespace

GraphAllocator::GraphAllocator(CUDAAllocator& base) : base_(base) {
  for (DevicePools* pools : DevicePools::All()) pools->stats.DropBase();
  instance_.store(this, std::memory_order_release);
}

GraphAllocator::~GraphAllocator() { instance_.store(nullptr, std::memory_order_release); }

template <typename AskStream, typename AskBase>
DataPtr GraphAllocator::Allocate(size_t bytes, const AskStream& ask_stream,
                                 const AskBase& ask_base) {
  const Gate::Word gate = Gate::Read();
  std::optional<Target> target;
  if (Gate::HasScopes(gate) && bytes != 0) {
    const DeviceIndex device = CurrentDevice();
    const cudaStream_t stream = ask_stream(device);
    target = routes_.Match(device, stream);
    if (target && target->kind == ScopeKind::kLoan) {
      if (const auto block = Borrow(*target, bytes, stream)) return ToData(*block, device);
      target.reset();
    }
    if (target && target->pools != nullptr) {
      return ToData(AllocateInPool(*target, bytes, stream), device);
    }
  }
  try {
    DataPtr memory = ask_base();
    if (target) (void)memory.compare_exchange_deleter(base_.raw_deleter(), &FreeMemory);
    if (!Gate::IsEager(gate)) Gate::NoteBaseGrowth();
    return memory;
  } catch (c10::OutOfMemoryError& error) {
    const DeviceIndex device = CurrentDevice();
    const auto owned = target ? std::nullopt : AllocateOnOom(bytes, device, ask_stream(device));
    if (!owned) {
      AddPools(error, device);
      throw;
    }
    return ToData(owned->block, device);
  }
}

DataPtr GraphAllocator::allocate(size_t bytes) {
  return Allocate(bytes, &CurrentStream, [&] { return base_.allocate(bytes); });
}

void* GraphAllocator::raw_alloc(size_t bytes) {
  const auto ask_base = [&] { return ToData(base_.raw_alloc(bytes), 0); };
  return Allocate(bytes, &CurrentStream, ask_base).release_context();
}

void* GraphAllocator::raw_alloc_with_stream(size_t bytes, cudaStream_t stream) {
  const auto ask_base = [&] { return ToData(base_.raw_alloc_with_stream(bytes, stream), 0); };
  return Allocate(
             bytes, [stream](DeviceIndex) { return stream; }, ask_base)
      .release_context();
}

DataPtr GraphAllocator::allocateWithAddress(size_t bytes, void* address) {
  if (bytes != 0) {
    const DeviceIndex device = CurrentDevice();
    const auto target = routes_.Match(device, CurrentStream(device));
    // The base's memory cannot serve it: it would not stay for the graph.
    TORCH_CHECK(
        !target || target->pools == nullptr || target->kind == ScopeKind::kLoan,
        "graph pool " + ToString(target ? target->id : PoolId{}) +
            " chooses the addresses of its blocks itself and cannot give " + Size(bytes) + " at " +
            Hex(reinterpret_cast<Address>(address)) +
            ": allocate outside of the capture or use_pool block what has to have a certain "
            "address");
  }
  try {
    DataPtr memory = ForwardAllocateWithAddress(base_, bytes, address);
    Gate::NoteBaseGrowth();
    return memory;
  } catch (c10::OutOfMemoryError& error) {
    AddPools(error, CurrentDevice());
    throw;
  }
}

Block GraphAllocator::AllocateInPool(const Target& target, size_t bytes, cudaStream_t stream) {
  DevicePools& pools = *target.pools;
  const Request request{target.id, bytes, ToStreamId(stream), target.capture, target.whole_pages};
  if (!pools.stats.IsWatched() && !c10::memoryProfilingEnabled() &&
      c10::impl::GPUTrace::get_trace() == nullptr) {
    if (const auto block = TryAllocate(pools, request)) {
      if (pools.set.HasNewPeak()) Announce(base_, {&pools, request.id, *block}, nullptr);
      return *block;
    }
  }
  // Others want to know of it, the base has grown, or room has to be made.
  const History::Telling telling(history_);
  History::Context context = history_.Gather(History::When::STATE);
  for (bool first = true;; first = false) {
    if (const auto block = TryWatched(pools, request)) {
      Announce(base_, {&pools, request.id, *block}, std::move(context));
      return *block;
    }
    // While a capture is under way, be it another thread's, nothing may be unmapped, freed or
    // waited for.
    const bool captures = target.kind == ScopeKind::kCapture || routes_.capturing();
    if (!first || captures) ThrowOutOfMemory(base_, pools, request);
    scopes_.TryTrim(pools.device);
    base_.emptyCache();
    ++pools.stats.retries;
  }
}

std::optional<Block> GraphAllocator::TryWatched(DevicePools& pools, const Request& request) {
  pools.stats.BeforeChange(base_);
  // Ends before room is made: what other pools give back then is not for this one.
  const History::Purpose purpose(request.id, request.stream);
  MeteredDriver::ClearRefusals();
  std::optional<Block> block = TryAllocate(pools, request);
  if (!block && MeteredDriver::LimitRefused()) {
    pools.stats.CatchUp(base_);
    block = TryAllocate(pools, request);
  }
  return block;
}

std::optional<Block> GraphAllocator::Borrow(const Target& loan, size_t bytes, cudaStream_t stream) {
  if (routes_.capturing()) return std::nullopt;  // nothing may be ordered behind all work then
  const History::Telling telling(history_);
  History::Context context = history_.Gather(History::When::STATE);
  const auto block = UnlessItFails([&] {
    return TryWatched(*loan.pools, {loan.id, bytes, ToStreamId(stream)});
  });
  if (block) Announce(base_, {loan.pools, loan.id, *block}, std::move(context));
  return block;
}

std::optional<DevicePools::Owned> GraphAllocator::AllocateOnOom(size_t bytes, DeviceIndex device,
                                                                cudaStream_t stream) {
  if (IsCapturing(stream)) return std::nullopt;  // no graph would hold it
  const History::Telling telling(history_);
  History::Context context = history_.Gather(History::When::STATE);
  const auto allocate = [&](DevicePools& pools, const Target& target) {
    return TryWatched(pools,
                      {target.id, bytes, ToStreamId(stream), kNoCapture, target.whole_pages});
  };
  auto owned = UnlessItFails([&] { return scopes_.AllocateOnOom(device, bytes, allocate); });
  if (owned) Announce(base_, *owned, std::move(context));
  return owned;
}

void GraphAllocator::FreeMemory(void* pointer) noexcept {
  // A destructor has called this, and cannot throw.
  bool freed = false;
  TryTwice("freeing memory", [&] {
    // Only an allocator makes pools.
    GraphAllocator& allocator = *Find();
    if (freed || pointer == nullptr || FreeAnnounced(allocator.base_, pointer)) return;
    freed = true;  // as far as it is ours to do
    allocator.base_.raw_deleter()(pointer);
  });
}

void GraphAllocator::raw_delete(void* pointer) {
  if (pointer != nullptr && !FreeAnnounced(base_, pointer)) base_.raw_delete(pointer);
}

void GraphAllocator::recordStream(const DataPtr& data, c10::cuda::CUDAStream stream) {
  if (data.get_deleter() != &FreeMemory) return base_.recordStream(data, stream);
  const StreamId used_by = StreamOn(stream.device_index(), ToStreamId(stream.stream()));
  if (DevicePools::TryRecordUse(data.get(), used_by)) return;
  base_.recordStream({data.get(), nullptr, base_.raw_deleter(), data.device()}, stream);
}

void GraphAllocator::emptyCache(MempoolId_t id) {
  const History::Telling telling(history_);
  if (id != MempoolId_t{0, 0} && scopes_.EmptyOurs(id)) return;
  scopes_.EndAbandoned();
  base_.emptyCache(id);
  if (id == MempoolId_t{0, 0}) scopes_.Trim();
}

// --- What differs from the base only for our pointers and pools ---

void GraphAllocator::init(int device_count) {
  base_.init(device_count);
  // change_current_allocator() does not tell c10, which torch.accelerator asks.
  if (cca::get() == this) RegisterWithC10(*this);
}

DeviceStats GraphAllocator::getDeviceStats(DeviceIndex device) {
  DevicePools* const pools = DevicePools::Find(device);
  if (pools == nullptr) return base_.getDeviceStats(device);
  DeviceStats stats = pools->stats.Get(base_);
  scopes_.side_pools().Rename(stats);
  return stats;
}

cca::SnapshotInfo GraphAllocator::snapshot(MempoolId_t id, bool include_traces) {
  const bool all = id == MempoolId_t{0, 0};
  std::vector<std::pair<DevicePools*, std::optional<PoolId>>> ours;
  for (DevicePools* pools : DevicePools::All()) {
    const auto only = all ? std::nullopt : scopes_.FindOurs(pools->device, id);
    if (all) ours.emplace_back(pools, std::nullopt);
    if (only) ours.emplace_back(pools, only->id);
  }
  // For one pool of ours, the base is asked for its side pools, and for the rest of the answer
  // under an id that no pool has.
  const bool one_of_ours = !all && !ours.empty();
  auto info = base_.snapshot(one_of_ours ? MempoolId_t{~0ULL, ~0ULL} : id, include_traces);
  for (const auto& [pools, only] : ours) {
    if (const auto side_pool =
            only ? scopes_.side_pools().Find(pools->device, *only) : std::nullopt) {
      auto segments = base_.snapshot(*side_pool, false).segments;
      std::ranges::move(segments, std::back_inserter(info.segments));
    }
    pools->AppendSegments(only, history_, info.segments);
  }
  scopes_.side_pools().Rename(info);
  if (include_traces) history_.MergeInto(info.device_traces);
  return info;
}

void* GraphAllocator::getBaseAllocation(void* pointer, size_t* bytes) {
  void* const ours = DevicePools::BaseAllocation(pointer, bytes);
  return ours != nullptr ? ours : base_.getBaseAllocation(pointer, bytes);
}

bool GraphAllocator::checkPoolLiveAllocations(DeviceIndex device, MempoolId_t id,
                                              const std::unordered_set<void*>& expected) {
  const auto ours = scopes_.FindOurs(device, id);
  if (!ours) return base_.checkPoolLiveAllocations(device, id, expected);
  std::unordered_set<void*> rest = expected;
  for (const PoolSnapshot::LiveBlock& live : ours->pools->set.Snapshot(ours->id).blocks) {
    if (rest.erase(reinterpret_cast<void*>(live.block.address)) == 0) return false;
  }
  const auto side_pool = scopes_.side_pools().Find(device, ours->id);
  return side_pool ? base_.checkPoolLiveAllocations(device, *side_pool, rest) : rest.empty();
}

cca::ShareableHandle GraphAllocator::shareIpcHandle(void* pointer) {
  TORCH_CHECK(!IsMapped(pointer),
              "the memory at " + Hex(reinterpret_cast<Address>(pointer)) +
                  " belongs to a graph pool, which cannot be shared with another process; share a "
                  "copy made outside the capture (tensor.clone())");
  return base_.shareIpcHandle(pointer);
}

// Lets `device` into the memory of `peer`.
void GraphAllocator::enablePeerAccess(DeviceIndex device, DeviceIndex peer) {
  base_.enablePeerAccess(device, peer);
  try {
    for (const PoolsOwner owner : kPoolsOwners) {
      DevicePools::For(peer, owner).set.EnablePeer(device);
    }
  } catch (const DriverError&) {
    // A device that cannot map memory has no pools. The base has refused one that cannot reach the
    // peer.
    if (DevicePools::Find(peer) != nullptr) throw;
  }
}

cudaError_t GraphAllocator::memcpyAsync(void* destination, int destination_device,
                                        const void* source, int source_device, size_t bytes,
                                        cudaStream_t stream, bool p2p_enabled) {
  // Without peer access the plain copy works only for memory of cudaMalloc.
  if (!p2p_enabled && destination_device != source_device &&
      (IsMapped(destination) || IsMapped(source))) {
    return cudaMemcpyPeerAsync(destination, destination_device, source, source_device, bytes,
                               stream);
  }
  return base_.memcpyAsync(destination, destination_device, source, source_device, bytes, stream,
                           p2p_enabled);
}

void GraphAllocator::annotateMemory(const void* pointer, const std::string& metadata) {
  const auto ours = DevicePools::At(pointer);
  if (!ours) {
    ForwardAnnotateMemory(base_, pointer, metadata);  // refuses what is not its own either
    return;
  }
  constexpr std::optional<History::Action> kAnnotate = AnnotateAction<History::Action>();
  if (!kAnnotate) return;
  const Block& block = ours->block;
  history_.Record({*kAnnotate, ours->pools->device, block.address, block.requested_bytes,
                   block.stream, ours->id},
                  history_.Gather(History::When::ALLOC), metadata);
}

std::shared_ptr<cca::AllocatorState> GraphAllocator::getCheckpointState(DeviceIndex device,
                                                                        MempoolId_t id) {
  const auto ours = scopes_.FindOurs(device, id);
  if (!ours) return base_.getCheckpointState(device, id);
  const auto state = std::make_shared<CheckpointOfOurs>();
  state->id = ours->id;
  state->checkpoint = ours->pools->set.Checkpoint(ours->id);
  state->side_pool = scopes_.side_pools().Find(device, ours->id);
  if (state->side_pool) state->of_side_pool = base_.getCheckpointState(device, *state->side_pool);
  return state;
}

cca::CheckpointDelta GraphAllocator::setCheckpointPoolState(
    DeviceIndex device, std::shared_ptr<cca::AllocatorState> state) {
  const auto* const ours = dynamic_cast<const CheckpointOfOurs*>(state.get());
  cca::CheckpointDelta delta;
  const auto restore_in_base = [&](std::shared_ptr<cca::AllocatorState> of_base) {
    delta = base_.setCheckpointPoolState(device, std::move(of_base));
    for (DataPtr& data : delta.dataptrs_allocd) {
      (void)data.compare_exchange_deleter(base_.raw_deleter(), &FreeMemory);
    }
  };
  if (ours == nullptr) {
    restore_in_base(std::move(state));
    return delta;
  }
  DevicePools& pools = DevicePools::For(device);
  const History::Telling telling(history_);
  // Trees also go back after a failed graph.
  scopes_.EndFailed(device, {ours->id.first, ours->id.second});
  scopes_.Rouse(device, {ours->id.first, ours->id.second});
  // This comes first: the base could refuse only after ours has been restored.
  TORCH_CHECK(!ours->side_pool || ours->side_pool == scopes_.side_pools().Find(device, ours->id),
              "the checkpoint is of graph pool " + ToString(ours->id) +
                  " as it was before all its graphs were reset: take another one");
  pools.stats.BeforeChange(base_);
  // No other thread may use the pool now, since torch goes back in it. The base goes first: if it
  // throws, ours is as it was.
  if (ours->side_pool) restore_in_base(ours->of_side_pool);
  std::vector<void*>& freed = delta.ptrs_freed;
  std::vector<DataPtr>& allocated = delta.dataptrs_allocd;
  const auto restore = [&] {
    freed.reserve(freed.size() + pools.set.Stats(ours->id).live_blocks);
    allocated.reserve(allocated.size() + ours->checkpoint.blocks.size());
    return pools.set.Restore(ours->id, ours->checkpoint);
  };
  // An error from here on must not free what the caller's tensors still have.
  const auto let_go = [&] {
    for (DataPtr& data : allocated) data.release_context();
  };
  const RestoreDelta restored = OrUndo(restore, let_go);
  pools.stats.AfterChange(base_);
  NoteRestored(base_, pools, ours->id, restored);
  for (const Block& block : restored.freed) {
    freed.push_back(reinterpret_cast<void*>(block.address));
  }
  for (const Block& block : restored.allocated) {
    allocated.push_back(ToData(block, device));
  }
  return delta;
}

}  // namespace cgp
