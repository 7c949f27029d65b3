// The executables of graphs: makes, updates and destroys them as exec_table.h decides.
//
// Thread-safe. What an executable holds is not changed while it is leased to a launch; nor for a
// graph that is to run on another stream while its last launch has not ended. With an executable
// each, the two graphs might run at once, and one might wait for the other: so the second gets
// another executable, beyond the limit if need be.
//
// CUDA orders the launches of one executable, on whatever streams, and so those of a graph that
// keeps its own. Who shares expects no less: when an executable is taken from a graph the end of
// its last launch is marked, and a launch on another stream waits for the mark in stream order.
//
// An executable that has to make room for another one is destroyed when its last launch has ended:
// until then it would keep its memory, and a program that runs far ahead of the device could fill
// that with executables. Whoever needs the room waits, with the device still busy; others use the
// cache meanwhile, so who has waited plans anew. Nobody waits for launches that were made later.
//
// Where there is no memory to make one that the limit allows, one of its group is updated, or
// others make room, the longest unused first: all of them, if need be, before a replay fails. For a
// while no more of them are made then.
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
  // ExecTable, by the drivers' estimate of what an executable takes. Who has to wait for a launch
  // to end does so for `longest_wait` at most: it may wait for something that its own thread has
  // yet to do.
  ExecCache(std::unique_ptr<GraphDriver> graphs, Driver& events,
            std::optional<std::size_t> max_execs, uint64_t budget_bytes,
            std::chrono::milliseconds longest_wait)
      : graphs_(std::move(graphs)),
        events_(events),
        longest_wait_(longest_wait),
        table_(max_execs, budget_bytes) {}
  ~ExecCache();

  // The graph must live until it is removed. The first of a kind gets an executable at once where
  // the limit and the memory allow. All that follows throws DriverError, and may be tried again
  // after it.
  GraphNumber Add(Graph graph);
  void Remove(GraphNumber graph);

  // An executable that holds the graph, for a launch on `stream`; to be returned. The stream
  // waits for the launches that the graph had on others, unless a capture holds it: what is
  // captured runs later, and it is for those who replay it to order that. Nor for one on a stream
  // that a capture holds, where the end of no launch can be marked.
  GraphExec Lease(GraphNumber graph, StreamId stream);
  // `launch` is what it was used for. It is returned even if this throws.
  void Return(GraphNumber graph, const Launch& launch);

  // The next launch of the graph on that stream finds an executable that is ready on the device.
  // Getting it ready waits for the stream's work, and counts as a launch that has not ended. On a
  // stream that a capture holds the executable is made, and not made ready: that would be captured.
  void Prepare(GraphNumber graph, const Launch& launch);

  Stats stats() const;

 private:
  // A launch that may not have ended, known to the executable and to a graph that has lost that.
  struct Run {
    Run(Driver& driver, GraphNumber launched, const Launch& its_launch, uint64_t before)
        : events(driver), graph(launched), launch(its_launch), number(before) {}
    ~Run() { Unmark(); }
    Run(const Run&) = delete;
    Run& operator=(const Run&) = delete;
    // Whether what follows on that stream runs behind it anyway. A stream that may go can leave its
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
    // Made when it is leased, so that to return it needs no memory.
    std::vector<std::shared_ptr<Run>> leases = {};
    std::shared_ptr<Run> last_run = nullptr;  // if that may not have ended
  };
  struct Member {
    Graph graph;
    std::string alone = {};                   // why it does not share, if it does not
    std::shared_ptr<Run> last_run = nullptr;  // of those on executables that it has lost, likewise
  };
  void RemoveLocked(GraphNumber graph);
  // A graph has left the group, whose executable is of no more use then, if one is.
  void HasLeft(GroupNumber group, std::optional<ExecNumber> useless);
  // Sees to it that an executable holds the graph. `lock`, the cache's, is let go while this waits.
  Exec& Hold(GraphNumber graph, StreamId stream, std::unique_lock<std::mutex>& lock);
  // Without memory for it what holds the graph already is good enough: a faster one was to be made.
  // Returns nullptr where those that there are have to do.
  Exec* Make(GraphNumber graph);
  // Returns false if the driver refused: then the graph is set apart. If the driver fails otherwise
  // the executable is gone.
  bool Update(ExecNumber number, GraphNumber graph);
  void DestroyHandle(ExecNumber number) noexcept;
  // Whether it must stay as it is, when a graph is to run on `stream`.
  bool InUse(Exec& exec, StreamId stream);
  // Whether a launch has not ended, if there is one: one that has is forgotten.
  bool Running(std::shared_ptr<Run>& run);
  void NoteLaunch(Exec& exec, std::shared_ptr<Run> run, const Launch& launch);
  // Marks its end, if that is possible now. A stream that may be gone `is_there` after the launch.
  void MarkEnd(Run& run, bool is_there = false);
  // The graph that it holds is about to lose it.
  void RememberRun(ExecNumber number);
  // What follows on the stream runs behind that launch, if there is one.
  void WaitFor(std::shared_ptr<Run>& run, StreamId stream);
  // No mark can be made on it now: see Frontier::held.
  bool IsHeld(StreamId stream);
  // Another executable is to be launched.
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
