// Makes, updates and destroys the executables of graphs, as exec_table.h decides.
//
// Thread-safe. An executable keeps its graph while it is leased to a launch, and while its last
// launch has not ended if the next graph is to run on another stream. With an executable each,
// those two graphs might run at once, and one might wait for the other: so the second gets another
// executable, beyond the limit if need be.
//
// CUDA orders the launches of one executable, on whatever streams, and so those of a graph with an
// executable of its own. Graphs that share expect no less. So when an executable is taken from a
// graph, the end of its last launch is marked, and a launch on another stream waits for the mark in
// stream order.
//
// An executable that has to make room is destroyed when its last launch has ended. Until then it
// still takes memory, and a program that runs far ahead of the device could fill the memory with
// executables. So the launch that needs the room waits, with the device still busy. Others use the
// cache meanwhile, so it plans anew afterwards. Nobody waits for later launches.
//
// If there is no memory for one that the limit allows, one of its group is updated, or others make
// room, the longest unused first. All of them go, if need be, before a replay fails. For a while no
// more of them are made then.
#pragma once

#include <chrono>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "core/driver.h"
#include "exec/exec_table.h"
#include "exec/graph_driver.h"

namespace cgp {

class ExecCache {
 public:
  struct Stats {
    std::size_t execs = 0;  // that exist now
    uint64_t instantiations = 0;
    uint64_t updates = 0;
    std::map<std::string, std::size_t> alone = {};  // graphs that do not share, by reason
  };
  struct Launch {
    StreamId stream;
    bool stream_lasts;  // as long as the process
  };

  // `events` marks the ends of launches and must outlive this. `max_execs`, `budget_bytes` as for
  // ExecTable, by the drivers' estimate of an executable's memory. A launch waits at most
  // `longest_wait` for another to end, which may depend on something that its own thread has yet to
  // do.
  ExecCache(std::unique_ptr<GraphDriver> graphs, Driver& events,
            std::optional<std::size_t> max_execs, uint64_t budget_bytes,
            std::chrono::milliseconds longest_wait)
      : graphs_(std::move(graphs)),
        events_(events),
        longest_wait_(longest_wait),
        table_(max_execs, budget_bytes) {}
  ~ExecCache();

  // The graph must live until it is removed. The first of a kind gets an executable at once, if the
  // limit and the memory allow. This and all that follows throw DriverError, and may be tried
  // again.
  GraphNumber Add(Graph graph);
  void Remove(GraphNumber graph);

  // Leases an executable that holds the graph, for a launch on `stream`. The stream waits for the
  // graph's launches on others, unless a capture holds it: what is captured runs later, and whoever
  // replays it has to order that. It does not wait for a launch on a stream that a capture holds,
  // where the end of no launch can be marked.
  GraphExec Lease(GraphNumber graph, StreamId stream);
  // Ends the lease, even if this throws; `launch` is what it was used for.
  void Return(GraphNumber graph, const Launch& launch);

  // Makes an executable for the graph's next launch on that stream ready on the device. That waits
  // for the stream's work, and counts as a launch that has not ended. On a stream that a capture
  // holds it is only made: making it ready would be captured.
  void Prepare(GraphNumber graph, const Launch& launch);

  // Destroys all that no launch is using right now. They are made again when they are needed.
  void DropIdle();
  // Makes those again that held a graph, and makes them ready on that stream as Prepare() does.
  // What there is no room for is left to the graph's next launch.
  void MakeDropped(const Launch& launch);

  Stats stats() const;

 private:
  // A launch that may not have ended. The executable knows it, and so does a graph that has lost
  // that.
  struct Run {
    Run(Driver& driver, GraphNumber launched, const Launch& its_launch, uint64_t before)
        : events(driver), graph(launched), launch(its_launch), number(before) {}
    ~Run() { Unmark(); }
    Run(const Run&) = delete;
    Run& operator=(const Run&) = delete;
    // Whether later work on that stream runs behind it anyway. A stream that may go can leave its
    // name to another one.
    bool ComesBefore(StreamId what_follows) const {
      return launch.stream == what_follows && launch.stream_lasts;
    }
    void Unmark() noexcept {
      if (end) events.DestroyEvent(*end);
      end.reset();
    }

    Driver& events;
    const GraphNumber graph;
    Launch launch;
    uint64_t number;           // of all launches; until it is returned, of the one before
    bool captured = false;     // and does not run now
    std::optional<Event> end;  // or something later
  };
  struct Exec {
    GraphExec handle;
    // Made with the lease, so that a return needs no memory.
    std::vector<std::shared_ptr<Run>> leases = {};
    std::shared_ptr<Run> last_run = nullptr;  // if that may not have ended
  };
  struct Member {
    Graph graph;
    std::string alone = {};                   // why it does not share; empty if it may
    std::shared_ptr<Run> last_run = nullptr;  // the same, on an executable that it has lost
    bool dropped = false;                     // its executable, while idle
  };
  void RemoveLocked(GraphNumber graph);
  // A graph has left the group, which may leave an executable without use.
  void HasLeft(GroupNumber group, std::optional<ExecNumber> useless);
  // Makes an executable hold the graph. `lock`, the cache's, is released while this waits.
  Exec& Hold(GraphNumber graph, StreamId stream, std::unique_lock<std::mutex>& lock);
  // Makes an executable for the graph. Without memory, the graph's present one has to do; nullptr:
  // those of other graphs have to.
  Exec* Make(GraphNumber graph);
  // For a launch of the graph to come.
  void MakeReady(Exec& exec, GraphNumber graph, const Launch& launch);
  // Returns false if the driver refused; the graph is then set apart. If the driver fails
  // otherwise, the executable is gone.
  bool Update(ExecNumber number, GraphNumber graph);
  void DestroyHandle(ExecNumber number) noexcept;
  // Whether it must stay as it is while a graph is to run on `stream`.
  bool InUse(Exec& exec, StreamId stream);
  // Whether there is a launch that has not ended; one that has ended is dropped.
  bool Running(std::shared_ptr<Run>& run);
  void NoteLaunch(Exec& exec, std::shared_ptr<Run> run, const Launch& launch);
  // Marks its end, if possible now. A stream that may be gone `is_there` just after the launch.
  void MarkEnd(Run& run, bool is_there = false);
  // Its graph is about to lose it.
  void RememberRun(ExecNumber number);
  // Makes later work on the stream run behind that launch, if there is one.
  void WaitFor(std::shared_ptr<Run>& run, StreamId stream);
  // Whether no mark can be made on it now: see Frontier::held.
  bool IsHeld(StreamId stream);
  // `next` is to be launched.
  void MarkEndOfLast(ExecNumber next);

  const std::unique_ptr<GraphDriver> graphs_;
  Driver& events_;
  const std::chrono::milliseconds longest_wait_;
  mutable std::mutex mutex_;
  ExecTable table_;
  std::map<std::string, GroupNumber> groups_;  // by key
  std::unordered_map<GraphNumber, Member> members_;
  std::unordered_map<ExecNumber, Exec> execs_;
  std::optional<ExecNumber> launched_last_;
  uint64_t launches_ = 0;
  uint64_t instantiations_ = 0;
  uint64_t updates_ = 0;
};

}  // namespace cgp
