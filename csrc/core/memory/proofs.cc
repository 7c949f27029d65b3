#include "core/memory/proofs.h"

#include <algorithm>
#include <functional>

#include "core/base/error.h"

namespace cgp {

PathPosition GraphOrder::PositionOf(CaptureId capture, GraphNode node) {
  Positions& positions = positions_[capture];
  if (const PathPosition* const known = positions.Find(Key(node))) return *known;
  met_.clear();
  before_.clear();
  Meet(node);
  for (;;) {
    Met& met = met_.back();
    if (met.next < before_.size()) {
      Before& before = before_[met.next];
      const PathPosition* const known = positions.Find(Key(before.node));
      if (known == nullptr) {
        Meet(before.node);
      } else {
        before.position = *known;
        ++met.next;
      }
      continue;
    }
    const PathPosition position = Append(met, positions);
    if (met_.size() == 1) return position;
    before_.resize(met.first);
    met_.pop_back();
  }
}

void GraphOrder::Meet(GraphNode node) {
  const bool waits = driver_.Dependencies(node, &asked_);
  met_.push_back({.node = node, .waits = waits, .first = before_.size(), .next = before_.size()});
  if (!waits) return;  // no reach gets past it, so its dependencies do not matter
  for (const GraphNode before : asked_) before_.push_back({.node = before, .position = {}});
}

// pre: the places of all its dependencies are known.
PathPosition GraphOrder::Append(const Met& met, Positions& positions) {
  const std::span<const Before> before = std::span(before_).subspan(met.first);
  const PathId id = PathFor(before);
  Path& path = paths_[Index(id)];
  // Some may be left of a call that failed.
  while (!path.edges.empty() && path.edges.back().index == path.length) path.edges.pop_back();
  for (const auto& [node, position] : before) {
    if (position.path != id) path.edges.push_back({.index = path.length, .before = position});
  }
  positions.Reserve(positions.size() + 1);

  // Nothing throws from here on.
  const PathPosition position{.path = id, .index = path.length++};
  path.waits &= met.waits;
  positions.Insert(Key(met.node), position);
  return position;
}

// A path that ends with a dependency of the new node, or a new path.
PathId GraphOrder::PathFor(std::span<const Before> before) {
  for (const auto& [node, position] : before) {
    if (position.index + 1 == paths_[Index(position.path)].length) return position.path;
  }
  if (paths_.empty() || paths_.back().length > 0) paths_.emplace_back();
  return PathId{static_cast<uint32_t>(paths_.size() - 1)};
}

void GraphOrder::Advance(Reach& reach, const Frontier& frontier, std::vector<Step>* steps) {
  if (reach.stopped) return;
  const std::size_t known = steps->size();
  bool stopped = !frontier.waits;
  const auto take_back = [&] {
    for (; steps->size() > known; steps->pop_back()) {
      reach.counts[Index(steps->back().path)] = steps->back().before;
    }
  };
  try {
    todo_.clear();
    if (!stopped) {
      for (const GraphNode node : frontier.nodes) {
        todo_.push_back(PositionOf(frontier.capture, node));
      }
    }
    Extend(reach, steps);
  } catch (...) {
    take_back();
    throw;
  }
  for (std::size_t i = known; i < steps->size(); ++i) {
    stopped |= !paths_[Index((*steps)[i].path)].waits;
  }
  if (!stopped) return;
  // Even an earlier frontier does not count: the stream may not have waited for it.
  take_back();
  reach = {.counts = {}, .stopped = true};
}

// Throws with `steps` saying what has changed.
void GraphOrder::Extend(Reach& reach, std::vector<Step>* steps) {
  if (reach.counts.size() < paths_.size()) reach.counts.resize(paths_.size());
  while (!todo_.empty()) {
    const auto [id, index] = todo_.back();
    todo_.pop_back();
    uint32_t& count = reach.counts[Index(id)];
    if (index < count) continue;
    steps->push_back({.path = id, .before = count});
    const std::vector<Edge>& edges = paths_[Index(id)].edges;
    auto edge = std::ranges::lower_bound(edges, count, {}, &Edge::index);
    for (; edge != edges.end() && edge->index <= index; ++edge) todo_.push_back(edge->before);
    count = index + 1;
  }
}

void GraphOrder::Clear() {
  paths_.clear();
  positions_.clear();
}

std::size_t ProofTable::AddStream(CaptureId capture) {
  const std::size_t number = streams_.size();
  streams_.emplace_back().capture = capture;
  try {
    for (Stream& stream : streams_) stream.leases.resize(streams_.size());
    for (std::size_t i = 0; i < fences_.size(); ++i) {
      const auto fence = static_cast<FenceId>(i);
      if (Contains(fence)) Wait(number, fence);
    }
  } catch (...) {
    RemoveLastStream();
    throw;
  }
  return number;
}

void ProofTable::Add(FenceId fence, CaptureId capture, std::span<const GraphNode> nodes,
                     std::optional<std::size_t> owner) {
  CGP_CHECK(!nodes.empty() && !Contains(fence));
  if (fences_.size() <= Index(fence)) fences_.resize(Index(fence) + std::size_t{1});
  Fence& added = fences_[Index(fence)];
  added.first = static_cast<uint32_t>(nodes_.size());
  added.owner = owner;
  for (const GraphNode node : nodes) nodes_.push_back(order_.PositionOf(capture, node));
  added.count = static_cast<uint32_t>(nodes.size());
  try {
    for (std::size_t stream = 0; stream < streams_.size(); ++stream) {
      if (!Wait(stream, fence)) Lease(fence, stream);
    }
  } catch (...) {
    added.count = 0;  // its waiters are passed over
    throw;
  }
  last_ = fence;
}

std::optional<FenceId> ProofTable::LastLike(CaptureId capture, std::span<const GraphNode> nodes,
                                            std::optional<std::size_t> owner) {
  if (!Contains(last_)) return std::nullopt;
  const Fence& last = fences_[Index(last_)];
  if (last.owner != owner || last.count != nodes.size()) return std::nullopt;
  for (uint32_t i = 0; i < last.count; ++i) {
    if (order_.PositionOf(capture, nodes[i]) != nodes_[last.first + i]) return std::nullopt;
  }
  return last_;
}

bool ProofTable::IsProven(FenceId fence, std::size_t stream) const {
  const Fence& known = fences_[Index(fence)];
  return Owns(stream, known) || !FirstMissing(streams_[stream], known);
}

bool ProofTable::IsLeased(FenceId fence, std::size_t stream) const {
  const std::optional<std::size_t> owner = fences_[Index(fence)].owner;
  return IsProven(fence, stream) &&
         (!owner || owner == stream || streams_[*owner].leases[stream] != LeaseState::kRefused);
}

void ProofTable::NoteGrowth(std::size_t stream) {
  std::ranges::replace(streams_[stream].leases, LeaseState::kOut, LeaseState::kRefused);
}

bool ProofTable::Lease(FenceId fence, std::size_t stream) {
  const std::optional<std::size_t> owner = fences_[Index(fence)].owner;
  if (!owner || owner == stream) return true;
  Receive(stream, *owner);
  LeaseState& lease = streams_[*owner].leases[stream];
  if (lease == LeaseState::kRefused) {
    streams_[stream].refused.push_back(fence);
    return false;
  }
  lease = LeaseState::kOut;
  return true;
}

void ProofTable::Receive(std::size_t stream, std::size_t other) {
  LeaseState& lease = streams_[stream].leases[other];
  if (lease == LeaseState::kRefused) {
    std::vector<FenceId>& refused = streams_[other].refused;
    std::erase_if(refused, [this](FenceId fence) { return !Contains(fence); });
    const auto leased = std::partition(refused.begin(), refused.end(), [&](FenceId fence) {
      return fences_[Index(fence)].owner != stream;
    });
    streams_[other].proven.insert(streams_[other].proven.end(), leased, refused.end());
    refused.erase(leased, refused.end());
  }
  lease = LeaseState::kNone;
}

void ProofTable::Forfeit(std::size_t number) {
  Stream& stream = streams_[number];
  stream.relies_on_proofs = false;
  stream.owns_from = static_cast<uint32_t>(nodes_.size());
  stream.proven.clear();
  stream.refused.clear();
  last_ = FenceId::kOpen;  // LastLike() must find no earlier fence
}

std::span<const FenceId> ProofTable::Advance(std::size_t number, const Frontier& frontier) {
  Stream& stream = streams_[number];
  order_.Advance(stream.reach, frontier, &stream.news);
  for (; !stream.news.empty(); stream.news.pop_back()) Tell(number, stream.news.back().path);
  return stream.proven;
}

// Tells those that wait at what the stream has reached of the path, one after the other. Each is
// told before it goes.
void ProofTable::Tell(std::size_t number, PathId path) {
  Stream& stream = streams_[number];
  const auto next = [&] {
    if (Index(path) >= stream.queues.size() || stream.queues[Index(path)].empty()) return false;
    return stream.reach.Contains({path, stream.queues[Index(path)].front().index});
  };
  while (next()) {
    const FenceId fence = stream.queues[Index(path)].front().fence;
    ReserveMore(stream.proven, 1);
    if (Contains(fence) && !Wait(number, fence) && Lease(fence, number)) {
      stream.proven.push_back(fence);
    }
    std::vector<Waiter>& queue = stream.queues[Index(path)];
    std::ranges::pop_heap(queue, std::greater(), &Waiter::index);
    queue.pop_back();
  }
}

bool ProofTable::Wait(std::size_t number, FenceId fence) {
  Stream& stream = streams_[number];
  const Fence& waits = fences_[Index(fence)];
  if (Owns(number, waits)) return false;
  const std::optional<PathPosition> missing = FirstMissing(stream, waits);
  if (!missing) {
    stream.relies_on_proofs = true;
    return false;
  }
  if (stream.queues.size() <= Index(missing->path)) stream.queues.resize(order_.path_count());
  std::vector<Waiter>& queue = stream.queues[Index(missing->path)];
  queue.push_back({.index = missing->index, .fence = fence});
  std::ranges::push_heap(queue, std::greater(), &Waiter::index);
  return true;
}

std::optional<PathPosition> ProofTable::FirstMissing(const Stream& stream,
                                                     const Fence& fence) const {
  for (uint32_t i = 0; i < fence.count; ++i) {
    const PathPosition node = nodes_[fence.first + i];
    if (!stream.reach.Contains(node)) return node;
  }
  return std::nullopt;
}

void ProofTable::Clear() {
  order_.Clear();
  nodes_.clear();
  fences_.clear();
  streams_.clear();
  last_ = FenceId::kOpen;
}

}  // namespace cgp
