// The bodies of conditional nodes: torch ends the route of the graph, begins it again for the body,
// which is a capture of its own, and does so once more behind it.
#include "torch/adapter_fuzz_session.h"

namespace cgp::simulated {

// Whether the open body runs behind a node of the captures around it.
bool Session::IsBefore(const Graph& graph, GraphNode node) {
  return std::ranges::any_of(graph.bodies, [&](const Body& body) {
    const auto number = body.numbers.find(node);
    if (number == body.numbers.end()) return false;
    const Body& inner = graph.bodies.back();
    const int of_inner = inner.numbers.at(inner.node);
    return graph.before[static_cast<size_t>(of_inner)].contains(number->second);
  });
}

// Its route is there again.
void Session::Resume(Graph& graph, cudaStream_t stream) {
  if (!Begin(graph, stream) && !Begin(graph, stream, MayFail::kNothing)) {
    Complain("cannot go on: graph ", graph.number);
  }
  ++graph.users;
}

void Session::EnterBody() {
  Graph* const graph = SomeOpen();
  if (graph == nullptr || graph->state != Graph::State::kOpen) return;
  const cudaStream_t outer = dice_.Of(graph->streams);
  const cudaStream_t stream = Stream(graph->device);
  if (DeviceOf(outer) != graph->device) return;
  if (dice_.OneIn(4)) {
    // As for random numbers.
    Log("graph ", graph->number, " pauses");
    End(outer, graph->id);
    return Resume(*graph, outer);
  }
  if (IsHeld(stream) || !MayCome(*graph, stream)) return;
  timelines.Finish(timelines.Now(stream));
  const GraphNode node = Launch(*graph, outer);
  Log("graph ", graph->number, ": a body on ", stream, " for node ", static_cast<uint64_t>(node),
      " of ", outer);
  End(outer, graph->id);
  graph->bodies.push_back({.outer = outer,
                           .node = node,
                           .capture = std::exchange(graph->capture, kNoCapture),
                           .streams = std::exchange(graph->streams, {stream}),
                           .numbers = std::exchange(graph->numbers, {}),
                           .nested = graph->nested.size(),
                           .tensors = tensors_.size()});
  Resume(*graph, outer);
  graph->capture = graphs.Begin(ToStreamId(stream));
  fake_cuda::SetCapture(stream, graph->capture);
}

void Session::LeaveBody(Graph& graph) {
  LeaveNested(graph, graph.bodies.back().nested);
  const Body body = std::move(graph.bodies.back());
  graph.bodies.pop_back();
  for (cudaStream_t stream : graph.streams) {
    if (stream != graph.streams.front()) Extend(graph, graph.streams.front(), stream);
  }
  for (cudaStream_t stream : graph.streams) fake_cuda::SetCapture(stream, 0);
  graphs.End(graph.capture);
  Log("graph ", graph.number, ": the body is over");
  std::set<int>& before = graph.before[static_cast<size_t>(body.numbers.at(body.node))];
  for (const auto& [node, number] : graph.numbers) {
    before.insert(number);
    before.merge(std::set<int>(graph.before[static_cast<size_t>(number)]));
  }
  // Whoever goes on with what was in the body waits for the node.
  for (auto& [number, tensor] : tensors_) {
    std::vector<GraphNode>& last = tensor.last_in[graph.number];
    const bool is_of_body = static_cast<size_t>(number) > body.tensors && tensor.graph == &graph;
    const auto was_in_body = [&](GraphNode node) { return graph.numbers.contains(node); };
    if (is_of_body || std::ranges::any_of(last, was_in_body)) last = {body.node};
  }
  graph.capture = kNoCapture;
  End(body.outer, graph.id);
  graph.capture = body.capture;
  graph.streams = body.streams;
  graph.numbers = body.numbers;
  Resume(graph, body.outer);
}

}  // namespace cgp::simulated
