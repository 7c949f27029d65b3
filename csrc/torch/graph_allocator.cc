// GraphAllocator: allocating, freeing and running out. Scopes are in graph_scopes.cc, what is
// forwarded in graph_forwarding.cc.
#include "torch/graph_allocator.h"

#include <c10/core/impl/GPUTrace.h>
#include <c10/cuda/CUDAStream.h>

#include <algorithm>
#include <iterator>
#include <type_traits>

#include "torch/errors.h"
#include "torch/observe/snapshot.h"
#include "torch/runtime.h"

// Texts are put together before torch's macros get them: given several parts these format them with
// std::ostream, which crashes in a module that a compiler linked with a libstdc++ of its own.
namespace cgp {
namespace {

std::atomic<GraphAllocator*> instance{nullptr};
std::mutex instance_mutex;

// Passes on what the base has allocated.
template <typename Memory>
Memory FromBase(Memory memory) {
  MergedStats::NoteBaseAllocation();
  return memory;
}

// Tell torch's profiler and its sanitizer what native allocators tell them too.
void ReportToProfiler(DevicePools& pools, CUDAAllocator& base, Address address, int64_t bytes) {
  if (!c10::memoryProfilingEnabled()) return;
  const MergedStats::Totals total = pools.stats().Now(base);
  c10::reportMemoryUsageToProfiler(reinterpret_cast<void*>(address), bytes, total.allocated_bytes,
                                   total.reserved_bytes, c10::Device(c10::kCUDA, pools.device()));
}

void TraceAllocation(const Block& block) {
  if (const c10::impl::PyInterpreter* tracer = c10::impl::GPUTrace::get_trace()) {
    (*tracer)->trace_gpu_memory_allocation(c10::kCUDA, static_cast<uintptr_t>(block.address));
  }
}

void TraceFree(const Block& block) {
  if (const c10::impl::PyInterpreter* tracer = c10::impl::GPUTrace::get_trace()) {
    (*tracer)->trace_gpu_memory_deallocation(c10::kCUDA, static_cast<uintptr_t>(block.address));
  }
}

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
      if (allocator != nullptr) bytes = allocator->FreeUnusedPools(CurrentDevice());
    });
    return bytes > 0;
  }
};

const c10::RegistererFreeCudaMemoryCallbacksRegistry callback_registerer(
    "cudagraph_pool", c10::FreeCudaMemoryCallbacksRegistry(),
    c10::RegistererFreeCudaMemoryCallbacksRegistry::DefaultCreator<FreeUnusedPoolsCallback>);

}  // namespace

GraphAllocator* FindGraphAllocator() noexcept { return instance.load(std::memory_order_acquire); }

std::shared_ptr<GraphAllocator> GetGraphAllocator() {
  const std::lock_guard lock(instance_mutex);
  GraphAllocator* allocator = instance.load(std::memory_order_acquire);
  if (allocator == nullptr) {
    allocator = new GraphAllocator(*cca::get());
  }
  return {allocator, [](GraphAllocator*) {}};
}

GraphAllocator::GraphAllocator(CUDAAllocator& base) : base_(base) {
  instance.store(this, std::memory_order_release);
}

GraphAllocator::~GraphAllocator() { instance.store(nullptr, std::memory_order_release); }

template <typename AskStream, typename AskBase>
auto GraphAllocator::Allocate(size_t bytes, const AskStream& ask_stream, const AskBase& ask_base) {
  using Memory = decltype(ask_base());
  std::optional<RouteTable::Target> target;
  if (routes_.active() && bytes != 0) {
    const DeviceIndex device = CurrentDevice();
    const cudaStream_t stream = ask_stream(device);
    target = routes_.Match(device, stream);
    if (target && target->ours) {
      return To<Memory>(AllocateInPool(device, *target, bytes, stream), device);
    }
  }
  try {
    return FromBase(ask_base());
  } catch (const c10::OutOfMemoryError&) {
    if (target) throw;
    const DeviceIndex device = CurrentDevice();
    try {
      if (const auto lent = Lend(bytes, ask_stream(device))) return To<Memory>(*lent, device);
    } catch (const DriverError&) {  // NOLINT(bugprone-empty-catch): the first error is to be known
    }
    throw;
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
        !target || !target->ours,
        "graph pool " + ToString(target ? target->id : PoolId{}) +
            " chooses the addresses of its blocks itself and cannot give " + Mebibytes(bytes) +
            " at " + Hex(reinterpret_cast<Address>(address)) +
            ": allocate outside of the capture or use_pool block what has to have a certain "
            "address");
  }
  return FromBase(ForwardAllocateWithAddress(base_, bytes, address));
}

Block GraphAllocator::AllocateInPool(DeviceIndex device, const RouteTable::Target& target,
                                     size_t bytes, cudaStream_t stream) {
  const History::Telling telling(history_);
  DevicePools& pools = DevicePools::For(device);
  History::Context context = history_.Gather(History::When::STATE);
  BeforeOursChange(pools);
  const Request request{target.id, target.whole_pages ? WholePages(pools, bytes) : bytes,
                        ToStreamId(stream), target.capture};
  for (bool first = true;; first = false) {
    LimitOurs(pools);
    if (const auto block = TryAllocate(pools, request)) {
      Announce({&pools, target.id, *block}, std::move(context));
      return *block;
    }
    const bool rejected = MeteredDriver::Purpose::limit_refused() && RejectsAtOnce();
    if (rejected || !first || !MakeRoom(target, device)) ThrowOutOfMemory(pools, request, rejected);
    pools.stats().CountRetry();
  }
}

std::optional<Block> GraphAllocator::TryAllocate(DevicePools& pools, const Request& request) {
  // Ends before room is made: what other pools give back then is not this one's.
  const MeteredDriver::Purpose purpose(request.id, request.stream);
  try {
    return pools.set().Allocate(request.id, request.bytes, request.stream, request.capture);
  } catch (const OutOfMemoryError&) {
    return std::nullopt;
  } catch (const DriverError& error) {
    TORCH_CHECK(error.status() == DriverStatus::kOutOfMemory, error.what());
    return std::nullopt;
  } catch (const std::logic_error& error) {
    TORCH_CHECK(false, error.what());
  }
}

void GraphAllocator::Announce(const DevicePools::Owned& made, History::Context context) {
  DevicePools& pools = *made.pools;
  const Block& block = made.block;
  const auto bytes = static_cast<int64_t>(block.bytes);
  bool noted = false;
  bool reported = false;
  try {
    pools.stats().OursGrew(base_);
    LimitBase(pools);
    if (history_.active()) {
      noted = true;
      Note(History::Action::ALLOC, made, std::move(context));
    }
    reported = true;
    ReportToProfiler(pools, base_, block.address, bytes);
    TraceAllocation(block);
  } catch (...) {
    // Nobody will free what nobody got. Who heard of the block hears that it is gone; the error to
    // know is the first.
    Callbacks callbacks;
    if (noted) callbacks.Run([&] { Note(History::Action::FREE_REQUESTED, made); });
    TryTwice("freeing a block", [&] { pools.set().Free(block.address); });
    if (reported) callbacks.Run([&] { ReportToProfiler(pools, base_, block.address, -bytes); });
    throw;
  }
}

// Not of other devices: somebody may wait for one with the base's lock of it held.
void GraphAllocator::BeforeOursChange(DevicePools& pools) {
  Undo taken([] { MergedStats::NoteBaseAllocation(); });  // next time
  if (MergedStats::TakeBaseGrew()) {
    for (DevicePools* each : DevicePools::All()) each->stats().NoteBaseGrew();
  }
  if (pools.stats().TakeBaseGrewHere()) pools.stats().BaseGrew(base_);
  taken.Keep();
}

bool GraphAllocator::MakeRoom(const RouteTable::Target& target, DeviceIndex device) {
  // Nothing may be unmapped, freed or waited for while a capture is under way, be it another
  // thread's.
  if (target.kind == ScopeKind::kCapture || routes_.capturing()) return false;
  FreeUnusedPools(device);
  base_.emptyCache();
  return true;
}

void GraphAllocator::FreeMemory(void* pointer) noexcept {
  // A destructor called this and cannot throw.
  bool freed = false;
  TryTwice("freeing memory", [&] {
    // Pools are only made by an allocator.
    GraphAllocator& allocator = *FindGraphAllocator();
    if (freed || pointer == nullptr || allocator.FreeOurs(pointer, &freed)) return;
    freed = true;  // as far as it is ours to do
    allocator.base_.raw_delete(pointer);
  });
}

void GraphAllocator::Note(History::Action action, const DevicePools::Owned& owned,
                          History::Context context) {
  const auto& [pools, id, block] = owned;
  history_.Record({action, pools->device(), block.address, block.requested_bytes, block.stream, id},
                  std::move(context), base_.getUserMetadata());
}

bool GraphAllocator::FreeOurs(void* pointer, bool* freed) {
  const History::Telling telling(history_);
  if (DevicePools* const behind = DevicePools::BehindBaseAt(pointer)) BeforeOursChange(*behind);
  // The block is freed whatever those say who are told: a second attempt would free what is not
  // there any more, or tell some of them twice.
  Callbacks callbacks;
  // They hear of it before anybody else can have the bytes.
  const bool traced = c10::impl::GPUTrace::get_trace() != nullptr;
  const auto told = traced || history_.active() ? DevicePools::At(pointer) : std::nullopt;
  if (told) callbacks.Run([&] { TraceFree(told->block); });
  const bool noted = told && history_.active();
  const History::Context allocated = noted ? history_.ContextOf(told->block.address) : nullptr;
  const auto note_freed = [&] {
    Note(History::Action::FREE_REQUESTED, *told, history_.Gather(History::When::ALL));
  };
  if (noted) callbacks.Run(note_freed);
  Block block;
  DevicePools* pools = nullptr;
  try {
    pools = DevicePools::TryFree(pointer, &block);
  } catch (...) {
    // It could not be freed after all.
    if (noted) callbacks.Run([&] { Note(History::Action::ALLOC, *told, allocated); });
    throw;
  }
  *freed = pools != nullptr;
  if (pools != nullptr) {
    callbacks.Run([&] {
      ReportToProfiler(*pools, base_, block.address, -static_cast<int64_t>(block.bytes));
    });
  }
  callbacks.Rethrow();
  return pools != nullptr;
}

c10::DeleterFnPtr GraphAllocator::raw_deleter() const {
  bool ours = takes_captures();
  for (DevicePools* pools : DevicePools::All()) ours = ours || !pools->set().ids().empty();
  ours = ours && !base_serves_trees_.load(std::memory_order_acquire);
  return ours ? &FreeMemory : base_.raw_deleter();
}

void GraphAllocator::raw_delete(void* pointer) {
  bool freed = false;
  if (pointer != nullptr && !FreeOurs(pointer, &freed)) base_.raw_delete(pointer);
}

void GraphAllocator::recordStream(const DataPtr& data, c10::cuda::CUDAStream stream) {
  if (data.get_deleter() != &FreeMemory) {
    base_.recordStream(data, stream);
    return;
  }
  DevicePools::TryRecordUse(data.get(),
                            StreamOn(stream.device_index(), ToStreamId(stream.stream())));
}

void GraphAllocator::emptyCache(MempoolId_t id) {
  const History::Telling telling(history_);
  if (id != MempoolId_t{0, 0} && EmptyOurs(id)) return;
  EndAbandonedCaptures();
  base_.emptyCache(id);
  if (id != MempoolId_t{0, 0}) return;
  const std::lock_guard lock(scopes_mutex_);
  TrimUnlessCapturing();
}

uint64_t GraphAllocator::FreeUnusedPools(std::optional<DeviceIndex> only) {
  const History::Telling telling(history_);
  // Holding this keeps a capture of torch's from beginning meanwhile.
  const std::unique_lock lock(scopes_mutex_, std::try_to_lock);
  return lock.owns_lock() ? TrimUnlessCapturing(only) : 0;
}

uint64_t GraphAllocator::TrimUnlessCapturing(std::optional<DeviceIndex> only) {
  if (routes_.capturing()) return 0;
  uint64_t bytes = 0;
  for (const PoolsOwner owner : kPoolsOwners) {
    const bool ours = owner == PoolsOwner::kGraphAllocator;
    for (DevicePools* pools : DevicePools::All(owner)) {
      if (only && pools->device() != *only) continue;
      if (ours) BeforeOursChange(*pools);
      bytes += pools->Trim();
      if (ours) LimitBase(*pools);
    }
  }
  return bytes;
}

DeviceStats GraphAllocator::getDeviceStats(DeviceIndex device) {
  DevicePools* const pools = DevicePools::Find(device);
  if (pools == nullptr) return base_.getDeviceStats(device);
  DeviceStats stats = pools->stats().Get(base_);
  annexes_.Rename(stats);
  return stats;
}

void GraphAllocator::resetAccumulatedStats(DeviceIndex device) {
  DevicePools* const pools = DevicePools::Find(device);
  pools == nullptr ? base_.resetAccumulatedStats(device) : pools->stats().ResetAccumulated(base_);
}

void GraphAllocator::resetPeakStats(DeviceIndex device) {
  DevicePools* const pools = DevicePools::Find(device);
  pools == nullptr ? base_.resetPeakStats(device) : pools->stats().ResetPeaks(base_);
}

cca::SnapshotInfo GraphAllocator::snapshot(MempoolId_t id, bool include_traces) {
  const bool all = id == MempoolId_t{0, 0};
  std::vector<DevicePools*> ours = DevicePools::All();
  if (!all) std::erase_if(ours, [&](auto* pools) { return !FindOurs(pools->device(), id); });
  // Asked for one pool of ours, the base is asked for its annexes and the rest of the answer, under
  // an id that no pool has.
  const bool one_of_ours = !all && !ours.empty();
  auto info = base_.snapshot(one_of_ours ? MempoolId_t{~0ULL, ~0ULL} : id, include_traces);
  for (DevicePools* pools : ours) {
    const auto only = all ? std::nullopt : std::optional(names_.Find(pools->device(), id));
    const auto annex = only ? annexes_.Find(pools->device(), *only) : std::nullopt;
    if (annex) {
      auto segments = base_.snapshot(*annex, false).segments;
      std::ranges::move(segments, std::back_inserter(info.segments));
    }
    AppendSegments(*pools, only, history_, info.segments);
  }
  annexes_.Rename(info);
  if (include_traces) history_.MergeInto(info.device_traces);
  return info;
}

}  // namespace cgp
