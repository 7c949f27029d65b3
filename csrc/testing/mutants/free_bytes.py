"""Which bytes are free, and which of them a stream may take."""

from __future__ import annotations

from mutants.mutant import Mutant

MUTANTS = [
    Mutant(
        "space-join-next",
        "page_space.cc",
        "a freed node is not joined with the next",
        "  if (joins(node.next)) AbsorbNext(used);\n",
        "",
    ),
    Mutant(
        "space-join-before",
        "page_space.cc",
        "a freed node is not joined with the one before",
        "  if (!joins(before)) return used;\n",
        "  if (!joins(before) || true) return used;\n",
    ),
    Mutant(
        "space-join-fences",
        "page_space.cc",
        "nodes are joined whatever their fences",
        "!at(other).used && at(other).fence == fence;",
        "!at(other).used;",
    ),
    Mutant(
        "space-rest-fence",
        "page_space.cc",
        "the rest of a taken node gets the first fence, not the last",
        "  at(id).fence = at(next).fence;\n",
        "",
    ),
    Mutant(
        "space-take-count",
        "page_space.cc",
        "taken granules still count as free",
        "  free_granules_ -= length.count();\n",
        "",
    ),
    Mutant(
        "space-open-no-join",
        "page_space.cc",
        "opened neighbours are not joined",
        "      AbsorbNext(before);\n      id = before;\n",
        "",
    ),
    Mutant(
        "space-open-forgotten",
        "page_space.cc",
        "an opened fence stays on its bytes",
        "return opened[Index(fence)] ? FenceId::kOpen : fence; }",
        "return fence; }",
    ),
    Mutant(
        "space-split-last",
        "page_space.cc",
        "a split forgets the page's last node",
        "  if (page.last == id) page.last = right_id;\n",
        "",
    ),
    Mutant(
        "view-ignores-fences",
        "free_view.h",
        "a stream takes what is behind any fence",
        "return !node.used && Passes(node.fence);",
        "return !node.used;",
    ),
    Mutant(
        "view-not-own",
        "free_view.cc",
        "a stream may not take what it freed itself",
        "  LetThrough(own);\n",
        "",
    ),
    Mutant(
        "view-fit-off-by-one",
        "free_view.cc",
        "the best fit overlooks exact fits",
        "filled_bins_.Next(static_cast<uint32_t>(length.count()));",
        "filled_bins_.Next(static_cast<uint32_t>(length.count()) + 1);",
    ),
    Mutant(
        "view-unlink-count",
        "free_view.cc",
        "whole pages that are taken still count",
        "    --whole_page_count_;\n",
        "",
    ),
    Mutant(
        "view-unlink-bin",
        "free_view.cc",
        "an emptied bin stays marked",
        "  if (head == NodeId::kNone) filled_bins_.Erase(bin);\n",
        "",
    ),
    Mutant(
        "view-chain-start",
        "free_view.cc",
        "a chain is taken to start at any of its nodes",
        "NodeId id = Available(first) ? ChainStart(first) : first;",
        "NodeId id = first;",
    ),
    Mutant(
        "view-new-slot",
        "free_view.cc",
        "a whole page's new slot is not learned",
        "    if (Index(page) < old_page_count && IsWhole(page)) runs_.SetFree(slot);\n",
        "    (void)page;\n",
    ),
    Mutant(
        "runs-taken",
        "run_index.cc",
        "a taken page stays free where it is mapped",
        "    words_[Index(slot) / 64] &= ~(uint64_t{1} << (Index(slot) % 64));\n",
        "    (void)slot;\n",
    ),
    Mutant(
        "runs-bound",
        "run_index.cc",
        "a freed page does not raise its range's bound",
        "if (bounds_[leaf_count() + Index(range)] < most) SetBound(range, most);",
        "(void)most;",
    ),
    Mutant(
        "runs-bound-exact",
        "run_index.cc",
        "a range whose longest run just fits is passed over",
        "if (i % 2 == 0 || bounds_[i - 1] < pages) continue;",
        "if (i % 2 == 0 || bounds_[i - 1] <= pages) continue;",
    ),
    Mutant(
        "runs-back",
        "run_index.cc",
        "the free slots at a range's back are counted one too many",
        "    slot -= std::min(ones, in_word);\n",
        "    slot -= std::min(ones + 1, in_word);\n",
    ),
    Mutant(
        "runs-front",
        "run_index.cc",
        "the free slots at a range's front are counted one too many",
        "  return Find(false, Index(range.begin()), Index(range.end())) - Index(range.begin());",
        "  return std::min(range.mapped(),\n"
        "                  Find(false, Index(range.begin()), Index(range.end())) + 1 -\n"
        "                      Index(range.begin()));",
    ),
    Mutant(
        "set-erase",
        "index_set.h",
        "an emptied word stays marked as filled",
        "    if (word != 0) return;\n",
        "    return;\n",
    ),
]
