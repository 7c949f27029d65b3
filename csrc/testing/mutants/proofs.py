"""What the graph under capture proves, and what it does not."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "order-programmatic",
        "graph_order.cc",
        "programmatic edges are followed",
        "stopped = !node.waits;",
        "stopped = false;",
    ),
    Mutant(
        "order-programmatic-event",
        "graph_order.cc",
        "a stream is behind a programmatic event",
        "bool stopped = !frontier.waits;",
        "bool stopped = false;",
    ),
    Mutant(
        "order-kept-frontier",
        "graph_order.cc",
        "what a frontier had stays proven when the stream goes on without waiting for it",
        "    reach.reached_.clear();\n",
        "    for (const NodeNumber node : news) "
        "reach.reached_[static_cast<std::size_t>(node)] = false;\n",
    ),
    Mutant(
        "order-first-predecessor",
        "graph_order.cc",
        "a node's second predecessor is forgotten",
        "d < node.count; ++d)",
        "d < (node.count > 0 ? 1U : 0U); ++d)",
    ),
    Mutant(
        "order-undo",
        "graph_order.cc",
        "a question that fails leaves nodes behind as reached",
        "    for (const NodeNumber node : news) "
        "reach.reached_[static_cast<std::size_t>(node)] = false;\n"
        "    throw;",
        "    throw;",
    ),
    Mutant(
        "order-old-edges",
        "graph_order.cc",
        "the nodes of a capture that is over keep their numbers",
        "  for (Numbers& numbers : numbers_) numbers = {};\n",
        "",
    ),
    Mutant(
        "order-old-graph",
        "graph_order.cc",
        "nothing is forgotten of a capture that is over",
        "  nodes_.clear();\n"
        "  dependencies_.clear();\n"
        "  for (Numbers& numbers : numbers_) numbers = {};\n",
        "",
    ),
    Mutant(
        "proof-first-node",
        "proofs.cc",
        "a fence stands behind the first of its nodes only",
        "  for (uint32_t i = 0; i < fence.count; ++i) {\n",
        "  for (uint32_t i = 0; i < std::min(fence.count, 1U); ++i) {\n",
    ),
    Mutant(
        "proof-like-nodes",
        "proofs.cc",
        "a fence is taken for the last one, whatever nodes that is behind",
        "    if (order_.NumberOf(capture, nodes[i]) != nodes_[last.first + i]) return std::nullopt;\n",
        "    if (nodes.empty()) return std::nullopt;\n",
    ),
    Mutant(
        "proof-like-owner",
        "proofs.cc",
        "a fence is taken for the last one, whosever that is",
        "if (last.owner != owner || last.count != nodes.size()) return",
        "if (void(owner), last.count != nodes.size()) return",
    ),
    Mutant(
        "proof-other-reach",
        "proofs.cc",
        "the reach of one stream stands for another's",
        "known.owner == stream || !FirstMissing(streams_[stream], known);",
        "known.owner == stream || !FirstMissing(streams_[0], known);",
    ),
    Mutant(
        "proof-one-node-reached",
        "proofs.cc",
        "a fence is proven once one of its nodes is reached",
        "      if (!Wait(number, waiter.fence)) proven_.push_back(waiter.fence);",
        "      proven_.push_back(waiter.fence);",
    ),
    Mutant(
        "proof-new-stream",
        "proofs.cc",
        "a stream that comes later waits for no fence that there is (memory only)",
        "    if (Contains(fence)) Wait(number, fence);",
        "    if (Contains(fence)) (void)number;",
    ),
    Mutant(
        "proof-old-fences",
        "proofs.cc",
        "the fences of a capture that is over are kept",
        "  fences_.clear();\n",
        "",
    ),
    Mutant(
        "proof-use-left-out",
        "pool_proofs.cc",
        "the streams that used a block are left out of its fence",
        "  if (live.others && !std::ranges::all_of(live.others->uses, collect)) return false;\n",
        "",
    ),
    Mutant(
        "proof-home-left-out",
        "pool_proofs.cc",
        "the block's own stream is left out of its fence",
        "  if (!collect(live.block.stream)) return false;\n",
        "  if (nodes.empty() && !collect(live.block.stream)) return false;\n",
    ),
    Mutant(
        "proof-owner-used",
        "pool_proofs.cc",
        "a block that others used is its stream's own",
        "const auto owner = used ? std::nullopt : FindProvenView",
        "const auto owner = used && false ? std::nullopt : FindProvenView",
    ),
    Mutant(
        "proof-too-early",
        "pool_proofs.cc",
        "the fence is behind where the streams stood one node earlier",
        "    for (const GraphNode node : frontier.nodes) {\n"
        "      if (std::ranges::find(nodes, node) == nodes.end()) nodes.push_back(node);\n"
        "    }\n",
        "    for (const GraphNode node : frontier.nodes) {\n"
        "      std::vector<GraphNode> before;\n"
        "      driver.Dependencies(node, &before);\n"
        "      nodes.insert(nodes.end(), before.begin(), before.end());\n"
        "    }\n",
    ),
    Mutant(
        "proof-any-capture",
        "pool_proofs.cc",
        "the frontiers of several captures make one fence",
        "    return frontier.capture == of;\n  };",
        "    return true;\n  };",
    ),
    Mutant(
        "proof-not-captured",
        "pool_proofs.cc",
        "a user that is not captured is not waited for",
        "    if (frontier.capture == kNoCapture) return false;\n",
        "    if (frontier.capture == kNoCapture) return true;\n",
    ),
    Mutant(
        "proof-eager",
        "pool_proofs.cc",
        "the graph speaks for eager work",
        "  if (live.eager || (live.others && !live.others->behind.empty())) return false;\n",
        "",
    ),
    Mutant(
        "proof-first-stream",
        "pool_proofs.cc",
        "what the first stream has freed before a second came is free to all",
        "  if (frontier.nodes.empty()) {\n    std::vector<bool> opened",
        "  if (true) {\n    std::vector<bool> opened",
    ),
    Mutant(
        "proof-first-blocks",
        "pool_proofs.cc",
        "which blocks are the first stream's is not noted (memory only)",
        "    if (live.block.stream == view->stream()) live.view = static_cast<uint16_t>(number);\n",
        "    (void)live;\n",
    ),
    Mutant(
        "proof-keeps-all",
        "pool_proofs.cc",
        "a stream keeps what it may not take any more",
        "  const bool stops = !stopped && proofs.stopped(*number);\n",
        "  const bool stops = stopped && !stopped;\n",
    ),
    Mutant(
        "proof-small-handles",
        "placement.cc",
        "a small pool of several streams grows by handles of several pages (memory only)",
        "streams_ == Streams::kSeveral && pool_pages < kExactPool ? 1 : MostHandlePages(pool_pages);",
        "MostHandlePages(pool_pages);",
    ),
    Mutant(
        "proof-own-again",
        "pool_proofs.cc",
        "a stream that has begun anew owns what it had before",
        "  if (live.view != LiveBlock::kNoView && owner != live.view) owner.reset();\n",
        "",
    ),
    Mutant(
        "proof-kept",
        "pool_proofs.cc",
        "a capture's proofs outlive it",
        "  proofs.Clear();\n",
        "",
    ),
    Mutant(
        "proof-wake-forget",
        "pool_proofs.cc",
        "a view learns what is proven beside what it knew",
        "  for (const auto& [first, last] : spans) view.Forget(first, last);\n",
        "",
    ),
    Mutant(
        "proof-wake-pass",
        "pool_proofs.cc",
        "a view is not let through to what is proven",
        "  for (const FenceId fence : proven) view.LetThrough(fence);\n",
        "",
    ),
    Mutant(
        "proof-wake-learn",
        "pool_proofs.cc",
        "a view does not learn what is proven",
        "  for (const auto& [first, last] : spans) view.Learn(first, last);\n",
        "",
    ),
    Mutant(
        "proof-rest-unnoted",
        "pool_streams.cc",
        "what is left of an extent is not found when its fence is proven (memory only)",
        "  if (space.node(taken).next != behind) NoteExtent(space.node(taken).next);\n",
        "",
    ),
    Mutant(
        "proof-order-protects",
        "pool_streams.cc",
        "its stream's order protects a block in any capture",
        "  if (!several_streams) return true;\n",
        "  return true;\n",
    ),
    Mutant(
        "fence-captured-apart",
        "pool_streams.cc",
        "a capture's end stands for users in other captures",
        "return frontier.capture != kNoCapture && frontier.capture == of;",
        "return frontier.capture != kNoCapture;",
    ),
    Mutant(
        "fence-not-captured",
        "pool_streams.cc",
        "a capture's end stands for users that are not captured",
        "return frontier.capture != kNoCapture && frontier.capture == of;",
        "return frontier.capture == of;",
    ),
    Mutant(
        "fence-still-captured",
        "fences.cc",
        "events are recorded on streams that are still captured",
        "  if (AnyCaptures(fence.streams)) {",
        "  if (false) {",
    ),
    Mutant(
        "proof-order-captures",
        "pool_streams.cc",
        "a stream's order is trusted where there are several captures",
        "  return !captured && !several_captures;",
        "  return !captured;",
    ),
    Mutant(
        "proof-other-capture",
        "pool_proofs.cc",
        "a stream's frontier in one capture speaks for its block of another",
        "live.view != LiveBlock::kNoView && proofs.capture(live.view) == of;",
        "live.view != LiveBlock::kNoView;",
    ),
    Mutant(
        "proof-least-wanted",
        "pool_placing.cc",
        "a small block takes any of equal places (memory only)",
        "return LeastWanted(view, *start);",
        "return start;",
    ),
    Mutant(
        "fence-never-recorded",
        "fences.cc",
        "events of a stream that was captured are never recorded (memory only)",
        "    if (fence.state == State::kLateEvents) RecordOrWait(fence);\n",
        "",
    ),
    Mutant(
        "fence-proof-listed",
        "fences.cc",
        "a stream goes on with a fence that has become a proof",
        "  std::erase(listed_, stream_fence);\n",
        "",
    ),
]
