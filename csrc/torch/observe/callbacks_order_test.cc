// Those who are told may ask: trackers and observers are called with no lock held, in order.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <stdexcept>
#include <thread>
#include <utility>
#include <vector>

#include "torch/testing/graph_allocator_fixture.h"

namespace cgp {
namespace {

using Action = History::Action;

class TrackersThatAskTest : public GraphAllocatorTest {
 protected:
  void SetUp() override {
    GraphAllocatorTest::SetUp();
    static const bool attached = [] {  // trackers stay for good
      History::Get().AttachTracker([](const History::TraceEntry& entry) {
        if (asks_) asks_(entry);
      });
      return true;
    }();
    ASSERT_TRUE(attached);
  }
  void TearDown() override { asks_ = nullptr; }

  inline static std::function<void(const History::TraceEntry&)> asks_;
};

TEST_F(TrackersThatAskTest, StatisticsSnapshotsAndTheCacheAreToBeHad) {
  std::vector<Action> told;
  asks_ = [&](const History::TraceEntry& entry) {
    told.push_back(entry.action_);
    allocator_.getDeviceStats(device_);
    allocator_.snapshot();
    allocator_.emptyCache();
    allocator_.setMemoryFraction(1, device_);
  };
  Graph graph(*this, id_, 7);
  graph.Begin();
  allocator_.allocate(1000).clear();
  EXPECT_THROW(allocator_.allocate(kPhysicalLimit + 1), c10::OutOfMemoryError);
  graph.End();
  graph.Reset();
  told.clear();
  allocator_.emptyCache();
  EXPECT_EQ(told, std::vector{Action::SEGMENT_UNMAP});
}

// One that registers memory must not hear last of what came first.
TEST_F(TrackersThatAskTest, AnotherThreadsMappingsAreToldInOrderByWhoIsTelling) {
  std::vector<Action> told;
  std::thread beside;
  asks_ = [&](const History::TraceEntry& entry) {
    told.push_back(entry.action_);
    if (told.size() > 1) return;
    beside = std::thread([&] {
      allocator_.emptyCache();  // unmaps, and waits for nobody
    });
    beside.join();
  };
  allocator_.scopes().Register(device_, {0, 9});
  allocator_.beginAllocateToPool(device_, {0, 9}, ThisThread());
  allocator_.beginAllocateToPool(device_, id_, ThisThread());
  {
    const auto quiet = std::exchange(asks_, nullptr);
    allocator_.allocate(kPage).clear();
    allocator_.endAllocateToPool(device_, id_);
    allocator_.releasePool(device_, id_);
    asks_ = quiet;
  }
  const DataPtr inside = allocator_.allocate(3 * kPage);
  ASSERT_FALSE(beside.joinable());
  EXPECT_EQ(std::ranges::count(told, Action::SEGMENT_UNMAP), 1);
  EXPECT_EQ(told.back(), Action::ALLOC) << "last what happened last";
  asks_ = nullptr;
  allocator_.endAllocateToPool(device_, {0, 9});
}

class ObserversTest : public GraphAllocatorTest {
 protected:
  // Torch's own list: also of those that were attached before us.
  std::vector<size_t> Observe() {
    std::vector<size_t> told;
    base_.observers.emplace_back([&](int64_t, size_t bytes, size_t, size_t) {
      told.push_back(bytes);
      allocator_.getDeviceStats(device_);
      allocator_.snapshot();
    });
    Graph graph(*this, id_, 7);
    graph.Begin();
    const DataPtr inside = allocator_.allocate(kPage);
    EXPECT_THROW(allocator_.allocate(kPhysicalLimit), c10::OutOfMemoryError);
    EXPECT_THROW(allocator_.raw_alloc_with_stream(4 * kPhysicalLimit, Stream(1)),
                 c10::OutOfMemoryError);
    graph.End();
    base_.observers.clear();
    EXPECT_TRUE(FakeBaseAllocator::live.empty());
    EXPECT_TRUE(base_.open.empty());
    for (const auto& [id, users] : base_.users) EXPECT_LE(users, 1);
    return told;
  }
};

TEST_F(ObserversTest, ABaseThatIsNotTorchsIsNotAskedForTooMuch) {
  base_.its_name = "pluggable";
  EXPECT_TRUE(Observe().empty());
  EXPECT_EQ(allocator_.getDeviceStats(device_).num_ooms, 2);
}

TEST_F(ObserversTest, OneThatFailsDoesNotHideWhatHappened) {
  base_.observers.emplace_back(
      [](int64_t, size_t, size_t, size_t) { throw std::runtime_error("mine"); });
  Graph graph(*this, id_, 7);
  graph.Begin();
  EXPECT_THROW(allocator_.allocate(kPhysicalLimit + 1), c10::OutOfMemoryError);
  graph.End();
  EXPECT_TRUE(base_.open.empty());
}

}  // namespace
}  // namespace cgp
