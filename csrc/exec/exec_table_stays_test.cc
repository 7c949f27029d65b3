// Graphs that are launched again and again, for which executables are made, not updated; and those
// that nobody needs any more.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <random>
#include <set>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "exec/exec_table.h"

namespace cgp {
namespace {

using ::testing::Each;
using ::testing::ElementsAre;
using ::testing::IsEmpty;

class ExecTableStaysTest : public ::testing::Test {
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

  // A program that goes on to another graph after each launch. Ends with the last of two or three.
  void Hurry(ExecTable* table, const std::vector<GraphNumber>& graphs) {
    for (int i = 0; i < 42; ++i) Stay(table, graphs[static_cast<size_t>(i) % graphs.size()], 1);
  }

  std::set<ExecNumber> in_use_;
  std::set<ExecNumber> running_;
};

TEST_F(ExecTableStaysTest, WhatNobodyNeedsAtOnceAnyMoreGoesThoughEachGraphIsHeld) {
  for (const std::optional<size_t> limit : {std::optional<size_t>(1), std::optional<size_t>()}) {
    ExecTable table(limit);
    const auto graphs = AddGraphs(&table, 3);
    for (const GraphNumber graph : graphs) {
      Run(&table, graph);
      in_use_.insert(*table.HolderOf(graph));
    }
    for (uint32_t i = 1; i < kLaunchesBeforeMore; ++i) Run(&table, graphs[2]);
    in_use_ = {*table.HolderOf(graphs[0])};
    EXPECT_THAT(PlanFor(table, graphs[2]).destroy, IsEmpty()) << "it may be needed soon";
    Run(&table, graphs[2]);
    running_ = {*table.HolderOf(graphs[1])};
    EXPECT_THAT(PlanFor(table, graphs[2]).destroy, IsEmpty());
    running_.clear();
    EXPECT_EQ(Run(&table, graphs[2]), Step::kNone);
    EXPECT_EQ(table.HolderOf(graphs[1]), std::nullopt);
    in_use_.clear();
    Run(&table, graphs[2]);
    EXPECT_EQ(table.exec_count(), 1u);
  }
}

TEST_F(ExecTableStaysTest, NobodyWaitsForTheLaunchesOfTheGraphThatStays) {
  ExecTable table(2);
  const auto graphs = AddGraphs(&table, 3);
  Hurry(&table, graphs);
  Stay(&table, graphs[0], kLongStay);
  const ExecNumber updated = *table.HolderOf(graphs[0]);
  const ExecNumber other = *table.HolderOf(graphs[2]);
  running_ = {updated};
  EXPECT_THAT(PlanFor(table, graphs[0]).destroy, ElementsAre(other));
  Run(&table, graphs[0]);
  EXPECT_NE(table.HolderOf(graphs[0]), updated);
  EXPECT_EQ(PlanFor(table, graphs[1]).exec, updated) << "it holds nothing: the next one takes it";
}

TEST_F(ExecTableStaysTest, TheOnlyOneIsMadeAnewWhenItsLaunchesHaveEndedOrAfterVeryMany) {
  for (const std::optional<size_t> limit : {std::optional<size_t>(1), std::optional<size_t>()}) {
    ExecTable table(limit);
    const auto graphs = AddGraphs(&table, 2);
    Hurry(&table, graphs);
    Stay(&table, graphs[0], kLongStay);
    running_ = {*table.HolderOf(graphs[0])};
    EXPECT_THAT(Stay(&table, graphs[0], kVeryLongStay - kLongStay), Each(Step::kNone));
    EXPECT_EQ(PlanFor(table, graphs[0]).step, Step::kMake);
    running_.clear();
    Hurry(&table, graphs);
    Stay(&table, graphs[0], kLongStay);
    const ExecTable::Plan plan = PlanFor(table, graphs[0]);
    EXPECT_EQ(plan.step, Step::kMake);
    EXPECT_THAT(plan.destroy, ElementsAre(*table.HolderOf(graphs[0])));
    Run(&table, graphs[0]);
    EXPECT_EQ(table.exec_count(), 1u);
  }
}

TEST_F(ExecTableStaysTest, AStepThatIsNotAllowedIsRefused) {
  ExecTable table(4);
  const auto first = AddGraphs(&table, 2);
  const auto second = AddGraphs(&table, 1);
  const GroupNumber alone = table.AddGroup(GroupKind::kAlone);
  table.Add(alone);
  Run(&table, first[0]);
  const ExecNumber exec = *table.HolderOf(first[0]);
  EXPECT_THROW(table.Add(alone), InternalError);
  EXPECT_THROW(table.SetApart(first[0]), InternalError) << "an executable holds it";
  EXPECT_THROW(table.Made(first[0]), InternalError);
  EXPECT_THROW(table.Updated(exec, second[0]), InternalError) << "of another group";
  EXPECT_THROW(table.Updated(exec, first[0]), InternalError) << "it holds it already";
  table.Check();
}

// Whatever is launched how often, and whatever runs meanwhile.
TEST_F(ExecTableStaysTest, RandomStaysKeepTheEquationsAndTheLimit) {
  for (uint64_t seed = 1; seed <= 100; ++seed) {
    SCOPED_TRACE(seed);
    std::mt19937_64 random(seed);
    const size_t limit = 1 + seed % 4;
    const uint64_t budget = seed % 8 < 4 ? 0 : random() % 200;
    const uint64_t longest = seed % 16 < 8 ? 1 : 2 * kVeryLongStay;
    ExecTable table(limit, budget);
    std::vector<std::pair<GraphNumber, uint64_t>> graphs;
    for (int group = 0; group < 4; ++group) {
      const uint64_t bytes = 1 + random() % 40;
      for (const GraphNumber graph : AddGraphs(&table, 1 + random() % 6, bytes)) {
        graphs.emplace_back(graph, bytes);
      }
    }
    for (int stay = 0; stay < 200; ++stay) {
      running_.clear();
      for (const auto& [other, bytes] : graphs) {
        if (table.HolderOf(other) && random() % 2 == 0) running_.insert(*table.HolderOf(other));
      }
      const GraphNumber graph = graphs[random() % graphs.size()].first;
      Stay(&table, graph, static_cast<uint32_t>(1 + random() % longest));
      uint64_t taken = 0;
      for (const auto& [held, bytes] : graphs) taken += table.HolderOf(held) ? bytes : 0;
      // That of one that holds nothing is not known.
      ASSERT_TRUE(table.exec_count() <= limit || taken <= budget) << table.exec_count();
    }
    for (const auto& [graph, bytes] : graphs) {
      table.Remove(graph);
      table.Check();
    }
    EXPECT_EQ(table.exec_count(), 0u);
  }
}

}  // namespace
}  // namespace cgp
