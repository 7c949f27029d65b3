// The contract for captured graphs and what runs them: templates, and executables made from them.
//
// cuda_graph_driver.h does this on a GPU. Rules for every call: it may come from any thread, but no
// two calls name the same graph or executable at once. A failed call throws DriverError and changes
// nothing, unless stated otherwise. No call disturbs a capture of another thread.
#pragma once

#include <cstdint>
#include <string>

#include "core/driver.h"

namespace cgp {

// A captured graph, whose capture has ended: the value of a cudaGraph_t.
enum class Graph : uint64_t {};

// The value of a cudaGraphExec_t.
enum class GraphExec : uint64_t {};

// Decides which graphs an executable can hold one after the other.
struct GraphKind {
  // An executable that holds a graph can be updated to hold any graph with an equal key, and then
  // does what an executable made from that one does. The driver may still refuse.
  std::string key;
  std::string alone = {};   // why an executable of it is never updated; empty: it may be
  uint64_t exec_bytes = 0;  // roughly what an executable takes on the device; equal for equal keys
};

class GraphDriver {
 public:
  GraphDriver() = default;
  GraphDriver(const GraphDriver&) = delete;
  GraphDriver& operator=(const GraphDriver&) = delete;
  virtual ~GraphDriver() = default;

  virtual GraphKind KindOf(Graph graph) = 0;

  // Makes an executable that holds the graph, as torch.cuda.CUDAGraph.instantiate() does.
  virtual GraphExec Instantiate(Graph graph) = 0;

  // Makes the executable hold `graph` from its next launch on; earlier launches, even running ones,
  // stay what they were. Returns false, with nothing changed, if the driver refuses. After another
  // failure it is unknown what the executable holds.
  virtual bool Update(GraphExec exec, Graph graph) = 0;

  // Makes the next launch ready on the device, behind the work of `stream`.
  virtual void Upload(GraphExec exec, StreamId stream) = 0;

  // Launches that still run are not disturbed.
  virtual void Destroy(GraphExec exec) noexcept = 0;
};

}  // namespace cgp
