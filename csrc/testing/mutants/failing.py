"""What a call that fails half-way may leave: the order of making room, changing and telling."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "failing-room-mapping",
        "pool_placing.cc",
        "a pool grows before its views have room for it",
        "    view->MakeRoomForMapping(new_pages, ranges.MostSlotsAfter(mapping), "
        "ranges.range_count() + 1);\n",
        "    (void)view;\n",
    ),
    Mutant(
        "failing-room-nodes",
        "pool.cc",
        "bytes are taken before the views have room for what is left of them",
        "  for (const auto& other : s.views) other->MakeRoomForNodes();\n",
        "",
    ),
    Mutant(
        "failing-room-guide",
        "pool.cc",
        "a block is placed before the guide has room for it",
        "  if (foretold) s.foresight.ReserveOne();\n",
        "",
    ),
    Mutant(
        "failing-room-spare",
        "page_space.cc",
        "there is room for nodes before there is for spare ones",
        "  spare_nodes_.reserve(room);  // first, since any node may be spare\n"
        "  nodes_.reserve(room);\n",
        "  nodes_.reserve(room);\n  spare_nodes_.reserve(room);\n",
    ),
    Mutant(
        "failing-room-waking",
        "pool.cc",
        "fences are marked as opened before there is room to tell",
        "fence_count() > 0;\n  s.ReserveForWaking();\n",
        "fence_count() > 0;\n  s.fences.EndScope();\n  s.ReserveForWaking();\n",
    ),
    Mutant(
        "failing-several-early",
        "pool_proofs.cc",
        "a capture counts as one of several streams before its proofs begin",
        "  const FenceId own = view->own_fence();\n  const bool is_capturing",
        "  several_streams = true;\n  const FenceId own = view->own_fence();\n"
        "  const bool is_capturing",
    ),
    Mutant(
        "failing-stream-alone",
        "pool_proofs.cc",
        "a stream without a view stays in the proofs",
        "    proofs.RemoveLastStream();\n",
        "",
    ),
    Mutant(
        "failing-room-proof",
        "pool_proofs.cc",
        "a proof is added before the views have room for it",
        "  for (const auto& view : views) view->MakeRoomForFence(fence);\n",
        "",
    ),
    Mutant(
        "failing-proven-lost",
        "proofs.cc",
        "what was proven when a call failed is forgotten (memory only)",
        "  order_.Advance(stream.reach, frontier, &stream.news);\n",
        "  stream.proven.clear();\n  order_.Advance(stream.reach, frontier, &stream.news);\n",
    ),
    Mutant(
        "failing-waiter-lost",
        "proofs.cc",
        "a waiter goes before it is told (memory only)",
        "      ReserveMore(stream.spare, 1);\n",
        "      stream.first[node] = waiter.next;\n      ReserveMore(stream.spare, 1);\n",
    ),
    Mutant(
        "failing-reached-early",
        "graph_order.cc",
        "a node is reached before it can be taken back",
        "    news->push_back(node);  // first: what is not there is not taken back\n"
        "    reach.reached_[Index(node)] = true;\n",
        "    reach.reached_[Index(node)] = true;\n    news->push_back(node);\n",
    ),
    Mutant(
        "failing-undo-forgotten",
        "range_table.cc",
        "what could not be undone is never given back",
        "      remains.mapped.push_back(mapping);\n",
        "",
    ),
    Mutant(
        "failing-trim-forgotten",
        "range_table_shrink.cc",
        "what the driver failed to take back is forgotten",
        "    table_.unreleased_.push_back(handle);\n",
        "    return;\n",
    ),
    Mutant(
        "failing-exec-room",
        "exec_table.cc",
        "an executable is made before there is room for it",
        "  ReserveMore(by_use_, 1);\n",
        "",
        folder="exec",
    ),
]
