// What the tests of the exec table share: doing what it plans.
#pragma once

#include <gtest/gtest.h>

#include <set>
#include <vector>

#include "exec/exec_table.h"

namespace cgp {

class ExecTableTest : public ::testing::Test {
 protected:
  using Step = ExecTable::Step;

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
    return table.PlanFor(graph, {.in_use = [&](ExecNumber e) { return in_use_.contains(e); },
                                 .running = [&](ExecNumber e) { return running_.contains(e); }});
  }

  static std::vector<GraphNumber> AddGraphs(ExecTable* table, size_t count, uint64_t bytes = 0) {
    const GroupNumber group = table->AddGroup(GroupKind::kShared);
    std::vector<GraphNumber> graphs;
    for (size_t i = 0; i < count; ++i) graphs.push_back(table->Add(group, bytes));
    return graphs;
  }

  // So many launches of the graph in a row; returns the steps.
  std::vector<Step> Stay(ExecTable* table, GraphNumber graph, uint32_t launches) {
    std::vector<Step> steps;
    for (uint32_t i = 0; i < launches; ++i) {
      steps.push_back(Run(table, graph));
      table->Launched(*table->HolderOf(graph));
    }
    return steps;
  }

  std::set<ExecNumber> in_use_;
  std::set<ExecNumber> running_;
};

}  // namespace cgp
