// What PyTorch sees as its CUDA allocator: graph captures allocate in our pools, everything else in
// the base, the allocator that was installed before.
//
// Whose is a pool id?
//
// - Ids that the base knows are the base's: those of graphs captured and of MemPools made before
//   enable(), and of MemPools with an allocator of their own.
// - Any other id becomes ours when somebody begins to allocate in it (a capture, or a thread that
//   torch.compile's graph trees warm up on), or when a cudagraph_pool.GraphPool registers it or a
//   torch.cuda.MemPool is made, which tells the allocator before it uses its id.
//
// An id that is ours stays ours until its pool is gone, also after disable(): its graphs need it.
//
// A scope is a capture's if its filter refuses the current stream while that is not capturing
// (torch begins the route before the capture, and a graph's filter asks for its capture), or if the
// current stream is capturing already.
//
// Deleters. What the base made keeps the base's deleter, so that eager memory is not touched and
// the base still recognises it (native ignores the recordStream() of a DataPtr with any other
// deleter: a silent data race). What is ours carries FreeMemory(), which takes both kinds of
// pointers, as raw_delete() does.
//
// torch compares raw_deleter() with the deleter of DataPtrs for the pools of graph trees alone. So
// it has to be that of whoever serves the trees: us, or the base after disable() and as long as
// trees from before enable() are alive. Who serves trees serves new ones too, as long as those
// live. Their ids alone may change hands, until a first block is allocated in them: a tree captures
// an empty graph, only to hold its pool, and then warms up in it.
//
// Locks, in the order they are taken: scopes_mutex_, then MergedStats', then the base's, then
// RouteTable's, then PoolSet's. So nothing here is called back by the base but FreeUnusedPools(),
// which only tries the first two.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>
#include <c10/cuda/CUDAMacros.h>

#include <array>
#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/pool_set.h"
#include "torch/device_pools.h"
#include "torch/observe/history.h"
#include "torch/scopes/annexes.h"
#include "torch/scopes/pool_names.h"
#include "torch/scopes/routes.h"
#include "torch/torch_version.h"

namespace cgp {

namespace cca = c10::cuda::CUDACachingAllocator;

using c10::DataPtr;
using c10::DeviceIndex;
using c10::MempoolId_t;
using cca::CUDAAllocator;

class GraphAllocator final : public CUDAAllocator {
 public:
  // `base` must outlive the process, as every allocator that torch was given must.
  explicit GraphAllocator(CUDAAllocator& base);
  ~GraphAllocator() override;

  CUDAAllocator& base() const { return base_; }

  // From now on new captures become ours, or the base's; pools that are ours go on working. If
  // nothing needs this allocator to be the installed one, `uninstall` runs before any scope can
  // begin: no scope is open, and no device ever had pools (whose part in the statistics' peaks only
  // we know).
  void TakeCaptures() {
    taken_out_ = false;
    takes_captures_.store(true, std::memory_order_release);
  }
  void StopTakingCaptures(const std::function<void()>& uninstall);
  bool takes_captures() const { return takes_captures_.load(std::memory_order_acquire); }
  // Whether captures that name no pool share one, from now on.
  void SetSharesCaptures(bool shares) { shares_captures_.store(shares); }
  // Whether MemPools are ours, while captures are: of those made from now on.
  void SetTakesMemPools(bool takes) { takes_mempools_.store(takes); }

  // How many captures have begun since the process did.
  struct CaptureCounts {
    uint64_t ours = 0;
    uint64_t bases = 0;
    // Of the base's, why. The others went to pools that the base had before.
    uint64_t while_stopped = 0;  // between StopTakingCaptures() and TakeCaptures()
    uint64_t in_mempools = 0;    // of the base's
  };
  CaptureCounts capture_counts() const {
    return {captures_of_ours_, captures_of_base_, captures_while_stopped_, captures_in_mempools_};
  }

  // Whether a capture route is open, of ours or of the base.
  bool capturing() const { return routes_.capturing(); }

  // Makes `id` ours and holds its pool open until UnregisterPool(). Throws UsageError if it is in
  // use.
  void RegisterPool(DeviceIndex device, PoolId id);
  void UnregisterPool(DeviceIndex device, PoolId id);
  // Whether it is a torch.cuda.MemPool's, and ours.
  bool IsMemPool(DeviceIndex device, PoolId id) const;

  // Closes the scopes of captures that the calling thread began, that are over, and that nobody has
  // ended: see graph_abandoned.cc.
  void EndAbandonedCaptures();
  // The calling thread saw a capture into the pool fail: nobody will end it any more.
  void EndFailedCapture(DeviceIndex device, MempoolId_t id);

  // Gives the memory of unused pools back unless a capture is under way, of all devices or of the
  // `only` one that needs it: it waits for each that has any. Returns the bytes. Waits for no lock
  // of ours, so the base may call it from within an allocation; asks nothing of the base but its
  // statistics and a larger share of the memory, which its lock allows.
  uint64_t FreeUnusedPools(std::optional<DeviceIndex> only = std::nullopt);

  // The deleter of our DataPtrs; takes the base's pointers too. Never throws: it is called from
  // destructors.
  static void FreeMemory(void* pointer) noexcept;

  // c10::Allocator
  DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override;
  void copy_data(void* destination, const void* source, size_t bytes) const override {
    base_.copy_data(destination, source, bytes);
  }
  bool is_simple_data_ptr(const DataPtr& data) const override {
    return base_.is_simple_data_ptr(data);
  }

  // c10::DeviceAllocator
  bool initialized() override { return base_.initialized(); }
  void emptyCache(MempoolId_t id = {0, 0}) override;
  using CUDAAllocator::recordStream;
  void recordStream(const DataPtr& data, c10::cuda::CUDAStream stream) override;
  DeviceStats getDeviceStats(DeviceIndex device) override;
  void resetAccumulatedStats(DeviceIndex device) override;
  void resetPeakStats(DeviceIndex device) override;
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    return base_.getMemoryInfo(device);
  }

  // CUDAAllocator
  void* raw_alloc(size_t bytes) override;
  void* raw_alloc_with_stream(size_t bytes, cudaStream_t stream) override;
  void raw_delete(void* pointer) override;
  void init(int device_count) override;
  double getMemoryFraction(DeviceIndex device) override;
  void setMemoryFraction(double fraction, DeviceIndex device) override;
  std::vector<cca::StreamSegmentSize> getExpandableSegmentSizes(DeviceIndex device) override {
    return base_.getExpandableSegmentSizes(device);
  }
  void enable(bool value) override { base_.enable(value); }
  bool isEnabled() const override { return base_.isEnabled(); }
  void cacheInfo(DeviceIndex device, size_t* largest_block) override {
    base_.cacheInfo(device, largest_block);
  }
  void* getBaseAllocation(void* pointer, size_t* bytes) override;
  cca::SnapshotInfo snapshot(MempoolId_t id = {0, 0}, bool include_traces = true) override;
  void beginAllocateToPool(DeviceIndex device, MempoolId_t id, StreamFilter filter) override;
  void endAllocateToPool(DeviceIndex device, MempoolId_t id) override;
  void releasePool(DeviceIndex device, MempoolId_t id) override;
  int getPoolUseCount(DeviceIndex device, MempoolId_t id) override;
  void createOrIncrefPool(DeviceIndex device, MempoolId_t id,
                          std::shared_ptr<CUDAAllocator> allocator = nullptr) override;
  void setUseOnOOM(DeviceIndex device, MempoolId_t id, bool use_on_oom) override;
  void setNoSplit(DeviceIndex device, MempoolId_t id) override;
  bool checkPoolLiveAllocations(DeviceIndex device, MempoolId_t id,
                                const std::unordered_set<void*>& expected) override;
  cca::ShareableHandle shareIpcHandle(void* pointer) override;
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
    return base_.getIpcDevPtr(std::move(handle));
  }
  bool isHistoryEnabled() override { return base_.isHistoryEnabled(); }
  void recordHistory(bool enabled, cca::CreateContextFn recorder, size_t max_entries,
                     cca::RecordContext when, bool clear_history,
                     const std::vector<std::string>& skip_actions) override;
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& metadata) override {
    base_.recordAnnotation(metadata);
  }
  void pushCompileContext(std::string& context) override;
  void popCompileContext() override;
  void setUserMetadata(const std::string& metadata) override { base_.setUserMetadata(metadata); }
  std::string getUserMetadata() override { return base_.getUserMetadata(); }
  void attachOutOfMemoryObserver(  // see graph_out_of_memory.cc
      cca::OutOfMemoryObserver observer) override {
    base_.attachOutOfMemoryObserver(std::move(observer));
  }
  void attachAllocatorTraceTracker(cca::AllocatorTraceTracker tracker) override;
  void enablePeerAccess(DeviceIndex device, DeviceIndex peer) override;
  cudaError_t memcpyAsync(void* destination, int destination_device, const void* source,
                          int source_device, size_t bytes, cudaStream_t stream,
                          bool p2p_enabled) override;
  std::shared_ptr<cca::AllocatorState> getCheckpointState(DeviceIndex device,
                                                          MempoolId_t id) override;
  cca::CheckpointDelta setCheckpointPoolState(DeviceIndex device,
                                              std::shared_ptr<cca::AllocatorState> state) override;
  // Code that asks (torch.cuda.get_allocator_backend()) wants to know what works, and with us what
  // works with the base does; is_enabled() is the question whether we are there.
  std::string name() override { return base_.name(); }

  // Newer than 2.11, and so without `override`: see torch_version.h.
#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Winconsistent-missing-override"
#endif
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* pointer);
  void attachOomRejectionObserver(OomRejectionObserver observer);
  void markCaptureBegin(DeviceIndex device) { ForwardMarkCaptureBegin(base_, device); }
  void markCaptureEnd(DeviceIndex device) { ForwardMarkCaptureEnd(base_, device); }
  DataPtr allocateWithAddress(size_t bytes, void* address);
  bool supportsUserMetadata() { return ForwardSupportsUserMetadata(base_); }
  void annotateMemory(const void* pointer, const std::string& metadata);
#if defined(__clang__)
#pragma clang diagnostic pop
#endif

 private:
  using ScopeKey = std::pair<DeviceIndex, PoolId>;

  // An allocation that was asked for in one of our pools.
  struct Request {
    PoolId id;
    size_t bytes = 0;
    StreamId stream{};
    CaptureId capture = kNoCapture;
  };

  // In one of our pools, if a route leads there; else what `ask_base` returns or, if that is routed
  // to no pool and the base has none, what a MemPool of ours lends.
  template <typename AskStream, typename AskBase>
  auto Allocate(size_t bytes, const AskStream& ask_stream, const AskBase& ask_base);
  // What to ask for so that a block shares no page.
  static size_t WholePages(DevicePools& pools, size_t bytes);
  Block AllocateInPool(DeviceIndex device, const RouteTable::Target& target, size_t bytes,
                       cudaStream_t stream);
  // Nothing if the memory does not suffice; MeteredDriver::Purpose knows whether it is the
  // fraction's.
  std::optional<Block> TryAllocate(DevicePools& pools, const Request& request);
  // Tells everybody of a new block. If that fails the block is gone, and the error goes on.
  void Announce(const DevicePools::Owned& made, History::Context context);
  // Share the device's memory as setMemoryFraction() says, between the base and our pools.
  void LimitOurs(DevicePools& pools);
  void LimitBase(DevicePools& pools);
  // Frees what it can outside captures; returns whether another attempt makes sense.
  bool MakeRoom(const RouteTable::Target& target, DeviceIndex device);
  // Tell everybody who asked to hear when memory runs out: graph_out_of_memory.cc.
  void TellOutOfMemory(DevicePools& pools, const Request& request, bool rejected,
                       const MemoryInfo& info);
  [[noreturn]] void ThrowOutOfMemory(DevicePools& pools, const Request& request, bool rejected);
  // For the history.
  void Note(History::Action action, const DevicePools::Owned& owned,
            History::Context context = nullptr);
  void NoteRestored(DevicePools& pools, PoolId id, const RestoreDelta& delta);
  // Frees the block that starts at `pointer`; returns false if none of ours does. An error of those
  // who are told of it is thrown when the block is free, which `freed` says.
  bool FreeOurs(void* pointer, bool* freed);
  // Keeps the statistics' peaks: see merged_stats.h.
  void BeforeOursChange(DevicePools& pools);

  // The pool of ours that torch calls `id`, if it is one.
  struct OurPool {
    DevicePools* pools;
    PoolId id;
  };
  std::optional<OurPool> FindOurs(DeviceIndex device, MempoolId_t id) const;
  bool BaseKnows(DeviceIndex device, MempoolId_t id) const;
  // Whether nothing was ever allocated in our pool `id`, so that it can still become the base's.
  bool IsUndecided(DevicePools& pools, PoolId id) const;
  // Begin and end a scope. The former with what was decided of it; the base gets `undecided`'s pool
  // of that name too, with its users, unless that is nullptr. `graphs` is the pool of the graph
  // that a nested scope is of. pre: scopes_mutex_ is held.
  void BeginInBase(Route route, DevicePools* undecided);
  void BeginInOurs(DevicePools& pools, Route route, bool capturing, std::optional<PoolId> graphs);
  void EndInOurs(DeviceIndex device, PoolId pool, ScopeKind kind);
  // graph_mempools.cc. The first two wait for scopes_mutex_.
  // Gives back what a pool of ours has, unless a capture is under way; returns whether it is ours.
  bool EmptyOurs(MempoolId_t id) noexcept;
  // A block of a use_on_oom pool, for what no route takes and the base has no memory for.
  std::optional<Block> Lend(size_t bytes, cudaStream_t stream);
  // pre: scopes_mutex_ is held.
  std::optional<Block> LendFrom(DevicePools& pools, PoolId pool, const Request& request);
  // How many use the pool, but for graphs that are captured into others.
  int UsersOf(DevicePools& pools, PoolId pool) const;
  // `nested` has memory of graphs in pool `of`: it is kept until that has no users. Returns whether
  // this is new.
  bool KeepFor(DevicePools& pools, PoolId of, PoolId nested);
  void ReleaseKeptFor(DevicePools& pools, PoolId of);
  // Add and take away a user of our pool, which torch calls `id`.
  void Hold(DevicePools& pools, MempoolId_t id, PoolId pool);
  void Drop(DevicePools& pools, MempoolId_t id, PoolId pool);
  // Whether a capture that begins under this name is to fill the shared pool.
  bool SharesPool(DeviceIndex device, MempoolId_t id) const;
  // pre: scopes_mutex_ is held, for the following.
  // The pool of ours has lost a user. That is so whatever the base says.
  void ReleaseUnused(DevicePools& pools, PoolId id);
  void NoteWhoServesTrees();
  void ForgetBasesDeadTrees();
  uint64_t TrimUnlessCapturing(std::optional<DeviceIndex> only = std::nullopt);

  // The route that a capture of ours had which looked abandoned. Its scope is closed; its graph may
  // still end it.
  struct LateEnd {
    Route route;
    // Known to be: only since 2.14 does the graph still end it then. Or nested: its thread does.
    bool failed = false;
  };
  void CloseAbandoned(const std::function<bool(const Route&)>& counts);
  // A capture begins on `origin`, or something in the pool: who captured there before has failed.
  void TakeAsFailed(cudaStream_t origin);
  void TakeAsFailed(DeviceIndex device, PoolId pool);
  void ReleaseFailed(const std::function<bool(const Route&)>& failed);
  bool TakeLateEnd(DeviceIndex device, PoolId pool);

  CUDAAllocator& base_;
  std::atomic<bool> takes_captures_{true};
  // Torch asks the base: StopTakingCaptures() has uninstalled us.
  std::atomic<bool> taken_out_{false};
  std::atomic<bool> shares_captures_{false};
  std::atomic<bool> takes_mempools_{true};
  std::atomic<uint64_t> captures_of_ours_{0};
  std::atomic<uint64_t> captures_of_base_{0};
  std::atomic<uint64_t> captures_while_stopped_{0};
  std::atomic<uint64_t> captures_in_mempools_{0};
  RouteTable routes_;
  Annexes annexes_{base_, routes_};  // changed with scopes_mutex_ held
  PoolNames names_;
  History& history_ = History::Get();

  // Orders begin, end and release of scopes, and keeps a capture from beginning while memory is
  // given back.
  mutable std::mutex scopes_mutex_;
  std::set<ScopeKey> registered_;  // ids of live GraphPools
  // Ids of torch.cuda.MemPools: those of the base, as far as we saw them being made, and ours.
  std::set<ScopeKey> bases_mempools_;
  struct MemPool {
    bool lends = false;        // use_on_oom
    bool whole_pages = false;  // no_split
  };
  std::map<ScopeKey, MemPool> mempools_;
  // Pools of graphs, and those that have memory of their graphs too: a user of the latter each.
  std::set<std::pair<ScopeKey, PoolId>> kept_;
  // Pools that graph trees warm up in, as it seems, of the base and of ours. A MemPool from before
  // enable() looks like one of the base's.
  std::set<ScopeKey> bases_trees_;
  std::set<ScopeKey> our_trees_;                // none comes while the base serves them
  std::atomic<bool> base_serves_trees_{false};  // == there are the base's alone
  std::vector<LateEnd> late_ends_;

  // What setMemoryFraction() allows the base and us together.
  struct Share {
    // Nobody has set one since we are here. What the base was told before counts for both: it is
    // asked when ours allocate for the first time.
    static constexpr double kUnknown = 3;
    static constexpr double kNone = 2;
    std::atomic<double> fraction{kUnknown};  // of the device's memory; kNone: all
    std::atomic<uint64_t> settings{0};       // how often it was set
    // What settings and MeteredDriver::changes() added up to when the base was told.
    std::atomic<uint64_t> told{0};

    bool limits() const { return fraction.load() <= 1; }
  };
  std::array<Share, C10_COMPILE_TIME_MAX_GPUS> shares_;  // by device

  std::mutex observers_mutex_;
  std::vector<OomRejectionObserver> rejection_observers_;
};

// The process's one GraphAllocator, or nullptr if none was made yet.
GraphAllocator* FindGraphAllocator() noexcept;

// The same, made around the allocator installed now if need be. It is never destroyed: DataPtrs,
// storages and torch's own globals point to it until the process ends.
std::shared_ptr<GraphAllocator> GetGraphAllocator();

}  // namespace cgp
