"""When freed bytes may be taken again."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "fence-no-events",
        "fences.cc",
        "an eager scope's fences open at its end",
        "  fence.state = State::kEvents;\n",
        "  fence.state = State::kOpened;\n",
    ),
    Mutant(
        "fence-any-event",
        "fences.cc",
        "one of several events opens a fence",
        "std::ranges::all_of(fence.events, [&](Event event) {",
        "std::ranges::any_of(fence.events, [&](Event event) {",
    ),
    Mutant(
        "fence-held-streams",
        "fences.cc",
        "a held fence forgets the streams of later blocks",
        "        fence.streams.push_back(stream);\n",
        "        (void)stream;\n",
    ),
    Mutant(
        "fence-first-stream",
        "fences.cc",
        "an event is recorded on the first stream only",
        "for (const StreamId stream : streams) events.push_back(driver_.RecordEvent(stream));",
        "events.push_back(driver_.RecordEvent(streams.front()));",
    ),
    Mutant(
        "fence-event-leak",
        "fences.cc",
        "events are never destroyed",
        "  for (const Event event : events) driver_.DestroyEvent(event);\n",
        "",
    ),
    Mutant(
        "fence-stays-armed",
        "fences.cc",
        "a stream that goes on keeps the events of its earlier work",
        "    fence.state = state;\n",
        "",
    ),
    Mutant(
        "fence-scope-end",
        "fences.cc",
        "a capture's end opens nothing",
        "    if (fence.state == State::kScope) fence.state = State::kOpened;\n",
        "",
    ),
    Mutant(
        "fence-eager-owner",
        "fences.cc",
        "a capture's stream takes over its eager fence",
        "fence.owner != stream || fence.eager != eager) continue;",
        "fence.owner != stream) continue;",
    ),
    Mutant(
        "fence-use-in-capture",
        "pool_streams.cc",
        "a foreign use in a capture is ignored",
        "if (in_capture && !used && !eager && OrderProtects(live)) {",
        "if (in_capture && !eager && OrderProtects(live)) {",
    ),
    Mutant(
        "fence-use-in-eager",
        "pool_streams.cc",
        "a foreign use in an eager scope is ignored",
        "if (scope == ScopeKind::kEager && !used) return",
        "if (scope == ScopeKind::kEager) return",
    ),
    Mutant(
        "fence-outside",
        "pool_streams.cc",
        "what is freed between scopes is free at once",
        "  if (!scope) return fences.After(streams);\n",
        "  if (!scope) return FenceId::kOpen;\n",
    ),
    Mutant(
        "fence-eager-in-capture",
        "pool_streams.cc",
        "a block of eager work freed in a capture is free at its end",
        "eager || !in_capture || !AreCapturedTogether(streams)",
        "!in_capture || !AreCapturedTogether(streams)",
    ),
    Mutant(
        "fence-eager-alone",
        "pool_streams.cc",
        "the same, of a block that only its own stream works on",
        "if (in_capture && !used && !eager && OrderProtects(live)) {",
        "if (in_capture && !used && OrderProtects(live)) {",
    ),
    Mutant(
        "fence-own-stream",
        "pool_streams.cc",
        "what others used does not wait for the block's own stream",
        "  streams.push_back(stream);\n",
        "",
    ),
]
