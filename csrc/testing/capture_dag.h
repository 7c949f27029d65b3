// A captured program as a judge sees it: which node runs behind which, by plain all-pairs
// reachability, and the program's execution in any order that this allows.
//
// It shares no code with the core, nor with the host driver's graphs from which the core learns of
// captures: what a program captures is told to both, and both must come to the same frontiers.
//
// A node that launches programmatically runs behind what its own stream launched before, and behind
// nothing else that the stream was told to wait for.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <random>
#include <set>
#include <vector>

#include "core/driver.h"
#include "core/pool.h"
#include "testing/host_graphs.h"

namespace cgp {

// Fills a block with what follows from a word, or sees that it is filled with that: at both ends of
// each granule, since nothing smaller is ever placed.
struct Kernel {
  Block block;
  uint64_t word = 0;
  bool writes = false;

  // Returns whether it found what it expects.
  bool Run() const;
};

class CaptureDag {
 public:
  using Node = size_t;  // numbered in the order of capture, over all captures
  struct Point {
    CaptureId capture = kNoCapture;
    std::vector<Node> nodes;
    bool waits = true;  // until the nodes are complete
  };

  explicit CaptureDag(HostGraphs& host) : host_(host) {}

  // --- What a program captures ---

  // What the capture has runs behind `behind`, of other captures, as a body's does.
  CaptureId Begin(StreamId stream, std::vector<Node> behind = {});
  // All streams leave the capture; the nodes stay, to be executed.
  void End(CaptureId capture);
  // Nothing of it will ever run, and nothing more can be captured.
  void Invalidate(CaptureId capture);
  // pre: the stream is capturing, and what launches programmatically has no kernel: it would need
  // more than this model to touch memory.
  Node Launch(StreamId stream, const std::optional<Kernel>& kernel = {}, bool programmatic = false);
  // The capture is over, and was that of a body: its nodes run as a part of this one.
  void Contain(Node node, CaptureId body);
  // Without a capture: the stream is not capturing.
  Point At(StreamId stream) const {
    const auto found = streams_.find(stream);
    return found == streams_.end() ? Point{} : found->second.point;
  }
  // Nothing happens if the capture is invalid. pre: the stream is part of it or of none.
  void Wait(StreamId stream, const Point& point);

  // --- What follows ---

  size_t size() const { return nodes_.size(); }
  bool IsCapturing(StreamId stream) const { return At(stream).capture != kNoCapture; }
  bool IsInvalid(CaptureId capture) const { return invalid_.contains(capture); }
  // In a capture that is valid.
  bool IsCaptured(StreamId stream) const {
    return IsCapturing(stream) && !IsInvalid(At(stream).capture);
  }
  CaptureId CaptureOf(Node node) const { return nodes_[node].capture; }
  // What the host driver must say of a stream that stands there.
  Frontier ToHost(const Point& point) const;
  // Whether what the stream launches next runs behind all of these.
  bool RunsBehind(StreamId stream, const std::vector<Node>& nodes) const;
  // Whether what it launched last does, or there is nothing to run behind.
  bool LastRunsBehind(StreamId stream, const std::vector<Node>& nodes) const;
  // Whether edges that wait for completion say so, and no others stand anywhere before the stream.
  bool ProvesBehind(StreamId stream, const std::vector<Node>& nodes) const;

  // --- Execution ---

  // Runs the nodes from `first` up to `end` in an order that the edges allow: of those that are
  // ready always the most urgent one. Returns the first that finds wrong data.
  // pre: urgency has one number for each of them.
  std::optional<Node> Run(Node first, Node end, const std::vector<uint64_t>& urgency) const;
  // An order to try: random, along branches, the oldest node last, one node as late as can be, ...
  std::vector<uint64_t> SomeUrgency(Node first, Node end, std::mt19937_64& random) const;

 private:
  class NodeSet {
   public:
    void Insert(Node node) {
      words_.resize(std::max(words_.size(), node / 64 + 1));
      words_[node / 64] |= uint64_t{1} << node % 64;
    }
    void Merge(const NodeSet& other) {
      words_.resize(std::max(words_.size(), other.words_.size()));
      for (size_t i = 0; i < other.words_.size(); ++i) words_[i] |= other.words_[i];
    }
    bool ContainsAll(const std::vector<Node>& nodes) const {
      return std::ranges::all_of(nodes, [this](Node node) {
        return node / 64 < words_.size() && (words_[node / 64] >> node % 64 & 1) != 0;
      });
    }

   private:
    std::vector<uint64_t> words_;
  };
  struct Launched {
    StreamId stream{};
    CaptureId capture = kNoCapture;
    GraphNode host{};
    std::optional<Kernel> kernel;
    std::vector<Node> after;  // it runs directly behind
    // Itself and all that it runs behind; and what of that is said by edges that wait.
    NodeSet behind;
    NodeSet proven;
    bool only_waits = true;  // no edge before it does not
  };
  struct Stream {
    Point point;
    std::optional<Node> last;  // that it launched itself
  };

  // What the next node runs directly behind.
  std::vector<Node> After(const Stream& stream, bool waits) const;

  HostGraphs& host_;
  std::map<StreamId, Stream> streams_;
  std::map<CaptureId, std::vector<Node>> bases_;  // what captures run behind as a whole
  std::set<CaptureId> invalid_;
  std::vector<Launched> nodes_;
};

}  // namespace cgp
