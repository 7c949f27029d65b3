// More executables than the limit, within a budget.

#include <gtest/gtest.h>

#include <cstdint>
#include <vector>

#include "exec/exec_table.h"
#include "exec/exec_table_test_table.h"

namespace cgp {
namespace {

class ExecTableBudgetTest : public ExecTableTest {
 protected:
  // Launches each graph once, so often, and returns how many switches that takes.
  int Cycle(ExecTable* table, const std::vector<GraphNumber>& graphs, int rounds) {
    int switches = 0;
    for (int round = 0; round < rounds; ++round) {
      for (const GraphNumber graph : graphs) {
        switches += Stay(table, graph, 1).front() != Step::kNone;
      }
    }
    return switches;
  }
};

TEST_F(ExecTableBudgetTest, GraphsInUseKeepTheirOwn) {
  ExecTable table(2, 100);
  const auto graphs = AddGraphs(&table, 10, 10);
  Cycle(&table, graphs, 4);
  EXPECT_EQ(table.exec_count(), 10u);
  EXPECT_EQ(Cycle(&table, graphs, 4), 0) << "nothing is switched any more";
}

TEST_F(ExecTableBudgetTest, WhatIsNotInUseGetsNone) {
  ExecTable table(2, 1000);
  const auto graphs = AddGraphs(&table, 50, 10);
  const std::vector<GraphNumber> used(graphs.begin(), graphs.begin() + 5);
  Cycle(&table, used, 10);
  EXPECT_EQ(table.exec_count(), 5u);
}

TEST_F(ExecTableBudgetTest, TheBudgetIsKept) {
  ExecTable table(2, 55);
  const auto graphs = AddGraphs(&table, 10, 10);
  Cycle(&table, graphs, 10);
  EXPECT_EQ(table.exec_count(), 5u);
  // So it is by graphs that take more.
  const auto larger = AddGraphs(&table, 3, 30);
  Cycle(&table, larger, 3);
  EXPECT_EQ(table.exec_count(), 2u) << "two may be there, whatever they take";
  Cycle(&table, graphs, 10);
  EXPECT_EQ(table.exec_count(), 5u);
}

TEST_F(ExecTableBudgetTest, WithoutABudgetNothingChanges) {
  ExecTable table(2);
  const auto graphs = AddGraphs(&table, 10, 10);
  Cycle(&table, graphs, 4);
  EXPECT_EQ(table.exec_count(), 2u);
}

TEST_F(ExecTableBudgetTest, WhereTheMemoryEndsTheBudgetDoesNot) {
  ExecTable table(2, 100);
  const auto graphs = AddGraphs(&table, 10, 10);
  const std::vector<GraphNumber> used(graphs.begin(), graphs.begin() + 4);
  Cycle(&table, used, 4);
  ASSERT_EQ(table.exec_count(), 4u);
  EXPECT_TRUE(table.OutOfMemory(graphs[7]));
  Cycle(&table, graphs, 3);
  EXPECT_EQ(table.exec_count(), 4u);
  Stay(&table, graphs[0], kLaunchesBeforeMore);  // until more are tried
  Cycle(&table, graphs, 10);
  EXPECT_EQ(table.exec_count(), 10u);
}

}  // namespace
}  // namespace cgp
