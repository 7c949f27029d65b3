#include "core/exec_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <set>
#include <vector>

#include "core/error.h"

namespace cgp {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;
using Step = ExecTable::Step;

class ExecTableTest : public ::testing::Test {
 protected:
  // Does what the plan for the graph says, and returns its step.
  Step Run(ExecTable* table, GraphNumber graph) {
    const ExecTable::Plan plan = PlanFor(*table, graph);
    for (const ExecNumber exec : plan.destroy) table->Destroyed(exec);
    if (plan.step == Step::kMake) table->Made(graph);
    if (plan.step == Step::kUpdate) table->Updated(*plan.exec, graph);
    if (plan.step == Step::kNone) table->Used(*plan.exec);
    table->Check();
    EXPECT_TRUE(table->HolderOf(graph));
    return plan.step;
  }

  ExecTable::Plan PlanFor(const ExecTable& table, GraphNumber graph) const {
    return table.PlanFor(graph, [&](ExecNumber exec) { return in_use_.contains(exec); });
  }

  static std::vector<GraphNumber> AddGraphs(ExecTable* table, int count) {
    const GroupNumber group = table->AddGroup(GroupKind::kShared);
    std::vector<GraphNumber> graphs;
    for (int i = 0; i < count; ++i) graphs.push_back(table->Add(group));
    return graphs;
  }

  std::set<ExecNumber> in_use_;
};

TEST_F(ExecTableTest, GraphsOfAGroupTakeTurns) {
  ExecTable table(1);
  const auto graphs = AddGraphs(&table, 2);
  EXPECT_EQ(Run(&table, graphs[0]), Step::kMake);
  const ExecNumber exec = *table.HolderOf(graphs[0]);
  EXPECT_EQ(Run(&table, graphs[1]), Step::kUpdate);
  EXPECT_EQ(table.HolderOf(graphs[1]), exec);
  EXPECT_EQ(table.HolderOf(graphs[0]), std::nullopt);
  EXPECT_EQ(Run(&table, graphs[1]), Step::kNone);
  EXPECT_EQ(table.exec_count(), 1u);
}

TEST_F(ExecTableTest, APlanChangesNothing) {
  ExecTable table(1);
  const auto graphs = AddGraphs(&table, 2);
  Run(&table, graphs[0]);
  for (int i = 0; i < 2; ++i) {
    const ExecTable::Plan plan = PlanFor(table, graphs[1]);
    EXPECT_EQ(plan.step, Step::kUpdate);
    EXPECT_EQ(plan.exec, table.HolderOf(graphs[0]));
    EXPECT_THAT(plan.destroy, IsEmpty());
  }
}

TEST_F(ExecTableTest, WithinTheLimitEachGraphGetsItsOwn) {
  ExecTable table(2);
  const auto graphs = AddGraphs(&table, 3);
  EXPECT_EQ(Run(&table, graphs[0]), Step::kMake);
  EXPECT_EQ(Run(&table, graphs[1]), Step::kMake);
  EXPECT_EQ(Run(&table, graphs[0]), Step::kNone);
  EXPECT_EQ(Run(&table, graphs[2]), Step::kUpdate);
  EXPECT_EQ(table.HolderOf(graphs[1]), std::nullopt) << "the longest unused goes first";
  EXPECT_TRUE(table.HolderOf(graphs[0]));
  EXPECT_EQ(table.exec_count(), 2u);
}

TEST_F(ExecTableTest, AnotherGroupsExecutableIsDestroyedAndNotUpdated) {
  ExecTable table(2);
  const auto first = AddGraphs(&table, 2);
  const auto second = AddGraphs(&table, 1);
  Run(&table, first[0]);
  Run(&table, first[1]);
  const ExecNumber oldest = *table.HolderOf(first[0]);
  const ExecTable::Plan plan = PlanFor(table, second[0]);
  EXPECT_EQ(plan.step, Step::kMake);
  EXPECT_EQ(plan.exec, std::nullopt);
  EXPECT_THAT(plan.destroy, ElementsAre(oldest));
  Run(&table, second[0]);
  EXPECT_EQ(table.HolderOf(first[0]), std::nullopt);
  EXPECT_TRUE(table.HolderOf(first[1]));
}

TEST_F(ExecTableTest, WithoutALimitThereIsOneForEachGroup) {
  ExecTable table(std::nullopt);
  const auto first = AddGraphs(&table, 3);
  const auto second = AddGraphs(&table, 2);
  for (int round = 0; round < 3; ++round) {
    for (const GraphNumber graph : first) Run(&table, graph);
    for (const GraphNumber graph : second) Run(&table, graph);
  }
  EXPECT_EQ(table.exec_count(), 2u);
  EXPECT_EQ(Run(&table, first[2]), Step::kNone) << "another group's use takes nothing away";
}

TEST_F(ExecTableTest, WhatIsInUseStaysAndTheNumberComesBackToTheLimit) {
  for (const std::optional<size_t> limit : {std::optional<size_t>(1), std::optional<size_t>()}) {
    ExecTable table(limit);
    const auto graphs = AddGraphs(&table, 4);
    Run(&table, graphs[0]);
    in_use_ = {*table.HolderOf(graphs[0])};
    EXPECT_EQ(Run(&table, graphs[1]), Step::kMake);
    EXPECT_EQ(Run(&table, graphs[2]), Step::kUpdate);
    EXPECT_TRUE(table.HolderOf(graphs[0]));
    EXPECT_EQ(table.exec_count(), 2u);
    in_use_.clear();
    const ExecTable::Plan plan = PlanFor(table, graphs[3]);
    EXPECT_EQ(plan.exec, table.HolderOf(graphs[0]));
    EXPECT_THAT(plan.destroy, ElementsAre(*table.HolderOf(graphs[2])));
    Run(&table, graphs[3]);
    EXPECT_EQ(table.exec_count(), 1u);
  }
}

TEST_F(ExecTableTest, AGraphThatIsHeldNeedsNothingThoughInUse) {
  ExecTable table(1);
  const auto graphs = AddGraphs(&table, 2);
  Run(&table, graphs[0]);
  in_use_ = {*table.HolderOf(graphs[0])};
  EXPECT_EQ(Run(&table, graphs[0]), Step::kNone);
  Run(&table, graphs[1]);
  const ExecTable::Plan plan = PlanFor(table, graphs[0]);
  EXPECT_EQ(plan.step, Step::kNone);
  EXPECT_THAT(plan.destroy, IsEmpty()) << "nor is anything tidied up for it";
}

TEST_F(ExecTableTest, OneThatIsAloneCountsTowardsNoLimit) {
  ExecTable table(1);
  const auto graphs = AddGraphs(&table, 1);
  const GroupNumber group = table.AddGroup(GroupKind::kAlone);
  const GraphNumber alone = table.Add(group);
  EXPECT_THROW(table.Add(group), InternalError);
  EXPECT_TRUE(table.MayHaveFirst(alone));
  Run(&table, graphs[0]);
  EXPECT_TRUE(table.MayHaveFirst(alone));
  EXPECT_EQ(Run(&table, alone), Step::kMake);
  EXPECT_FALSE(table.MayHaveFirst(alone));
  EXPECT_TRUE(table.HolderOf(graphs[0]));
  Run(&table, graphs[0]);
  const auto others = AddGraphs(&table, 1);
  Run(&table, others[0]);
  EXPECT_TRUE(table.HolderOf(alone)) << "however long unused, it keeps its own";
  const ExecNumber exec = *table.HolderOf(alone);
  EXPECT_THAT(table.Remove(alone), ElementsAre(exec));
  table.Check();
  EXPECT_FALSE(table.Contains(group));
}

TEST_F(ExecTableTest, TheFirstOfAGroupMayHaveOneWithinTheLimit) {
  ExecTable table(2);
  const auto first = AddGraphs(&table, 2);
  const auto second = AddGraphs(&table, 1);
  const auto third = AddGraphs(&table, 1);
  EXPECT_TRUE(table.MayHaveFirst(first[0]));
  Run(&table, first[0]);
  EXPECT_FALSE(table.MayHaveFirst(first[1]));
  EXPECT_TRUE(table.MayHaveFirst(second[0]));
  Run(&table, second[0]);
  EXPECT_FALSE(table.MayHaveFirst(third[0]));
}

TEST_F(ExecTableTest, WithoutALimitTheFirstOfEachGroupMayHaveOne) {
  ExecTable table(std::nullopt);
  for (int i = 0; i < 10; ++i) {
    const auto graphs = AddGraphs(&table, 2);
    EXPECT_TRUE(table.MayHaveFirst(graphs[0]));
    Run(&table, graphs[0]);
    EXPECT_FALSE(table.MayHaveFirst(graphs[1]));
  }
}

TEST_F(ExecTableTest, WhatARemovedGraphLeavesIsTakenBeforeAnotherIsSwitched) {
  ExecTable table(2);
  const auto graphs = AddGraphs(&table, 4);
  Run(&table, graphs[0]);
  Run(&table, graphs[1]);
  const ExecNumber left = *table.HolderOf(graphs[1]);
  EXPECT_THAT(table.Remove(graphs[1]), IsEmpty());
  table.Check();
  EXPECT_EQ(Run(&table, graphs[2]), Step::kUpdate);
  EXPECT_EQ(table.HolderOf(graphs[2]), left) << "though the other was not used for longer";
  EXPECT_TRUE(table.HolderOf(graphs[0]));
}

TEST_F(ExecTableTest, NoMoreExecutablesThanGraphsRemain) {
  ExecTable table(4);
  const auto graphs = AddGraphs(&table, 2);
  Run(&table, graphs[0]);
  Run(&table, graphs[1]);
  const ExecNumber first = *table.HolderOf(graphs[0]);
  const ExecNumber second = *table.HolderOf(graphs[1]);
  EXPECT_THAT(table.Remove(graphs[0]), ElementsAre(first));
  EXPECT_EQ(table.HolderOf(graphs[1]), second);
  EXPECT_THAT(table.Remove(graphs[1]), ElementsAre(second));
  EXPECT_EQ(table.exec_count(), 0u);
  table.Check();
}

TEST_F(ExecTableTest, ARemovedGraphWithoutAnExecutableMayMakeOneUseless) {
  ExecTable table(2);
  const auto graphs = AddGraphs(&table, 3);
  Run(&table, graphs[0]);
  Run(&table, graphs[1]);
  const ExecNumber left = *table.HolderOf(graphs[0]);
  EXPECT_THAT(table.Remove(graphs[0]), IsEmpty()) << "the third graph may want it";
  EXPECT_THAT(table.Remove(graphs[2]), ElementsAre(left));
  table.Check();
}

TEST_F(ExecTableTest, WhatIsLeftEmptyAndBusyDoesNotMakeMoreExecutablesThanGraphs) {
  ExecTable table(4);
  const auto graphs = AddGraphs(&table, 3);
  Run(&table, graphs[0]);
  Run(&table, graphs[1]);
  const ExecNumber busy = *table.HolderOf(graphs[0]);
  in_use_ = {busy};
  EXPECT_THAT(table.Remove(graphs[0]), IsEmpty());
  EXPECT_EQ(Run(&table, graphs[2]), Step::kMake) << "it still runs for another stream";
  EXPECT_EQ(table.exec_count(), 2u);
}

TEST_F(ExecTableTest, AGraphThatIsSetApartHasAGroupOfItsOwn) {
  ExecTable table(1);
  const GroupNumber group = table.AddGroup(GroupKind::kShared);
  const GraphNumber first = table.Add(group);
  const GraphNumber second = table.Add(group);
  Run(&table, first);
  EXPECT_THROW(table.SetApart(first), InternalError) << "an executable holds it";
  table.Destroyed(*table.HolderOf(first));  // what holds nobody knows what
  const GroupNumber own = table.SetApart(second);
  EXPECT_NE(own, group);
  table.Check();
  EXPECT_TRUE(table.Contains(group));
  EXPECT_EQ(Run(&table, second), Step::kMake);
  const ExecNumber exec = *table.HolderOf(second);
  const ExecTable::Plan plan = PlanFor(table, first);
  EXPECT_EQ(plan.step, Step::kMake);
  EXPECT_THAT(plan.destroy, ElementsAre(exec)) << "it counts towards the limit";
  table.Remove(first);
  EXPECT_FALSE(table.Contains(group));
}

TEST_F(ExecTableTest, TheGroupOfALastGraphThatIsSetApartIsGone) {
  ExecTable table(std::nullopt);
  const GroupNumber group = table.AddGroup(GroupKind::kShared);
  const GraphNumber graph = table.Add(group);
  table.SetApart(graph);
  EXPECT_FALSE(table.Contains(group));
  table.Check();
}

TEST_F(ExecTableTest, AStepThatIsNotAllowedIsRefused) {
  ExecTable table(4);
  const auto first = AddGraphs(&table, 2);
  const auto second = AddGraphs(&table, 1);
  Run(&table, first[0]);
  const ExecNumber exec = *table.HolderOf(first[0]);
  EXPECT_THROW(table.Made(first[0]), InternalError);
  EXPECT_THROW(table.Updated(exec, second[0]), InternalError) << "of another group";
  EXPECT_THROW(table.Updated(exec, first[0]), InternalError) << "it holds it already";
  table.Check();
}

}  // namespace
}  // namespace cgp
