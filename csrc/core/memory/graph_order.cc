#include "core/memory/graph_order.h"

namespace cgp {

NodeNumber GraphOrder::NumberOf(CaptureId capture, GraphNode node) {
  Numbers& numbers = NumbersOfLike(capture, node);
  if (const NodeNumber* const known = numbers.Find(Key(node))) return *known;
  const NodeNumber number{node_count()};
  numbers.ReserveOne();
  nodes_.push_back({.handle = node});
  numbers.Insert(Key(node), number);
  return number;
}

void GraphOrder::Advance(Reach& reach, const Frontier& frontier, std::vector<NodeNumber>* news) {
  if (reach.stopped_) return;
  const std::size_t known = news->size();
  const auto take_back = [&] {
    for (std::size_t i = known; i < news->size(); ++i) reach.reached_[Index((*news)[i])] = false;
    news->resize(known);
  };
  bool stopped = !frontier.waits;
  const auto visit = [&](NodeNumber node) {
    if (reach.Contains(node)) return;
    if (reach.reached_.size() <= Index(node)) reach.reached_.resize(nodes_.size());
    news->push_back(node);  // first: what is not there is not taken back
    reach.reached_[Index(node)] = true;
  };
  try {
    if (!stopped) {
      for (const GraphNode node : frontier.nodes) visit(NumberOf(frontier.capture, node));
    }
    for (std::size_t i = known; i < news->size() && !stopped; ++i) {
      AskDependencies(frontier.capture, (*news)[i]);
      const Node& node = nodes_[Index((*news)[i])];
      stopped = !node.waits;
      if (node.count == 1) {
        visit(node.dependency);
        continue;
      }
      for (uint32_t d = 0; d < node.count; ++d) visit(dependencies_[node.first + d]);
    }
  } catch (...) {
    take_back();
    throw;
  }
  if (!stopped) return;
  // Not even what was in an earlier frontier stands: the stream may have gone on without waiting
  // for it.
  take_back();
  reach.Stop();
}

void GraphOrder::Clear() {
  nodes_.clear();
  dependencies_.clear();
  numbers_.clear();
}

GraphOrder::Numbers& GraphOrder::NumbersOfLike(CaptureId capture, GraphNode node) {
  // By the middle bits of the hash of which the map uses the first.
  const uint64_t hash = static_cast<uint64_t>(node) * 0x9E3779B97F4A7C15ull;
  auto& parts = numbers_[capture];
  return parts[(hash >> 32) % parts.size()];
}

void GraphOrder::AskDependencies(CaptureId capture, NodeNumber number) {
  const auto i = Index(number);
  if (nodes_[i].asked) return;
  const bool waits = driver_.Dependencies(nodes_[i].handle, &asked_);
  const auto count = static_cast<uint32_t>(asked_.size());
  const auto first = static_cast<uint32_t>(dependencies_.size());
  NodeNumber dependency{};
  for (const GraphNode before : asked_) {
    dependency = NumberOf(capture, before);
    if (count > 1) dependencies_.push_back(dependency);
  }
  Node& node = nodes_[i];
  node.asked = true;
  node.waits = waits;
  node.count = count;
  node.dependency = dependency;
  node.first = first;
}

}  // namespace cgp
