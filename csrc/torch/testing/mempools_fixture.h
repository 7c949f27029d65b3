// torch.cuda.MemPools for tests of GraphAllocator.
#pragma once

#include <gtest/gtest.h>

#include <cstddef>
#include <cstdint>
#include <optional>

#include "testing/pool_of.h"
#include "torch/graph_allocator.h"
#include "torch/testing/graph_allocator_fixture.h"

namespace cgp {

class MemPoolTest : public GraphAllocatorTest {
 protected:
  // What at::cuda::MemPool does, in its order. An error in its destructor ends the process.
  class MemPool {
   public:
    MemPool(MemPoolTest& test, MempoolId_t id, bool use_on_oom = false, bool no_split = false)
        : test_(test), id_(id) {
      test.allocator_.createOrIncrefPool(test.device_, id);
      if (use_on_oom) test.allocator_.setUseOnOOM(test.device_, id, true);
      if (no_split) test.allocator_.setNoSplit(test.device_, id);
    }
    ~MemPool() {
      test_.allocator_.setUseOnOOM(test_.device_, id_, false);
      test_.allocator_.releasePool(test_.device_, id_);
      test_.allocator_.emptyCache(id_);
    }
    MemPool(const MemPool&) = delete;
    MemPool& operator=(const MemPool&) = delete;

   private:
    MemPoolTest& test_;
    const MempoolId_t id_;
  };

  void TearDown() override { ExpectNothingIsLeft(); }

  // torch.cuda.use_mem_pool
  void Enter(MempoolId_t id) { allocator_.beginAllocateToPool(device_, id, ThisThread()); }
  void Exit(MempoolId_t id) {
    allocator_.endAllocateToPool(device_, id);
    allocator_.releasePool(device_, id);
  }

  DataPtr AllocateIn(MempoolId_t id, size_t bytes) {
    Enter(id);
    DataPtr data = allocator_.allocate(bytes);
    Exit(id);
    EXPECT_EQ(PoolOf(data), ToPoolId(id));
    return data;
  }
  std::optional<PoolId> PoolOf(const DataPtr& data) {
    return cgp::PoolOf(pools(), reinterpret_cast<Address>(data.get()));
  }
  uint64_t Reserved(MempoolId_t id) {
    return pools().Contains(ToPoolId(id)) ? pools().Stats(ToPoolId(id)).reserved_bytes : 0;
  }
  int Users(MempoolId_t id) { return allocator_.getPoolUseCount(device_, id); }

  const MempoolId_t other_{0, 2};
  const PoolId pool_ = ToPoolId(id_);
};

}  // namespace cgp
