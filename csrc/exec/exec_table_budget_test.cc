// More executables than the limit, within a budget.

#include <gtest/gtest.h>

#include <cstdint>
#include <random>
#include <utility>
#include <vector>

#include "exec/exec_table.h"
#include "exec/exec_table_test_table.h"

namespace cgp {
namespace {

class ExecTableBudgetTest : public ExecTableTest {
 protected:
  static std::vector<GraphNumber> AddGraphs(ExecTable* table, std::size_t count, uint64_t bytes) {
    const GroupNumber group = table->AddGroup(GroupKind::kShared);
    std::vector<GraphNumber> graphs;
    for (std::size_t i = 0; i < count; ++i) graphs.push_back(table->Add(group, bytes));
    return graphs;
  }

  // Launches each graph once, so often, and returns how many switches that takes.
  int Cycle(ExecTable* table, const std::vector<GraphNumber>& graphs, int rounds) {
    int switches = 0;
    for (int round = 0; round < rounds; ++round) {
      for (const GraphNumber graph : graphs) {
        const bool switched = Run(table, graph) != Step::kNone;
        table->Launched(*table->HolderOf(graph));
        table->Check();
        switches += switched;
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

TEST_F(ExecTableBudgetTest, RandomPrograms) {
  for (uint32_t seed = 1; seed <= 50; ++seed) {
    std::mt19937 random(seed);
    const auto draw = [&](std::size_t below) { return random() % below; };
    const std::size_t limit = 1 + draw(4);
    const uint64_t budget = draw(200);
    ExecTable table(limit, budget);
    std::vector<std::pair<GraphNumber, uint64_t>> graphs;
    for (int group = 0; group < 4; ++group) {
      const uint64_t bytes = 1 + draw(40);
      for (const GraphNumber graph : AddGraphs(&table, 1 + draw(6), bytes)) {
        graphs.emplace_back(graph, bytes);
      }
    }
    for (int step = 0; step < 400; ++step) {
      const auto [graph, bytes] = graphs[draw(graphs.size())];
      Run(&table, graph);
      table.Launched(*table.HolderOf(graph));
      uint64_t taken = 0;
      for (const auto& [held, size] : graphs) {
        if (table.HolderOf(held)) taken += size;
      }
      // What holds nothing is of a graph's size too: nothing is removed here.
      ASSERT_TRUE(table.exec_count() <= limit || taken <= budget)
          << "seed " << seed << ", step " << step << ": " << table.exec_count() << " take " << taken
          << " of " << budget;
    }
  }
}

}  // namespace
}  // namespace cgp
