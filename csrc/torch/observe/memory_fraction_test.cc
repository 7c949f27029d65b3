// One share of the device's memory for the base and our pools together; and running out of it.
#include <gtest/gtest.h>

#include <string>

#include "torch/testing/graph_allocator_fixture.h"

namespace cgp {
namespace {

class MemoryFractionTest : public GraphAllocatorTest {
 protected:
  static constexpr double kPages = 32;  // of the device
  static_assert(kPages * kPage == kPhysicalLimit);

  void BaseHolds(uint64_t pages) {
    base_.stats.reserved_bytes[0].current = static_cast<int64_t>(pages * kPage);
  }
  std::string RefusalOf(size_t bytes) {
    try {
      allocator_.allocate(bytes);
    } catch (const c10::OutOfMemoryError& error) {
      return error.what_without_backtrace();
    }
    return "";
  }
};

TEST_F(MemoryFractionTest, UnsetItIsTheBasesToSay) {
  EXPECT_EQ(allocator_.getMemoryFraction(device_), 1);
  Graph graph(*this, id_, 7);
  graph.Begin();
  EXPECT_TRUE(IsOurs(allocator_.allocate(28 * kPage)));
  graph.End();
  EXPECT_EQ(base_.fraction, 1) << "nobody asked for a share";
  base_.fraction = 0.75;
  EXPECT_EQ(allocator_.getMemoryFraction(device_), 0.75);
}

TEST_F(MemoryFractionTest, OursGetWhatTheBaseDoesNotHold) {
  allocator_.setMemoryFraction(0.5, device_);
  BaseHolds(10);
  Graph graph(*this, id_, 7);
  graph.Begin();
  const DataPtr first = allocator_.allocate(4 * kPage);
  EXPECT_NE(RefusalOf(3 * kPage), "");
  const DataPtr second = allocator_.allocate(2 * kPage);
  EXPECT_NE(RefusalOf(kPage), "");
  BaseHolds(9);
  EXPECT_EQ(RefusalOf(kPage), "");
  BaseHolds(20);
  EXPECT_NE(RefusalOf(4 * kPage), "") << "the base alone has more than both may";
  graph.End();
}

TEST_F(MemoryFractionTest, TheBaseGetsWhatOursDoNotHold) {
  allocator_.setMemoryFraction(0.5, device_);
  EXPECT_EQ(base_.fraction, 0.5);
  Graph graph(*this, id_, 7);
  graph.Begin();
  allocator_.allocate(4 * kPage).clear();
  EXPECT_EQ(base_.fraction, 0.5 - 4 / kPages);
  allocator_.allocate(6 * kPage).clear();
  EXPECT_EQ(base_.fraction, 0.5 - 6 / kPages);
  graph.End();
  EXPECT_EQ(allocator_.getMemoryFraction(device_), 0.5) << "as it was set";
  allocator_.setMemoryFraction(0.25, device_);
  EXPECT_EQ(base_.fraction, 0.25 - 6 / kPages);
  allocator_.setMemoryFraction(0.125, device_);
  EXPECT_EQ(base_.fraction, 0) << "ours have more than both may";
  EXPECT_THROW(allocator_.setMemoryFraction(1.5, device_), c10::Error);
  EXPECT_EQ(allocator_.getMemoryFraction(device_), 0.125);
  allocator_.setMemoryFraction(0.5, device_);
  graph.Reset();
  allocator_.emptyCache();
  EXPECT_EQ(base_.fraction, 0.5) << "ours gave it back";
}

TEST_F(MemoryFractionTest, AShareThatIsSetMeanwhileCounts) {
  allocator_.setMemoryFraction(0.5, device_);
  Graph graph(*this, id_, 7);
  graph.Begin();
  base_.before_fraction = [&] {
    base_.before_fraction = [] {};
    allocator_.setMemoryFraction(0.75, device_);
  };
  const DataPtr inside = allocator_.allocate(2 * kPage);
  EXPECT_EQ(base_.fraction, 0.75 - 2 / kPages);
  graph.End();
}

}  // namespace
}  // namespace cgp
