// Which fences of the capture under way the graph proves to be over, and for which of its streams.
//
// A fence stands behind nodes: the frontiers, at the free, of all streams that worked on the bytes.
// To a stream it is proven once all of them are in the stream's reach (graph_order.h). Each fence
// that is not waits at one node that the stream has not reached yet; when the stream reaches it,
// the fence goes on to the next, or is proven. Those that wait on one path of the graph wait in the
// order in which the stream will come by. So nobody ever looks through the fences.
//
// What a stream frees is lent to others to whom it is proven. A stream that never waits for the
// others does not get it back before the capture ends, and without a limit the pool would grow as
// long as that lasts. So one that has had to make the pool grow since it lent to another lends no
// more to that one until something of the other's is proven to it. Free pages that nobody had in
// this capture count as growth: a later capture would else lend until it has used them up.
#pragma once

#include <cstddef>
#include <cstdint>
#include <deque>
#include <optional>
#include <span>
#include <vector>

#include "core/driver.h"
#include "core/memory/graph_order.h"
#include "core/memory/page_space.h"

namespace cgp {

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
  // Whether it is proven, and its owner lends to the stream.
  bool IsLent(FenceId fence, std::size_t stream) const;
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

  // The stream stands at `frontier`: returns the fences that are proven and lent to it since
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
  enum class Loan : uint8_t { kNone, kOut, kRefused };
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
    std::vector<FenceId> proven;              // and lent, but not handed over yet
    std::vector<FenceId> refused;             // proven, but not lent
    std::vector<Loan> loans;                  // to each stream
    std::vector<std::vector<Waiter>> queues;  // by path: heaps, that of the first node in front
  };

  // Makes the fence wait at a node that the stream has not reached. Returns false if there is none.
  // Throws with nothing changed.
  bool Wait(std::size_t stream, FenceId fence);

  bool Owns(std::size_t stream, const Fence& fence) const {
    return fence.owner == stream && fence.first >= streams_[stream].owns_from;
  }

  // Whether the fence, which has come to be proven to the stream, is lent to it; it is refused else.
  // Throws with it neither lent nor refused.
  bool Lend(FenceId fence, std::size_t stream);
  // Something of the other's is proven to the stream, which lends to it again.
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
