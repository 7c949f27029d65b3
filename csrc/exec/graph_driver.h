// The contract for captured graphs and what runs them: templates, and executables made from them.
//
// cuda_graph_driver.h does it on a GPU. Rules for every call: it may come from any thread, but no
// two calls that name the same graph or executable at once; one that fails throws DriverError and
// has changed nothing, but where it says otherwise; none disturbs a capture that another thread has
// under way.
#pragma once

#include <cstdint>
#include <string>

#include "core/driver.h"

namespace cgp {

// A graph under no capture any more: the value of a cudaGraph_t.
enum class Graph : uint64_t {};

// The value of a cudaGraphExec_t.
enum class GraphExec : uint64_t {};

// What decides which graphs an executable can hold in turn.
struct GraphKind {
  // An executable that holds a graph can be updated to hold any other one with an equal key, and
  // then does what an executable made from that one does. The driver may still refuse.
  std::string key;
  std::string alone = {};   // why an executable of it is never updated; empty: it may be
  uint64_t exec_bytes = 0;  // about what an executable takes on the device; alike for equal keys
};

class GraphDriver {
 public:
  GraphDriver() = default;
  GraphDriver(const GraphDriver&) = delete;
  GraphDriver& operator=(const GraphDriver&) = delete;
  virtual ~GraphDriver() = default;

  virtual GraphKind KindOf(Graph graph) = 0;

  // An executable that holds the graph, as torch.cuda.CUDAGraph.instantiate() makes it.
  virtual GraphExec Instantiate(Graph graph) = 0;

  // The executable holds `graph` from its next launch on; launches before stay what they were,
  // those that still run included. Returns false, with nothing changed, if the driver refuses. What
  // the executable holds after another failure is not known.
  virtual bool Update(GraphExec exec, Graph graph) = 0;

  // Makes ready on the device what the next launch needs, behind the work of `stream`.
  virtual void Upload(GraphExec exec, StreamId stream) = 0;

  // Launches that still run end as if it lived on.
  virtual void Destroy(GraphExec exec) noexcept = 0;
};

}  // namespace cgp
