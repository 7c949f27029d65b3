// The order of the nodes of the graph under capture, and which fences it proves to be over, for
// which stream.
//
// The nodes lie on paths. Each node of a path depends on the one before it, so whatever is behind a
// node is behind all of the path up to there. A stream's reach is one number for each path: how
// many of its nodes are in the stream's frontier or before it. It only grows, so it is never
// computed anew: it follows the edges from other paths into the new part of a path. So each stream
// follows such an edge once in a capture, and each node is asked once for its dependencies, however
// many nodes there are. A capture has about as many paths as streams. (H. V. Jagadish, A
// compression technique to materialize transitive closure, ACM TODS 15, 1990: chains.)
//
// A node behind a programmatic edge may begin, and end, before the node in front of it is complete.
// So when such a node is complete, what comes before it may not be. A reach that meets one is empty
// from then on, since that node may not wait for what was reached before as a frontier only.
//
// A fence stands behind nodes: the frontiers, at the free, of all streams that worked on the bytes.
// It is proven to a stream once all of them are in the stream's reach. Until then it waits at one
// node that the stream has not reached. When the stream reaches that node, the fence moves on to
// the next, or is proven. The fences that wait on one path wait in the order of its nodes, so
// nobody ever searches the fences.
//
// A stream leases what it frees to others to whom it is proven. If a stream never waits for the
// others, it gets nothing back before the capture ends, and the pool would grow without a limit. So
// a stream that made the pool grow since it gave another a lease gives that one no more leases,
// until something of the other's is proven to it. Free pages that nobody had in this capture count
// as growth: otherwise a later capture would lease until it has used them up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <span>
#include <vector>

#include "core/base/address_map.h"
#include "core/base/units.h"
#include "core/driver.h"
#include "core/memory/page_space.h"

namespace cgp {

// Paths are numbered from 0, in the order in which their first nodes are met.
enum class PathId : uint32_t {};

// The node `index` of a path.
struct PathPosition {
  PathId path{};
  uint32_t index = 0;

  friend bool operator==(const PathPosition&, const PathPosition&) = default;
};

// Which nodes are complete before what a stream captures next begins.
class GraphOrder {
 public:
  explicit GraphOrder(Driver& driver) : driver_(driver) {}

  // What a stream has reached; Advance() moves it on.
  struct Reach {
    std::vector<uint32_t> counts;  // of nodes, by path
    bool stopped = false;          // by a programmatic edge

    bool Contains(PathPosition node) const {
      return Index(node.path) < counts.size() && node.index < counts[Index(node.path)];
    }
  };

  // A path of which a reach has grown from `before` nodes.
  struct Step {
    PathId path{};
    uint32_t before = 0;
  };

  // Returns where the node is. Asks the driver for its dependencies, and for theirs, as far as they
  // are new. The capture is a part of a node's name: once it is over, another may use the handle
  // again. May throw with some of the dependencies met.
  PathPosition PositionOf(CaptureId capture, GraphNode node);
  std::size_t path_count() const { return paths_.size(); }

  // Moves the reach to `frontier` and appends what it has grown by. Throws with neither changed.
  void Advance(Reach& reach, const Frontier& frontier, std::vector<Step>* steps);

  // Drops all nodes.
  void Clear();

 private:
  // The node `index` of a path depends on `before`, a node of another path.
  struct Edge {
    uint32_t index = 0;
    PathPosition before;
  };
  struct Path {
    uint32_t length = 0;
    bool waits = true;        // its first node does, for all its dependencies to be complete
    std::vector<Edge> edges;  // by index
  };
  // A node that is being met. Its dependencies begin at before_[first], as long as it is the last
  // in met_. The places of those before `next` are known.
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

  // These only reuse their memory.
  std::vector<GraphNode> asked_;    // what the driver said last
  std::vector<Met> met_;            // each is what the one before it depends on
  std::vector<Before> before_;      // of all in met_
  std::vector<PathPosition> todo_;  // what a reach is to contain
};

// Which fences are over, and for which streams.
class ProofTable {
 public:
  explicit ProofTable(Driver& driver) : order_(driver) {}

  // Adds a stream of that capture, which has reached nothing yet, and returns its number. Streams
  // are numbered from 0. Throws with nothing changed.
  std::size_t AddStream(CaptureId capture);
  // Drops the stream that was added last. pre: it has reached nothing yet.
  void RemoveLastStream() { streams_.pop_back(); }
  std::size_t stream_count() const { return streams_.size(); }
  CaptureId capture(std::size_t stream) const { return streams_[stream].capture; }

  // Adds a fence behind at least one node of that capture. It is proven to `owner`, if any, at
  // once: the stream's order protects what it alone has worked on. pre: the fence is not in the
  // table. Throws with nothing changed, except that the fence may not be added again.
  void Add(FenceId fence, CaptureId capture, std::span<const GraphNode> nodes,
           std::optional<std::size_t> owner);
  // The fence added last, if it has this capture, these nodes and this owner.
  std::optional<FenceId> LastLike(CaptureId capture, std::span<const GraphNode> nodes,
                                  std::optional<std::size_t> owner);
  bool Contains(FenceId fence) const {
    return Index(fence) < fences_.size() && fences_[Index(fence)].count > 0;
  }
  bool IsProven(FenceId fence, std::size_t stream) const;
  // Whether it is proven to the stream, and its owner gives that one leases.
  bool IsLeased(FenceId fence, std::size_t stream) const;
  // Notes that the stream has taken pages that nobody had in this capture, new or free ones.
  void NoteGrowth(std::size_t stream);
  // Whether the stream has gone on without waiting, behind a programmatic edge, and has relied on
  // proofs. Nothing more is proven to it then but what it owns. Some of that may have come to it by
  // a proof that holds no more, so it must forfeit all of it.
  bool must_forfeit(std::size_t stream) const {
    return streams_[stream].reach.stopped && streams_[stream].relies_on_proofs;
  }
  // From now on nothing is proven to the stream but fences that it comes to own later.
  void Forfeit(std::size_t stream);

  // Moves the stream to `frontier`. Returns the fences that were proven and leased to it since the
  // last HandOver(), in no order; valid until the next call. A caller that fails to act on them
  // gets them again. May throw with the stream at the frontier or where it was.
  std::span<const FenceId> Advance(std::size_t stream, const Frontier& frontier);
  // The caller has acted on what Advance() returned.
  void HandOver(std::size_t stream) { streams_[stream].proven.clear(); }
  // Whether nothing is left from an Advance() that failed or was not acted on.
  bool IsHandedOver(std::size_t stream) const {
    return streams_[stream].news.empty() && streams_[stream].proven.empty();
  }

  // The capture is over.
  void Clear();

 private:
  struct Fence {
    uint32_t first = 0;  // node, in nodes_
    uint32_t count = 0;  // of nodes; 0: no fence of this table
    std::optional<std::size_t> owner;
  };
  enum class LeaseState : uint8_t { kNone, kOut, kRefused };
  struct Waiter {
    uint32_t index = 0;  // of the node on its path
    FenceId fence{};
  };
  struct Stream {
    CaptureId capture = kNoCapture;
    bool relies_on_proofs = false;  // a fence of another owner has been proven to it
    uint32_t owns_from = 0;         // it owns fences whose first node is not before this one
    GraphOrder::Reach reach;
    std::vector<GraphOrder::Step> news;       // reached, with waiters not told yet
    std::vector<FenceId> proven;              // and leased, but not handed over yet
    std::vector<FenceId> refused;             // proven, but not leased
    std::vector<LeaseState> leases;           // to each stream
    std::vector<std::vector<Waiter>> queues;  // by path: heaps, that of the first node in front
  };

  // Makes the fence wait at a node that the stream has not reached, or returns false if there is
  // none. Throws with nothing changed.
  bool Wait(std::size_t stream, FenceId fence);

  bool Owns(std::size_t stream, const Fence& fence) const {
    return fence.owner == stream && fence.first >= streams_[stream].owns_from;
  }

  // Leases the fence, now proven to the stream, or refuses to; returns whether it did. Throws with
  // it neither leased nor refused.
  bool Lease(FenceId fence, std::size_t stream);
  // Something of the other's is proven to the stream, which gives that one leases again.
  void Receive(std::size_t stream, std::size_t other);

  void Tell(std::size_t stream, PathId path);

  // The first node of the fence that the stream has not reached.
  std::optional<PathPosition> FirstMissing(const Stream& stream, const Fence& fence) const;

  GraphOrder order_;
  std::deque<PathPosition> nodes_;  // of all fences
  std::deque<Fence> fences_;        // by FenceId
  std::vector<Stream> streams_;
  FenceId last_ = FenceId::kOpen;  // added
};

}  // namespace cgp
