// What captures record, on the host: graphs whose nodes are only numbers, and the streams that are
// part of each capture.
//
// As CUDA has it: a capture begins on one stream; a stream that waits for a point of it becomes
// part of it; what is captured on a stream depends on all that it was told to wait for.
#pragma once

#include <cstdint>
#include <map>
#include <mutex>
#include <optional>
#include <unordered_map>
#include <vector>

#include "core/driver.h"

namespace cgp {

class HostGraphs {
 public:
  // All throw UsageError for what CUDA would refuse, as it does any work in a capture that has been
  // invalidated.

  // pre: the stream is not capturing.
  CaptureId Begin(StreamId origin);
  // Every stream of the capture leaves it; its nodes are forgotten, and later nodes get their
  // numbers, as CUDA's get the addresses of those of a graph that is gone.
  void End(CaptureId capture);
  // As when a call that captures forbid was made: the streams stay, but nothing is told of them.
  void Invalidate(CaptureId capture);

  // Captures a node behind the stream's frontier, and returns it. A programmatic launch does not
  // wait until what stands before it is complete. pre: the stream is capturing.
  enum class LaunchKind : uint8_t { kPlain, kProgrammatic };
  GraphNode Launch(StreamId stream, LaunchKind kind = LaunchKind::kPlain);
  // Where the stream stands, as an event recorded on it now has it (with `waits` taken away, as a
  // programmatic event has it: who waits for that does not wait until the nodes are complete).
  // pre: the stream is capturing.
  Frontier Record(StreamId stream);
  // What is captured on the stream from now on depends on the point too. pre: the stream is part of
  // the point's capture or of none.
  void Wait(StreamId stream, const Frontier& point);

  // Whether the stream is part of a capture, be it an invalidated one.
  bool Contains(StreamId stream) const;
  // The capture that began first, of those under way, and the one that began last, of all.
  std::optional<CaptureId> oldest() const;
  CaptureId newest() const;
  bool AnyCapture() const { return oldest().has_value(); }

  // Driver::Capture() and Driver::Dependencies().
  void Capture(StreamId stream, Frontier* frontier) const;
  bool Dependencies(GraphNode node, std::vector<GraphNode>* nodes) const;

 private:
  struct Graph {
    bool invalidated = false;
    std::vector<GraphNode> nodes;
  };
  struct Node {
    std::vector<GraphNode> dependencies;
    bool waits = true;
  };

  Graph& UnderWay(CaptureId capture);
  Frontier& Known(StreamId stream);
  GraphNode NewNode();

  mutable std::mutex mutex_;
  std::map<CaptureId, Graph> graphs_;
  std::map<StreamId, Frontier> streams_;  // those that are capturing, with their frontiers
  std::unordered_map<GraphNode, Node> nodes_;
  CaptureId last_capture_ = kNoCapture;
  uint64_t last_node_ = 0;
  std::vector<GraphNode> spare_nodes_;  // of captures that are over; the newest are taken first
};

}  // namespace cgp
