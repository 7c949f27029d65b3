// Memory has run out in a pool of ours: who hears of it, and what the error says.
#pragma once

#include <mutex>
#include <vector>

#include "torch/device_pools.h"
#include "torch/torch_version.h"

namespace cgp {

// An allocation that was asked for in one of our pools.
struct Request {
  PoolId id;
  size_t bytes = 0;
  StreamId stream{};
  CaptureId capture = kNoCapture;
  bool whole_pages = false;  // of which the block shares none
};

class OutOfMemory {
 public:
  using Base = MergedStats::Base;

  // CUDAAllocator::attachOomRejectionObserver()
  void Attach(Base& base, OomRejectionObserver observer);

  // Tells everybody who asked to hear of it, and throws c10::OutOfMemoryError. `rejected`: no
  // attempt was made to get room.
  [[noreturn]] void Throw(Base& base, DevicePools& pools, const Request& request, bool rejected);

 private:
  void Tell(Base& base, DevicePools& pools, const Request& request, bool rejected,
            const MemoryInfo& info);

  std::mutex mutex_;
  std::vector<OomRejectionObserver> rejection_observers_;
};

}  // namespace cgp
