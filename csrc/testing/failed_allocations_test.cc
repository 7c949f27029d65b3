// Every allocation of what is no pool fails, alone and with all that follow; of pools
// scripts_test.cc and cgp_fuzz --fail-each say it.
#include <gtest/gtest.h>

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "exec/exec_table.h"
#include "testing/allocation_faults.h"
#include "testing/operation_generator.h"
#include "testing/text.h"
#include "testing/world.h"

namespace cgp {
namespace {

class FailedAllocationsTest : public ::testing::Test {
 protected:
  // The call fails in every way, and each time leaves what `describe` says.
  void FailAll(const std::function<void()>& call, const std::function<std::string()>& describe) {
    world_.FailEach(FaultKind::kAllocation, call, describe);
  }

  World world_{{.granularity = 4096, .map_memory = false}, {.page_bytes = 4096}};
};

TEST_F(FailedAllocationsTest, ASetIsMadeOrNot) {
  std::optional<PoolSet> set;
  FailAll([&] { set.emplace(world_.sparing); }, [&] { return Text(set.has_value()); });
  set->Check();
}

TEST_F(FailedAllocationsTest, AScopeInWhichNothingWasDoneEndsWithoutMemory) {
  const PoolId id{0, 1};
  PoolSet& set = *world_.set;
  const auto end_without_memory = [&] {
    const AllocationFault fault(1, /*for_good=*/true);
    EXPECT_NO_THROW(set.EndScope(id)) << "who could not begin would leave it open for ever";
  };
  for (const ScopeKind kind : {ScopeKind::kCapture, ScopeKind::kEager}) {
    set.BeginScope(id, kind);
    end_without_memory();
    set.BeginScope(id, ScopeKind::kCapture);
    set.Free(set.Allocate(id, 4096, StreamId{1}).address);
    set.EndScope(id);
    set.BeginScope(id, kind);
    end_without_memory();
  }
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
  std::optional<ExecNumber> useless;
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
  EXPECT_FALSE(useless);
  std::size_t gone = 0;
  while (!graphs.empty()) {
    const GraphNumber last = graphs.back();
    FailAll([&] { useless = table.Remove(last); }, describe);
    graphs.pop_back();
    gone += useless ? 1 : 0;
    table.Check();
  }
  EXPECT_EQ(gone, 4U);
  EXPECT_EQ(table.exec_count(), 0U);
}

// After a call that failed comes any other one, with memory or without: FailEach() repeats the call
// itself, which mends what it left half done.
class RandomFaultsTest : public ::testing::TestWithParam<uint64_t> {};

TEST_P(RandomFaultsTest, WhatFailsIsFollowedByAnything) {
  OperationGenerator generator(GetParam(), /*map_memory=*/false);
  FuzzSession session(generator.setup);
  Dice dice(GetParam());
  // Three of four calls fail at one of their first allocations, alone or with all that follow.
  while (const std::optional<Step> step = generator.Next(session)) {
    Step fail{Step::Kind::kFailAllocation};
    fail.fault = {.call_number = dice.OneIn(4) ? 0 : 1 + dice.Below(4), .for_good = dice.OneIn(2)};
    ASSERT_EQ(session.Run(fail), "") << *step;
    ASSERT_EQ(session.Run(*step), "") << ToString(fail);
  }
  EXPECT_EQ(session.Finish(), "");
}

INSTANTIATE_TEST_SUITE_P(Seeds, RandomFaultsTest, ::testing::Range(uint64_t{1}, uint64_t{101}));

}  // namespace
}  // namespace cgp
