// Which executable runs which captured graph.
//
// A captured graph is a template: it costs no device memory, and cannot run. An executable can run;
// it costs device memory, and holds one graph at a time. Graphs of one group are so much alike that
// an executable that holds one can be updated to hold another. This decides who gets which, and
// calls nobody: it plans a step, and is told when the step is done, so that a step that fails
// leaves it as it was.
//
// Equations, for every group that may share (Check()):
//   held_by[graph] = exec  <=>  holds[exec] = graph, and then both are of one group
//   executables of the group <= graphs of the group
//   by_use_ = all executables of such groups, each once
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <vector>

namespace cgp {

enum class GraphNumber : uint32_t {};
enum class GroupNumber : uint32_t {};
enum class ExecNumber : uint32_t {};

enum class GroupKind : uint8_t {
  kShared,
  kAlone,  // one graph, which keeps an executable of its own that counts towards no limit
};

class ExecTable {
 public:
  enum class Step : uint8_t { kNone, kUpdate, kMake };
  // What lets a graph run.
  struct Plan {
    Step step = Step::kNone;
    std::optional<ExecNumber> exec;   // that holds the graph, or that is to be updated
    std::vector<ExecNumber> destroy;  // before it: they would be too many
  };

  // At most so many executables; nullopt: one for each group. Both may be exceeded while
  // executables are in use. pre: not 0.
  explicit ExecTable(std::optional<std::size_t> max_execs) : max_execs_(max_execs) {}

  GroupNumber AddGroup(GroupKind kind);
  // pre: the group exists; it has no graph yet if it is kAlone.
  GraphNumber Add(GroupNumber group);
  // A group whose last graph goes is gone too. Returns the executables that are of no more use, and
  // forgets them.
  std::vector<ExecNumber> Remove(GraphNumber graph);

  // The graph is not like the others of its group after all: it goes to a new one.
  // pre: no executable holds it.
  GroupNumber SetApart(GraphNumber graph);
  bool Contains(GroupNumber group) const { return groups_.contains(group); }

  // `in_use` says of an executable that it must neither be updated nor destroyed now. One that holds
  // nothing, since its graph was removed, may be destroyed all the same: nobody can launch it.
  Plan PlanFor(GraphNumber graph, const std::function<bool(ExecNumber)>& in_use) const;
  // Whether its group lacks an executable, and may have one within the limit.
  bool MayHaveFirst(GraphNumber graph) const;

  // A step was done: the graph is held, by the executable that was used last.
  ExecNumber Made(GraphNumber graph);
  void Updated(ExecNumber exec, GraphNumber graph);
  // pre: the executable holds a graph.
  void Used(ExecNumber exec);
  void Destroyed(ExecNumber exec);

  std::optional<ExecNumber> HolderOf(GraphNumber graph) const { return graphs_.at(graph).held_by; }
  std::size_t exec_count() const { return execs_.size(); }

  // Throws InternalError if an equation does not hold.
  void Check() const;

 private:
  struct Group {
    GroupKind kind;
    std::size_t graphs = 0;
    std::size_t execs = 0;
  };
  struct Graph {
    GroupNumber group;
    std::optional<ExecNumber> held_by;
  };
  struct Exec {
    GroupNumber group;
    std::optional<GraphNumber> holds;
  };

  // The executables that the limit on those of `group` counts, longest unused first.
  std::vector<ExecNumber> Counted(GroupNumber group) const;
  std::size_t limit() const { return max_execs_.value_or(1); }

  const std::optional<std::size_t> max_execs_;
  std::map<GroupNumber, Group> groups_;
  std::map<GraphNumber, Graph> graphs_;
  std::map<ExecNumber, Exec> execs_;
  std::vector<ExecNumber> by_use_;  // longest unused first
  uint32_t next_group_ = 0;
  uint32_t next_graph_ = 0;
  uint32_t next_exec_ = 0;
};

}  // namespace cgp
