#include "core/graph_order.h"

namespace cgp {

NodeNumber GraphOrder::NumberOf(GraphNode node) {
  const auto [found, is_new] = NumbersOfLike(node).try_emplace(node, NodeNumber{node_count()});
  if (is_new) nodes_.push_back({.handle = node});
  return found->second;
}

std::vector<NodeNumber> GraphOrder::Advance(Reach& reach, const Frontier& frontier) {
  std::vector<NodeNumber> news;
  if (reach.stopped_) return news;
  bool stopped = !frontier.waits;
  const auto visit = [&](NodeNumber node) {
    if (reach.Contains(node)) return;
    if (reach.reached_.size() < nodes_.size()) reach.reached_.resize(nodes_.size());
    reach.reached_[static_cast<std::size_t>(node)] = true;
    news.push_back(node);
  };
  try {
    for (const GraphNode node : frontier.nodes) {
      if (!stopped) visit(NumberOf(node));
    }
    for (std::size_t i = 0; i < news.size() && !stopped; ++i) {
      AskDependencies(news[i]);
      const Node& node = nodes_[static_cast<std::size_t>(news[i])];
      stopped = !node.waits;
      for (uint32_t d = 0; d < node.count; ++d) visit(dependencies_[node.first + d]);
    }
  } catch (...) {
    for (const NodeNumber node : news) reach.reached_[static_cast<std::size_t>(node)] = false;
    throw;
  }
  if (stopped) {
    // Not even what was in an earlier frontier stands: the stream may have gone on without waiting
    // for it.
    reach.reached_.clear();
    news.clear();
    reach.stopped_ = true;
  }
  return news;
}

void GraphOrder::Clear() {
  nodes_.clear();
  dependencies_.clear();
  for (Numbers& numbers : numbers_) numbers.clear();
}

GraphOrder::Numbers& GraphOrder::NumbersOfLike(GraphNode node) {
  static_assert(std::tuple_size_v<decltype(numbers_)> == 1 << 9);
  return numbers_[static_cast<uint64_t>(node) * 0x9E3779B97F4A7C15ull >> (64 - 9)];
}

void GraphOrder::AskDependencies(NodeNumber number) {
  const auto i = static_cast<std::size_t>(number);
  if (nodes_[i].asked) return;
  const bool waits = driver_.Dependencies(nodes_[i].handle, &asked_);
  const auto first = static_cast<uint32_t>(dependencies_.size());
  for (const GraphNode node : asked_) dependencies_.push_back(NumberOf(node));
  Node& node = nodes_[i];
  node.asked = true;
  node.waits = waits;
  node.first = first;
  node.count = static_cast<uint32_t>(asked_.size());
}

}  // namespace cgp
