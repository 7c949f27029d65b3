// Which edges hold a length: the free head or tail of a handle that is partly used is called an
// edge.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>
#include <optional>
#include <set>
#include <utility>

#include "core/memory/free_view.h"

namespace cgp {

// Which edges a stretch of addresses begins and ends with.
struct EdgePair {
  std::optional<Edge> tail;
  std::optional<Edge> head;
};

// Where a stretch of addresses may have an edge: an extension in front of a range begins with a
// tail, one behind it ends with a head, a new range does both.
enum class Ends : uint8_t { kTail, kHead, kBoth };

// The shortest edge of at least `length` whose handle passes `allowed`.
template <typename Allowed>
std::optional<Edge> ShortestEdge(const std::set<Edge>& edges, uint64_t length, Allowed&& allowed) {
  for (auto it = edges.lower_bound({.length = length}); it != edges.end(); ++it) {
    if (allowed(it->handle)) return *it;
  }
  return std::nullopt;
}

// The edges that hold `length`: one if one does, the shortest; else a tail and a head of two
// handles, the longest of each.
// pre: `allowed` passes all handles if ends is kBoth.
template <typename Allowed>
std::optional<EdgePair> ChooseEdges(const FreeHandles& free, uint64_t length, Ends ends,
                                    Allowed&& allowed) {
  if (length == 0) return EdgePair{};
  const auto tail = ends == Ends::kHead ? std::nullopt : ShortestEdge(free.tails, length, allowed);
  const auto head = ends == Ends::kTail ? std::nullopt : ShortestEdge(free.heads, length, allowed);
  if (tail && (!head || tail->length <= head->length)) return EdgePair{.tail = tail, .head = {}};
  if (head) return EdgePair{.tail = {}, .head = head};
  if (ends != Ends::kBoth) return std::nullopt;
  // The longest of each, or the longest but one of either where both are of one handle.
  for (const auto& [t, h] : {std::pair<std::ptrdiff_t, std::ptrdiff_t>{1, 1}, {1, 2}, {2, 1}}) {
    if (t > std::ssize(free.tails) || h > std::ssize(free.heads)) continue;
    const Edge& first = *std::prev(free.tails.end(), t);
    const Edge& second = *std::prev(free.heads.end(), h);
    if (first.handle == second.handle || first.length + second.length < length) continue;
    return EdgePair{.tail = first, .head = second};
  }
  return std::nullopt;
}

}  // namespace cgp
