// What comes before what in the graph under capture, and which fences that proves to be over, and
// for which of its streams.
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
//
// A fence stands behind nodes: the frontiers, at the free, of all streams that worked on the bytes.
// To a stream it is proven once all of them are in the stream's reach. Each fence that is not waits
// at one node that the stream has not reached yet; when the stream reaches it, the fence goes on to
// the next, or is proven. Those that wait on one path of the graph wait in the order in which the
// stream will come by. So nobody ever looks through the fences.
//
// What a stream frees is leased to others to whom it is proven. A stream that never waits for the
// others does not get it back before the capture ends, and without a limit the pool would grow as
// long as that lasts. So one that has had to make the pool grow since it leased to another leases
// no more to that one until something of the other's is proven to it. Free pages that nobody had in
// this capture count as growth: a later capture would else lease until it has used them up.
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

// Paths are numbered from 0 as their first nodes are met.
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

// Which fences are over, and for which streams.
class ProofTable {
 public:
  explicit ProofTable(Driver& driver) : order_(driver) {}

  // A stream of that capture, which has reached nothing yet. Streams are numbered from 0 as they
  // are added: returns the number. Throws with nothing changed.
  std::size_t AddStream(CaptureId capture);
  // Forgets the one that was added last. pre: it has reached nothing yet.
  void RemoveLastStream() { streams_.pop_back(); }
  std::size_t stream_count() const { return streams_.size(); }
  CaptureId capture(std::size_t stream) const { return streams_[stream].capture; }

  // A fence behind at least one node of that capture. To `owner`, if any, it is proven at once: the
  // order of the stream protects what it alone has worked on. pre: the fence is not in the table.
  // Throws with nothing changed, but that the fence may not be added again.
  void Add(FenceId fence, CaptureId capture, std::span<const GraphNode> nodes,
           std::optional<std::size_t> owner);
  // The fence added last, if it is just like that.
  std::optional<FenceId> LastLike(CaptureId capture, std::span<const GraphNode> nodes,
                                  std::optional<std::size_t> owner);
  bool Contains(FenceId fence) const {
    return Index(fence) < fences_.size() && fences_[Index(fence)].count > 0;
  }
  bool IsProven(FenceId fence, std::size_t stream) const;
  // Whether it is proven, and its owner leases to the stream.
  bool IsLeased(FenceId fence, std::size_t stream) const;
  // The stream has taken pages that nobody had in this capture, new or free ones.
  void NoteGrowth(std::size_t stream);
  // Whether the stream has gone on without waiting for what came before: it is behind a
  // programmatic edge. Nothing more is proven to it but what it owns. What it owns already may have
  // come to it by a proof that holds no more: if any has, it must forfeit all of that.
  bool must_forfeit(std::size_t stream) const {
    return streams_[stream].reach.stopped && streams_[stream].relies_on_proofs;
  }
  // Nothing is proven to the stream but the fences that it comes to own from now on.
  void Forfeit(std::size_t stream);

  // The stream stands at `frontier`: returns the fences that are proven and leased to it since
  // HandOver() was called last, in no order; valid until the next call. Whoever fails to act on
  // them gets them again. May throw with the stream at the frontier or where it was.
  std::span<const FenceId> Advance(std::size_t stream, const Frontier& frontier);
  // What Advance() returned has been acted on.
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
    bool relies_on_proofs = false;  // a fence that it does not own has been proven to it
    uint32_t owns_from = 0;         // it owns fences whose first node is not before this one
    GraphOrder::Reach reach;
    std::vector<GraphOrder::Step> news;       // reached, but who waits there has not been told yet
    std::vector<FenceId> proven;              // and leased, but not handed over yet
    std::vector<FenceId> refused;             // proven, but not leased
    std::vector<LeaseState> leases;           // to each stream
    std::vector<std::vector<Waiter>> queues;  // by path: heaps, that of the first node in front
  };

  // Makes the fence wait at a node that the stream has not reached. Returns false if there is none.
  // Throws with nothing changed.
  bool Wait(std::size_t stream, FenceId fence);

  bool Owns(std::size_t stream, const Fence& fence) const {
    return fence.owner == stream && fence.first >= streams_[stream].owns_from;
  }

  // Whether the fence, which has come to be proven to the stream, is leased to it; it is refused
  // else. Throws with it neither leased nor refused.
  bool Lease(FenceId fence, std::size_t stream);
  // Something of the other's is proven to the stream, which leases to it again.
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
