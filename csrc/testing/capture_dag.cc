#include "testing/capture_dag.h"

#include <algorithm>
#include <queue>
#include <utility>

#include "core/base/units.h"

namespace cgp {

bool Kernel::Run() const {
  constexpr uint64_t kWords = kGranuleBytes / sizeof(uint64_t);
  // NOLINTNEXTLINE(performance-no-int-to-ptr): the host driver's addresses are this process's own.
  auto* const words = reinterpret_cast<uint64_t*>(block.address);
  bool right = true;
  for (uint64_t i = 0; i < block.bytes / sizeof(uint64_t); i += kWords) {
    const uint64_t mixed = word + i * 0xBF58476D1CE4E5B9U;
    for (uint64_t* const at : {words + i, words + i + kWords - 1}) {
      if (writes) *at = mixed;
      right = right && *at == mixed;
    }
  }
  return right;
}

CaptureId CaptureDag::Begin(StreamId stream, std::vector<Node> behind) {
  const CaptureId capture = host_.Begin(stream);
  streams_[stream] = {.point = {.capture = capture, .nodes = {}}, .last = {}};
  bases_[capture] = std::move(behind);
  return capture;
}

void CaptureDag::End(CaptureId capture) {
  host_.End(capture);
  std::erase_if(streams_, [&](const auto& each) { return each.second.point.capture == capture; });
}

void CaptureDag::Invalidate(CaptureId capture) {
  host_.Invalidate(capture);
  invalid_.insert(capture);
}

std::vector<CaptureDag::Node> CaptureDag::After(const Stream& stream, bool waits) const {
  if (stream.point.nodes.empty()) return bases_.at(stream.point.capture);
  if (waits) return stream.point.nodes;
  return stream.last ? std::vector<Node>{*stream.last} : std::vector<Node>{};
}

CaptureDag::Node CaptureDag::Launch(StreamId stream, const std::optional<Kernel>& kernel,
                                    bool programmatic) {
  Stream& own = streams_.at(stream);
  const bool waits = own.point.waits && !programmatic;
  const Node node = nodes_.size();
  const auto kind =
      programmatic ? HostGraphs::LaunchKind::kProgrammatic : HostGraphs::LaunchKind::kPlain;
  Launched launched{.stream = stream,
                    .capture = own.point.capture,
                    .host = host_.Launch(stream, kind),
                    .kernel = kernel,
                    .after = After(own, waits),
                    .behind = {},
                    .proven = {},
                    .only_waits = waits};
  launched.behind.Insert(node);
  launched.proven.Insert(node);
  for (const Node before : launched.after) launched.behind.Merge(nodes_[before].behind);
  for (const Node before : own.point.nodes) {
    launched.only_waits = launched.only_waits && nodes_[before].only_waits;
    if (waits) launched.proven.Merge(nodes_[before].proven);
  }
  nodes_.push_back(std::move(launched));
  own.point.nodes = {node};
  own.point.waits = true;
  own.last = node;
  return node;
}

void CaptureDag::Contain(Node node, CaptureId body) {
  for (const Launched& inner : nodes_) {
    if (inner.capture != body) continue;
    nodes_[node].behind.Merge(inner.behind);
    nodes_[node].proven.Merge(inner.proven);
  }
}

void CaptureDag::Wait(StreamId stream, const Point& point) {
  if (IsInvalid(point.capture)) return;
  host_.Wait(stream, ToHost(point));
  const Stream joining{.point = {.capture = point.capture, .nodes = {}}, .last = {}};
  Point& own = streams_.try_emplace(stream, joining).first->second.point;
  own.waits = own.waits && point.waits;
  for (const Node node : point.nodes) {
    if (std::ranges::find(own.nodes, node) == own.nodes.end()) own.nodes.push_back(node);
  }
}

Frontier CaptureDag::ToHost(const Point& point) const {
  Frontier frontier{.capture = point.capture, .nodes = {}, .waits = point.waits};
  for (const Node node : point.nodes) frontier.nodes.push_back(nodes_[node].host);
  return frontier;
}

bool CaptureDag::RunsBehind(StreamId stream, const std::vector<Node>& nodes) const {
  const Stream& own = streams_.at(stream);
  NodeSet behind;
  for (const Node node : After(own, own.point.waits)) behind.Merge(nodes_[node].behind);
  return behind.ContainsAll(nodes);
}

bool CaptureDag::LastRunsBehind(StreamId stream, const std::vector<Node>& nodes) const {
  const std::optional<Node> last = streams_.at(stream).last;
  return last ? nodes_[*last].behind.ContainsAll(nodes) : nodes.empty();
}

bool CaptureDag::ProvesBehind(StreamId stream, const std::vector<Node>& nodes) const {
  const Point& point = streams_.at(stream).point;
  NodeSet proven;
  for (const Node node : point.nodes) {
    if (!nodes_[node].only_waits) return false;
    proven.Merge(nodes_[node].proven);
  }
  return point.waits && proven.ContainsAll(nodes);
}

std::optional<CaptureDag::Node> CaptureDag::Run(Node first, Node end,
                                                const std::vector<uint64_t>& urgency) const {
  std::vector<size_t> waiting_for(end - first);
  std::vector<std::vector<Node>> successors(end - first);
  std::priority_queue<std::pair<uint64_t, Node>> ready;
  const auto make_ready = [&](Node node) { ready.emplace(urgency[node - first], node); };
  for (Node node = first; node < end; ++node) {
    waiting_for[node - first] = nodes_[node].after.size();
    for (const Node before : nodes_[node].after) successors[before - first].push_back(node);
    if (nodes_[node].after.empty()) make_ready(node);
  }
  while (!ready.empty()) {
    const Node node = ready.top().second;
    ready.pop();
    if (nodes_[node].kernel && !nodes_[node].kernel->Run()) return node;
    for (const Node next : successors[node - first]) {
      if (--waiting_for[next - first] == 0) make_ready(next);
    }
  }
  return std::nullopt;
}

std::vector<uint64_t> CaptureDag::SomeUrgency(Node first, Node end, std::mt19937_64& random) const {
  std::vector<uint64_t> urgency(end - first);
  if (urgency.empty()) return urgency;
  const uint64_t kind = random() % 4;
  std::map<StreamId, uint64_t> streams;
  for (size_t i = 0; i < urgency.size(); ++i) {
    if (kind == 0) {
      urgency[i] = 1 + random() % 1024;
    } else if (kind == 1) {  // one stream as far as it gets, then the next
      urgency[i] = streams.try_emplace(nodes_[first + i].stream, 1 + random() % 1024).first->second;
    } else {  // the newest first: the oldest are kept waiting
      urgency[i] = 1 + i;
    }
  }
  // Something that touches memory comes as late as it can.
  const size_t late = random() % urgency.size();
  for (size_t i = 0; kind != 2 && i < urgency.size(); ++i) {
    const size_t victim = (late + i) % urgency.size();
    if (!nodes_[first + victim].kernel) continue;
    urgency[victim] = 0;
    break;
  }
  return urgency;
}

}  // namespace cgp
