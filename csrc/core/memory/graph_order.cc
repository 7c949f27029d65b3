#include "core/memory/graph_order.h"

#include <algorithm>

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
  if (!waits) return;  // what comes before it does not matter: nobody gets past it
  for (const GraphNode before : asked_) before_.push_back({.node = before, .position = {}});
}

// pre: it is known where all that it depends on stands.
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

// One that ends with a node that the new one depends on, or a new one.
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
  // Not even what was in an earlier frontier stands: the stream may have gone on without waiting
  // for it.
  take_back();
  reach = {.counts = {}, .stopped = true};
}

// Throws with `steps` telling what has changed.
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

}  // namespace cgp
