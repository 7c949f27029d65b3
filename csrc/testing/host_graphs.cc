#include "testing/host_graphs.h"

#include <algorithm>
#include <string>
#include <utility>

#include "core/base/error.h"

namespace cgp {
namespace {

std::string Name(StreamId stream) {
  return "stream " + std::to_string(static_cast<uint64_t>(stream));
}

}  // namespace

CaptureId HostGraphs::Begin(StreamId origin) {
  const std::lock_guard lock(mutex_);
  if (streams_.contains(origin)) throw UsageError(Name(origin) + " is capturing already");
  const CaptureId capture = ++last_capture_;
  graphs_.emplace(capture, Graph{});
  streams_.emplace(origin, Frontier{.capture = capture, .nodes = {}});
  return capture;
}

void HostGraphs::End(CaptureId capture) {
  const std::lock_guard lock(mutex_);
  const Graph& graph = UnderWay(capture);
  ReserveMore(spare_nodes_, graph.nodes.size());
  for (const GraphNode node : graph.nodes) {
    nodes_.erase(node);
    spare_nodes_.push_back(node);
  }
  graphs_.erase(capture);
  std::erase_if(streams_, [&](const auto& entry) { return entry.second.capture == capture; });
}

void HostGraphs::Invalidate(CaptureId capture) {
  const std::lock_guard lock(mutex_);
  UnderWay(capture).invalidated = true;
}

GraphNode HostGraphs::Launch(StreamId stream, LaunchKind kind) {
  const std::lock_guard lock(mutex_);
  Frontier& point = Known(stream);
  std::vector<GraphNode>& nodes = graphs_.at(point.capture).nodes;
  ReserveMore(nodes, 1);
  const GraphNode node = NewNode();
  std::vector<GraphNode> frontier = {node};
  Node& made = nodes_[node];  // nothing throws from here on
  made.waits = point.waits && kind == LaunchKind::kPlain;
  made.dependencies = std::exchange(point.nodes, std::move(frontier));
  point.waits = true;
  nodes.push_back(node);
  return node;
}

Frontier HostGraphs::Record(StreamId stream) {
  const std::lock_guard lock(mutex_);
  return Known(stream);
}

void HostGraphs::Wait(StreamId stream, const Frontier& point) {
  const std::lock_guard lock(mutex_);
  if (UnderWay(point.capture).invalidated) {
    throw UsageError("the point's capture has been invalidated");
  }
  const auto found = streams_.find(stream);
  Frontier own =
      found == streams_.end() ? Frontier{.capture = point.capture, .nodes = {}} : found->second;
  if (own.capture != point.capture) throw UsageError(Name(stream) + " is part of another capture");
  own.waits = own.waits && point.waits;
  for (const GraphNode node : point.nodes) {
    if (std::ranges::find(own.nodes, node) == own.nodes.end()) own.nodes.push_back(node);
  }
  streams_.insert_or_assign(stream, std::move(own));
}

void HostGraphs::Capture(StreamId stream, Frontier* frontier) const {
  const std::lock_guard lock(mutex_);
  const auto found = streams_.find(stream);
  const bool tells = found != streams_.end() && !graphs_.at(found->second.capture).invalidated;
  *frontier = tells ? found->second : Frontier{};
  frontier->held = found != streams_.end();
}

bool HostGraphs::Dependencies(GraphNode node, std::vector<GraphNode>* nodes) const {
  const std::lock_guard lock(mutex_);
  const auto found = nodes_.find(node);
  if (found == nodes_.end()) {
    throw UsageError("there is no node " + std::to_string(static_cast<uint64_t>(node)));
  }
  *nodes = found->second.dependencies;
  return found->second.waits;
}

bool HostGraphs::Contains(StreamId stream) const {
  const std::lock_guard lock(mutex_);
  return streams_.contains(stream);
}

std::optional<CaptureId> HostGraphs::oldest() const {
  const std::lock_guard lock(mutex_);
  return graphs_.empty() ? std::nullopt : std::optional(graphs_.begin()->first);
}

CaptureId HostGraphs::newest() const {
  const std::lock_guard lock(mutex_);
  return last_capture_;
}

HostGraphs::Graph& HostGraphs::UnderWay(CaptureId capture) {
  const auto found = graphs_.find(capture);
  if (found == graphs_.end()) throw UsageError("no such capture is under way");
  return found->second;
}

Frontier& HostGraphs::Known(StreamId stream) {
  const auto found = streams_.find(stream);
  if (found == streams_.end()) throw UsageError(Name(stream) + " is not capturing");
  if (graphs_.at(found->second.capture).invalidated) {
    throw UsageError("the capture of " + Name(stream) + " has been invalidated");
  }
  return found->second;
}

GraphNode HostGraphs::NewNode() {
  if (spare_nodes_.empty()) return GraphNode{++last_node_};
  const GraphNode node = spare_nodes_.back();
  spare_nodes_.pop_back();
  return node;
}

}  // namespace cgp
