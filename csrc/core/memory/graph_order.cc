#include "core/memory/graph_order.h"

namespace cgp {

NodeNumber GraphOrder::NumberOf(CaptureId capture, GraphNode node) {
  // The part is told by the middle bits of the hash of which the map uses the first.
  auto& parts = numbers_[capture];
  const uint64_t hash = static_cast<uint64_t>(node) * 0x9E3779B97F4A7C15ull;
  Numbers& numbers = parts[(hash >> 32) % parts.size()];
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

void GraphOrder::AskDependencies(CaptureId capture, NodeNumber number) {
  Node& node = nodes_[Index(number)];  // stays where it is when others are added
  if (node.asked) return;
  node.waits = driver_.Dependencies(node.handle, &asked_);
  node.first = static_cast<uint32_t>(dependencies_.size());
  for (const GraphNode before : asked_) dependencies_.push_back(NumberOf(capture, before));
  node.count = static_cast<uint32_t>(asked_.size());
  node.asked = true;
}

}  // namespace cgp
