"""Entries that fail half-way, captures that nobody ended, and who is told of what: csrc/torch."""

from __future__ import annotations

from functools import partial

from mutants.mutant import Mutant

_Mutant = partial(Mutant, folder="torch")

MUTANTS = [
    # What an entry that fails has changed.
    _Mutant(
        "faults-end-route",
        "graph_scopes.cc",
        "the route is gone where the end of its scope fails",
        "  // The scope first: who is told that it has not ended can end it again.\n",
        "  routes_.Remove(device, pool);\n",
    ),
    _Mutant(
        "faults-begin-name",
        "graph_scopes.cc",
        "the name of a shared pool keeps a user where the begin fails",
        "  Undo name([&] {\n    if (route.id == PoolNames::kShared)",
        "  Undo name([&] {\n    if (false)",
    ),
    _Mutant(
        "faults-begin-mempool",
        "graph_mempools.cc",
        "a pool that the base refused is taken for a MemPool",
        "    if (is_new) bases_mempools_.erase(mempool);\n",
        "",
    ),
    _Mutant(
        "faults-begin-given",
        "graph_scopes.cc",
        "the base keeps users of a pool that did not become its own",
        "    for (; given > 0; --given) base_.releasePool(device, id);\n",
        "",
    ),
    _Mutant(
        "faults-begin-tree",
        "graph_scopes.cc",
        "a tree that the base refused is remembered",
        "    if (is_new) ForgetBasesTree(device, route.id);\n",
        "",
    ),
    _Mutant(
        "faults-registered",
        "graph_scopes.cc",
        "a pool that could not be made is registered",
        "  Undo noted([&] { registered_.erase(registered); });\n"
        "  set.Retain(id);\n"
        "  noted.Keep();\n",
        "  set.Retain(id);\n",
    ),
    _Mutant(
        "faults-fraction",
        "graph_passed_on.cc",
        "a fraction that the base refused is in force",
        "    share.fraction.store(before);\n",
        "",
    ),
    _Mutant(
        "faults-free-again",
        "graph_allocator.cc",
        "a free in a destructor that failed is not tried again",
        "attempt < 2 && !freed; ++attempt",
        "attempt < 1 && !freed; ++attempt",
    ),
    _Mutant(
        "faults-grew",
        "graph_allocator.cc",
        "that the base grew is forgotten where it could not be asked",
        "  Undo taken([] { MergedStats::NoteBaseAllocation(); });  // next time\n"
        "  for (DevicePools* pools : DevicePools::All()) pools->stats().BaseGrew(base_);\n"
        "  taken.Keep();\n",
        "  for (DevicePools* pools : DevicePools::All()) pools->stats().BaseGrew(base_);\n",
    ),
    # Captures that nobody ended.
    _Mutant(
        "abandoned-thread",
        "graph_abandoned.cc",
        "another thread's route is taken for abandoned before its capture begins",
        "[](const Route& route) { return route.thread == std::this_thread::get_id(); }",
        "[](const Route&) { return true; }",
    ),
    _Mutant(
        "abandoned-pool-thread",
        "graph_abandoned.cc",
        "a begin in a pool takes another thread's route for abandoned",
        "    return route.thread == std::this_thread::get_id() && route.device == device",
        "    return route.device == device",
    ),
    _Mutant(
        "abandoned-forgotten",
        "graph_abandoned.cc",
        "the end of a capture that looked abandoned is an error",
        "    late.Keep();\n",
        "",
    ),
    _Mutant(
        "abandoned-released",
        "graph_abandoned.cc",
        "a failed capture's pool keeps its user",
        "    AsTorchErrors([&] { pools.set().Release(late.pool); });\n",
        "",
    ),
    _Mutant(
        "abandoned-stream",
        "graph_abandoned.cc",
        "the next capture on its stream does not show that one failed",
        "return late.origin == origin; }",
        "return late.origin == origin && false; }",
    ),
    _Mutant(
        "abandoned-pool",
        "graph_abandoned.cc",
        "the next capture in its pool does not show that one failed",
        "  ReleaseFailed([&](const LateEnd& late) {",
        "  ReleaseFailed([&](const LateEnd& late) {\n"
        "    if (late.device == device) return false;\n"
        "   ",
    ),
    _Mutant(
        "abandoned-host-route",
        "graph_abandoned.cc",
        "the host's route of a failed capture stays",
        "    EndHostRoute(late.name);\n",
        "",
    ),
    _Mutant(
        "abandoned-disable",
        "install.cc",
        "a capture that failed keeps the allocator in",
        "  allocator->EndAbandonedCaptures();\n",
        "",
    ),
    # Who is told.
    _Mutant(
        "told-observers",
        "graph_out_of_memory.cc",
        "observers from before hear nothing of our pools",
        '  if (base_.name() != "native") return false;\n',
        '  if (base_.name() != "unknown") return false;\n',
    ),
    _Mutant(
        "told-anybody",
        "graph_out_of_memory.cc",
        "a base that is not torch's is asked for too much",
        '  if (base_.name() != "native") return false;\n',
        "",
    ),
    _Mutant(
        "told-more",
        "graph_out_of_memory.cc",
        "a base that has the bytes tells nobody",
        "{request.bytes, request.bytes + pools.total_bytes()}",
        "{request.bytes}",
    ),
    _Mutant(
        "told-pool-stays",
        "graph_out_of_memory.cc",
        "the pool in which the base ran out stays open",
        "    if (open) base_.endAllocateToPool(device, id);\n",
        "",
    ),
    _Mutant(
        "told-observer-fails",
        "graph_out_of_memory.cc",
        "an observer that fails hides that memory has run out",
        '  WithWarnings("who was told that memory has run out", [&] {\n',
        "  std::invoke([&] {\n",
    ),
    _Mutant(
        "told-waits",
        "history.cc",
        "who has mapped waits for who is telling",
        "    const std::unique_lock telling(telling_mutex_, std::try_to_lock);\n",
        "    const std::unique_lock telling(telling_mutex_);\n",
    ),
    _Mutant(
        "told-order",
        "history.cc",
        "what was mapped for a block is told after it",
        "  TellMappings();  // what came before\n",
        "",
    ),
    _Mutant(
        "told-stats-wait",
        "merged_stats.cc",
        "who asks the base keeps others from being told",
        "void MergedStats::Add(Base& base, int64_t Stat::*of_base) {\n",
        "void MergedStats::Add(Base& base, int64_t Stat::*of_base) {\n"
        "  static std::mutex one_at_a_time;\n  const std::lock_guard wait(one_at_a_time);\n",
    ),
]
