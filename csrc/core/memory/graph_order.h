// Which nodes of the graph under capture are complete before what a stream captures next begins.
//
// A stream's reach is its frontier and all that comes before it. It grows while the capture goes
// on, so it is never worked out anew: a search goes backwards from the frontier and stops at what
// was reached before. So each stream visits each node once in a capture, and each node is asked
// once what it depends on.
//
// A node behind a programmatic edge may begin, and end, before the one in front of it is complete:
// what comes before such a node is not complete when it is. A reach that meets one is empty from
// then on: what was reached as a frontier only may be what that node does not wait for.
#pragma once

#include <array>
#include <cstdint>
#include <deque>
#include <map>
#include <vector>

#include "core/base/address_map.h"
#include "core/base/units.h"
#include "driver/driver.h"

namespace cgp {

// Nodes are numbered from 0 as they are met.
enum class NodeNumber : uint32_t {};

class GraphOrder {
 public:
  explicit GraphOrder(Driver& driver) : driver_(driver) {}

  class Reach {
   public:
    bool Contains(NodeNumber node) const {
      return Index(node) < reached_.size() && reached_[Index(node)];
    }
    bool stopped() const { return stopped_; }
    void Stop() {
      reached_.clear();
      stopped_ = true;
    }

   private:
    friend class GraphOrder;
    std::vector<bool> reached_;  // by node
    bool stopped_ = false;
  };

  // A node is known by its capture too: once that is over, another may use the node's handle again.
  NodeNumber NumberOf(CaptureId capture, GraphNode node);
  uint32_t node_count() const { return static_cast<uint32_t>(nodes_.size()); }

  // The stream of that reach stands at `frontier` now: appends the nodes that it has newly reached.
  // Throws with neither changed.
  void Advance(Reach& reach, const Frontier& frontier, std::vector<NodeNumber>* news);

  // Forgets all nodes.
  void Clear();

 private:
  struct Node {
    GraphNode handle{};
    bool asked = false;  // its dependencies are known:
    bool waits = true;   // for all of them to be complete
    uint32_t first = 0;  // in dependencies_
    uint32_t count = 0;
  };

  using Numbers = AddressMap<NodeNumber>;  // by Key()

  // A node is a pointer, and the map is made for multiples of 512.
  static Address Key(GraphNode node) { return static_cast<Address>(node) * kGranuleBytes; }
  void AskDependencies(CaptureId capture, NodeNumber number);

  Driver& driver_;

  // A capture has up to 100,000 nodes and more, and whoever asks for a few bytes must not wait
  // until tables of that size have been moved to where they can grow: these never move, or in small
  // parts.
  std::deque<Node> nodes_;  // by number
  std::deque<NodeNumber> dependencies_;
  std::map<CaptureId, std::array<Numbers, 64>> numbers_;
  std::vector<GraphNode> asked_;  // what the driver said last; kept for its memory
};

}  // namespace cgp
