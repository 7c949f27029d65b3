// Every allocation of every entry of the core is made to fail, alone and with all that follow: what
// fails changes nothing, and all goes on as if nothing had been.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "core/fences.h"
#include "core/range_table.h"
#include "exec/exec_table.h"
#include "testing/fail_each.h"
#include "testing/failure_workload.h"
#include "testing/pool_set_text.h"
#include "testing/text.h"

namespace cgp {
namespace {

using ::testing::IsEmpty;

std::string Held(const HostUsage& usage) {
  return Text(usage.physical_bytes, " bytes in ", usage.handles, " handles, ", usage.mappings,
              " mappings, ", usage.reservations, " reservations, ", usage.events, " events\n");
}

class EveryAllocationFails : public ::testing::TestWithParam<Script> {};

TEST_P(EveryAllocationFails, ChangesNothingAndGoesThroughAtLast) {
  Workload workload(GetParam());
  const PoolSet& set = workload.set();
  workload.set_caller([&](const std::function<void()>& call) {
    const std::string complaint = FailEach(FaultKind::kAllocation, workload.faulty(), call, [&] {
      set.Check();
      HostUsage usage = workload.usage();
      usage.events = 0;  // one found to be done may be let go of by a call that fails later
      return Describe(set) + Held(usage);
    });
    EXPECT_EQ(complaint, "");
  });
  for (size_t i = 0; i < workload.steps().size(); ++i) {
    SCOPED_TRACE("step " + std::to_string(i));
    workload.steps()[i]();
    if (HasFailure()) return;
    for (const PoolId id : set.ids()) {
      const auto ask = [&](const std::function<void()>& call) {
        EXPECT_EQ(FailEach(FaultKind::kAllocation, workload.faulty(), call,
                           [&] { return Describe(set); }),
                  "");
      };
      ask([&] { set.Snapshot(id); });
      ask([&] { set.Stats(id); });
      ask([&] { set.ReservedByPool(); });
    }
  }
  EXPECT_THAT(set.ids(), IsEmpty());
  EXPECT_EQ(workload.usage(), HostUsage{});
  EXPECT_THAT(workload.watch().violations(), IsEmpty());
}

INSTANTIATE_TEST_SUITE_P(All, EveryAllocationFails,
                         ::testing::Values(Script::kEverything, Script::kPlanned, Script::kAhead,
                                           Script::kRestores));

class FailedAllocationsTest : public ::testing::Test {
 protected:
  static constexpr uint64_t kPage = 4096;

  // The call fails in every way, and each time leaves what `describe` says.
  void FailAll(const std::function<void()>& call, const std::function<std::string()>& describe) {
    EXPECT_EQ(FailEach(FaultKind::kAllocation, faulty_, call, describe), "");
  }

  HostDriver host_{{.granularity = kPage, .map_memory = false}};
  FaultyDriver faulty_{host_};
  SparingDriver driver_{faulty_};
};

TEST_F(FailedAllocationsTest, ASetIsMadeOrNot) {
  std::optional<PoolSet> set;
  FailAll([&] { set.emplace(driver_); }, [&] { return Text(set.has_value()); });
  set->Check();
}

// More blocks than the tables of a page's parts had room for when it was made.
TEST_F(FailedAllocationsTest, ManySmallBlocksInAPage) {
  constexpr PoolId kPool{0, 1};
  PoolSet set(driver_, {.page_bytes = 128 * kGranuleBytes});
  const auto describe = [&] {
    set.Check();
    return Describe(set);
  };
  set.BeginScope(kPool, ScopeKind::kEager);
  std::vector<Block> blocks(128);
  for (size_t i = 0; i < blocks.size(); ++i) {
    FailAll([&] { blocks[i] = set.Allocate(kPool, kGranuleBytes, StreamId{1 + i % 2}); }, describe);
    if (HasFailure()) return;
  }
  EXPECT_EQ(set.Stats(kPool).pages, 1U);
  for (size_t i = 0; i < blocks.size(); ++i) {
    FailAll([&] { set.Free(blocks[i * 37 % blocks.size()].address); }, describe);
  }
  FailAll([&] { set.EndScope(kPool); }, describe);
  set.Release(kPool);
  set.Trim();
  EXPECT_EQ(host_.usage(), HostUsage{});
}

// An event that is recorded for a mark that is not made would never be destroyed.
TEST_F(FailedAllocationsTest, FencesWithMarks) {
  {
    FenceTable fences(driver_);
    const auto events = [&] { return Text(host_.usage().events); };
    for (uint64_t i = 0; i < 20; ++i) {
      FailAll([&] { fences.ForStream(StreamId{i}, /*eager=*/true); }, events);
      FailAll([&] { fences.Mark(); }, events);
    }
  }
  EXPECT_EQ(host_.usage(), HostUsage{});
}

TEST_F(FailedAllocationsTest, ExecTable) {
  ExecTable table(2);
  std::vector<GraphNumber> graphs;
  const auto describe = [&] {
    table.Check();
    std::string text = Text(table.exec_count(), " executables;");
    for (const GraphNumber graph : graphs) {
      const auto holder = table.HolderOf(graph);
      text += Text(" ", Index(table.GroupOf(graph)), ":", holder ? Index(*holder) + 1 : 0U);
    }
    return text;
  };
  GroupNumber group{};
  GraphNumber graph{};
  ExecNumber exec{};
  std::vector<ExecNumber> useless;
  FailAll([&] { group = table.AddGroup(GroupKind::kShared); }, describe);
  graphs.reserve(100);
  for (int i = 0; i < 6; ++i) {
    FailAll([&] { graph = table.Add(group); }, describe);
    graphs.push_back(graph);
  }
  for (std::size_t i = 0; i < 3; ++i) {
    FailAll([&] { exec = table.Made(graphs[i]); }, describe);
  }
  FailAll([&] { table.Updated(exec, graphs[3]); }, describe);
  FailAll([&] { exec = table.Made(graphs[3]); }, describe);  // in place of one that was updated
  const ExecTable::Conditions idle{.in_use = [](ExecNumber) { return false; },
                                   .running = [](ExecNumber) { return false; }};
  ExecTable::Plan plan;
  FailAll([&] { plan = table.PlanFor(graphs[4], idle); }, describe);
  FailAll([&] { useless = table.SetApart(graphs[5]); }, describe);
  EXPECT_THAT(useless, IsEmpty());
  std::size_t gone = 0;
  while (!graphs.empty()) {
    const GraphNumber last = graphs.back();
    FailAll([&] { useless = table.Remove(last); }, describe);
    graphs.pop_back();
    gone += useless.size();
    table.Check();
  }
  EXPECT_EQ(gone, 4U);
  EXPECT_EQ(table.exec_count(), 0U);
}

class FailedMappingsTest : public FailedAllocationsTest,
                           public ::testing::WithParamInterface<FaultKind> {};

TEST_P(FailedMappingsTest, RangeTable) {
  constexpr PageId kNew = MappingPlan::kNewPage;
  {
    RangeTable table(driver_, Granules(kPage / kGranuleBytes));
    const auto describe = [&] {
      table.Check();
      return Text(table.page_count(), " pages ", table.handle_count(), " handles ",
                  table.range_count(), " ranges ", table.slot_limit(), " slots ",
                  table.mapping_count(), " mappings, ", Held(host_.usage()));
    };
    const auto map = [&](const MappingPlan& plan) {
      EXPECT_EQ(FailEach(
                    GetParam(), faulty_, [&] { table.Map(plan); }, describe),
                "");
    };
    for (uint32_t i = 0; i < 20; ++i) {
      map({.range = {}, .handles = {kNew, MappingPlan::NewHandle(3), kNew}});
      map({.range = RangeId{i}, .at_front = true, .handles = {kNew}});
      map({.range = {}, .handles = {PageId{0}, kNew}});
      map({.range = RangeId{i}, .handles = {kNew, kNew}});
    }
  }
  EXPECT_EQ(host_.usage(), HostUsage{});
}

INSTANTIATE_TEST_SUITE_P(All, FailedMappingsTest,
                         ::testing::Values(FaultKind::kAllocation, FaultKind::kDriverCall));

// Whatever call of a trim fails, all else is given back, and the rest with the next trim.
TEST(FailedTrimTest, IsFinishedByTheNext) {
  for (uint64_t number = 1;; ++number) {
    SCOPED_TRACE("call " + std::to_string(number));
    Workload workload(Script::kPlanned);
    for (size_t i = 0; i + 1 < workload.steps().size(); ++i) workload.steps()[i]();
    PoolSet& set = workload.set();
    const uint64_t all = set.TrimmableBytes();
    workload.faulty().Arm({.call_number = number});
    try {
      EXPECT_EQ(set.Trim(), all);
      ASSERT_GT(number, 10U) << "nothing failed";
      break;
    } catch (const DriverError&) {
      workload.faulty().Disarm();
    }
    set.Check();
    const bool waited = number > 1;
    EXPECT_FALSE(set.ids().empty()) << "the pool stays until all of it is given back";
    const uint64_t left = set.TrimmableBytes();
    EXPECT_EQ(set.Usage().reserved_bytes.current, left);
    EXPECT_EQ(workload.usage().physical_bytes, left) << "what the driver holds is known";
    if (waited) {
      EXPECT_LE(left, all / 4);
    }
    EXPECT_EQ(set.Trim(), left);
    set.Check();
    EXPECT_EQ(workload.usage(), HostUsage{});
    EXPECT_TRUE(set.ids().empty());
    EXPECT_EQ(set.Usage().reserved_bytes.current, 0U);
    EXPECT_THAT(workload.watch().violations(), IsEmpty());
    if (::testing::Test::HasFailure()) return;
  }
}

// The pool that could not be given back is used again, and given back after that.
TEST(FailedTrimTest, LeavesAPoolThatWorks) {
  Workload workload(Script::kPlanned);
  for (size_t i = 0; i + 1 < workload.steps().size(); ++i) workload.steps()[i]();
  PoolSet& set = workload.set();
  workload.faulty().Arm({.for_good = true, .only = DriverCall::kRelease});
  EXPECT_THROW(set.Trim(), DriverError);
  const uint64_t left = set.TrimmableBytes();
  EXPECT_EQ(left, workload.usage().physical_bytes);
  set.BeginScope(Workload::kOne, ScopeKind::kEager);
  const Block block = set.Allocate(Workload::kOne, Workload::kPage, Workload::kA);
  set.Check();
  EXPECT_EQ(set.Trim(), 0U) << "a pool in use";
  EXPECT_EQ(set.Usage().reserved_bytes.current, left + Workload::kPage);
  set.EndScope(Workload::kOne);
  set.Release(Workload::kOne);
  EXPECT_THROW(set.Trim(), DriverError) << "what is left";
  workload.faulty().Disarm();
  EXPECT_EQ(set.Trim(), left);
  EXPECT_EQ(workload.usage().handles, 1U) << "of the block that lives";
  set.Free(block.address);
  set.Trim();
  EXPECT_EQ(workload.usage().handles, 0U);
}

}  // namespace
}  // namespace cgp
