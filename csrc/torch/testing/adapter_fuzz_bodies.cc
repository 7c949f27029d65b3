// The bodies of conditional nodes: torch ends the route of the graph, begins it again for the body,
// which is a capture of its own, and does so once more behind it.
#include "torch/testing/adapter_fuzz_session.h"

namespace cgp::simulated {

void Session::EnterBody() {
  Graph* const graph = SomeOpen();
  if (graph == nullptr || graph->state != Graph::State::kOpen) return;
  const StreamId outer = dice_.Of(graph->streams);
  const StreamId stream = Stream(graph->device);
  if (DeviceIndexOf(outer) != graph->device) return;
  if (dice_.OneIn(4)) {
    // As for random numbers.
    Log("graph ", graph->number, " pauses");
    End(outer, graph->id);
    return Resume(*graph, outer);
  }
  if (IsHeld(stream) || !MayCome(*graph, stream)) return;
  timelines.Finish(timelines.Now(stream));
  const Node node = dag.Launch(outer);
  Log("graph ", graph->number, ": a body on ", stream, " for node ", node, " of ", outer);
  End(outer, graph->id);
  graph->bodies.push_back({.outer = outer,
                           .node = node,
                           .capture = std::exchange(graph->capture, kNoCapture),
                           .streams = std::exchange(graph->streams, {stream}),
                           .nested = graph->nested.size(),
                           .tensors = tensors_.size()});
  Resume(*graph, outer);
  graph->capture = dag.Begin(stream, {node});
  fake_cuda::SetCapture(ToCuda(stream), graph->capture);
}

void Session::LeaveBody(Graph& graph) {
  LeaveNested(graph, graph.bodies.back().nested);
  const Body body = std::move(graph.bodies.back());
  graph.bodies.pop_back();
  EndStreams(graph, /*join=*/true);
  Log("graph ", graph.number, ": the body is over");
  dag.Contain(body.node, graph.capture);
  // Whoever goes on with what was in the body waits for the node.
  for (auto& [number, tensor] : tensors_) {
    std::vector<Node>& last = tensor.last_in[graph.number];
    const bool is_of_body = static_cast<size_t>(number) > body.tensors && tensor.graph == &graph;
    const auto was_in_body = [&](Node node) { return dag.CaptureOf(node) == graph.capture; };
    if (is_of_body || std::ranges::any_of(last, was_in_body)) last = {body.node};
  }
  graph.capture = kNoCapture;
  End(body.outer, graph.id);
  graph.capture = body.capture;
  graph.streams = body.streams;
  Resume(graph, body.outer);
}

}  // namespace cgp::simulated
