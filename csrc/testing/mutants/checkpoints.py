"""Going back to a checkpoint, and whose work outlives it."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "restore-lives-on",
        "pool_checkpoint.cc",
        "blocks that live on are dropped and brought back",
        "    if (same != checkpoint.blocks.end() && same->block == live.block) {",
        "    if (false && same->block == live.block) {",
    ),
    Mutant(
        "restore-same-address",
        "pool_checkpoint.cc",
        "any block at the address passes for the checkpoint's",
        "same->block == live.block) {",
        "same->block.address == address) {",
    ),
    Mutant(
        "restore-known-forgotten",
        "pool_checkpoint.cc",
        "a block that passes for the checkpoint's takes nothing over from it",
        "    live->Add(entry);\n",
        "    (void)live;\n",
    ),
    Mutant(
        "restore-uses",
        "pool_state.h",
        "a block brought back has lost its uses",
        "    for (const StreamId use : known.uses) AddUse(use);\n",
        "",
    ),
    Mutant(
        "restore-eager",
        "pool_state.h",
        "a block brought back is not eager any more",
        "    eager |= known.eager;\n",
        "",
    ),
    Mutant(
        "restore-behind-first",
        "pool_checkpoint.cc",
        "only a piece's first node is asked who is at work on it",
        "    for (NodeId id = NodeAt(page, offset); id != NodeId::kNone; "
        "id = space.node(id).next) {\n"
        "      const PageSpace::Node& node = space.node(id);\n"
        "      if (Granules(node.offset) >= offset + length) break;",
        "    for (NodeId id = NodeAt(page, offset); id != NodeId::kNone; id = NodeId::kNone) {\n"
        "      const PageSpace::Node& node = space.node(id);\n"
        "      if (Granules(node.offset) >= offset + length) break;",
    ),
    Mutant(
        "restore-owner",
        "pool_checkpoint.cc",
        "the checkpoint of any pool is taken",
        "  if (checkpoint.owner.lock() != s.identity) {",
        "  if (false) {",
    ),
    Mutant(
        "restore-owner-alive",
        "pool_checkpoint.cc",
        "the checkpoint of any pool that lives is taken",
        "  if (checkpoint.owner.lock() != s.identity) {",
        "  if (checkpoint.owner.expired()) {",
    ),
    Mutant(
        "restore-open",
        "pool_checkpoint.cc",
        "what a restore drops is free to all",
        "    dropped.emplace_back(address, s.FenceFor(live));",
        "    dropped.emplace_back(address, FenceId::kOpen);",
    ),
    Mutant(
        "checkpoint-order",
        "pool_checkpoint.cc",
        "a checkpoint's blocks are in no order",
        "  std::ranges::sort(checkpoint.blocks, {}, "
        "[](const auto& entry) { return entry.block.address; });\n",
        "",
    ),
    Mutant(
        "set-restore-scope",
        "pool_set.cc",
        "checkpoints are taken and restored within scopes",
        "  Member& member = Known(id);\n  if (member.pool.in_scope()) {",
        "  Member& member = Known(id);\n  if (false) {",
    ),
    Mutant(
        "set-restore-owners",
        "pool_set.cc",
        "dropped blocks stay in the set's books",
        "    owners_.Erase(block.address);\n",
        "",
    ),
    Mutant(
        "set-restore-usage",
        "pool_set.cc",
        "the usage keeps what a restore drops",
        "    usage_.Freed(block);\n",
        "",
    ),
    Mutant(
        "set-restore-count",
        "pool_set.cc",
        "a pool's blocks are not counted when they are brought back",
        "    owners_.Insert(block.address, &member);\n    ++member.live_blocks;\n    if (usage_",
        "    owners_.Insert(block.address, &member);\n    if (usage_",
    ),
    Mutant(
        "use-outside-captures",
        "pool.cc",
        "a use outside of captures is over when the capture is that frees the block",
        "  if (!captured) live.eager = true;\n",
        "",
    ),
    Mutant(
        "restore-behind-forgotten",
        "pool_checkpoint.cc",
        "who is at work on the bytes brought back is forgotten",
        "      if (node.fence != FenceId::kOpen) live.others->AddBehind(node.fence);\n",
        "",
    ),
    Mutant(
        "restore-behind-eager",
        "pool_streams.cc",
        "the work on the bytes brought back is taken for captured work",
        "live.eager || behind;",
        "live.eager;",
    ),
    Mutant(
        "restore-behind-for-good",
        "pool_streams.cc",
        "work on the bytes brought back is never over",
        "    std::erase_if(live.others->behind, "
        "[&](FenceId fence) { return opened[Index(fence)]; });\n",
        "",
    ),
    Mutant(
        "restore-poll",
        "pool_checkpoint.cc",
        "a restore does not ask what is done",
        "  s.PollFences();  // what is over is forgotten, not handed on\n",
        "",
    ),
    Mutant(
        "restore-fence-room",
        "pool_checkpoint.cc",
        "what a restore drops goes behind a fence that the space has no list for",
        "    s.space.ReserveFence(dropped.back().second);\n",
        "",
    ),
]
