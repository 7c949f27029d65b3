#include "exec/exec_table.h"

#include <algorithm>
#include <iterator>
#include <utility>

#include "core/base/error.h"

namespace cgp {

GroupNumber ExecTable::AddGroup(GroupKind kind) {
  const GroupNumber number{next_group_++};
  groups_[number].kind = kind;
  return number;
}

GraphNumber ExecTable::Add(GroupNumber group, uint64_t bytes) {
  Group& joined = groups_.at(group);
  CGP_CHECK(joined.kind == GroupKind::kShared || joined.graphs == 0);
  const GraphNumber number{next_graph_++};
  graphs_[number] = {.group = group, .bytes = bytes};
  ++joined.graphs;
  if (joined.kind == GroupKind::kShared) wanted_.Add(bytes);
  return number;
}

std::optional<ExecNumber> ExecTable::Remove(GraphNumber graph) {
  const Graph removed = graphs_.at(graph);
  graphs_.erase(graph);
  if (removed.held_by) execs_.at(*removed.held_by).holds.reset();
  if (MayShare(removed.group)) wanted_.Remove(removed.bytes);
  return Left(removed.group);
}

std::optional<ExecNumber> ExecTable::SetApart(GraphNumber graph) {
  Graph& apart = graphs_.at(graph);
  CGP_CHECK(!apart.held_by);
  const GroupNumber before = std::exchange(apart.group, AddGroup(GroupKind::kShared));
  ++groups_.at(apart.group).graphs;
  return Left(before);
}

std::optional<ExecNumber> ExecTable::Left(GroupNumber number) {
  Group& group = groups_.at(number);
  --group.graphs;
  // One that holds no graph stays for the next graph that needs one, but there are never more
  // executables than graphs.
  std::optional<ExecNumber> useless;
  if (group.execs > group.graphs) useless = EmptyOne(number);
  if (useless) Destroyed(*useless);
  if (group.graphs == 0) groups_.erase(number);
  return useless;
}

ExecTable::Plan ExecTable::PlanFor(GraphNumber graph, const Conditions& now) const {
  const Graph& planned = graphs_.at(graph);
  if (planned.held_by) return PlanToKeep(planned, now);
  return MayShare(planned.group) ? PlanToGet(planned, now) : Plan{.step = Step::kMake};
}

ExecTable::Plan ExecTable::PlanToKeep(const Graph& graph, const Conditions& now) const {
  const ExecNumber holder = *graph.held_by;
  Plan keep{.step = Step::kNone, .exec = holder};
  const Exec& held = execs_.at(holder);
  // Each launch lets one of those beyond the limit go.
  if (!Allows(CountedInAll(graph.group)) && uses_ - exceeded_ >= kLaunchesBeforeMore) {
    const std::vector<ExecNumber> counted = Counted(graph.group);
    const auto idle = std::ranges::find_if(counted, [&](ExecNumber exec) {
      return exec != holder && !now.in_use(exec) && !now.running(exec);
    });
    if (idle != counted.end()) keep.destroy.push_back(*idle);
  }
  if (room_ || !held.updated || held.launches < kLongStay || now.in_use(holder)) return keep;
  // All its launches may be under way: another one goes, and the updated one is left for the next
  // graph.
  Plan renew{.step = Step::kMake};
  const Group& group = groups_.at(graph.group);
  const std::vector<ExecNumber> counted = Counted(graph.group);
  const auto fits_in_place_of = [&](ExecNumber exec) {
    const uint64_t bytes = execs_.at(exec).bytes;
    return graph.bytes <= bytes || Allows({taken_.count, taken_.bytes - bytes + graph.bytes});
  };
  const auto other = std::ranges::find_if(counted, [&](ExecNumber exec) {
    return exec != holder && fits_in_place_of(exec) && !now.in_use(exec);
  });
  if (HasRoom(CountedInAll(graph.group), graph)) {
    if (group.execs < group.graphs) return renew;
  } else if (other != counted.end()) {
    if (group.execs < group.graphs || execs_.at(*other).group == graph.group) {
      renew.destroy.push_back(*other);
      return renew;
    }
  }
  if (held.launches < kVeryLongStay && now.running(holder)) return keep;
  renew.destroy.push_back(holder);
  return renew;
}

ExecTable::Plan ExecTable::PlanToGet(const Graph& graph, const Conditions& now) const {
  Plan plan{.step = Step::kMake};
  const std::vector<ExecNumber> counted = Counted(graph.group);
  Total left = CountedInAll(graph.group);
  std::vector<ExecNumber> idle;
  std::ranges::remove_copy_if(counted, std::back_inserter(idle), now.in_use);
  const auto of_group = [&](ExecNumber exec) { return execs_.at(exec).group == graph.group; };
  auto replaced = std::ranges::find_if(idle, [&](ExecNumber exec) {
    return of_group(exec) && !execs_.at(exec).holds;  // no graph needs it
  });
  if (replaced == idle.end() && !HasRoom(left, graph)) {
    if (room_) replaced = std::ranges::find_if(idle, of_group);
    if (replaced == idle.end()) replaced = idle.begin();
  }
  if (replaced != idle.end() && of_group(*replaced)) {
    // With a single one, waiting for it would leave the device without work.
    const bool stays = !room_ && usual_stay_ > kLongStay - 1;  // an average comes near to it
    const bool is_the_only_one = room_.value_or(limit()) == 1;
    if (!stays || (is_the_only_one && now.running(*replaced))) {
      plan.step = Step::kUpdate;
      plan.exec = *replaced;
    } else {
      plan.destroy.push_back(*replaced);
    }
    idle.erase(replaced);
  }
  // A group never has more than graphs: the new one may take a place.
  const Group& group = groups_.at(graph.group);
  if (plan.step == Step::kMake && group.execs - plan.destroy.size() >= group.graphs) {
    plan.destroy.push_back(EmptyOne(graph.group).value());
  }
  // There may be more than the limit if too many were in use before, and one that goes may take
  // less than the new one.
  for (const ExecNumber gone : plan.destroy) left.Remove(execs_.at(gone).bytes);
  const auto fits = [&] { return plan.step == Step::kMake ? HasRoom(left, graph) : Allows(left); };
  for (std::size_t i = 0; i < idle.size() && !fits(); ++i) {
    plan.destroy.push_back(idle[i]);
    left.Remove(execs_.at(idle[i]).bytes);
  }
  return plan;
}

std::optional<ExecNumber> ExecTable::EmptyOne(GroupNumber group) const {
  std::optional<ExecNumber> empty;
  for (const auto& [number, exec] : execs_) {
    if (exec.group != group || exec.holds) continue;
    if (!empty || exec.used < execs_.at(*empty).used) empty = number;
  }
  return empty;
}

bool ExecTable::OutOfMemory(GraphNumber graph) {
  if (!MayShare(graphs_.at(graph).group)) return false;
  const bool is_lower = (!max_execs_ && !room_) || HasRoom(taken_, graphs_.at(graph));
  if (taken_.count == 0 || !is_lower) return false;
  room_ = taken_.count;
  launches_in_room_ = 0;
  return true;
}

bool ExecTable::MayHaveFirst(GraphNumber graph) const {
  const GroupNumber number = graphs_.at(graph).group;
  const Group& group = groups_.at(number);
  if (group.execs != 0) return false;
  if (group.kind == GroupKind::kAlone) return true;
  const Total there = CountedInAll(number);
  return there.count < limit() && HasRoom(there, graphs_.at(graph));
}

bool ExecTable::MayHaveOneMore(GraphNumber graph) const {
  const Graph& member = graphs_.at(graph);
  return !member.held_by &&
         (!MayShare(member.group) || HasRoom(CountedInAll(member.group), member));
}

ExecNumber ExecTable::Made(GraphNumber graph) {
  Graph& held = graphs_.at(graph);
  CGP_CHECK(!held.held_by || execs_.at(*held.held_by).updated);
  const ExecNumber number{next_exec_++};
  Exec& made = execs_[number];
  made = {.group = held.group, .bytes = held.bytes, .holds = graph, .used = ++uses_};
  if (held.held_by) {
    Exec& before = execs_.at(*held.held_by);
    before.holds.reset();
    made.launches = std::exchange(before.launches, 0);
  }
  held.held_by = number;
  ++groups_.at(held.group).execs;
  if (MayShare(held.group)) taken_.Add(made.bytes);
  if (!Allows(CountedInAll(held.group))) exceeded_ = uses_;
  return number;
}

void ExecTable::Updated(ExecNumber exec, GraphNumber graph) {
  Exec& updated = execs_.at(exec);
  Graph& held = graphs_.at(graph);
  CGP_CHECK(!held.held_by && held.group == updated.group);
  EndStay(updated);
  if (updated.holds) graphs_.at(*updated.holds).held_by.reset();
  updated.holds = graph;
  if (!std::exchange(updated.updated, true)) ++updated_;
  updated.launches = 0;
  held.held_by = exec;
  Used(exec);
}

void ExecTable::Launched(ExecNumber exec) {
  ++execs_.at(exec).launches;
  if (room_ && ++launches_in_room_ == kLaunchesBeforeMore) room_.reset();
}

void ExecTable::Used(ExecNumber exec) { execs_.at(exec).used = ++uses_; }

void ExecTable::Destroyed(ExecNumber exec) {
  const Exec destroyed = execs_.at(exec);
  EndStay(destroyed);
  if (destroyed.holds) graphs_.at(*destroyed.holds).held_by.reset();
  --groups_.at(destroyed.group).execs;
  if (destroyed.updated) --updated_;
  if (MayShare(destroyed.group)) taken_.Remove(destroyed.bytes);
  execs_.erase(exec);
}

void ExecTable::EndStay(const Exec& exec) {
  constexpr double kWeight = 0.25;
  if (exec.launches != 0) usual_stay_ += kWeight * (exec.launches - usual_stay_);
}

void ExecTable::NotReplaced(ExecNumber exec) {
  execs_.at(exec).launches = 0;
  Used(exec);
}

std::vector<ExecNumber> ExecTable::Counted(GroupNumber group) const {
  std::vector<ExecNumber> counted;
  for (const auto& [number, exec] : execs_) {
    const bool counts = max_execs_ || room_ ? MayShare(exec.group) : exec.group == group;
    if (counts) counted.push_back(number);
  }
  std::ranges::sort(counted, {}, [this](ExecNumber exec) { return execs_.at(exec).used; });
  return counted;
}

void ExecTable::Check() const {
  std::map<GroupNumber, Group> counts;
  Total wanted;
  for (const auto& [number, graph] : graphs_) {
    ++counts[graph.group].graphs;
    if (MayShare(graph.group)) wanted.Add(graph.bytes);
    if (!graph.held_by) continue;
    const Exec& exec = execs_.at(*graph.held_by);
    CGP_CHECK(exec.holds == number && exec.group == graph.group);
  }
  Total taken;
  std::size_t updated = 0;
  for (const auto& [number, exec] : execs_) {
    ++counts[exec.group].execs;
    updated += exec.updated ? 1 : 0;
    if (exec.holds) CGP_CHECK(graphs_.at(*exec.holds).held_by == number);
    CGP_CHECK(exec.used <= uses_);
    if (MayShare(exec.group)) taken.Add(exec.bytes);
  }
  CGP_CHECK(taken_ == taken && wanted_ == wanted && updated_ == updated);
  if (room_) CGP_CHECK(*room_ > 0);
  for (const auto& [number, group] : groups_) {
    CGP_CHECK(group.graphs == counts[number].graphs && group.execs == counts[number].execs);
    CGP_CHECK(group.execs <= group.graphs);
  }
}

}  // namespace cgp
