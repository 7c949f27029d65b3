// Where the memory has no room for as many executables as the limit allows.

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <vector>

#include "exec/exec_table.h"
#include "exec/exec_table_test_table.h"

namespace cgp {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

class ExecTableRoomTest : public ExecTableTest {};

TEST_F(ExecTableRoomTest, WhereTheMemoryEndsThereAreNoMoreThanThereWere) {
  for (const std::optional<size_t> limit : {std::optional<size_t>(8), std::optional<size_t>()}) {
    ExecTable table(limit);
    const auto graphs = AddGraphs(&table, 2);
    const auto others = AddGraphs(&table, 2);
    const auto more = AddGraphs(&table, 1);
    Run(&table, graphs[0]);
    Run(&table, others[0]);
    const ExecNumber first = *table.HolderOf(graphs[0]);
    EXPECT_EQ(PlanFor(table, more[0]).step, Step::kMake);
    EXPECT_THAT(PlanFor(table, more[0]).destroy, IsEmpty()) << "the limit allows it";
    EXPECT_TRUE(table.OutOfMemory(more[0]));
    table.Check();
    EXPECT_FALSE(table.MayHaveFirst(more[0]));
    EXPECT_THAT(PlanFor(table, more[0]).destroy, ElementsAre(first));
    EXPECT_EQ(Run(&table, graphs[1]), Step::kUpdate);
    EXPECT_EQ(table.HolderOf(graphs[1]), first);
    EXPECT_FALSE(table.OutOfMemory(more[0])) << "there are no more than it said before";
    EXPECT_EQ(Run(&table, more[0]), Step::kMake);
    EXPECT_EQ(table.HolderOf(others[0]), std::nullopt);
    EXPECT_EQ(table.exec_count(), 2u);
  }
}

TEST_F(ExecTableRoomTest, WithoutMemoryForOneInAnothersPlaceThereAreFewer) {
  ExecTable table(8);
  const auto graphs = AddGraphs(&table, 1);
  const auto others = AddGraphs(&table, 2);
  const auto more = AddGraphs(&table, 1);
  Run(&table, graphs[0]);
  Run(&table, others[0]);
  EXPECT_TRUE(table.OutOfMemory(more[0]));
  for (const ExecNumber exec : PlanFor(table, more[0]).destroy) table.Destroyed(exec);
  EXPECT_TRUE(table.OutOfMemory(more[0]));
  table.Check();
  EXPECT_THAT(PlanFor(table, more[0]).destroy, ElementsAre(*table.HolderOf(others[0])));
  EXPECT_EQ(PlanFor(table, others[1]).step, Step::kUpdate);
  table.Destroyed(*table.HolderOf(others[0]));
  EXPECT_FALSE(table.OutOfMemory(more[0])) << "there is none that could make room";
  EXPECT_EQ(Run(&table, more[0]), Step::kMake);
}

TEST_F(ExecTableRoomTest, WhatIsInUseMakesNoRoom) {
  ExecTable table(3);
  const auto graphs = AddGraphs(&table, 3);
  Run(&table, graphs[0]);
  in_use_ = {*table.HolderOf(graphs[0])};
  EXPECT_EQ(PlanFor(table, graphs[1]).step, Step::kMake);
  EXPECT_TRUE(table.OutOfMemory(graphs[1]));
  EXPECT_EQ(PlanFor(table, graphs[1]).step, Step::kMake) << "there is nothing else to do";
  EXPECT_FALSE(table.OutOfMemory(graphs[1]));
  Run(&table, graphs[1]);
  EXPECT_EQ(table.exec_count(), 2u) << "now there was";
  EXPECT_FALSE(table.OutOfMemory(graphs[2])) << "and the limit is not raised by that";
}

TEST_F(ExecTableRoomTest, OneOfTheGroupIsUpdatedBeforeOneOfAnotherGroupGoes) {
  for (const std::optional<size_t> limit : {std::optional<size_t>(8), std::optional<size_t>()}) {
    ExecTable table(limit);
    const auto others = AddGraphs(&table, 1);
    const auto graphs = AddGraphs(&table, 2);
    const auto more = AddGraphs(&table, 1);
    Run(&table, others[0]);
    Run(&table, graphs[0]);
    const ExecNumber own = *table.HolderOf(graphs[0]);
    EXPECT_TRUE(table.OutOfMemory(more[0]));
    EXPECT_EQ(PlanFor(table, graphs[1]).exec, own);
    in_use_ = {own};
    EXPECT_THAT(PlanFor(table, graphs[1]).destroy, ElementsAre(*table.HolderOf(others[0])));
    in_use_.clear();
    EXPECT_EQ(Run(&table, graphs[1]), Step::kUpdate);
    EXPECT_TRUE(table.HolderOf(others[0]));
  }
}

TEST_F(ExecTableRoomTest, NoneGoesForAFasterOne) {
  ExecTable table(2);
  const auto graphs = AddGraphs(&table, 3);
  Run(&table, graphs[0]);
  EXPECT_TRUE(table.OutOfMemory(graphs[1]));
  for (const GraphNumber graph : {graphs[1], graphs[2], graphs[0]}) {
    std::vector<Step> steps = Stay(&table, graph, 2 * kVeryLongStay);
    EXPECT_EQ(steps.front(), Step::kUpdate) << "though the program stays with its graphs";
    steps.erase(steps.begin());
    EXPECT_THAT(steps, Each(Step::kNone));
  }
}

TEST_F(ExecTableRoomTest, AfterManyLaunchesOneMoreIsTried) {
  ExecTable table(3);
  const auto graphs = AddGraphs(&table, 4);
  Stay(&table, graphs[0], 1);
  EXPECT_TRUE(table.OutOfMemory(graphs[1]));
  for (uint32_t i = 1; i <= kLaunchesBeforeMore; ++i) {
    EXPECT_THAT(Stay(&table, graphs[i % 2], 1), ElementsAre(Step::kUpdate));
  }
  EXPECT_THAT(Stay(&table, graphs[2], 1), ElementsAre(Step::kMake));
  EXPECT_TRUE(table.OutOfMemory(graphs[3]));
  for (uint32_t i = 0; i < kLaunchesBeforeMore; ++i) {
    EXPECT_EQ(table.exec_count(), 2u);
    Stay(&table, graphs[(i + 3) % 4], 1);
  }
  EXPECT_EQ(Run(&table, graphs[3]), Step::kMake) << "the count began anew";
  EXPECT_EQ(table.exec_count(), 3u);
}

TEST_F(ExecTableRoomTest, NothingMakesRoomForOneThatIsAlone) {
  ExecTable table(8);
  const auto graphs = AddGraphs(&table, 2);
  const GraphNumber alone = table.Add(table.AddGroup(GroupKind::kAlone));
  Run(&table, graphs[0]);
  EXPECT_FALSE(table.OutOfMemory(alone));
  EXPECT_EQ(Run(&table, graphs[1]), Step::kMake) << "nor is it known how large it was to be";
}

}  // namespace
}  // namespace cgp
