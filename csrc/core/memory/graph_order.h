// Which nodes of the graph under capture are complete before what a stream captures next begins.
//
// The nodes are laid out on paths: each node of a path depends on the one before it, so whoever is
// behind a node is behind all of its path up to there. A stream's reach is one number for each
// path: how many of its nodes are in the stream's frontier or before that. It grows while the
// capture goes on, so it is never worked out anew: it follows the edges from other paths into the
// part of a path that is new. So each stream follows each such edge once in a capture, however many
// nodes there are, and each node is asked once what it depends on. A capture has about as many
// paths as streams. (H. V. Jagadish, A compression technique to materialize transitive closure,
// ACM TODS 15, 1990: chains.)
//
// A node behind a programmatic edge may begin, and end, before the one in front of it is complete:
// what comes before such a node is not complete when it is. A reach that meets one is empty from
// then on: what was reached as a frontier only may be what that node does not wait for.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "core/base/address_map.h"
#include "core/base/units.h"
#include "core/driver.h"

namespace cgp {

// Paths are numbered from 0 as their first nodes are met.
enum class PathId : uint32_t {};

// The node `index` of a path.
struct PathPosition {
  PathId path{};
  uint32_t index = 0;

  friend bool operator==(const PathPosition&, const PathPosition&) = default;
};

class GraphOrder {
 public:
  explicit GraphOrder(Driver& driver) : driver_(driver) {}

  // What Advance() makes of it.
  struct Reach {
    std::vector<uint32_t> counts;  // of nodes, by path
    bool stopped = false;          // by a programmatic edge

    bool Contains(PathPosition node) const {
      return Index(node.path) < counts.size() && node.index < counts[Index(node.path)];
    }
  };

  // A path of which a reach contains more nodes than the `before` that it did.
  struct Step {
    PathId path{};
    uint32_t before = 0;
  };

  // Asks the driver for what the node depends on, and for what that depends on, as far as it is
  // new. A node is known by its capture too: once that is over, another may use the node's handle
  // again. May throw with some of those before it met.
  PathPosition PositionOf(CaptureId capture, GraphNode node);
  std::size_t path_count() const { return paths_.size(); }

  // The stream of that reach stands at `frontier` now: appends what the reach has grown by. Throws
  // with neither changed.
  void Advance(Reach& reach, const Frontier& frontier, std::vector<Step>* steps);

  // Forgets all nodes.
  void Clear();

 private:
  // The node `index` of a path comes behind `before`, a node of another path.
  struct Edge {
    uint32_t index = 0;
    PathPosition before;
  };
  struct Path {
    uint32_t length = 0;
    bool waits = true;        // its first node does, for all that it depends on to be complete
    std::vector<Edge> edges;  // by index
  };
  // A node that is being met, and what it depends on: before_[first] and all behind that, as long
  // as it is the last in met_. It is known where those in front of `next` stand.
  struct Met {
    GraphNode node{};
    bool waits = true;
    std::size_t first = 0;
    std::size_t next = 0;
  };
  struct Before {
    GraphNode node{};
    PathPosition position;
  };
  using Positions = AddressMap<PathPosition>;  // by the node's handle

  static Address Key(GraphNode node) { return static_cast<Address>(node); }

  void Meet(GraphNode node);
  PathPosition Append(const Met& met, Positions& positions);
  PathId PathFor(std::span<const Before> before);
  void Extend(Reach& reach, std::vector<Step>* steps);

  Driver& driver_;
  std::vector<Path> paths_;
  std::map<CaptureId, Positions> positions_;

  // Kept for their memory.
  std::vector<GraphNode> asked_;    // what the driver said last
  std::vector<Met> met_;            // each is what the one before it depends on
  std::vector<Before> before_;      // of all in met_
  std::vector<PathPosition> todo_;  // what a reach is to contain
};

}  // namespace cgp
