// GraphAllocator: what differs from the base only for our pointers and pools. What is the base's
// alone stands in graph_allocator.h.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <optional>

#include "core/base/reserve.h"
#include "torch/errors.h"
#include "torch/graph_allocator.h"
#include "torch/install.h"
#include "torch/runtime.h"

namespace cgp {
namespace {

// Whether the driver mapped what `pointer` points to, for whoever: memory of a pool that no block
// has (any more) is as little cudaMalloc's as that of a live one, and a graph may still use it.
bool IsMapped(const void* pointer) {
  const auto address = reinterpret_cast<Address>(pointer);
  for (const PoolsOwner owner : kPoolsOwners) {
    for (DevicePools* pools : DevicePools::All(owner)) {
      if (pools->set().HasReserved(address)) return true;
    }
  }
  return false;
}

}  // namespace

void GraphAllocator::init(int device_count) {
  base_.init(device_count);
  // Who installs us by change_current_allocator() does not tell c10, which torch.accelerator asks.
  if (cca::get() == this) RegisterWithC10(*this);
}

double GraphAllocator::getMemoryFraction(DeviceIndex device) {
  const Share& share = shares_.at(static_cast<size_t>(device));
  return share.limits() ? share.fraction.load() : base_.getMemoryFraction(device);
}

void GraphAllocator::setMemoryFraction(double fraction, DeviceIndex device) {
  DevicePools* const pools = DevicePools::Find(device);
  if (pools != nullptr) LimitOurs(*pools);    // asks what is in force, to go back to
  base_.setMemoryFraction(fraction, device);  // refuses what is no fraction or no device
  Share& share = shares_.at(static_cast<size_t>(device));
  const double before = share.fraction.exchange(fraction);
  ++share.settings;
  Undo setting([&] {
    share.fraction.store(before);
    ++share.settings;
    base_.setMemoryFraction(std::min(before, 1.0), device);
    if (pools != nullptr) LimitBase(*pools);
  });
  if (pools != nullptr) LimitBase(*pools);
  setting.Keep();
}

void GraphAllocator::LimitOurs(DevicePools& pools) {
  Share& share = shares_.at(static_cast<size_t>(pools.device()));
  double unknown = Share::kUnknown;
  if (share.fraction.load() == unknown) {
    // This may be within a capture, and the base of cudaMallocAsync asks CUDA.
    const RelaxedCaptureMode relaxed;
    const double of_base =
        IfSupported([&] { return base_.getMemoryFraction(pools.device()); }).value_or(1);
    share.fraction.compare_exchange_strong(unknown, of_base < 1 ? of_base : Share::kNone);
  }
  if (!share.limits()) return;
  const double all =
      std::min(share.fraction.load(), 1.0) * static_cast<double>(pools.total_bytes());
  const auto bases = pools.stats().OfBase(base_).reserved_bytes[0].current;
  pools.driver().SetLimit(static_cast<uint64_t>(std::max(0.0, all - static_cast<double>(bases))));
}

void GraphAllocator::LimitBase(DevicePools& pools) {
  Share& share = shares_.at(static_cast<size_t>(pools.device()));
  if (!share.limits()) return;
  const auto state_now = [&] { return share.settings.load() + pools.driver().changes(); };
  uint64_t state = state_now();
  if (share.told.load() == state) return;
  // Several threads may tell the base at once, and no lock can order them: some come with the
  // base's held, others go for it. So each looks, after it has told, whether what it told is still
  // so, and tells again if not. The last to tell has looked, so the base was told the truth last.
  for (;;) {
    const double of_ours =
        static_cast<double>(pools.driver().held_bytes()) / static_cast<double>(pools.total_bytes());
    base_.setMemoryFraction(std::max(0.0, share.fraction.load() - of_ours), pools.device());
    const uint64_t now = state_now();
    if (now == state) break;
    state = now;
  }
  share.told.store(state);
}

void* GraphAllocator::getBaseAllocation(void* pointer, size_t* bytes) {
  const std::optional<Block> block = DevicePools::Around(pointer);
  if (!block) return base_.getBaseAllocation(pointer, bytes);
  if (bytes != nullptr) *bytes = block->bytes;
  return reinterpret_cast<void*>(block->address);
}

bool GraphAllocator::checkPoolLiveAllocations(DeviceIndex device, MempoolId_t id,
                                              const std::unordered_set<void*>& expected) {
  const auto ours = FindOurs(device, id);
  if (!ours) return base_.checkPoolLiveAllocations(device, id, expected);
  std::unordered_set<void*> rest = expected;
  for (const PoolSnapshot::LiveBlock& live : ours->pools->set().Snapshot(ours->id).blocks) {
    if (rest.erase(reinterpret_cast<void*>(live.block.address)) == 0) return false;
  }
  const auto annex = annexes_.Find(device, ours->id);
  return annex ? base_.checkPoolLiveAllocations(device, *annex, rest) : rest.empty();
}

cca::ShareableHandle GraphAllocator::shareIpcHandle(void* pointer) {
  TORCH_CHECK(!IsMapped(pointer),
              "the memory at " + Hex(reinterpret_cast<Address>(pointer)) +
                  " belongs to a graph pool, which cannot be shared with another process; share a "
                  "copy made outside the capture (tensor.clone())");
  return base_.shareIpcHandle(pointer);
}

void GraphAllocator::recordHistory(bool enabled, cca::CreateContextFn recorder, size_t max_entries,
                                   cca::RecordContext when, bool clear_history,
                                   const std::vector<std::string>& skip_actions) {
  history_.Configure(enabled, recorder, max_entries, when, clear_history, skip_actions, [&] {
    base_.recordHistory(enabled, recorder, max_entries, when, clear_history, skip_actions);
  });
}

void GraphAllocator::pushCompileContext(std::string& context) {
  History::PushCompileContext(context);
  Undo pushed([] { History::PopCompileContext(); });
  base_.pushCompileContext(context);
  pushed.Keep();
}

void GraphAllocator::popCompileContext() {
  base_.popCompileContext();
  History::PopCompileContext();
}

void GraphAllocator::attachAllocatorTraceTracker(cca::AllocatorTraceTracker tracker) {
  history_.AttachTracker(tracker, [&] { base_.attachAllocatorTraceTracker(tracker); });
}

// `device` is let into the memory of `peer`.
void GraphAllocator::enablePeerAccess(DeviceIndex device, DeviceIndex peer) {
  base_.enablePeerAccess(device, peer);
  try {
    for (const PoolsOwner owner : kPoolsOwners) {
      DevicePools::For(peer, owner).set().EnablePeer(device);
    }
  } catch (const DriverError&) {
    // A device that cannot map memory has no pools. One that cannot reach the peer was refused by
    // the base.
    if (DevicePools::Find(peer) != nullptr) throw;
  }
}

cudaError_t GraphAllocator::memcpyAsync(void* destination, int destination_device,
                                        const void* source, int source_device, size_t bytes,
                                        cudaStream_t stream, bool p2p_enabled) {
  // Without peer access the plain copy works only between what cudaMalloc made.
  if (!p2p_enabled && destination_device != source_device &&
      (IsMapped(destination) || IsMapped(source))) {
    return cudaMemcpyPeerAsync(destination, destination_device, source, source_device, bytes,
                               stream);
  }
  return base_.memcpyAsync(destination, destination_device, source, source_device, bytes, stream,
                           p2p_enabled);
}

std::shared_ptr<c10::GatheredContext> GraphAllocator::getContextForPointer(const void* pointer) {
  // Where one of ours was allocated, if that is known.
  const auto address = reinterpret_cast<uintptr_t>(pointer);
  if (auto context = history_.ContextOf(address)) return context;
  return ForwardGetContextForPointer(base_, pointer);
}

void GraphAllocator::attachOomRejectionObserver(OomRejectionObserver observer) {
  const std::lock_guard lock(observers_mutex_);
  ReserveMore(rejection_observers_, 1);
  ForwardAttachOomRejectionObserver(base_, observer);
  rejection_observers_.push_back(std::move(observer));
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
  history_.Record({*kAnnotate, ours->pools->device(), block.address, block.requested_bytes,
                   block.stream, ours->id},
                  history_.Gather(History::When::ALLOC), metadata);
}

}  // namespace cgp
