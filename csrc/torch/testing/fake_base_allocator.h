// An allocator to wrap in tests: plain host memory, and a record of what it was asked for.
#pragma once

#include <c10/cuda/CUDACachingAllocator.h>

#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <stdexcept>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "torch/runtime.h"
#include "torch/scopes/routes.h"
#include "torch/testing/fake_cuda.h"
#include "torch/testing/fake_faults.h"
#include "torch/torch_version.h"

namespace cgp {

class FakeBaseAllocator final : public c10::cuda::CUDACachingAllocator::CUDAAllocator {
 public:
  // What was called, by name, and how often. Only what changes something or is asked for in tests
  // is counted.
  std::map<std::string, int> calls;
  // What it says of itself. Tests set it.
  c10::CachingDeviceAllocator::DeviceStats stats;
  std::map<c10::MempoolId_t, int> users;
  std::map<std::pair<c10::DeviceIndex, c10::MempoolId_t>, StreamFilter> open;
  std::string its_name = "native";
  size_t largest = ~size_t{0};  // more it has for nobody
  // More bytes it has for no stream that allocates in a pool, and says so to its observers.
  size_t largest_in_pool = size_t{1} << 20;
  std::vector<c10::cuda::CUDACachingAllocator::OutOfMemoryObserver> observers;
  std::map<void*, c10::MempoolId_t> pool_of;      // of what was allocated in a pool
  double fraction = 1;                            // of whichever device was named last
  std::function<void()> before_stats = [] {};     // runs whenever they are asked for
  std::function<void()> before_fraction = [] {};  // runs whenever another one is to be set
  inline static std::set<void*> live{};

  // A deleter knows no allocator, so `live` has a lock of its own.
  static void Delete(void* pointer) {
    {
      const std::lock_guard lock(live_mutex_);
      TORCH_CHECK(live.erase(pointer) == 1, "invalid device pointer: ", pointer);
    }
    std::free(pointer);  // NOLINT(cppcoreguidelines-no-malloc)
  }

  c10::DataPtr allocate(size_t bytes) override {
    const Entered entered(mutex_);
    ++calls["allocate"];
    void* pointer = bytes == 0 ? nullptr : raw_alloc(bytes);
    return {pointer, pointer, &Delete, c10::Device(c10::kCUDA, 0)};
  }
  c10::DeleterFnPtr raw_deleter() const override { return &Delete; }
  void copy_data(void*, const void*, size_t) const override { const Entered entered(mutex_); }
  bool initialized() override { return true; }
  void emptyCache(c10::MempoolId_t = {0, 0}) override {
    const Entered entered(mutex_);
    ++calls["emptyCache"];
  }
  using CUDAAllocator::recordStream;
  void recordStream(const c10::DataPtr&, c10::cuda::CUDAStream) override {
    const Entered entered(mutex_);
    ++calls["recordStream"];
  }
  c10::CachingDeviceAllocator::DeviceStats getDeviceStats(c10::DeviceIndex) override {
    const auto before = before_stats;  // it may put another one in its place
    before();
    const Entered entered(mutex_);
    return stats;
  }
  void resetAccumulatedStats(c10::DeviceIndex) override {
    const Entered entered(mutex_);
    stats.num_ooms = 0;
  }
  void resetPeakStats(c10::DeviceIndex) override {
    const Entered entered(mutex_);
    const auto reset = [](auto& array) {
      for (auto& stat : array) stat.peak = stat.current;
    };
    reset(stats.allocated_bytes);
    stats.oversize_segments.peak = stats.oversize_segments.current;
    if (auto* const pools = ReservedByPrivatePool(stats)) {
      for (auto& [id, reserved] : *pools) reset(reserved);
    }
  }
  void* raw_alloc(size_t bytes) override {
    const Entered entered(mutex_);
    if (bytes > largest) RunOut(CurrentDevice(), bytes);
    void* pointer = std::malloc(bytes);  // NOLINT(cppcoreguidelines-no-malloc)
    {
      const std::lock_guard lock(live_mutex_);
      live.insert(pointer);
    }
    pool_of.erase(pointer);
    for (const auto& [scope, filter] : open) {
      if (scope.first == CurrentDevice() && filter(CurrentStream(scope.first))) {
        pool_of.emplace(pointer, scope.second);
      }
    }
    return pointer;
  }
  void* raw_alloc_with_stream(size_t bytes, cudaStream_t stream) override {
    {
      const Entered entered(mutex_);
      for (const auto& [scope, filter] : open) {
        if (filter(stream) && bytes > largest_in_pool) RunOut(scope.first, bytes);
      }
    }
    return raw_alloc(bytes);
  }
  void raw_delete(void* pointer) override {
    const Entered entered(mutex_);
    Delete(pointer);
  }
  void init(int) override { const Entered entered(mutex_); }
  double getMemoryFraction(c10::DeviceIndex) override {
    const Entered entered(mutex_);
    return fraction;
  }
  void setMemoryFraction(double of_device, c10::DeviceIndex) override {
    TORCH_CHECK(0 <= of_device && of_device <= 1, "not a fraction");
    const auto before = before_fraction;
    before();
    const Entered entered(mutex_);
    fraction = of_device;
  }
  std::vector<c10::cuda::CUDACachingAllocator::StreamSegmentSize> getExpandableSegmentSizes(
      c10::DeviceIndex) override {
    const Entered entered(mutex_);
    return {};
  }
  void enable(bool) override { const Entered entered(mutex_); }
  bool isEnabled() const override {
    const Entered entered(mutex_);
    return true;
  }
  void cacheInfo(c10::DeviceIndex, size_t*) override { const Entered entered(mutex_); }
  void* getBaseAllocation(void* pointer, size_t*) override {
    const Entered entered(mutex_);
    return pointer;
  }
  // What of `pool_of` is alive, each a segment of its own.
  c10::cuda::CUDACachingAllocator::SnapshotInfo snapshot(c10::MempoolId_t id, bool) override {
    c10::cuda::CUDACachingAllocator::SnapshotInfo info;
    for (const auto& [pointer, pool] : pool_of) {
      if (!live.contains(pointer) || (id != c10::MempoolId_t{0, 0} && id != pool)) continue;
      auto& segment = info.segments.emplace_back();
      segment.address = reinterpret_cast<size_t>(pointer);
      segment.owner_private_pool_id = pool;
    }
    return info;
  }

  void beginAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t id,
                           StreamFilter filter) override {
    const Entered entered(mutex_);
    TORCH_CHECK(!users.contains(id) || users[id] > 0, "nobody holds the pool any more");
    TORCH_CHECK(open.emplace(std::pair(device, id), std::move(filter)).second, "already recording");
    ++users[id];
  }
  void endAllocateToPool(c10::DeviceIndex device, c10::MempoolId_t id) override {
    const Entered entered(mutex_);
    TORCH_CHECK(open.erase({device, id}) == 1, "not recording");
  }
  void releasePool(c10::DeviceIndex, c10::MempoolId_t id) override {
    const Entered entered(mutex_);
    TORCH_CHECK(users.contains(id), "unknown pool");
    --users[id];
  }
  int getPoolUseCount(c10::DeviceIndex, c10::MempoolId_t id) override {
    const Entered entered(mutex_);
    TORCH_CHECK(users.contains(id), "unknown pool");
    return users[id];
  }
  void createOrIncrefPool(c10::DeviceIndex, c10::MempoolId_t id,
                          std::shared_ptr<CUDAAllocator>) override {
    const Entered entered(mutex_);
    ++users[id];
  }
  void setUseOnOOM(c10::DeviceIndex, c10::MempoolId_t, bool) override {
    const Entered entered(mutex_);
    ++calls["setUseOnOOM"];
  }
  void setNoSplit(c10::DeviceIndex, c10::MempoolId_t) override {
    const Entered entered(mutex_);
    ++calls["setNoSplit"];
  }

  c10::cuda::CUDACachingAllocator::ShareableHandle shareIpcHandle(void*) override {
    const Entered entered(mutex_);
    return {};
  }
  std::shared_ptr<void> getIpcDevPtr(std::string) override {
    const Entered entered(mutex_);
    return nullptr;
  }
  void recordHistory(bool, c10::cuda::CUDACachingAllocator::CreateContextFn, size_t,
                     c10::cuda::CUDACachingAllocator::RecordContext, bool,
                     const std::vector<std::string>&) override {
    const Entered entered(mutex_);
  }
  void attachOutOfMemoryObserver(
      c10::cuda::CUDACachingAllocator::OutOfMemoryObserver observer) override {
    const Entered entered(mutex_);
    observers.push_back(std::move(observer));
  }
  void attachOomRejectionObserver(  // pure from 2.12 on
      std::function<void(int64_t, size_t, size_t, size_t)>) {}
  void attachAllocatorTraceTracker(
      c10::cuda::CUDACachingAllocator::AllocatorTraceTracker) override {
    const Entered entered(mutex_);
  }
  void enablePeerAccess(c10::DeviceIndex, c10::DeviceIndex) override {
    const Entered entered(mutex_);
    ++calls["enablePeerAccess"];
  }
  cudaError_t memcpyAsync(void*, int, const void*, int, size_t, cudaStream_t, bool) override {
    const Entered entered(mutex_);
    ++calls["memcpyAsync"];
    return cudaSuccess;
  }
  std::shared_ptr<c10::cuda::CUDACachingAllocator::AllocatorState> getCheckpointState(
      c10::DeviceIndex, c10::MempoolId_t id) override {
    const Entered entered(mutex_);
    ++calls["getCheckpointState"];
    auto state = std::make_shared<State>();
    state->live = LiveIn(id);
    return state;
  }
  // Knows nothing of what was freed meanwhile.
  c10::cuda::CUDACachingAllocator::CheckpointDelta setCheckpointPoolState(
      c10::DeviceIndex device,
      std::shared_ptr<c10::cuda::CUDACachingAllocator::AllocatorState> state) override {
    c10::cuda::CUDACachingAllocator::CheckpointDelta delta;
    for (void* const pointer : dynamic_cast<const State&>(*state).live) {
      delta.ptrs_freed.push_back(pointer);
      delta.dataptrs_allocd.emplace_back(pointer, pointer, &Delete,
                                         c10::Device(c10::kCUDA, device));
    }
    return delta;
  }
  bool checkPoolLiveAllocations(c10::DeviceIndex, c10::MempoolId_t id,
                                const std::unordered_set<void*>& expected) override {
    return LiveIn(id) == expected;
  }
  std::string name() override { return its_name; }

 private:
  // A call: it fails here or not at all, and holds the lock, as the native allocator's do.
  class Entered {
   public:
    explicit Entered(std::recursive_mutex& mutex) : lock_(mutex) {
      if (faults::Fails(faults::Kind::kBase)) throw std::runtime_error("the base was made to fail");
      ++faults::state.within;
    }
    ~Entered() { --faults::state.within; }
    Entered(const Entered&) = delete;
    Entered& operator=(const Entered&) = delete;

   private:
    const std::lock_guard<std::recursive_mutex> lock_;
  };

  void RunOut(c10::DeviceIndex device, size_t bytes) {
    ++stats.num_ooms;
    const auto allowed =
        static_cast<size_t>(fraction * static_cast<double>(fake_cuda::kPhysicalLimit));
    for (const auto& observer : observers) observer(device, bytes, allowed, 0);
    TORCH_CHECK_WITH(OutOfMemoryError, false, "the fake has no more");
  }

  struct State final : c10::cuda::CUDACachingAllocator::AllocatorState {
    std::unordered_set<void*> live;
  };

  std::unordered_set<void*> LiveIn(c10::MempoolId_t id) const {
    std::unordered_set<void*> in_pool;
    for (const auto& [pointer, pool] : pool_of) {
      if (pool == id && live.contains(pointer)) in_pool.insert(pointer);
    }
    return in_pool;
  }

  inline static std::mutex live_mutex_{};
  mutable std::recursive_mutex mutex_;
};

}  // namespace cgp
