#include "core/exec_table.h"

#include <algorithm>

#include "core/error.h"

namespace cgp {

GroupNumber ExecTable::AddGroup(GroupKind kind) {
  const GroupNumber number{next_group_++};
  groups_[number].kind = kind;
  return number;
}

GraphNumber ExecTable::Add(GroupNumber group) {
  Group& joined = groups_.at(group);
  CGP_CHECK(joined.kind == GroupKind::kShared || joined.graphs == 0);
  const GraphNumber number{next_graph_++};
  graphs_[number] = {.group = group, .held_by = std::nullopt};
  ++joined.graphs;
  return number;
}

std::vector<ExecNumber> ExecTable::Remove(GraphNumber graph) {
  const Graph removed = graphs_.at(graph);
  Group& group = groups_.at(removed.group);
  graphs_.erase(graph);
  --group.graphs;
  if (removed.held_by) execs_.at(*removed.held_by).holds.reset();
  std::vector<ExecNumber> useless;
  // What holds no graph is kept for the next one that has to be held, but never more of them than
  // there are graphs.
  for (const auto& [number, exec] : execs_) {
    if (exec.group != removed.group || exec.holds) continue;
    if (group.execs - useless.size() > group.graphs) useless.push_back(number);
  }
  for (const ExecNumber exec : useless) Destroyed(exec);
  if (group.graphs == 0) groups_.erase(removed.group);
  return useless;
}

GroupNumber ExecTable::SetApart(GraphNumber graph) {
  Graph& apart = graphs_.at(graph);
  CGP_CHECK(!apart.held_by);
  const GroupNumber before = apart.group;
  apart.group = AddGroup(GroupKind::kShared);
  ++groups_.at(apart.group).graphs;
  if (--groups_.at(before).graphs == 0) groups_.erase(before);
  return apart.group;
}

ExecTable::Plan ExecTable::PlanFor(GraphNumber graph,
                                   const std::function<bool(ExecNumber)>& in_use) const {
  const Graph& planned = graphs_.at(graph);
  if (planned.held_by) return {.step = Step::kNone, .exec = planned.held_by, .destroy = {}};
  Plan plan{.step = Step::kMake, .exec = std::nullopt, .destroy = {}};
  if (groups_.at(planned.group).kind == GroupKind::kAlone) return plan;

  const std::vector<ExecNumber> counted = Counted(planned.group);
  std::vector<ExecNumber> idle;
  std::copy_if(counted.begin(), counted.end(), std::back_inserter(idle),
               [&](ExecNumber exec) { return !in_use(exec); });
  const auto of_group = [&](ExecNumber exec) { return execs_.at(exec).group == planned.group; };
  auto chosen = std::find_if(idle.begin(), idle.end(), [&](ExecNumber exec) {
    return of_group(exec) && !execs_.at(exec).holds;  // nobody misses it
  });
  if (chosen == idle.end() && counted.size() >= limit()) chosen = idle.begin();
  if (chosen != idle.end() && of_group(*chosen)) {
    plan.step = Step::kUpdate;
    plan.exec = *chosen;
    idle.erase(chosen);
  }
  std::size_t count = counted.size() + (plan.step == Step::kMake ? 1 : 0);
  const Group& group = groups_.at(planned.group);
  if (plan.step == Step::kMake && group.execs == group.graphs) {
    // As many as graphs, and this graph has none: then some hold nothing, and all of those are in
    // use.
    const auto empty = std::find_if(counted.begin(), counted.end(), [&](ExecNumber exec) {
      return of_group(exec) && !execs_.at(exec).holds;
    });
    plan.destroy.push_back(*empty);
    --count;
  }
  // There may be more than the limit since a time when too many were in use.
  for (std::size_t i = 0; i < idle.size() && count > limit(); ++i, --count) {
    plan.destroy.push_back(idle[i]);
  }
  return plan;
}

bool ExecTable::MayHaveFirst(GraphNumber graph) const {
  const GroupNumber number = graphs_.at(graph).group;
  const Group& group = groups_.at(number);
  if (group.execs != 0) return false;
  return group.kind == GroupKind::kAlone || Counted(number).size() < limit();
}

ExecNumber ExecTable::Made(GraphNumber graph) {
  Graph& held = graphs_.at(graph);
  CGP_CHECK(!held.held_by);
  Group& group = groups_.at(held.group);
  const ExecNumber number{next_exec_++};
  execs_[number] = {.group = held.group, .holds = graph};
  held.held_by = number;
  ++group.execs;
  if (group.kind == GroupKind::kShared) by_use_.push_back(number);
  return number;
}

void ExecTable::Updated(ExecNumber exec, GraphNumber graph) {
  Exec& updated = execs_.at(exec);
  Graph& held = graphs_.at(graph);
  CGP_CHECK(!held.held_by && held.group == updated.group);
  if (updated.holds) graphs_.at(*updated.holds).held_by.reset();
  updated.holds = graph;
  held.held_by = exec;
  Used(exec);
}

void ExecTable::Used(ExecNumber exec) {
  const auto found = std::find(by_use_.begin(), by_use_.end(), exec);
  if (found != by_use_.end()) std::rotate(found, found + 1, by_use_.end());
}

void ExecTable::Destroyed(ExecNumber exec) {
  const Exec destroyed = execs_.at(exec);
  if (destroyed.holds) graphs_.at(*destroyed.holds).held_by.reset();
  --groups_.at(destroyed.group).execs;
  execs_.erase(exec);
  by_use_.erase(std::remove(by_use_.begin(), by_use_.end(), exec), by_use_.end());
}

std::vector<ExecNumber> ExecTable::Counted(GroupNumber group) const {
  if (max_execs_) return by_use_;
  std::vector<ExecNumber> counted;
  std::copy_if(by_use_.begin(), by_use_.end(), std::back_inserter(counted),
               [&](ExecNumber exec) { return execs_.at(exec).group == group; });
  return counted;
}

void ExecTable::Check() const {
  std::map<GroupNumber, Group> counts;
  for (const auto& [number, graph] : graphs_) {
    ++counts[graph.group].graphs;
    if (!graph.held_by) continue;
    const Exec& exec = execs_.at(*graph.held_by);
    CGP_CHECK(exec.holds == number && exec.group == graph.group);
  }
  std::size_t shared = 0;
  for (const auto& [number, exec] : execs_) {
    ++counts[exec.group].execs;
    if (exec.holds) CGP_CHECK(graphs_.at(*exec.holds).held_by == number);
    if (groups_.at(exec.group).kind == GroupKind::kAlone) continue;
    ++shared;
    CGP_CHECK(std::count(by_use_.begin(), by_use_.end(), number) == 1);
  }
  CGP_CHECK(by_use_.size() == shared);
  for (const auto& [number, group] : groups_) {
    CGP_CHECK(group.graphs == counts[number].graphs && group.execs == counts[number].execs);
    CGP_CHECK(group.execs <= group.graphs);
  }
}

}  // namespace cgp
