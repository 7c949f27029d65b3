"""When freed bytes may be taken again."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "fence-no-events",
        "fences.cc",
        "an eager scope's fences open at its end",
        "    fence.state = State::kMarked;\n",
        "    fence.state = State::kOpened;\n",
    ),
    Mutant(
        "fence-event-leak",
        "fences.h",
        "events are never destroyed",
        "  ~SharedEvent() { driver_.DestroyEvent(event_); }\n",
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
        "  if (!in_capture && !used) {\n",
        "  if (!in_capture) {\n",
    ),
    Mutant(
        "fence-outside",
        "pool_streams.cc",
        "what is freed between scopes is free at once",
        "  if (!scope && !used && !eager) return FenceId::kOpen;\n",
        "  if (!scope) return FenceId::kOpen;\n",
    ),
    Mutant(
        "fence-eager-in-capture",
        "pool_streams.cc",
        "a block of eager work freed in a capture is free at its end",
        "eager || !in_capture || !AreCapturedTogether(live)",
        "!in_capture || !AreCapturedTogether(live)",
    ),
    Mutant(
        "fence-eager-alone",
        "pool_streams.cc",
        "the same, of a block that only its own stream works on",
        "if (in_capture && !used && !eager && OrderProtects(live)) {",
        "if (in_capture && !used && OrderProtects(live)) {",
    ),
    Mutant(
        "replays-not-awaited",
        "pool_streams.cc",
        "an eager scope does not wait for the replays of before",
        "  driver.WaitEvent(stream, replays->get());\n",
        "",
    ),
    Mutant(
        "replays-unknown-open",
        "pool.cc",
        "what captures freed stays open where the device cannot be marked",
        "  if (behind_replays && !mark) s.HoldAllFree();\n",
        "",
    ),
    Mutant(
        "replays-unknown-output",
        "pool_streams.cc",
        "a stream takes what a graph gave back where it cannot wait for it",
        "    if (scope && !eager && replays_unknown) return fences.Held(/*eager=*/true);\n",
        "",
    ),
    Mutant(
        "fence-mark-in-capture",
        "pool.cc",
        "the device is marked while something captures",
        "  may_ask_device = may_ask_device && s.driver.MayQuiesce();\n",
        "",
    ),
]
