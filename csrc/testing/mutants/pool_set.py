"""All pools of a device."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "trim-no-quiesce",
        "pool_set.cc",
        "a trim does not wait for the device",
        "  // Work that was submitted before may still use the pages.\n  driver_.Quiesce();\n",
        "",
    ),
    Mutant(
        "trim-always-quiesce",
        "pool_set.cc",
        "a trim of nothing waits for the device",
        "  if (due.empty()) return 0;\n",
        "",
    ),
    Mutant(
        "trim-live-blocks",
        "pool_give_back.cc",
        "a trim takes a handle in which a block lives",
        "      std::fill_n(in_use.begin() + begin, pages, true);\n",
        "",
    ),
    Mutant(
        "trim-users",
        "pool_set.cc",
        "a trim takes pools that a graph still uses",
        "return member.users == 0 && !member.pool.in_scope();",
        "return !member.pool.in_scope();",
    ),
    Mutant(
        "trim-open-scope",
        "pool_set.cc",
        "a trim takes a pool whose scope is open",
        "return member.users == 0 && !member.pool.in_scope();",
        "return member.users == 0;",
    ),
    Mutant(
        "trim-checkpoints",
        "pool_give_back.cc",
        "a checkpoint outlives a trim that took its pages",
        "  s.identity = std::move(s.next_identity);\n",
        "",
    ),
    Mutant(
        "trim-unreleased",
        "range_table_shrink.cc",
        "a handle whose release failed is never released",
        "  std::erase_if(table_.unreleased_, [&](const PhysicalHandle& handle) {\n"
        "    return Attempt(",
        "  std::erase_if(table_.unreleased_, [&](const PhysicalHandle& handle) {\n"
        "    return false && Attempt(",
    ),
    Mutant(
        "stale-pinned",
        "pool_give_back.cc",
        "an eager scope unmaps what graphs use",
        "if (s.ranges.range(s.ranges.range_of(slot)).pinned)",
        "if (false)",
    ),
    Mutant(
        "stale-checkpoint",
        "pool_checkpoint.cc",
        "an eager scope unmaps what a checkpoint comes back to",
        "  s.blocks.ForEach([&](Address, const LiveBlock& live) { s.ranges.Pin(live.slot); });\n",
        "",
    ),
    Mutant(
        "stale-kept",
        "pool_give_back.cc",
        "mappings of eager work are never unmapped",
        "s.ranges.mapping_count() > s.mapping_limit",
        "s.mapping_limit == 0",
    ),
    Mutant(
        "set-owner",
        "pool_set.cc",
        "a freed block keeps its owner",
        "  owners_.Erase(address);\n",
        "",
    ),
    Mutant(
        "set-peers",
        "pool_set.cc",
        "a new peer gets access to nothing that is mapped",
        "  for (const auto& [id, member] : members_) member->pool.RefreshAccess();\n",
        "",
    ),
    Mutant(
        "set-total",
        "pool_set.cc",
        "the total lacks the frees",
        "    total.frees += stats.frees;\n",
        "",
    ),
    Mutant(
        "set-end-quiesce",
        "pool_set.cc",
        "the destructor does not wait for the device",
        "    if (any) driver_.Quiesce();\n",
        "",
    ),
    Mutant(
        "set-refused-scope",
        "pool_set.cc",
        "a scope counts a user before it is known to begin",
        "  Member& member = FindOrCreate(id);\n  if (member.pool.in_scope()) {",
        "  Member& member = FindOrCreate(id);\n  ++member.users;\n  if (member.pool.in_scope()) {",
    ),
]
