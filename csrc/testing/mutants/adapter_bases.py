"""Between the adapter, the base, and other devices: csrc/torch, and csrc/driver for the latter."""

from __future__ import annotations

from functools import partial

from mutants.mutant import Mutant

_Mutant = partial(Mutant, folder="torch")

MUTANTS = [
    # What captures ask the base for.
    _Mutant(
        "adapter-annex-none",
        "graph_scopes.cc",
        "a capture of ours begins no scope at the base",
        "      annexes_.Begin(device, pool);\n",
        "",
    ),
    _Mutant(
        "adapter-annex-refused",
        "graph_scopes.cc",
        "a capture that the base refuses keeps its pool",
        "      pools->set().EndScope(pool);\n      pools->set().Release(pool);\n      throw;\n",
        "      throw;\n",
    ),
    _Mutant(
        "adapter-annex-eager",
        "graph_scopes.cc",
        "eager scopes begin one too",
        "  if (kind == ScopeKind::kCapture) {\n    try {\n",
        "  {\n    try {\n",
    ),
    _Mutant(
        "adapter-annex-failed",
        "graph_scopes.cc",
        "the base is not told that a capture of ours failed",
        "    EndAnnexScope(pools, route.id);\n",
        "",
    ),
    _Mutant(
        "adapter-annex-failed-kept",
        "graph_scopes.cc",
        "the annex of a failed capture stays",
        "    ReleaseUnusedAnnex(pools, route.id);\n",
        "",
    ),
    _Mutant(
        "adapter-annex-kept",
        "graph_scopes.cc",
        "an annex outlives its graphs",
        "  names_.Release(device, id);\n  ReleaseUnusedAnnex(*pools, pool);\n",
        "  names_.Release(device, id);\n",
    ),
    _Mutant(
        "adapter-annex-end-kept",
        "graph_scopes.cc",
        "an annex whose users are gone before its scope ends stays",
        "annexes_.End(pools.device(), id); });\n  ReleaseUnusedAnnex(pools, id);\n",
        "annexes_.End(pools.device(), id); });\n",
    ),
    _Mutant(
        "adapter-annex-handed",
        "graph_scopes.cc",
        "a pool that is handed to the base leaves its annex",
        "  ReleaseUnusedAnnex(pools, pool);\n}\n\n// A capture may not wait",
        "}\n\n// A capture may not wait",
    ),
    _Mutant(
        "adapter-annex-registered",
        "graph_scopes.cc",
        "the annex of a GraphPool that is gone stays",
        "  pools.set().Release(id);\n  ReleaseUnusedAnnex(pools, id);\n",
        "  pools.set().Release(id);\n",
    ),
    _Mutant(
        "adapter-annex-open",
        "graph_scopes.cc",
        "an annex is given up while its capture goes on",
        " || routes_.Contains(pools.device(), id)) return;",
        ") return;",
    ),
    _Mutant(
        "adapter-annex-shared",
        "annexes.cc",
        "an annex takes what is any pool's of ours",
        "target && target->ours && target->id == pool;",
        "target && target->ours;",
    ),
    _Mutant(
        "adapter-annex-users",
        "annexes.cc",
        "an annex is held by one graph only",
        "  ++annexes_.at(key).users;\n",
        "  annexes_.at(key).users = 1;\n",
    ),
    _Mutant(
        "adapter-annex-reopened",
        "annexes.cc",
        "an annex is called like the one before it",
        "AnnexName(++made_);",
        "AnnexName(key.second.second);",
    ),
    _Mutant(
        "adapter-annex-past",
        "annexes.cc",
        "whose an annex was is forgotten with it",
        "past_owners_[annex.id] = NameOf(pool);",
        "(void)past_owners_;",
    ),
    _Mutant(
        "adapter-annex-hidden",
        "graph_allocator.cc",
        "the snapshot of a pool leaves its annex out",
        "    if (annex) {\n",
        "    if (annex && false) {\n",
    ),
    _Mutant(
        "adapter-annex-end-throws",
        "graph_scopes.cc",
        "a scope that the base does not end is not ended",
        '  WithWarnings("the allocator below it, told that a capture is over,",\n'
        "               [&] { annexes_.End(pools.device(), id); });\n",
        "  annexes_.End(pools.device(), id);\n",
    ),
    # What a base does not support.
    _Mutant(
        "adapter-base-not-implemented",
        "base_support.h",
        "only NotImplementedError says that the base does not support something",
        "  } catch (const c10::Error&) {\n",
        "  } catch (const c10::NotImplementedError&) {\n",
    ),
    # Other devices.
    _Mutant(
        "adapter-copy-plain",
        "graph_passed_on.cc",
        "the base copies from and to mapped memory between devices that are no peers",
        "(IsMapped(destination) || IsMapped(source))) {",
        "false) {",
    ),
    _Mutant(
        "adapter-copy-one-end",
        "graph_passed_on.cc",
        "only the destination of a copy is asked after",
        "(IsMapped(destination) || IsMapped(source))) {",
        "IsMapped(destination)) {",
    ),
    _Mutant(
        "adapter-reserved-first",
        "metered_driver.cc",
        "only the first byte of a reservation counts",
        "  return address - begin < bytes;\n",
        "  return address == begin && bytes > 0;\n",
    ),
    _Mutant(
        "adapter-reserved-kept",
        "metered_driver.cc",
        "addresses that were given back still count as reserved",
        "  reservations_.erase(address);\n",
        "",
    ),
    _Mutant(
        "adapter-use-no-device",
        "graph_allocator.cc",
        "a recorded stream is taken for one of the block's device",
        "StreamOn(stream.device_index(), ToStreamId(stream.stream()))",
        "ToStreamId(stream.stream())",
    ),
    _Mutant(
        "adapter-use-own-device",
        "device_pools.cc",
        "a recorded stream of the block's own device is taken for another",
        "own ? WithoutDevice(stream) : stream);",
        "own ? stream : stream);",
    ),
    _Mutant(
        "adapter-plain-peers-old",
        "device_pools.cc",
        "what the C functions gave before is closed to new devices",
        "        others->LetIn(device);\n",
        "",
    ),
    _Mutant(
        "adapter-plain-peers-new",
        "device_pools.cc",
        "what the C functions give is closed to the devices before",
        "        made->LetIn(others->device());\n",
        "",
    ),
    Mutant(
        "driver-peers-unseen",
        "cuda_driver.cc",
        "who had a context before the driver was made is not let in",
        "  LetActiveDevicesIn();\n}",
        "}",
        folder="driver",
    ),
    Mutant(
        "driver-peers-idle",
        "cuda_driver.cc",
        "devices without a context are let in",
        "active != 0 && CanReach(cu_peer)",
        "CanReach(cu_peer)",
        folder="driver",
    ),
    Mutant(
        "driver-peers-unreachable",
        "cuda_driver.cc",
        "devices that cannot reach this one are let in",
        "active != 0 && CanReach(cu_peer)",
        "active != 0",
        folder="driver",
    ),
    Mutant(
        "driver-stream-context",
        "cuda_driver.cc",
        "streams of other devices are used in this device's context",
        "  if (device == device_) return *context_;\n",
        "  if (device >= 0) return *context_;\n",
        folder="driver",
    ),
    Mutant(
        "driver-quiesce-own",
        "cuda_driver.cc",
        "other devices that use the memory are not waited for",
        "    for (const auto& [device, context] : others_) contexts.push_back(context.get());\n",
        "",
        folder="driver",
    ),
]
