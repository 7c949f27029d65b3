// Pages that are away or lent: which pools can, who borrows, what makes room, and which replays are
// refused.
#include <c10/util/ThreadLocalDebugInfo.h>
#include <gtest/gtest.h>

#include <functional>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "torch/errors.h"
#include "torch/graph_allocator.h"
#include "torch/testing/mempools_fixture.h"

namespace cgp {
namespace {

class Profiler final : public c10::MemoryReportingInfoBase {
 public:
  bool memoryProfilingEnabled() const override { return false; }
  void reportMemoryUsage(void*, int64_t, size_t, size_t, c10::Device) override {}
};

class LeasesTest : public MemPoolTest {
 protected:
  using Name = std::pair<uint64_t, uint64_t>;

  void SetUp() override {
    MemPoolTest::SetUp();
    SetExportable(false);
    scopes().Register(device_, pool_);  // a GraphPool
  }
  void TearDown() override {
    scopes().Release(device_, id_);
    MemPoolTest::TearDown();
  }

  CaptureScopes& scopes() { return allocator_.scopes(); }
  PoolStats Stats(PoolId id) { return pools().Stats(id); }

  // A graph of `id` that allocates so many pages and frees them.
  Name Capture(Graph& graph, MempoolId_t id, size_t pages) {
    graph.Begin();
    allocator_.allocate(pages * kPage).clear();
    graph.End();
    return scopes().NameCapture(device_, id);
  }
  void Replay(MempoolId_t id, Name name = {}) {
    scopes().BeginReplay(device_, id, name.first, name.second);
  }
  template <typename Function>
  std::string ErrorOf(const Function& function) {
    try {
      function();
    } catch (const UsageError& error) {
      return error.what();
    }
    return "";
  }
  bool Borrows(PoolId loan) {
    const DataPtr data = allocator_.allocate(kPage);
    const bool ours = IsOurs(data);
    EXPECT_TRUE(!ours || PoolOf(data) == loan);
    return ours;
  }
  void InAnotherThread(const std::function<void()>& function) {
    std::thread([&] {
      current_device = device_;
      current_stream = Stream(2);
      function();
    }).join();
  }
};

TEST_F(LeasesTest, EagerWorkTakesNoPageOfAGraph) {
  Graph graph(*this, id_, 7);
  Capture(graph, id_, 3);
  AllocateIn(id_, kPage).clear();  // of a GraphPool, as of a MemPool
  EXPECT_EQ(Reserved(id_), 4 * kPage);
  // Graph trees warm up where their graphs are.
  Graph tree(*this, other_, 8);
  Capture(tree, other_, 3);
  AllocateIn(other_, kPage).clear();
  EXPECT_EQ(Reserved(other_), 3 * kPage);
  graph.Reset();
  tree.Reset();
}

TEST_F(LeasesTest, APoolSleepsAndIsWokenByACapture) {
  allocator_.recordHistory(true, nullptr, 100, History::When::STATE, true, {});
  Graph graph(*this, id_, 7), next(*this, id_, 8);
  const Name name = Capture(graph, id_, 3);
  EXPECT_EQ(scopes().Sleep(device_, id_, true).bytes, 3 * kPage);
  EXPECT_EQ(Reserved(id_), 0u);
  EXPECT_EQ(allocator_.getDeviceStats(device_).reserved_bytes[0].current, 0);
  EXPECT_NE(ErrorOf([&] { Replay(id_, name); }).find("asleep"), std::string::npos);
  Capture(next, id_, 1);
  EXPECT_EQ(Reserved(id_), 3 * kPage);
  EXPECT_EQ(ErrorOf([&] { Replay(id_, name); }), "");
  std::vector<size_t> mapped(2);
  const auto shown = allocator_.snapshot();
  for (const auto& entry : shown.device_traces.at(static_cast<size_t>(device_))) {
    if (entry.action_ == History::Action::SEGMENT_MAP) mapped[0] += entry.size_;
    if (entry.action_ == History::Action::SEGMENT_UNMAP) mapped[1] += entry.size_;
  }
  EXPECT_EQ(mapped[0], mapped[1] + 3 * kPage);
  allocator_.recordHistory(false, nullptr, 0, History::When::NEVER, true, {});
  graph.Reset();
  next.Reset();
}

TEST_F(LeasesTest, NothingLeavesDuringACapture) {
  Graph graph(*this, id_, 7), elsewhere(*this, other_, 8);
  Capture(graph, id_, 2);
  elsewhere.Begin();
  EXPECT_NE(ErrorOf([&] { scopes().Sleep(device_, id_, true); }), "");
  EXPECT_NE(ErrorOf([&] { scopes().BeginLoan(device_, id_); }), "");
  elsewhere.End();
  EXPECT_EQ(Reserved(id_), 2 * kPage);
  graph.Reset();
  elsewhere.Reset();
}

TEST_F(LeasesTest, ACaptureThatFailedHoldsNothingBack) {
  Graph graph(*this, id_, 7), failed(*this, other_, 8), again(*this, other_, 9);
  Capture(graph, id_, 2);
  failed.Begin();
  failed.Fail();
  EXPECT_EQ(scopes().Sleep(device_, id_, true).bytes, 2 * kPage);
  scopes().Wake(device_, id_);
  again.Begin();
  again.Fail();
  scopes().EndLoan(device_, scopes().BeginLoan(device_, id_));
  scopes().EndFailed(device_, other_);
  graph.Reset();
}

TEST_F(LeasesTest, WhatOthersMayHaveStays) {
  const auto lend = [&](MempoolId_t id) {
    return ErrorOf([&] { scopes().EndLoan(device_, scopes().BeginLoan(device_, id)); });
  };
  EXPECT_NE(lend(other_).find("none of cudagraph_pool's"), std::string::npos);
  Graph graph(*this, id_, 7), exported(*this, other_, 8);
  Capture(graph, id_, 2);
  SetExportable(true);
  Capture(exported, other_, 2);
  SetExportable(false);
  EXPECT_NE(lend(other_).find("exportable"), std::string::npos);
  EXPECT_EQ(lend(id_), "");
  scopes().lends_on_oom = true;
  base_.largest = 0;
  EXPECT_EQ(PoolOf(allocator_.allocate(kPage)), PoolSet::LoanOf(pool_));
  graph.Reset();
  exported.Reset();
}

TEST_F(LeasesTest, WithoutMemoryItStaysAsleepAndWhole) {
  Graph graph(*this, id_, 7);
  const Name name = Capture(graph, id_, 20);
  scopes().Sleep(device_, id_, true);
  std::optional<MemPool> hog(std::in_place, *this, other_);
  DataPtr held = AllocateIn(other_, 16 * kPage);
  const int emptied = base_.calls["emptyCache"];
  for (const auto& wake :
       {std::function<void()>([&] { scopes().Wake(device_, id_); }), {[&] { graph.Begin(); }}}) {
    try {
      wake();
      ADD_FAILURE() << "there is no memory for it";
    } catch (const c10::OutOfMemoryError& error) {
      EXPECT_NE(std::string(error.what()).find("40.00 MiB"), std::string::npos) << error.what();
    }
    EXPECT_TRUE(Stats(pool_).asleep);
  }
  EXPECT_EQ(base_.calls["emptyCache"], emptied + 2);
  EXPECT_FALSE(allocator_.capturing());
  held.clear();
  hog.reset();
  EXPECT_EQ(scopes().Wake(device_, id_).bytes, 20 * kPage);
  EXPECT_EQ(ErrorOf([&] { Replay(id_, name); }), "");
  graph.Reset();
}

TEST_F(LeasesTest, AThreadAndWhatInheritsItsStateBorrow) {
  Graph graph(*this, id_, 7), inside(*this, other_, 8);
  const Name name = Capture(graph, id_, 4);
  const PoolId loan = scopes().BeginLoan(device_, id_);
  EXPECT_TRUE(Borrows(loan));
  EXPECT_FALSE(IsOurs(allocator_.allocate(5 * kPage))) << "more than it has";
  const auto elsewhere = [&](std::shared_ptr<c10::ThreadLocalDebugInfo> state) {
    bool borrows = false;
    InAnotherThread([&] {
      c10::ThreadLocalDebugInfo::_forceCurrentDebugInfo(std::move(state));
      borrows = Borrows(loan);
    });
    return borrows;
  };
  EXPECT_TRUE(elsewhere(c10::ThreadLocalDebugInfo::current()));
  EXPECT_FALSE(elsewhere(nullptr));
  // A graph keeps nothing of it, and what is captured meanwhile changes nothing of that.
  inside.Begin();
  DataPtr captured = allocator_.allocate(kPage);
  EXPECT_EQ(PoolOf(captured), ToPoolId(other_));
  current_stream = Stream(3);
  EXPECT_FALSE(Borrows(loan));
  current_stream = Stream(1);
  captured.clear();
  inside.End();
  DataPtr borrowed = allocator_.allocate(kPage);
  EXPECT_EQ(borrowed.get_deleter(), &GraphAllocator::FreeMemory);
  scopes().EndLoan(device_, loan);
  EXPECT_FALSE(Borrows(loan));
  EXPECT_EQ(PoolOf(borrowed), loan);
  const std::string refused = ErrorOf([&] { Replay(id_, name); });
  EXPECT_NE(refused.find("2.00 MiB"), std::string::npos) << refused;
  EXPECT_EQ(Reserved(id_) + pools().Stats(loan).reserved_bytes, 4 * kPage);
  uint64_t shown = 0;
  for (const auto& segment : allocator_.snapshot().segments) shown += segment.total_size;
  EXPECT_EQ(shown, 5 * kPage) << "each byte once, with that of the other graph";
  borrowed.clear();
  EXPECT_EQ(ErrorOf([&] { Replay(id_, name); }), "");
  EXPECT_EQ(Reserved(id_), 4 * kPage);
  graph.Reset();
  inside.Reset();
}

TEST_F(LeasesTest, WhoLeavesALoanInAnotherThreadHasLeftIt) {
  Graph graph(*this, id_, 7);
  Capture(graph, id_, 2);
  const PoolId loan = scopes().BeginLoan(device_, id_);
  InAnotherThread([&] {
    scopes().EndLoan(device_, loan);
    EXPECT_EQ(scopes().BeginLoan(device_, id_), loan) << "the next one has its id";
    EXPECT_TRUE(Borrows(loan));
  });
  EXPECT_FALSE(Borrows(loan));
  scopes().EndLoan(device_, loan);
  graph.Reset();
}

TEST_F(LeasesTest, TheBaseServesWhereALoanCannotBeginAnew) {
  Graph graph(*this, id_, 7);
  const Name name = Capture(graph, id_, 2);
  const PoolId loan = scopes().BeginLoan(device_, id_);
  EXPECT_TRUE(Borrows(loan));
  Replay(id_, name);
  MeteredDriver::CountCaptures(1);  // without a route of this allocator
  EXPECT_FALSE(Borrows(loan));
  MeteredDriver::CountCaptures(-1);
  EXPECT_TRUE(Borrows(loan));
  scopes().EndLoan(device_, loan);
  graph.Reset();
}

// cuBLAS would keep it for ever.
TEST_F(LeasesTest, AWorkspaceThatIsMadeInALoanGoesWithIt) {
  if constexpr (kTorchMinor < 13) {
    Graph graph(*this, id_, 7);
    const Name name = Capture(graph, id_, 2);
    auto& map = fake_cuda::workspaces.map;
    map[{nullptr, Stream(1)}] = allocator_.allocate(kPage);
    const PoolId loan = scopes().BeginLoan(device_, id_);
    for (WorkspaceMap* const made : {&fake_cuda::workspaces, &fake_cuda::lt_workspaces}) {
      EXPECT_EQ(PoolOf(made->map[{nullptr, Stream(2)}] = allocator_.allocate(kPage)), loan);
    }
    scopes().EndLoan(device_, loan);
    EXPECT_EQ(map.size(), 1u) << "what was there before";
    EXPECT_TRUE(fake_cuda::lt_workspaces.map.empty());
    EXPECT_EQ(ErrorOf([&] { Replay(id_, name); }), "");
    map.clear();
    graph.Reset();
  }
}

TEST_F(LeasesTest, AProfilerBeginsAndEndsAtAnyTime) {
  using Slots = c10::ThreadLocalDebugInfo;
  const auto slot = c10::DebugInfoKind::PROFILER_STATE;
  Graph graph(*this, id_, 7);
  Capture(graph, id_, 2);
  const auto profiler = std::make_shared<Profiler>();
  Slots::_push(slot, profiler);
  const PoolId loan = scopes().BeginLoan(device_, id_);
  EXPECT_TRUE(Borrows(loan));
  EXPECT_EQ(Slots::_pop(slot), profiler);
  Slots::_push(slot, profiler);
  EXPECT_TRUE(Borrows(loan));
  scopes().EndLoan(device_, loan);
  EXPECT_FALSE(Borrows(loan));
  EXPECT_EQ(Slots::_pop(slot), profiler);
  EXPECT_EQ(Slots::current(), nullptr);
  graph.Reset();
}

TEST_F(LeasesTest, OnOomThePoolThatHasMostLends) {
  Graph small(*this, other_, 7), large(*this, id_, 8);
  Capture(small, other_, 2);
  const Name name = Capture(large, id_, 6);
  base_.largest = 1000;
  EXPECT_THROW(allocator_.allocate(kPage), c10::OutOfMemoryError);
  scopes().lends_on_oom = true;
  EXPECT_THROW(allocator_.allocate(7 * kPage), c10::OutOfMemoryError);
  EXPECT_FALSE(pools().Contains(PoolSet::LoanOf(pool_))) << "mapped in vain";
  DataPtr borrowed = allocator_.allocate(5 * kPage);
  EXPECT_EQ(PoolOf(borrowed), PoolSet::LoanOf(pool_));
  EXPECT_FALSE(IsOurs(allocator_.allocate(1000)));
  EXPECT_THROW(allocator_.allocate(7 * kPage), c10::OutOfMemoryError);
  EXPECT_NE(ErrorOf([&] { Replay(id_, name); }), "");
  borrowed.clear();
  scopes().Sleep(device_, id_, true);
  EXPECT_EQ(PoolOf(allocator_.allocate(kPage)), PoolSet::LoanOf(ToPoolId(other_)));
  small.Reset();
  large.Reset();
}

TEST_F(LeasesTest, OnOomAPoolWhoseLoanIsOpenIsPassedOver) {
  Graph large(*this, id_, 7), small(*this, other_, 8);
  const Name name = Capture(large, id_, 6);
  Capture(small, other_, 3);
  const PoolId loan = scopes().BeginLoan(device_, id_);
  Replay(id_, name);  // takes back what is free, so that this pool has most
  base_.largest = 0;
  scopes().lends_on_oom = true;
  InAnotherThread([&] {
    EXPECT_NO_THROW(
        EXPECT_EQ(PoolOf(allocator_.allocate(2 * kPage)), PoolSet::LoanOf(ToPoolId(other_))));
  });
  scopes().EndLoan(device_, loan);
  large.Reset();
  small.Reset();
}

TEST_F(LeasesTest, ACaptureIsNamedByTheThreadThatEndedItLast) {
  Graph graph(*this, id_, 7), next(*this, other_, 8);
  EXPECT_EQ(scopes().NameCapture(device_, id_), Name());
  const Name name = Capture(graph, id_, 4);
  EXPECT_NE(name.first, 0u);
  EXPECT_EQ(scopes().NameCapture(device_, id_).first, 0u) << "it has a name";
  next.Begin();
  next.End();
  EXPECT_EQ(scopes().NameCapture(device_, id_), Name()) << "that was another one's";
  std::thread([&] { EXPECT_EQ(scopes().NameCapture(device_, other_), Name()); }).join();
  EXPECT_GT(scopes().NameCapture(device_, other_).second, name.second);
  const auto trim = [&] {
    return scopes()
        .Take(device_, id_, [](PoolSet& set, PoolId id) { return set.TrimToNeeds(id); })
        .bytes;
  };
  EXPECT_EQ(trim(), 0u);
  pools().DropCapture(pool_, name.first);
  EXPECT_EQ(trim(), 4 * kPage);
  graph.Reset();
  next.Reset();
}

TEST_F(LeasesTest, WithoutItsTensorsOnlyItsCallerWakesIt) {
  Graph before(*this, other_, 7), graph(*this, id_, 8), after(*this, other_, 9);
  const Name older = Capture(before, other_, 1);
  graph.Begin();
  DataPtr live = allocator_.allocate(kPage);
  graph.End();
  const Name newer = Capture(after, other_, 1);
  scopes().Sleep(device_, id_, false);
  EXPECT_EQ(Reserved(id_), 0u);
  EXPECT_EQ(ErrorOf([&] { Replay(other_, older); }), "");
  for (const Name& name : {newer, Name()}) {
    EXPECT_NE(ErrorOf([&] { Replay(other_, name); }).find("wake()"), std::string::npos);
  }
  EXPECT_NE(ErrorOf([&] { Enter(id_); }).find("wake()"), std::string::npos);
  Graph beside(*this, {0, 3}, 10);
  beside.Begin();
  EXPECT_NE(ErrorOf([&] { scopes().Wake(device_, id_); }).find("under way"), std::string::npos);
  beside.End();
  beside.Reset();
  scopes().Wake(device_, id_);
  EXPECT_NE(ErrorOf([&] { Replay(other_, newer); }), "") << "nothing is copied back so far";
  scopes().NoteFilled(device_, pool_);
  EXPECT_EQ(ErrorOf([&] { Replay(other_, newer); }), "");
  live.clear();
  graph.Reset();
  before.Reset();
  after.Reset();
}

TEST_F(LeasesTest, OnlyGraphPoolsDropLiveTensors) {
  std::optional<MemPool> mempool(std::in_place, *this, other_);
  AllocateIn(other_, kPage).clear();
  EXPECT_NE(ErrorOf([&] { scopes().Sleep(device_, other_, false); }).find("not a GraphPool"),
            std::string::npos);
  mempool.reset();
}

TEST_F(LeasesTest, APoolThatIsGoneRefusesNoReplay) {
  Graph graph(*this, other_, 7), after(*this, id_, 8);
  scopes().Register(device_, ToPoolId(other_));
  graph.Begin();
  DataPtr live = allocator_.allocate(kPage);
  graph.End();
  const Name newer = Capture(after, id_, 1);
  scopes().Sleep(device_, other_, false);
  scopes().Release(device_, other_);
  graph.Reset();
  EXPECT_NE(ErrorOf([&] { Replay(id_, newer); }), "") << "what may read it is still there";
  live.clear();
  allocator_.emptyCache();
  EXPECT_EQ(ErrorOf([&] { Replay(id_, newer); }), "");
  after.Reset();
}

TEST_F(LeasesTest, AGraphNeedsWhatItTookOfAMemPool) {
  std::optional<MemPool> mempool(std::in_place, *this, other_);
  Graph graph(*this, id_, 7);
  graph.Begin();
  Enter(other_);
  allocator_.allocate(kPage).clear();
  Exit(other_);
  graph.End();
  const Name name = scopes().NameCapture(device_, id_);
  EXPECT_NE(name.first, 0u);
  scopes().Sleep(device_, other_, true);
  EXPECT_NE(ErrorOf([&] { Replay(id_, name); }), "");
  scopes().Wake(device_, other_);
  EXPECT_EQ(ErrorOf([&] { Replay(id_, name); }), "");
  // Whose device is not known.
  EXPECT_EQ(ErrorOf([&] { scopes().BeginReplay(std::nullopt, id_, 0, 0); }), "");
  mempool.reset();
  graph.Reset();
}

}  // namespace
}  // namespace cgp
