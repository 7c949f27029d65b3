// Random steps, against a model that keeps lists and searches them.
#include "exec/exec_table.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <vector>

namespace cgp {
namespace {

using ::testing::IsEmpty;

constexpr size_t kNoLimit = 0;

struct ModelExec {
  ExecNumber number;
  size_t group;
  std::optional<GraphNumber> holds;
};

struct ModelGroup {
  GroupNumber number;
  bool alone;
};

class Model {
 public:
  explicit Model(size_t limit) : limit_(limit) {}

  std::map<GraphNumber, size_t> group_of;  // every graph
  std::vector<ModelGroup> groups;          // those that are gone, too
  std::vector<ModelExec> execs;            // longest unused first

  size_t GraphsOf(size_t group) const {
    return static_cast<size_t>(std::count_if(group_of.begin(), group_of.end(),
                                             [&](const auto& e) { return e.second == group; }));
  }
  size_t ExecsOf(size_t group) const {
    return static_cast<size_t>(
        std::count_if(execs.begin(), execs.end(), [&](const auto& e) { return e.group == group; }));
  }
  const ModelExec* HolderOf(GraphNumber graph) const {
    const auto found = std::find_if(execs.begin(), execs.end(),
                                    [&](const ModelExec& e) { return e.holds == graph; });
    return found == execs.end() ? nullptr : &*found;
  }
  ModelExec& Exec(ExecNumber number) {
    return *std::find_if(execs.begin(), execs.end(),
                         [&](const ModelExec& e) { return e.number == number; });
  }
  void Destroy(ExecNumber number) {
    std::erase_if(execs, [&](const ModelExec& e) { return e.number == number; });
  }
  void MoveToEnd(ExecNumber number) {
    const ModelExec moved = Exec(number);
    Destroy(number);
    execs.push_back(moved);
  }

  // At most so many, or kNoLimit.
  size_t Most() const { return room_.value_or(limit_); }
  bool OutOfMemory() {
    const size_t there = static_cast<size_t>(std::count_if(
        execs.begin(), execs.end(), [&](const ModelExec& e) { return !groups[e.group].alone; }));
    if (there == 0 || (Most() != kNoLimit && Most() <= there)) return false;
    room_ = there;
    return true;
  }
  bool short_of_memory() const { return room_.has_value(); }

  // Those that the limit counts for a graph of `group`, longest unused first.
  std::vector<ModelExec> Counted(size_t group) const {
    std::vector<ModelExec> counted;
    for (const ModelExec& exec : execs) {
      if (groups[exec.group].alone) continue;
      if (Most() == kNoLimit && exec.group != group) continue;
      counted.push_back(exec);
    }
    return counted;
  }
  size_t Allowed() const { return Most() == kNoLimit ? 1 : Most(); }

 private:
  const size_t limit_;
  std::optional<size_t> room_;
};

class RandomSteps {
 public:
  RandomSteps(size_t limit, uint64_t seed)
      : random_(seed),
        may_run_out_(seed % 2 == 1),  // after which the memory stays short
        table_(limit == kNoLimit ? std::nullopt : std::optional(limit)),
        model_(limit) {}

  void Run(int steps) {
    for (int step = 0; step < steps && !::testing::Test::HasFailure(); ++step) {
      Step();
      table_.Check();
      Compare();
    }
    while (!model_.group_of.empty()) Remove(model_.group_of.begin()->first);
    EXPECT_EQ(table_.exec_count(), 0u);
    table_.Check();
  }

 private:
  size_t Pick(size_t count) { return random_() % count; }
  GraphNumber AnyGraph() {
    return std::next(model_.group_of.begin(), static_cast<long>(Pick(model_.group_of.size())))
        ->first;
  }

  void Step() {
    const size_t choice = Pick(20);
    if (choice == 0 || model_.group_of.empty()) return AddGroup();
    if (choice <= 2) return Add();
    if (choice <= 4) return Remove(AnyGraph());
    in_use_.clear();
    for (const ModelExec& exec : model_.execs) {
      if (Pick(3) == 0) in_use_.insert(exec.number);
    }
    Launch(AnyGraph(), choice == 5, may_run_out_ && choice == 6);
  }

  void AddGroup() {
    const bool alone = Pick(4) == 0;
    const GroupNumber number = table_.AddGroup(alone ? GroupKind::kAlone : GroupKind::kShared);
    model_.groups.push_back({number, alone});
    model_.group_of[table_.Add(number)] = model_.groups.size() - 1;
  }

  void Add() {
    const size_t group = model_.group_of.at(AnyGraph());
    if (model_.groups[group].alone) return;
    model_.group_of[table_.Add(model_.groups[group].number)] = group;
  }

  void Remove(GraphNumber graph) {
    const size_t group = model_.group_of.at(graph);
    if (const ModelExec* holder = model_.HolderOf(graph)) {
      model_.Exec(holder->number).holds.reset();
    }
    model_.group_of.erase(graph);
    const size_t graphs = model_.GraphsOf(group);
    const size_t execs = model_.ExecsOf(group);
    ExpectGone(table_.Remove(graph), group, execs > graphs);
  }

  void Launch(GraphNumber graph, bool driver_refuses, bool no_memory) {
    const ExecTable::Conditions now = {
        .in_use = [&](ExecNumber exec) { return in_use_.contains(exec); },
        .running = [](ExecNumber) { return false; }};
    const ExecTable::Plan plan = table_.PlanFor(graph, now);
    ExpectGoodPlan(graph, plan);
    for (const ExecNumber exec : plan.destroy) {
      table_.Destroyed(exec);
      model_.Destroy(exec);
    }
    const size_t group = model_.group_of.at(graph);
    switch (plan.step) {
      case ExecTable::Step::kNone:
        table_.Used(*plan.exec);
        return model_.MoveToEnd(*plan.exec);
      case ExecTable::Step::kMake:
        if (no_memory) return DoWithout(graph, driver_refuses);
        return model_.execs.push_back({table_.Made(graph), group, graph});
      case ExecTable::Step::kUpdate:
        if (driver_refuses) return Refuse(graph);
        table_.Updated(*plan.exec, graph);
        model_.Exec(*plan.exec).holds = graph;
        return model_.MoveToEnd(*plan.exec);
    }
  }

  // An executable of the group that holds nothing is of no more use, if one is to be.
  void ExpectGone(std::optional<ExecNumber> gone, size_t group, bool is_to_be) {
    EXPECT_EQ(gone.has_value(), is_to_be);
    if (!gone) return;
    EXPECT_EQ(model_.Exec(*gone).group, group);
    EXPECT_FALSE(model_.Exec(*gone).holds);
    model_.Destroy(*gone);
  }

  // None could be made: other plans are tried until none is left.
  void DoWithout(GraphNumber graph, bool driver_refuses) {
    const bool alone = model_.groups[model_.group_of.at(graph)].alone;
    const bool may_help = table_.OutOfMemory(graph);
    ASSERT_EQ(may_help, !alone && model_.OutOfMemory());
    if (may_help) Launch(graph, driver_refuses, /*no_memory=*/true);
  }

  void Refuse(GraphNumber graph) {
    const size_t before = model_.group_of.at(graph);
    const size_t execs = model_.ExecsOf(before);
    const std::optional<ExecNumber> gone = table_.SetApart(graph);
    model_.groups.push_back({table_.GroupOf(graph), /*alone=*/false});
    model_.group_of[graph] = model_.groups.size() - 1;
    const size_t graphs = model_.GraphsOf(before);
    ExpectGone(gone, before, execs > graphs);
    EXPECT_EQ(table_.Contains(model_.groups[before].number), graphs != 0);
  }

  void ExpectGoodPlan(GraphNumber graph, const ExecTable::Plan& plan) {
    const size_t group = model_.group_of.at(graph);
    if (const ModelExec* holder = model_.HolderOf(graph)) {
      EXPECT_EQ(plan.step, ExecTable::Step::kNone);
      EXPECT_EQ(plan.exec, holder->number);
      EXPECT_THAT(plan.destroy, IsEmpty());
      return;
    }
    EXPECT_NE(plan.step, ExecTable::Step::kNone);
    if (model_.groups[group].alone) {
      EXPECT_EQ(plan.step, ExecTable::Step::kMake);
      EXPECT_THAT(plan.destroy, IsEmpty());
      return;
    }
    const std::vector<ModelExec> counted = model_.Counted(group);
    std::vector<ModelExec> idle;
    for (const ModelExec& exec : counted) {
      if (!in_use_.contains(exec.number)) idle.push_back(exec);
    }
    ExpectGoodChoice(group, plan, counted.size(), idle);
    ExpectGoodNumber(group, plan, counted.size(), idle);
  }

  // Which executable the graph gets.
  void ExpectGoodChoice(size_t group, const ExecTable::Plan& plan, size_t counted,
                        const std::vector<ModelExec>& idle) {
    const auto empty = std::find_if(idle.begin(), idle.end(), [&](const ModelExec& exec) {
      return exec.group == group && !exec.holds;
    });
    if (empty != idle.end()) {
      EXPECT_EQ(plan.step, ExecTable::Step::kUpdate) << "one is there that nobody misses";
      EXPECT_EQ(plan.exec, empty->number);
      return;
    }
    const auto own = std::find_if(idle.begin(), idle.end(),
                                  [&](const ModelExec& exec) { return exec.group == group; });
    const bool chosen = own == idle.begin() || model_.short_of_memory();
    if (counted < model_.Allowed() || own == idle.end() || !chosen) {
      EXPECT_EQ(plan.step, ExecTable::Step::kMake);
      EXPECT_EQ(plan.exec, std::nullopt);
    } else {
      EXPECT_EQ(plan.step, ExecTable::Step::kUpdate);
      EXPECT_EQ(plan.exec, own->number) << "the longest unused goes first";
    }
  }

  // How many there will be.
  void ExpectGoodNumber(size_t group, const ExecTable::Plan& plan, size_t counted,
                        std::vector<ModelExec> idle) {
    std::erase_if(idle, [&](const ModelExec& exec) { return exec.number == plan.exec; });
    std::vector<ExecNumber> destroyed = plan.destroy;
    if (plan.step == ExecTable::Step::kMake && model_.ExecsOf(group) == model_.GraphsOf(group)) {
      // One too many for the group: one of those that hold nothing, which are all busy.
      const auto left = std::find_if(destroyed.begin(), destroyed.end(), [&](ExecNumber exec) {
        return model_.Exec(exec).group == group && !model_.Exec(exec).holds;
      });
      ASSERT_NE(left, destroyed.end());
      destroyed.erase(left);
      --counted;
    }
    const size_t after = counted + (plan.step == ExecTable::Step::kMake ? 1 : 0);
    const size_t too_many = after > model_.Allowed() ? after - model_.Allowed() : 0;
    ASSERT_EQ(destroyed.size(), std::min(too_many, idle.size()))
        << "never more than the limit but for what is in use, and none goes without need";
    for (size_t i = 0; i < destroyed.size(); ++i) EXPECT_EQ(destroyed[i], idle[i].number);
  }

  void Compare() {
    EXPECT_EQ(table_.exec_count(), model_.execs.size());
    for (const auto& [graph, group] : model_.group_of) {
      const ModelExec* const holder = model_.HolderOf(graph);
      EXPECT_EQ(table_.HolderOf(graph),
                holder == nullptr ? std::nullopt : std::optional(holder->number));
      const size_t allowed = model_.groups[group].alone ? SIZE_MAX : model_.Allowed();
      EXPECT_EQ(table_.MayHaveFirst(graph),
                model_.ExecsOf(group) == 0 && model_.Counted(group).size() < allowed);
    }
    for (size_t i = 0; i < model_.groups.size(); ++i) {
      EXPECT_EQ(table_.Contains(model_.groups[i].number), model_.GraphsOf(i) != 0);
    }
  }

  std::mt19937_64 random_;
  const bool may_run_out_;
  ExecTable table_;
  Model model_;
  std::set<ExecNumber> in_use_;
};

class ExecTableRandomTest : public ::testing::TestWithParam<size_t> {};

TEST_P(ExecTableRandomTest, DoesWhatTheModelDoes) {
  for (uint64_t seed = 1; seed <= 40 && !HasFailure(); ++seed) {
    SCOPED_TRACE(seed);
    RandomSteps(GetParam(), seed).Run(400);
  }
}

INSTANTIATE_TEST_SUITE_P(Limits, ExecTableRandomTest, ::testing::Values(kNoLimit, 1, 2, 4));

}  // namespace
}  // namespace cgp
