// The adapter without a GPU: CUDA's streams are faked, the host driver stands behind the pools.
#include "torch/graph_allocator.h"

#include <gtest/gtest.h>

#include <atomic>
#include <chrono>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "testing/host_driver.h"
#include "testing/pool_of.h"
#include "torch/testing/fake_faults.h"
#include "torch/testing/graph_allocator_fixture.h"

namespace cgp {
namespace {

TEST_F(GraphAllocatorTest, ACaptureAllocatesInAPoolOfOurs) {
  Graph graph(*this, id_, 7);
  graph.Begin();
  EXPECT_TRUE(allocator_.capturing());
  DataPtr inside = allocator_.allocate(1000);
  EXPECT_TRUE(IsOurs(inside));
  EXPECT_EQ(inside.get(), inside.get_context());
  EXPECT_EQ(inside.device(), c10::Device(c10::kCUDA, device_));
  SetCapture(Stream(2), 7);  // a side stream that joined the capture
  current_stream = Stream(2);
  EXPECT_TRUE(IsOurs(allocator_.allocate(1000)));
  current_stream = Stream(3);
  EXPECT_FALSE(IsOurs(allocator_.allocate(1000)));
  current_stream = Stream(1);
  EXPECT_EQ(allocator_.allocate(0).get(), nullptr);
  graph.End();
  EXPECT_FALSE(IsOurs(allocator_.allocate(1000)));
  EXPECT_FALSE(base_.users.contains(id_));

  EXPECT_EQ(allocator_.getPoolUseCount(device_, id_), 1);
  graph.Reset();
  allocator_.emptyCache();
  EXPECT_EQ(pools().Usage().reserved_bytes.current, kPage) << "a tensor lives in it";
  inside.clear();
  allocator_.emptyCache();
  EXPECT_TRUE(pools().ids().empty());
}

TEST_F(GraphAllocatorTest, OutOfMemoryInACaptureTouchesNothingElse) {
  Graph unused(*this, {0, 2}, 6);
  unused.Begin();
  allocator_.allocate(4 * kPage).clear();
  unused.End();
  unused.Reset();
  size_t observed = 0;
  allocator_.attachOutOfMemoryObserver(
      [&](int64_t, size_t bytes, size_t, size_t) { observed = bytes; });

  Graph graph(*this, id_, 7);
  graph.Begin();
  const DataPtr inside = allocator_.allocate(kPage);
  try {
    allocator_.allocate(kPhysicalLimit);
    FAIL() << "was allocated";
  } catch (const c10::OutOfMemoryError& error) {
    const std::string text = error.what_without_backtrace();
    EXPECT_NE(text.find("Tried to allocate 64.00 MiB in graph pool (0, 1)"), std::string::npos)
        << text;
    EXPECT_NE(text.find("(cudagraph_pool: graph pools of GPU " + std::to_string(device_) +
                        " hold 10.00 MiB (2.00 MiB in live blocks, 8.00 MiB free): pool (0, 1) "
                        "holds 2.00 MiB (2.00 MiB in live blocks, 0 bytes free) for 1 user(s); "
                        "pool (0, 2) holds 8.00 MiB"),
              std::string::npos)
        << text;
  }
  EXPECT_EQ(observed, kPhysicalLimit);
  EXPECT_EQ(base_.calls["emptyCache"], 0);
  EXPECT_EQ(pools().Stats({0, 2}).reserved_bytes, 4 * kPage);
  EXPECT_TRUE(IsOurs(allocator_.allocate(kPage)));
  graph.End();
}

TEST_F(GraphAllocatorTest, EagerMemoryThatRunsOutSaysWhatGraphPoolsHold) {
  base_.largest = 4 * kPage;
  const auto text_of = [&](const std::function<void()>& allocate) -> std::string {
    const uint64_t reserved = pools().Usage().reserved_bytes.current;
    const uint64_t live = pools().Usage().all.bytes.current;
    const auto ooms = allocator_.getDeviceStats(device_).num_ooms;
    std::string text = "nothing was thrown";
    try {
      allocate();
    } catch (const c10::OutOfMemoryError& error) {
      text = error.what_without_backtrace();
    }
    EXPECT_EQ(pools().Usage().reserved_bytes.current, reserved);
    EXPECT_EQ(pools().Usage().all.bytes.current, live);
    EXPECT_EQ(allocator_.getDeviceStats(device_).num_ooms, ooms + 1) << "the base's alone";
    EXPECT_FALSE(allocator_.capturing());
    pools().Check();
    return text;
  };
  const std::vector<std::function<void()>> ways = {
      [&] { allocator_.allocate(4 * kPage + 1); },
      [&] { allocator_.raw_alloc(4 * kPage + 1); },
      [&] { allocator_.raw_alloc_with_stream(4 * kPage + 1, Stream(2)); },
  };
  const std::string of_base = text_of(ways[0]);
  EXPECT_EQ(of_base.find("cudagraph_pool"), std::string::npos) << of_base;
  Graph graph(*this, id_, 7);
  graph.Begin();
  DataPtr inside = allocator_.allocate(kPage);
  allocator_.allocate(3 * kPage).clear();
  graph.End();
  for (const auto& way : ways) {
    EXPECT_EQ(
        text_of(way),
        of_base + " (cudagraph_pool: graph pools of GPU " + std::to_string(device_) +
            " hold 8.00 MiB (2.00 MiB in live blocks, 6.00 MiB free): pool (0, 1) holds 8.00 "
            "MiB (2.00 MiB in live blocks, 6.00 MiB free) for 1 user(s). Users are graphs and "
            "objects such as GraphPool: once they are gone a pool gives back what it holds. "
            "cudagraph_pool.report() says what each graph takes)");
  }
  const c10::DeviceIndex other = fake_cuda::NextDevice();
  current_device = other;
  EXPECT_EQ(text_of(ways[0]).find("cudagraph_pool"), std::string::npos) << "it has no pools";
  current_device = device_;
  inside.clear();
  graph.Reset();
  allocator_.emptyCache();
  EXPECT_EQ(text_of(ways[0]), of_base) << "nothing is held any more";
}

TEST_F(GraphAllocatorTest, WhatCannotBeGivenBackIsNoErrorOfWhoAllocatesElsewhere) {
  Graph unused(*this, id_, 7);
  unused.Begin();
  allocator_.allocate(1000).clear();
  unused.End();
  unused.Reset();
  // As the base does whenever nothing in its cache fits.
  const auto callback = c10::FreeCudaMemoryCallbacksRegistry()->Create("cudagraph_pool");
  for (int64_t call = 1; call < 4; ++call) {
    faults::Arm(faults::Kind::kDriver, call, /*for_good=*/true);
    EXPECT_NO_THROW(EXPECT_FALSE(callback->Execute()));
    EXPECT_TRUE(faults::Disarm());
  }
  EXPECT_TRUE(callback->Execute());
  ExpectNothingIsLeft();
}

TEST_F(GraphAllocatorTest, RawPointersOfBothKinds) {
  void* const outside = allocator_.raw_alloc(1000);
  Graph graph(*this, id_, 7);
  graph.Begin();
  void* const inside = allocator_.raw_alloc(1000);
  void* const other = allocator_.raw_alloc_with_stream(1000, Stream(9));
  graph.End();
  EXPECT_TRUE(cgp::PoolOf(pools(), reinterpret_cast<Address>(inside)).has_value());
  EXPECT_THROW(allocator_.raw_delete(static_cast<char*>(inside) + 512), c10::Error);
  EXPECT_EQ(pools().Usage().all.count.current, 1U);
  allocator_.raw_delete(inside);
  allocator_.raw_delete(outside);
  allocator_.raw_delete(other);
  allocator_.raw_delete(nullptr);
  EXPECT_EQ(pools().Usage().all.count.current, 0U);
  EXPECT_THROW(allocator_.raw_delete(inside), c10::Error) << "freed twice";
}

TEST_F(GraphAllocatorTest, WhatIsAskedOfOurPointersAndPools) {
  Graph graph(*this, id_, 7);
  graph.Begin();
  const DataPtr a = allocator_.allocate(1000), b = allocator_.allocate(3 * kPage);
  graph.End();
  size_t bytes = 0;
  EXPECT_EQ(allocator_.getBaseAllocation(static_cast<char*>(a.get()) + 700, &bytes), a.get());
  EXPECT_EQ(bytes, 1024U);
  EXPECT_TRUE(allocator_.checkPoolLiveAllocations(device_, id_, {a.get(), b.get()}));
  EXPECT_FALSE(allocator_.checkPoolLiveAllocations(device_, id_, {a.get()}));
  EXPECT_FALSE(allocator_.checkPoolLiveAllocations(device_, id_, {a.get(), this}));
  EXPECT_FALSE(allocator_.checkPoolLiveAllocations(device_, id_, {a.get(), b.get(), this}));
  EXPECT_THROW(allocator_.shareIpcHandle(a.get()), c10::Error);
  EXPECT_THROW(allocator_.setUseOnOOM(device_, id_, true), c10::Error);
  EXPECT_NO_THROW(allocator_.setUseOnOOM(device_, id_, false));
  EXPECT_THROW(allocator_.setNoSplit(device_, id_), c10::Error);
  const HostDriver& host = fake_cuda::HostOf(DevicePools::For(device_).driver.inner());
  const auto b_address = reinterpret_cast<Address>(b.get());
  const c10::DeviceIndex peer = fake_cuda::NextDevice();
  allocator_.enablePeerAccess(device_, peer);
  EXPECT_FALSE(host.CanAccess(b_address, 3 * kPage, peer)) << "it is the peer's memory that opens";
  allocator_.enablePeerAccess(peer, device_);
  EXPECT_TRUE(host.CanAccess(b_address, 3 * kPage, peer));
  EXPECT_EQ(base_.calls["enablePeerAccess"], 2);
}

TEST_F(GraphAllocatorTest, BlocksOfOtherDevicesFindTheirPools) {
  Graph graph(*this, id_, 7);
  graph.Begin();
  DataPtr here = allocator_.allocate(1000);
  const c10::DeviceIndex other = current_device = fake_cuda::NextDevice();
  allocator_.beginAllocateToPool(other, id_, graph.Filter());
  DataPtr there = allocator_.allocate(3000);
  EXPECT_EQ(there.device().index(), other);
  EXPECT_TRUE(DevicePools::TryRecordUse(there.get(), StreamId{9}));
  EXPECT_TRUE(DevicePools::At(there.get()));
  const char* const inside = static_cast<const char*>(there.get()) + 512;
  EXPECT_FALSE(DevicePools::TryRecordUse(inside, StreamId{9}));
  EXPECT_FALSE(DevicePools::At(inside));
  allocator_.endAllocateToPool(other, id_);
  there.clear();
  EXPECT_EQ(DevicePools::For(other).set.Usage().all.count.current, 0U);
  EXPECT_EQ(pools().Usage().all.count.current, 1U);
  here.clear();
  EXPECT_EQ(pools().Usage().all.count.current, 0U);
  current_device = device_;
  graph.End();
}

TEST_F(GraphAllocatorTest, ASnapshotGoesOnWithoutAPoolThatIsGivenBackMeanwhile) {
  // Others that are shown first, so that there is time for one to go.
  constexpr uint64_t kOthers = 300;
  for (uint64_t i = 0; i < kOthers; ++i) allocator_.scopes().Register(device_, {0, i});
  const PoolId changing{0, kOthers};
  std::atomic<bool> done{false};
  std::thread beside([&] {
    const auto end = std::chrono::steady_clock::now() + std::chrono::milliseconds(300);
    while (std::chrono::steady_clock::now() < end) {
      allocator_.scopes().Register(device_, changing);
      std::this_thread::yield();
      allocator_.releasePool(device_, {changing.first, changing.second});
      std::this_thread::yield();
    }
    done = true;
  });
  EXPECT_NO_THROW(while (!done) allocator_.snapshot({0, 0}, false));
  beside.join();
  for (uint64_t i = 0; i < kOthers; ++i) allocator_.releasePool(device_, {0, i});
}

TEST_F(GraphAllocatorTest, ThreadsCaptureInPoolsOfTheirOwn) {
  constexpr int kThreads = 4;
  std::atomic<int> strangers{0};
  std::vector<std::thread> threads;
  for (int t = 0; t < kThreads; ++t) {
    threads.emplace_back([this, t, &strangers] {
      current_device = device_;
      current_stream = Stream(static_cast<uintptr_t>(20 + t));
      const MempoolId_t id{0, static_cast<uint64_t>(100 + t)};
      for (int round = 0; round < 50; ++round) {
        Graph graph(*this, id, static_cast<CaptureId>(1000 * (t + 1) + round));
        graph.Begin();
        std::vector<DataPtr> blocks;
        for (size_t i = 0; i < 20; ++i) {
          blocks.push_back(allocator_.allocate(700 * (i + 1)));
          const auto owner = cgp::PoolOf(pools(), reinterpret_cast<Address>(blocks.back().get()));
          if (!owner || *owner != ToPoolId(id)) ++strangers;
        }
        blocks.clear();
        graph.End();
        if (round % 10 == 0) allocator_.emptyCache();
        allocator_.getDeviceStats(device_);
        graph.Reset();
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  EXPECT_EQ(strangers, 0);
  allocator_.emptyCache();
  EXPECT_TRUE(pools().ids().empty());
}

}  // namespace
}  // namespace cgp
