// What PyTorch sees as its CUDA allocator. Graph captures allocate in our pools, all else in the
// base, the allocator that was installed before.
//
// This class only passes on what torch says. CaptureScopes hears who allocates in which pool, a
// device's PoolSet what is allocated and freed, observe/ what others want to know, and the base all
// the rest. It has no lock.
//
// Deleters. Eager memory has the base's deleter, and is not touched. Memory of pools, ours or the
// base's, has FreeMemory(), which takes both kinds of pointers: torch compares raw_deleter() with
// the deleters of all blocks in the pools of graph trees. The base must not see it: the native
// allocator silently ignores recordStream() of a DataPtr with another deleter than its own.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "core/pool_set.h"
#include "torch/device_pools.h"
#include "torch/errors.h"
#include "torch/observe/events.h"
#include "torch/observe/history.h"
#include "torch/scopes/capture_scopes.h"
#include "torch/torch_version.h"

namespace cgp {

namespace cca = c10::cuda::CUDACachingAllocator;

using c10::DataPtr;
using cca::CUDAAllocator;

class GraphAllocator final : public CUDAAllocator {
 public:
  // `base` must outlive the process, as every allocator that torch was given must.
  explicit GraphAllocator(CUDAAllocator& base);
  ~GraphAllocator() override;

  // The only one of the process, or nullptr if there is none yet.
  static GraphAllocator* Find() noexcept { return instance_.load(std::memory_order_acquire); }

  CUDAAllocator& base() const { return base_; }

  // For calls that do not come from torch.
  CaptureScopes& scopes() { return scopes_; }
  // Whether a capture route is open, of ours or of the base.
  bool capturing() const { return routes_.capturing(); }

  // The deleter of DataPtrs. Destructors call it, so it never throws.
  static void FreeMemory(void* pointer) noexcept;

  // c10::Allocator
  DataPtr allocate(size_t bytes) override;
  c10::DeleterFnPtr raw_deleter() const override { return &FreeMemory; }
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
  void resetAccumulatedStats(DeviceIndex device) override {
    DevicePools* const pools = DevicePools::Find(device);
    pools == nullptr ? base_.resetAccumulatedStats(device) : pools->stats.ResetAccumulated(base_);
  }
  void resetPeakStats(DeviceIndex device) override {
    DevicePools* const pools = DevicePools::Find(device);
    pools == nullptr ? base_.resetPeakStats(device) : pools->stats.ResetPeaks(base_);
  }
  std::pair<size_t, size_t> getMemoryInfo(DeviceIndex device) override {
    return base_.getMemoryInfo(device);
  }

  // CUDAAllocator
  void* raw_alloc(size_t bytes) override;
  void* raw_alloc_with_stream(size_t bytes, cudaStream_t stream) override;
  void raw_delete(void* pointer) override;
  void init(int device_count) override;
  double getMemoryFraction(DeviceIndex device) override {
    DevicePools* const pools = DevicePools::Find(device);
    return pools == nullptr ? base_.getMemoryFraction(device) : pools->stats.Fraction(base_);
  }
  void setMemoryFraction(double fraction, DeviceIndex device) override {
    DevicePools* const pools = DevicePools::Find(device);
    pools == nullptr ? base_.setMemoryFraction(fraction, device)
                     : pools->stats.SetFraction(base_, fraction);
  }
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
  void beginAllocateToPool(DeviceIndex device, MempoolId_t id, StreamFilter filter) override {
    scopes_.Begin(device, id, std::move(filter));
  }
  void endAllocateToPool(DeviceIndex device, MempoolId_t id) override { scopes_.End(device, id); }
  void releasePool(DeviceIndex device, MempoolId_t id) override { scopes_.Release(device, id); }
  int getPoolUseCount(DeviceIndex device, MempoolId_t id) override {
    return scopes_.UseCount(device, id);
  }
  void createOrIncrefPool(DeviceIndex device, MempoolId_t id,
                          std::shared_ptr<CUDAAllocator> allocator = nullptr) override {
    scopes_.CreateOrIncref(device, id, std::move(allocator));
  }
  void setUseOnOOM(DeviceIndex device, MempoolId_t id, bool use_on_oom) override {
    scopes_.SetUseOnOom(device, id, use_on_oom);
  }
  void setNoSplit(DeviceIndex device, MempoolId_t id) override { scopes_.SetNoSplit(device, id); }
  bool checkPoolLiveAllocations(DeviceIndex device, MempoolId_t id,
                                const std::unordered_set<void*>& expected) override;
  cca::ShareableHandle shareIpcHandle(void* pointer) override;
  std::shared_ptr<void> getIpcDevPtr(std::string handle) override {
    return base_.getIpcDevPtr(std::move(handle));
  }
  bool isHistoryEnabled() override { return base_.isHistoryEnabled(); }
  void recordHistory(bool enabled, cca::CreateContextFn recorder, size_t max_entries,
                     cca::RecordContext when, bool clear_history,
                     const std::vector<std::string>& skip_actions) override {
    history_.Configure(enabled, recorder, max_entries, when, clear_history, skip_actions, [&] {
      base_.recordHistory(enabled, recorder, max_entries, when, clear_history, skip_actions);
    });
  }
  void recordAnnotation(const std::vector<std::pair<std::string, std::string>>& metadata) override {
    base_.recordAnnotation(metadata);
  }
  void pushCompileContext(std::string& context) override { base_.pushCompileContext(context); }
  void popCompileContext() override { base_.popCompileContext(); }
  void setUserMetadata(const std::string& metadata) override { base_.setUserMetadata(metadata); }
  std::string getUserMetadata() override { return base_.getUserMetadata(); }
  void attachOutOfMemoryObserver(  // see observe/events.cc
      cca::OutOfMemoryObserver observer) override {
    base_.attachOutOfMemoryObserver(std::move(observer));
  }
  void attachAllocatorTraceTracker(cca::AllocatorTraceTracker tracker) override {
    history_.AttachTracker(tracker, [&] { base_.attachAllocatorTraceTracker(tracker); });
  }
  void enablePeerAccess(DeviceIndex device, DeviceIndex peer) override;
  cudaError_t memcpyAsync(void* destination, int destination_device, const void* source,
                          int source_device, size_t bytes, cudaStream_t stream,
                          bool p2p_enabled) override;
  std::shared_ptr<cca::AllocatorState> getCheckpointState(DeviceIndex device,
                                                          MempoolId_t id) override;
  cca::CheckpointDelta setCheckpointPoolState(DeviceIndex device,
                                              std::shared_ptr<cca::AllocatorState> state) override;
  // Code that asks (torch.cuda.get_allocator_backend()) wants to know what works, and all that
  // works with the base works with us. is_enabled() says whether we are there.
  std::string name() override { return base_.name(); }

  // Newer than 2.11, so without `override`: see torch_version.h.
#if defined(__clang__)
#pragma clang diagnostic push
#pragma clang diagnostic ignored "-Winconsistent-missing-override"
#endif
  std::shared_ptr<c10::GatheredContext> getContextForPointer(const void* pointer) {
    auto ours = history_.ContextOf(reinterpret_cast<Address>(pointer));
    return ours ? std::move(ours) : ForwardGetContextForPointer(base_, pointer);
  }
  void attachOomRejectionObserver(OomRejectionObserver observer) {
    ForwardAttachOomRejectionObserver(base_, std::move(observer));
  }
  void markCaptureBegin(DeviceIndex device) { ForwardMarkCaptureBegin(base_, device); }
  void markCaptureEnd(DeviceIndex device) { ForwardMarkCaptureEnd(base_, device); }
  DataPtr allocateWithAddress(size_t bytes, void* address);
  bool supportsUserMetadata() { return ForwardSupportsUserMetadata(base_); }
  void annotateMemory(const void* pointer, const std::string& metadata);
#if defined(__clang__)
#pragma clang diagnostic pop
#endif

 private:
  // Allocates in one of our pools, if a route leads there; else as `ask_base` does. If no route
  // takes it and the base has no memory, AllocateOnOom() is asked.
  template <typename AskStream, typename AskBase>
  DataPtr Allocate(size_t bytes, const AskStream& ask_stream, const AskBase& ask_base);
  Block AllocateInPool(const Target& target, size_t bytes, cudaStream_t stream);
  // Allocates, with what the base has to be asked and told before. nullopt if memory does not
  // suffice; MeteredDriver says whether the fraction is why.
  std::optional<Block> TryWatched(DevicePools& pools, const Request& request);
  // A block of what a pool lends, if that suffices.
  std::optional<Block> Borrow(const Target& loan, size_t bytes, cudaStream_t stream);
  // A block of a use_on_oom pool, or of one that lends on OOM, for what no route takes and the base has no memory for.
  std::optional<DevicePools::Owned> AllocateOnOom(size_t bytes, DeviceIndex device,
                                                  cudaStream_t stream);

  CUDAAllocator& base_;
  CaptureScopes scopes_{kGraphAllocator, &base_};
  RouteTable& routes_ = scopes_.routes();
  History& history_ = History::Get();

  static inline constinit std::atomic<GraphAllocator*> instance_{nullptr};
};

}  // namespace cgp
