// Which executable runs which captured graph.
//
// A captured graph is a template: it costs no device memory, and cannot run. An executable can run,
// costs device memory, and holds one graph at a time. Graphs of one group are so much alike that an
// executable of one can be updated to hold another. This table decides which graph gets which
// executable. It plans a step, and is told when that is done, so a failed step changes nothing.
//
// An update takes less CPU time than making an executable anew, but an updated one runs slower.
// That is 0.1 to 0.6 us for each node whose grid or function has changed (docs/graph_updates.md).
// So a graph that is replayed again and again gets one that was made for it. In a program that has
// been staying with its graphs, each graph gets one at once.
//
// With a budget of memory, each graph in use has its own as long as all together fit into it.
//
// Equations, for every group that may share (Check()):
//   held_by[graph] = exec  <=>  holds[exec] = graph, and then both are of one group
//   executables of the group <= graphs of the group
//   taken_ = executables of such groups, and what they take
//   wanted_ = graphs of such groups, and what executables of all of them would take
//   updated_ = executables that were updated
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <unordered_map>
#include <vector>

namespace cgp {

enum class GraphNumber : uint32_t {};
enum class GroupNumber : uint32_t {};
enum class ExecNumber : uint32_t {};

// After so many launches in a row, a graph's updated executable should have been made anew: by then
// the slower launches have cost about as much.
inline constexpr uint32_t kLongStay = 4;
// The same if the device would run out of work meanwhile.
inline constexpr uint32_t kVeryLongStay = 16;
// After so many launches, one more executable than memory had room for is tried, and one beyond the
// limit goes. Making it again, if needed, takes about as long as a few launches.
inline constexpr uint32_t kLaunchesBeforeMore = 256;

enum class GroupKind : uint8_t {
  kShared,
  kAlone,  // one graph with an executable of its own, which counts towards no limit
};

// A member either does all that it says, or throws for lack of memory and changes nothing.
class ExecTable {
 public:
  enum class Step : uint8_t { kNone, kUpdate, kMake };
  // The step that lets a graph run.
  struct Plan {
    Step step = Step::kNone;
    // The executable that holds the graph, or is to be updated.
    std::optional<ExecNumber> exec = std::nullopt;
    std::vector<ExecNumber> destroy = {};  // before that
  };

  // At most `max_execs` executables, or one for each group (nullopt). There may be more while all
  // take no more than `budget_bytes`. Both may be exceeded while executables are in use, and for
  // kLaunchesBeforeMore launches. pre: max_execs is not 0; without it there is no budget.
  explicit ExecTable(std::optional<std::size_t> max_execs, uint64_t budget_bytes = 0)
      : max_execs_(max_execs), budget_bytes_(budget_bytes) {}

  GroupNumber AddGroup(GroupKind kind);
  // Adds a graph, whose executable takes about `bytes`, as do all of its group. pre: the group
  // exists; it has no graph yet if it is kAlone.
  GraphNumber Add(GroupNumber group, uint64_t bytes = 0);
  // Removes a graph, and its group with the last one. Drops and returns the executable that is of
  // no more use, if any. Needs no memory.
  std::optional<ExecNumber> Remove(GraphNumber graph);

  // Moves the graph to a new group, since it is unlike the others after all. Returns as Remove().
  // pre: no executable holds it.
  std::optional<ExecNumber> SetApart(GraphNumber graph);
  GroupNumber GroupOf(GraphNumber graph) const { return graphs_.at(graph).group; }
  bool Contains(GroupNumber group) const { return groups_.contains(group); }

  // What may be done with an executable now; called only if the answer matters.
  struct Conditions {
    // It must neither be updated nor destroyed. One that holds nothing, since its graph was
    // removed, may still be destroyed: nobody can launch it.
    std::function<bool(ExecNumber)> in_use;
    // A launch of it has not ended: destroying it has to wait for that, updating it has not.
    std::function<bool(ExecNumber)> running;
  };
  Plan PlanFor(GraphNumber graph, const Conditions& now) const;
  // There was no memory for the graph's executable. For kLaunchesBeforeMore launches there are to
  // be no more than now: one of the group is updated before one of another group goes, and none
  // goes for a faster one. Returns whether that lowers the limit, so that a new plan may help.
  // Others make no room for an executable that is alone.
  bool OutOfMemory(GraphNumber graph);
  // Whether its group lacks an executable, and may have one before any graph is in use. The budget
  // is only for graphs in use.
  bool MayHaveFirst(GraphNumber graph) const;
  // Whether it lacks one, and may have one more without another graph's going.
  bool MayHaveOneMore(GraphNumber graph) const;

  // A step was done: the executable used last holds the graph, and the one before holds nothing.
  ExecNumber Made(GraphNumber graph);
  void Updated(ExecNumber exec, GraphNumber graph);
  void Used(ExecNumber exec);
  // Its graph is launched.
  void Launched(ExecNumber exec);
  void Destroyed(ExecNumber exec);
  // No other one could be made in its place: that is not planned again before another long stay.
  void NotReplaced(ExecNumber exec);

  // Whether no graph will lose its executable to another while none is added: each has one that was
  // made for it, or may have.
  bool AllKeepTheirs() const {
    return updated_ == 0 && (execs_.size() == graphs_.size() || Allows(wanted_));
  }
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
    uint64_t bytes = 0;
    std::optional<ExecNumber> held_by = std::nullopt;
  };
  struct Exec {
    GroupNumber group;
    uint64_t bytes = 0;
    std::optional<GraphNumber> holds;
    bool updated = false;   // not made for its graph
    uint32_t launches = 0;  // since it holds its graph
    uint64_t used = 0;      // a number that grows with each use of any
  };

  bool MayShare(GroupNumber group) const { return groups_.at(group).kind == GroupKind::kShared; }
  // The limit on their number, whatever they take.
  std::size_t limit() const { return max_execs_.value_or(room_.value_or(1)); }
  // A number of executables and the bytes that they take.
  struct Total {
    std::size_t count = 0;
    uint64_t bytes = 0;

    void Add(uint64_t of_one) {
      ++count;
      bytes += of_one;
    }
    void Remove(uint64_t of_one) {
      --count;
      bytes -= of_one;
    }
    bool operator==(const Total&) const = default;
  };
  // Whether there may be so many.
  bool Allows(const Total& execs) const {
    if (room_ && execs.count > *room_) return false;
    return execs.count <= limit() || (budget_bytes_ != 0 && execs.bytes <= budget_bytes_);
  }
  // Whether there may be one more, for the graph.
  bool HasRoom(Total execs, const Graph& graph) const {
    execs.Add(graph.bytes);
    return Allows(execs);
  }
  // The executables that count towards the limit for `group`, longest unused first; and in all.
  std::vector<ExecNumber> Counted(GroupNumber group) const;
  Total CountedInAll(GroupNumber group) const {
    return {max_execs_ || room_ ? taken_.count : groups_.at(group).execs, taken_.bytes};
  }
  Plan PlanToKeep(const Graph& graph, const Conditions& now) const;
  Plan PlanToGet(const Graph& graph, const Conditions& now) const;
  // A graph has left the group, which goes with its last one. Returns as Remove().
  std::optional<ExecNumber> Left(GroupNumber number);
  // The longest unused of the group's that hold nothing.
  std::optional<ExecNumber> EmptyOne(GroupNumber group) const;
  void EndStay(const Exec& exec);

  const std::optional<std::size_t> max_execs_;
  const uint64_t budget_bytes_;
  Total taken_;
  Total wanted_;
  std::size_t updated_ = 0;
  std::map<GroupNumber, Group> groups_;
  std::unordered_map<GraphNumber, Graph> graphs_;
  std::unordered_map<ExecNumber, Exec> execs_;
  uint64_t uses_ = 0;
  uint64_t exceeded_ = 0;  // uses_ when one more than the limit was made last
  // How many there were when memory ran out. invariant: 0 < room_.
  std::optional<std::size_t> room_;
  uint32_t launches_in_room_ = 0;
  // The recent average of launches in a row of one graph.
  double usual_stay_ = 0;
  uint32_t next_group_ = 0;
  uint32_t next_graph_ = 0;
  uint32_t next_exec_ = 0;
};

}  // namespace cgp
