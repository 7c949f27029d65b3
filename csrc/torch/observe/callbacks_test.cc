// What the profiler and the trackers of allocations are told, and that an error of theirs leaves
// nothing half-done.
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>

#include <ctime>
#include <memory>
#include <utility>
#include <vector>

#include "torch/testing/graph_allocator_fixture.h"

namespace cgp {
namespace {

using Action = History::Action;

// What torch's profiler is told of a block, with the totals then; of memory that ran out the bytes
// that were asked for, at no address.
struct Reported {
  void* pointer = nullptr;
  int64_t bytes = 0;
  size_t allocated = 0;
  size_t reserved = 0;
  bool operator==(const Reported&) const = default;
};

class Profiler final : public c10::MemoryReportingInfoBase {
 public:
  bool memoryProfilingEnabled() const override { return enabled; }
  void reportMemoryUsage(void* pointer, int64_t bytes, size_t allocated, size_t reserved,
                         c10::Device) override {
    reports.push_back({pointer, bytes, allocated, reserved});
    TORCH_CHECK(!fails, "no profile");
  }
  void reportOutOfMemory(int64_t bytes, size_t allocated, size_t reserved, c10::Device) override {
    reports.push_back({nullptr, bytes, allocated, reserved});
  }
  std::vector<Reported> reports;
  bool enabled = true;
  bool fails = false;
};

class CallbacksTest : public GraphAllocatorTest {
 protected:
  void SetUp() override {
    GraphAllocatorTest::SetUp();
    told_.clear();
    failing_.clear();
  }
  void TearDown() override {
    failing_.clear();
    allocator_.recordHistory(false, nullptr, 0, History::When::NEVER, true, {});
  }
  // Two trackers, which stay for good and note what they are told. The first fails at the actions
  // that a test names.
  void Track() {
    static bool attached = false;
    if (!attached) {
      for (const bool first : {true, false}) {
        History::Get().AttachTracker([first](const History::TraceEntry& entry) {
          told_.push_back(entry.action_);
          for (const Action action : failing_) {
            TORCH_CHECK(!first || entry.action_ != action, "not tracked");
          }
        });
      }
    }
    attached = true;
  }
  void Record() {
    allocator_.recordHistory(true, [] { return std::shared_ptr<c10::GatheredContext>(new Stack); },
                             1000, History::When::ALL, true, {});
  }
  uint64_t LiveBlocks() { return pools().Usage().all.count.current; }

  struct Stack final : c10::GatheredContext {};
  inline static std::vector<Action> told_;
  inline static std::vector<Action> failing_;
  const std::shared_ptr<Profiler> profiler_ = std::make_shared<Profiler>();
  const c10::DebugInfoGuard guard_{c10::DebugInfoKind::PROFILER_STATE, profiler_};
};

// From us, where the base has nobody to tell: see graph_out_of_memory.cc.
TEST_F(CallbacksTest, TheProfilerHearsWhenMemoryRunsOut) {
  base_.its_name = "pluggable";
  base_.stats.allocated_bytes[0].current = 5000;
  base_.stats.reserved_bytes[0].current = 7 * kPage;
  Graph graph(*this, id_, 7);
  graph.Begin();
  const DataPtr inside = allocator_.allocate(kPage);
  EXPECT_THROW(allocator_.allocate(kPhysicalLimit), c10::OutOfMemoryError);
  graph.End();
  ASSERT_EQ(profiler_->reports.size(), 2U);
  EXPECT_EQ(profiler_->reports[1], (Reported{nullptr, kPhysicalLimit, kPage + 5000, 8 * kPage}));
}

TEST_F(CallbacksTest, OutOfMemoryIsWhatItIsWhateverATrackerSays) {
  base_.its_name = "pluggable";
  Track();
  failing_ = {Action::OOM};
  Graph graph(*this, id_, 7);
  graph.Begin();
  EXPECT_THROW(allocator_.allocate(kPhysicalLimit + 1), c10::OutOfMemoryError);
  EXPECT_EQ(told_.back(), Action::OOM);
  graph.End();
}

TEST_F(CallbacksTest, WhatIsAllocatedIsThereWhoeverFails) {
  Track();
  Record();
  Graph graph(*this, id_, 7);
  graph.Begin();
  allocator_.allocate(1000).clear();  // pages are mapped
  told_.clear();
  profiler_->reports.clear();
  profiler_->fails = true;
  failing_ = {Action::ALLOC};
  const DataPtr inside = allocator_.allocate(1000);
  profiler_->fails = false;
  failing_.clear();
  EXPECT_EQ(LiveBlocks(), 1U);
  EXPECT_EQ(profiler_->reports.size(), 1U);
  EXPECT_EQ(told_, (std::vector{Action::ALLOC, Action::ALLOC})) << "both trackers";
  EXPECT_NE(History::Get().ContextOf(reinterpret_cast<Address>(inside.get())), nullptr);
  graph.End();
}

TEST_F(CallbacksTest, WhatIsFreedIsGoneThoughNoStackCanBeRecorded) {
  static bool fails = false;
  const auto recorder = [] {
    TORCH_CHECK(!fails, "no stack");
    return std::shared_ptr<c10::GatheredContext>(new Stack);
  };
  allocator_.recordHistory(true, recorder, 1000, History::When::ALL, true, {});
  Graph graph(*this, id_, 7);
  graph.Begin();
  DataPtr inside = allocator_.allocate(1000);
  fails = true;
  inside.clear();
  fails = false;
  EXPECT_EQ(LiveBlocks(), 0U);
  graph.End();
}

TEST_F(CallbacksTest, WhereOursWasAllocatedIsTold) {
  Record();
  Graph graph(*this, id_, 7);
  graph.Begin();
  DataPtr inside = allocator_.allocate(1000);
  const void* const pointer = inside.get();
  EXPECT_NE(allocator_.getContextForPointer(pointer), nullptr);
  inside.clear();
  EXPECT_EQ(allocator_.getContextForPointer(pointer), nullptr);
  graph.End();
}

TEST_F(CallbacksTest, ARestoreIsNotedAsWhatItChanged) {
  Graph graph(*this, id_, 7);
  graph.Begin();
  const DataPtr lives_on = allocator_.allocate(1000);
  DataPtr comes_back = allocator_.allocate(3000);
  graph.End();
  const auto checkpoint = allocator_.getCheckpointState(device_, id_);
  void* const back = comes_back.get();
  comes_back.clear();
  Graph next(*this, id_, 8);
  next.Begin();
  DataPtr goes = allocator_.allocate(5000);
  next.End();
  Record();
  auto delta = allocator_.setCheckpointPoolState(device_, checkpoint);
  std::vector<std::pair<Action, void*>> noted;
  const auto traces = allocator_.snapshot().device_traces;
  for (const auto& entry : traces.at(static_cast<size_t>(device_))) {
    noted.emplace_back(entry.action_, reinterpret_cast<void*>(entry.addr_));
  }
  EXPECT_EQ(noted, (std::vector<std::pair<Action, void*>>{{Action::FREE_REQUESTED, goes.get()},
                                                          {Action::FREE_COMPLETED, goes.get()},
                                                          {Action::ALLOC, back}}));
  goes.release_context();  // as torch does
  for (DataPtr& data : delta.dataptrs_allocd) {
    if (data.get() == lives_on.get()) data.release_context();
  }
}

}  // namespace
}  // namespace cgp
