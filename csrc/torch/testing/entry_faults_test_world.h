// What entry_faults_test.cc makes to fail: a table of the entries that PyTorch calls.
#pragma once

#include <functional>
#include <memory>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "torch/testing/fake_faults.h"
#include "torch/testing/graph_allocator_fixture.h"

namespace cgp {

// What an entry is called in. Each attempt has one of its own, on the device of its entry.
class World {
 public:
  World() {
    current_device = device;
    current_stream = Stream(1);
    fake_cuda::Reset();
  }

  // A capture on the current stream, as torch does it; as far as the allocator is asked.
  void Begin(MempoolId_t id) {
    const CaptureId capture = ++last_capture;
    allocator.beginAllocateToPool(
        device, id, [capture](cudaStream_t stream) { return ActiveCapture(stream) == capture; });
    const faults::Within fake;
    SetCapture(current_stream, capture);
  }
  void End(MempoolId_t id) {
    {
      const faults::Within fake;
      SetCapture(current_stream, 0);
    }
    allocator.endAllocateToPool(device, id);
  }
  void BeginEager(MempoolId_t id) { allocator.beginAllocateToPool(device, id, ThisThread()); }
  void EndEager(MempoolId_t id) { allocator.endAllocateToPool(device, id); }
  void Release(MempoolId_t id) { allocator.releasePool(device, id); }

  PoolSet& pools() { return DevicePools::For(device).set; }
  // All that can be asked, but for peaks, counts of what was done, and what pools hold for later.
  std::string Describe();

  FakeBaseAllocator base;
  GraphAllocator allocator{base};
  const c10::DeviceIndex device = device_of_entry;
  std::vector<DataPtr> blocks;
  void* raw = nullptr;
  std::shared_ptr<c10::cuda::CUDACachingAllocator::AllocatorState> checkpoint;
  inline static c10::DeviceIndex device_of_entry = 0;
  inline static CaptureId last_capture = 0;
};

inline constexpr MempoolId_t kId{0, 1};
inline constexpr MempoolId_t kOther{0, 2};
inline constexpr MempoolId_t kAnonymous{5, 0};

using Step = std::function<void(World&)>;

struct Entry {
  std::string name;
  Step before;
  Step call;
  Step after;  // so that nothing is open or held
  // Of one that gives back or tells: an error may come when all is done, not only when nothing is.
  bool may_be_done = false;
};

inline void PrintTo(const Entry& entry, std::ostream* out) { *out << entry.name; }

inline const Step kNothing = [](World&) {};

// What several entries begin with and end with.
inline void EndCapture(World& w) {
  w.blocks.clear();
  w.End(kId);
  w.Release(kId);
}
inline void Captured(World& w) {
  w.Begin(kId);
  w.blocks.push_back(w.allocator.allocate(3 * kPage));
  w.raw = w.allocator.raw_alloc(1000);
  w.End(kId);
}
inline void CapturedNothing(World& w) {
  w.Begin(kId);
  w.End(kId);
}
inline void FreeAndRelease(World& w) {
  w.blocks.clear();
  if (w.raw != nullptr) w.allocator.raw_delete(std::exchange(w.raw, nullptr));
  w.Release(kId);
}
// Work is in flight on two streams then.
inline void InEagerScope(World& w) {
  Captured(w);
  w.BeginEager(kId);
  w.allocator.allocate(5 * kPage).clear();
  current_stream = Stream(2);
}
inline void EndEagerScope(World& w) {
  current_stream = Stream(1);
  w.EndEager(kId);
  w.Release(kId);
  FreeAndRelease(w);
}
inline void MakeMemPoolOfTheBases(World& w) {
  w.allocator.scopes().takes_mempools = false;
  w.allocator.createOrIncrefPool(w.device, kId);
}
// In a capture into kOther.
inline void UseNested(World& w) {
  w.BeginEager(kId);
  w.allocator.allocate(3 * kPage).clear();
  w.EndEager(kId);
  w.Release(kId);
}
inline void ReleaseOne(World& w) { w.Release(kId); }

// A use_on_oom MemPool, which serves what the base has no memory for.
inline void MakeUseOnOomPool(World& w) {
  w.allocator.createOrIncrefPool(w.device, kId);
  w.allocator.setUseOnOOM(w.device, kId, true);
  w.BeginEager(kId);
  w.allocator.allocate(3 * kPage).clear();
  w.EndEager(kId);
  w.Release(kId);
  w.base.largest = 1000;
}
inline void ReleaseUseOnOomPool(World& w) {
  w.base.largest = ~size_t{0};
  if (w.raw != nullptr) w.allocator.raw_delete(std::exchange(w.raw, nullptr));
  w.blocks.clear();
  w.allocator.setUseOnOOM(w.device, kId, false);
  w.Release(kId);
}

// The table: of blocks, of MemPools, of scopes and pools, and all others.
std::vector<Entry> EntriesOfBlocks();
std::vector<Entry> EntriesOfMemPools();
std::vector<Entry> EntriesOfScopes();
std::vector<Entry> OtherEntries();

}  // namespace cgp
