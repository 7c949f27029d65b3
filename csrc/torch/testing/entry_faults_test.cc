// Every entry that PyTorch calls, with everything failing once that it calls itself: the driver,
// the allocator below, and operator new. An entry that throws has changed nothing, and works when
// it is called again; one that does not has done all. Then everything works, and nothing leaks.
#include <gtest/gtest.h>

#include <memory>
#include <sstream>
#include <string>

#include "torch/testing/entry_faults_test_world.h"
#include "torch/testing/fake_faults.h"

namespace cgp {

namespace {

// Side pools may be late: the base knows captures of ours by them.
bool IsSidePool(const MempoolId_t& id) { return id.first > ~0ULL / 2 && id.second == ~0ULL; }

}  // namespace

std::string World::Describe() {
  std::ostringstream text;
  for (const PoolId id : pools().ids()) {
    const PoolStats stats = pools().Stats(id);
    text << "pool " << ToString(id) << " users " << pools().UseCount(id) << " blocks "
         << stats.live_blocks << " bytes " << stats.allocated_bytes << "\n";
  }
  for (const auto& [id, users] : base.users) {
    if (users > 0 && !IsSidePool(id)) {
      text << "base's " << id.first << " " << id.second << " users " << users << "\n";
    }
  }
  for (const auto& [scope, filter] : base.open) {
    if (!IsSidePool(scope.second)) text << "base's open " << scope.second.second << "\n";
  }
  text << "base's blocks " << FakeBaseAllocator::live.size() << " fraction " << base.fraction
       << " capturing " << allocator.capturing() << " limit " << allocator.getMemoryFraction(device)
       << " captures " << allocator.scopes().counts.ours << " " << allocator.scopes().counts.bases;
  for (const MempoolId_t& id : {kId, kOther, kAnonymous}) {
    try {
      text << " " << allocator.getPoolUseCount(device, id);
    } catch (const c10::Error&) {
      text << " -";
    }
  }
  return text.str();
}

namespace {

using faults::Kind;

class EntryFaultsTest : public ::testing::TestWithParam<Entry> {
 protected:
  void SetUp() override { World::device_of_entry = fake_cuda::NextDevice(); }

  // What there is before and after the call, where nothing fails.
  struct Expected {
    std::string before;
    std::string after;
  };

  static Expected WithoutFault(const Entry& entry) {
    // On the heap: of a mutex that was on the stack ThreadSanitizer does not see the end.
    const auto owned = std::make_unique<World>();
    World& world = *owned;
    entry.before(world);
    Expected expected{.before = world.Describe(), .after = ""};
    entry.call(world);
    expected.after = world.Describe();
    CleanUp(entry, world);
    return expected;
  }

  static void CleanUp(const Entry& entry, World& world) {
    entry.after(world);
    for (const MempoolId_t& id : {kId, kOther}) Exercise(world, id);
    world.allocator.emptyCache();
    EXPECT_TRUE(world.pools().ids().empty()) << world.Describe();
    EXPECT_TRUE(world.base.open.empty()) << world.Describe();
    EXPECT_EQ(FakeBaseAllocator::live.size(), 0U);
    EXPECT_FALSE(world.allocator.capturing());
    EXPECT_NO_THROW(world.pools().Check());
  }

  // A capture and eager work in a pool, and eager work in none.
  static void Exercise(World& world, MempoolId_t id) {
    world.Begin(id);
    {
      const DataPtr inside = world.allocator.allocate(3 * kPage);
      EXPECT_TRUE(DevicePools::At(inside.get()));
    }
    world.End(id);
    world.BeginEager(id);
    world.allocator.allocate(1000).clear();
    world.EndEager(id);
    EXPECT_EQ(world.allocator.allocate(1000).get_deleter(), &FakeBaseAllocator::Delete);
    for (int i = 0; i < 2; ++i) world.Release(id);
  }

  // Returns false when nothing was left to fail.
  static bool FailOnce(const Entry& entry, const Expected& expected, Kind kind, int64_t number) {
    const auto owned = std::make_unique<World>();
    World& world = *owned;
    entry.before(world);
    bool threw = false;
    std::string error;
    faults::Arm(kind, number);
    try {
      entry.call(world);
    } catch (const std::exception& caught) {
      threw = true;
      error = caught.what();
    }
    const bool failed = faults::Disarm();
    EXPECT_TRUE(failed || !threw) << error;
    const std::string now = world.Describe();
    if (threw && !(entry.may_be_done && now == expected.after)) {
      EXPECT_EQ(now, expected.before) << "changed by a call that failed: " << error;
      EXPECT_NO_THROW(entry.call(world)) << "the second attempt";
      EXPECT_EQ(world.Describe(), expected.after) << "after the second attempt";
    } else {
      EXPECT_EQ(now, expected.after) << "after a call that did not fail";
    }
    CleanUp(entry, world);
    return failed;
  }
};

TEST_P(EntryFaultsTest, WhateverFailsOnce) {
  const Entry& entry = GetParam();
  const Expected expected = WithoutFault(entry);
  for (const Kind kind : {Kind::kDriver, Kind::kBase, Kind::kMemory}) {
    for (int64_t number = 1;; ++number) {
      SCOPED_TRACE("kind " + std::to_string(static_cast<int>(kind)) + ", number " +
                   std::to_string(number));
      if (!FailOnce(entry, expected, kind, number) || HasFailure()) break;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Blocks, EntryFaultsTest, ::testing::ValuesIn(EntriesOfBlocks()),
                         [](const auto& entry) { return entry.param.name; });
INSTANTIATE_TEST_SUITE_P(MemPools, EntryFaultsTest, ::testing::ValuesIn(EntriesOfMemPools()),
                         [](const auto& entry) { return entry.param.name; });
INSTANTIATE_TEST_SUITE_P(Scopes, EntryFaultsTest, ::testing::ValuesIn(EntriesOfScopes()),
                         [](const auto& entry) { return entry.param.name; });
INSTANTIATE_TEST_SUITE_P(Others, EntryFaultsTest, ::testing::ValuesIn(OtherEntries()),
                         [](const auto& entry) { return entry.param.name; });

class AfterAFaultTest : public ::testing::Test {
 protected:
  void SetUp() override { World::device_of_entry = fake_cuda::NextDevice(); }
};

TEST_F(AfterAFaultTest, APeakIsNotLost) {
  bool failed = true;
  for (int64_t number = 1; failed; ++number) {
    World w;
    w.Begin(kId);
    auto& of_base = w.base.stats.allocated_bytes[0];
    of_base.current = of_base.peak = 100 * kPage;
    w.allocator.resetPeakStats(w.device);
    faults::Arm(Kind::kBase, number);
    try {
      w.allocator.allocate(5 * kPage).clear();
    } catch (const std::exception&) {  // the block is given up
    }
    failed = faults::Disarm();
    w.allocator.allocate(5 * kPage).clear();
    of_base.current = 10 * kPage;  // its own peak stays
    const auto stats = w.allocator.getDeviceStats(w.device);
    EXPECT_GE(stats.allocated_bytes[0].peak, static_cast<int64_t>(105 * kPage)) << number;
    w.End(kId);
    w.Release(kId);
  }
}

// A capture whose end fails for good: the end needs memory for what is free in pieces.
void CaptureThatCannotEnd(World& w) {
  w.Begin(kId);
  for (int i = 0; i < 3; ++i) w.blocks.push_back(w.allocator.allocate(kPage));
  w.blocks.front().clear();
  w.blocks.back().clear();
  SetCapture(Stream(1), 0);
  faults::Arm(Kind::kMemory, 1, /*for_good=*/true);
  EXPECT_ANY_THROW(w.allocator.endAllocateToPool(w.device, kId));
  EXPECT_TRUE(faults::Disarm());
  EXPECT_TRUE(w.pools().InScope(PoolId{kId.first, kId.second}));
}

// What could not be ended takes no allocation any more, and nobody takes it for a capture.
TEST_F(AfterAFaultTest, AnEndThatFailedHasClosedTheRoute) {
  World w;
  CaptureThatCannotEnd(w);
  EXPECT_FALSE(w.allocator.capturing());
  EXPECT_EQ(w.allocator.getPoolUseCount(w.device, kId), 1);
  SetCapture(Stream(1), World::last_capture);
  EXPECT_EQ(w.allocator.allocate(1000).get_deleter(), &FakeBaseAllocator::Delete);
  SetCapture(Stream(1), 0);
  CapturedNothing(w);
  EXPECT_FALSE(w.pools().InScope(PoolId{kId.first, kId.second}));
  w.Release(kId);
  FreeAndRelease(w);
}

TEST_F(AfterAFaultTest, APoolThatCouldNotServeForLackOfMemoryServesLater) {
  const Step make_new = [](World& w) {
    w.allocator.createOrIncrefPool(w.device, kId);
    w.allocator.setUseOnOOM(w.device, kId, true);
    w.base.largest = 1000;
  };
  for (const Step& make : {Step(MakeUseOnOomPool), make_new}) {
    World::device_of_entry = fake_cuda::NextDevice();
    for (int64_t number = 1;; ++number) {
      World w;
      make(w);
      const auto served = [&] { return w.pools().Usage().all.count.added; };
      const uint64_t before = served();
      faults::Arm(Kind::kMemory, number, /*for_good=*/true);
      try {
        w.blocks.push_back(w.allocator.allocate(3 * kPage));
      } catch (const std::exception&) {  // nobody has memory
      }
      faults::Disarm();
      w.blocks.clear();
      ASSERT_EQ(w.allocator.getPoolUseCount(w.device, kId), 1) << number;
      const bool found_room = served() > before;
      EXPECT_NO_THROW(w.allocator.allocate(3 * kPage).clear()) << number;
      ReleaseUseOnOomPool(w);
      w.allocator.emptyCache();
      if (found_room) break;  // a block that cannot be freed again stays
    }
  }
}

TEST_F(AfterAFaultTest, WhatACheckpointOfTheBaseBroughtBackIsNotFreed) {
  for (const Kind kind : {Kind::kDriver, Kind::kBase, Kind::kMemory}) {
    bool failed = true;
    for (int64_t number = 1; failed; ++number) {
      World w;
      w.Begin(kId);
      w.blocks.push_back(w.allocator.allocate(3 * kPage));
      w.blocks.push_back(w.base.allocate(1000));  // asked of the base: it lies in the side pool
      void* const beside = w.blocks.back().get();
      w.End(kId);
      w.checkpoint = w.allocator.getCheckpointState(w.device, kId);
      faults::Arm(kind, number);
      try {
        auto delta = w.allocator.setCheckpointPoolState(w.device, w.checkpoint);
        const faults::Within spared;
        for (DataPtr& data : delta.dataptrs_allocd) data.release_context();
      } catch (const std::exception&) {  // whoever has the block keeps it
      }
      failed = faults::Disarm();
      EXPECT_TRUE(FakeBaseAllocator::live.contains(beside)) << number;
      w.blocks.clear();
      w.Release(kId);
    }
  }
}

}  // namespace
}  // namespace cgp
