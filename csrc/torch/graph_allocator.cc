// Allocating, freeing and running out. What is forwarded stands in graph_forwarding.cc.
#include "torch/graph_allocator.h"

#include <c10/core/impl/GPUTrace.h>
#include <c10/cuda/CUDAStream.h>

#include <type_traits>

#include "torch/errors.h"
#include "torch/runtime.h"

// Texts are put together before torch's macros get them: given several parts these format them with
// std::ostream, which crashes in a module that a compiler linked with a libstdc++ of its own.
namespace cgp {
namespace {

std::atomic<GraphAllocator*> instance{nullptr};
std::mutex instance_mutex;

// A block as torch gets it: a DataPtr, or a plain pointer.
template <typename Memory>
Memory To(const Block& block, DeviceIndex device) {
  void* const pointer = reinterpret_cast<void*>(block.address);
  if constexpr (std::is_pointer_v<Memory>) {
    return pointer;
  } else {
    return {pointer, pointer, &GraphAllocator::FreeMemory, c10::Device(c10::kCUDA, device)};
  }
}

// So that the base can have our unused memory before it gives up. It runs this whenever nothing in
// its cache fits, with its lock held.
class FreeUnusedPoolsCallback final : public c10::FreeMemoryCallback {
 public:
  bool Execute() override {
    // The base asks the device next, whatever we could not give back.
    uint64_t bytes = 0;
    WithWarnings("giving back the memory of unused graph pools", [&] {
      GraphAllocator* const allocator = FindGraphAllocator();
      if (allocator != nullptr) bytes = allocator->scopes().TryTrim(CurrentDevice());
    });
    return bytes > 0;
  }
};

const c10::RegistererFreeCudaMemoryCallbacksRegistry callback_registerer(
    "cudagraph_pool", c10::FreeCudaMemoryCallbacksRegistry(),
    c10::RegistererFreeCudaMemoryCallbacksRegistry::DefaultCreator<FreeUnusedPoolsCallback>);

// Nothing if the memory does not suffice.
std::optional<Block> TryAllocate(DevicePools& pools, const Request& request) {
  try {
    return pools.set.Allocate(request.id, request.bytes, request.stream, request.capture,
                              request.whole_pages);
  } catch (const OutOfMemoryError&) {
    return std::nullopt;
  } catch (const DriverError& error) {
    if (error.status() != DriverStatus::kOutOfMemory) throw;
    return std::nullopt;
  }
}

}  // namespace

GraphAllocator* FindGraphAllocator() noexcept { return instance.load(std::memory_order_acquire); }

std::shared_ptr<GraphAllocator> GetGraphAllocator() {
  const std::lock_guard lock(instance_mutex);
  GraphAllocator* allocator = FindGraphAllocator();
  if (allocator == nullptr) allocator = new GraphAllocator(*cca::get());
  return {allocator, [](GraphAllocator*) {}};
}

GraphAllocator::GraphAllocator(CUDAAllocator& base) : base_(base) {
  for (DevicePools* pools : DevicePools::All()) pools->stats.ForgetBase();
  instance.store(this, std::memory_order_release);
}

GraphAllocator::~GraphAllocator() { instance.store(nullptr, std::memory_order_release); }

template <typename AskStream, typename AskBase>
auto GraphAllocator::Allocate(size_t bytes, const AskStream& ask_stream, const AskBase& ask_base) {
  using Memory = decltype(ask_base());
  const Gate::Word gate = Gate::Read();
  std::optional<Target> target;
  if (Gate::HasScopes(gate) && bytes != 0) {
    const DeviceIndex device = CurrentDevice();
    const cudaStream_t stream = ask_stream(device);
    target = routes_.Match(device, stream);
    if (target && target->pools != nullptr) {
      return To<Memory>(AllocateInPool(*target, bytes, stream), device);
    }
  }
  try {
    Memory memory = ask_base();
    if constexpr (!std::is_pointer_v<Memory>) {
      if (target) (void)memory.compare_exchange_deleter(base_.raw_deleter(), &FreeMemory);
    }
    if (!Gate::IsEager(gate)) Gate::NoteBaseGrowth();
    return memory;
  } catch (const c10::OutOfMemoryError&) {
    const DeviceIndex device = CurrentDevice();
    const auto lent = target ? std::nullopt : Lend(bytes, device, ask_stream(device));
    if (!lent) throw;
    return To<Memory>(lent->block, device);
  }
}

DataPtr GraphAllocator::allocate(size_t bytes) {
  return Allocate(bytes, &CurrentStream, [&] { return base_.allocate(bytes); });
}

void* GraphAllocator::raw_alloc(size_t bytes) {
  return Allocate(bytes, &CurrentStream, [&] { return base_.raw_alloc(bytes); });
}

void* GraphAllocator::raw_alloc_with_stream(size_t bytes, cudaStream_t stream) {
  return Allocate(
      bytes, [stream](DeviceIndex) { return stream; },
      [&] { return base_.raw_alloc_with_stream(bytes, stream); });
}

DataPtr GraphAllocator::allocateWithAddress(size_t bytes, void* address) {
  if (routes_.active() && bytes != 0) {
    const DeviceIndex device = CurrentDevice();
    const auto target = routes_.Match(device, CurrentStream(device));
    // The base's memory is no way out: it would not be kept for the graph.
    TORCH_CHECK(
        !target || target->pools == nullptr,
        "graph pool " + ToString(target ? target->id : PoolId{}) +
            " chooses the addresses of its blocks itself and cannot give " + Mebibytes(bytes) +
            " at " + Hex(reinterpret_cast<Address>(address)) +
            ": allocate outside of the capture or use_pool block what has to have a certain "
            "address");
  }
  DataPtr memory = ForwardAllocateWithAddress(base_, bytes, address);
  Gate::NoteBaseGrowth();
  return memory;
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
  // Somebody wants to know of it, the base has grown, or room has to be made.
  const History::Telling telling(history_);
  History::Context context = history_.Gather(History::When::STATE);
  for (bool first = true;; first = false) {
    if (const auto block = TryWatched(pools, request)) {
      Announce(base_, {&pools, request.id, *block}, std::move(context));
      return *block;
    }
    const bool rejected = MeteredDriver::LimitRefused() && RejectsAtOnce();
    // Nothing may be unmapped, freed or waited for while a capture is under way, be it another
    // thread's.
    const bool captures = target.kind == ScopeKind::kCapture || routes_.capturing();
    if (rejected || !first || captures) out_of_memory_.Throw(base_, pools, request, rejected);
    scopes_.TryTrim(pools.device);
    base_.emptyCache();
    ++pools.stats.retries;
  }
}

std::optional<Block> GraphAllocator::TryWatched(DevicePools& pools, const Request& request) {
  pools.stats.BeforeChange(base_);
  // Ends before room is made: what other pools give back then is not this one's.
  const History::Purpose purpose(request.id, request.stream);
  MeteredDriver::ForgetRefusals();
  std::optional<Block> block = TryAllocate(pools, request);
  if (!block && MeteredDriver::LimitRefused()) {
    pools.stats.CatchUp(base_);
    block = TryAllocate(pools, request);
  }
  return block;
}

std::optional<DevicePools::Owned> GraphAllocator::Lend(size_t bytes, DeviceIndex device,
                                                       cudaStream_t stream) {
  if (IsCapturing(stream)) return std::nullopt;  // no graph would keep it
  const History::Telling telling(history_);
  History::Context context = history_.Gather(History::When::STATE);
  try {
    auto lent = scopes_.Lend(device, [&](DevicePools& pools, const Target& lender) {
      return TryWatched(pools,
                        {lender.id, bytes, ToStreamId(stream), kNoCapture, lender.whole_pages});
    });
    if (lent) Announce(base_, *lent, std::move(context));
    return lent;
  } catch (const DriverError&) {
    return std::nullopt;  // the base's error is the one to know
  }
}

void GraphAllocator::FreeMemory(void* pointer) noexcept {
  // A destructor called this and cannot throw.
  bool freed = false;
  TryTwice("freeing memory", [&] {
    // Pools are only made by an allocator.
    GraphAllocator& allocator = *FindGraphAllocator();
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

}  // namespace cgp
