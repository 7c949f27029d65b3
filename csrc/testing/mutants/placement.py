"""Where a block goes."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "place-low-edge",
        "placement.cc",
        "the head, not the tail, of the page before a run is taken",
        "low -= view.Tail(ranges.page_at(SlotId{Index(run.begin) - 1})).count();",
        "low -= view.Head(ranges.page_at(SlotId{Index(run.begin) - 1})).count();",
    ),
    Mutant(
        "place-high-edge",
        "placement.cc",
        "the tail, not the head, of the page behind a run is taken",
        "high += view.Head(ranges.page_at(run.end())).count();",
        "high += view.Tail(ranges.page_at(run.end())).count();",
    ),
    Mutant(
        "place-page-twice",
        "placement.cc",
        "an edge's page may be mapped twice in a range",
        "return !range || !ranges_.Shows(*range, handle);",
        "return range || true;",
    ),
    Mutant(
        "place-whole-page-twice",
        "placement.cc",
        "a whole page may be mapped twice in a range",
        "      if (!allowed(handle)) continue;\n",
        "",
    ),
    Mutant(
        "place-front-start",
        "placement.cc",
        "a block that extends a range at its front starts at the first new slot",
        "best_.at_front ? mapped + reused - static_cast<int64_t>(length_) : -reused;",
        "best_.at_front ? 0 : -reused;",
    ),
    Mutant(
        "place-tail-start",
        "placement.cc",
        "a new range's block starts at its first page's start, not at its tail",
        "static_cast<int64_t>(ranges_.handle_pages(tail->handle) * page_ - fresh_.tail_length);",
        "static_cast<int64_t>(0 * tail->length);",
    ),
    Mutant(
        "place-eager-growth",
        "placement.cc",
        "an extension makes new pages where the ideal placement needs none",
        "    if (extension.stretch.new_pages > fresh_.new_pages) return;\n",
        "",
    ),
    Mutant(
        "place-range-overflow",
        "placement.cc",
        "a range is extended by one page more than there are addresses",
        "(at_front ? range.room_front : range.room_back))\n      return;",
        "(at_front ? range.room_front : range.room_back) + 1)\n      return;",
    ),
    Mutant(
        "place-slack",
        "placement.cc",
        "a block may take two whole pages more than it needs",
        "most_whole_(fresh_.whole + static_cast<uint64_t>(slack))",
        "most_whole_(fresh_.whole + 2)",
    ),
    Mutant(
        "place-same-edge-page",
        "placement.cc",
        "tail and head may be of one page",
        "if (first.handle == second.handle || first.length + second.length < length) continue;",
        "if (first.length + second.length < length) continue;",
    ),
    Mutant(
        "place-edge-too-short",
        "placement.cc",
        "a tail and a head that together are one granule too short are taken",
        "first.length + second.length < length) continue;",
        "first.length + second.length + 1 < length) continue;",
    ),
    Mutant(
        "place-last-page",
        "placement.cc",
        "a last page that is mostly left to others is part of a larger handle (advice)",
        "stretch.new_pages > 1 && stretch.unused > page_ / kMuchUnused;",
        "stretch.new_pages > 1 && stretch.unused > page_;",
    ),
    Mutant(
        "place-last-page-front",
        "placement.cc",
        "in front of a range the page next to it is a handle of its own (advice)",
        "if (at_front && LastApart(stretch))",
        "if (false && at_front)",
    ),
    Mutant(
        "place-even-handles",
        "placement.cc",
        "new handles are not about as large as each other (advice)",
        "const uint64_t pages = (left + count - 1) / count;",
        "const uint64_t pages = std::min(left, most + 0 * count);",
    ),
    Mutant(
        "place-largest-first",
        "placement.cc",
        "whole handles are not taken largest first (advice)",
        "return ranges.handle_pages(a) > ranges.handle_pages(b);",
        "return ranges.handle_pages(a) < ranges.handle_pages(b);",
    ),
    Mutant(
        "guide-end",
        "placement.cc",
        "the guide may lead one slot behind a range",
        "    if (slot >= range.end()) return false;\n",
        "    if (slot > range.end()) return false;\n",
    ),
    Mutant(
        "placement-first-range",
        "placement.cc",
        "new pages are not gathered behind the first range (advice)",
        "id == kFirstRange && !at_front;",
        "id == kFirstRange && !at_front && false;",
    ),
]
