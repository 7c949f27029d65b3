#include "core/page_space.h"

#include <algorithm>

#include "core/error.h"
#include "core/reserve.h"

namespace cgp {

PageSpace::PageSpace(Granules page_size)
    : page_granules_(static_cast<uint32_t>(page_size.count())) {
  CGP_CHECK(page_size.count() > 0 && page_size.count() < std::numeric_limits<uint32_t>::max());
}

void PageSpace::GrowBy(uint32_t more_pages, std::size_t splits) {
  ReserveMore(pages_, more_pages);
  // A new page brings one node, and taking bytes from a page splits at most twice.
  const std::size_t nodes = nodes_.size() + 3 * std::size_t{more_pages} + splits;
  if (nodes <= nodes_.capacity()) return;
  const std::size_t room = std::max(nodes, 2 * nodes_.capacity());
  spare_nodes_.reserve(room);  // first, since any node may be spare
  nodes_.reserve(room);
}

void PageSpace::AddPage() {
  const auto page = static_cast<PageId>(page_count());
  const NodeId whole = NewNode({.page = page, .length = page_granules_});
  pages_.push_back({.first = whole, .last = whole});
  free_granules_ += page_granules_;
}

NodeId PageSpace::Take(NodeId within, Granules offset, Granules length) {
  const auto begin = static_cast<uint32_t>(offset.count());
  const auto end = static_cast<uint32_t>((offset + length).count());
  const NodeId taken = SplitAt(within, begin);
  while (at(taken).offset + at(taken).length < end) {
    CGP_CHECK(!at(taken).used() && at(taken).next != NodeId::kNone && !at(at(taken).next).used());
    AbsorbNext(taken);
  }
  if (at(taken).offset + at(taken).length > end) {
    // The rest keeps the fence of the node that it is cut from, which may be the last of several
    // absorbed ones; that is the fence AbsorbNext() leaves behind.
    SplitAt(taken, end);
  }
  const Node& node = at(taken);
  CGP_CHECK(!node.used() && node.offset == begin && node.offset + node.length == end);
  SetFence(taken, FenceId::kUsed);
  ++used_nodes_;
  free_granules_ -= length.count();
  return taken;
}

NodeId PageSpace::Give(NodeId used, FenceId fence) {
  CGP_CHECK(at(used).used() && Index(fence) < behind_.size());
  SetFence(used, fence);
  --used_nodes_;
  free_granules_ += at(used).length;
  return JoinNeighbours(used);
}

void PageSpace::OpenFences(const std::vector<bool>& opened) {
  for (uint32_t fence = 1; fence < std::min(behind_.size(), opened.size()); ++fence) {
    while (opened[fence] && behind_[fence] != NodeId::kNone) {
      const NodeId id = behind_[fence];
      SetFence(id, FenceId::kOpen);
      JoinNeighbours(id);
    }
  }
}

void PageSpace::HoldAll(FenceId fence) {
  for (const Page& page : pages_) {
    for (NodeId id = page.first; id != NodeId::kNone; id = at(id).next) {
      if (at(id).used()) continue;
      SetFence(id, fence);
      id = JoinNeighbours(id);
    }
  }
}

void PageSpace::Renumber(const std::vector<uint32_t>& number) noexcept {
  constexpr uint32_t kGone = std::numeric_limits<uint32_t>::max();
  std::size_t left = 0;
  for (std::size_t p = 0; p < number.size(); ++p) {
    for (NodeId id = pages_[p].first; id != NodeId::kNone;) {
      const NodeId next = at(id).next;
      if (number[p] == kGone) {
        free_granules_ -= at(id).length;
        SetFence(id, FenceId::kOpen);
        spare_nodes_.push_back(id);
      } else {
        at(id).page = PageId{number[p]};
      }
      id = next;
    }
    if (number[p] != kGone) pages_[left++] = pages_[p];
  }
  pages_.resize(left);
}

// Of a free node with those beside it that are behind the same fence.
NodeId PageSpace::JoinNeighbours(NodeId id) {
  const auto joins = [&](NodeId other) {
    return other != NodeId::kNone && at(other).fence == at(id).fence;
  };
  if (joins(at(id).next)) AbsorbNext(id);
  const NodeId before = at(id).prev;
  if (!joins(before)) return id;
  AbsorbNext(before);
  return before;
}

NodeId PageSpace::NewNode(const Node& node) {
  if (spare_nodes_.empty()) {
    nodes_.push_back(node);
    return static_cast<NodeId>(nodes_.size() - 1);
  }
  const NodeId id = spare_nodes_.back();
  spare_nodes_.pop_back();
  at(id) = node;
  return id;
}

void PageSpace::Splice(NodeId left, NodeId right) {
  if (left != NodeId::kNone) at(left).next = right;
  if (right != NodeId::kNone) at(right).prev = left;
}

NodeId PageSpace::SplitAt(NodeId id, uint32_t offset) {
  const Node whole = at(id);
  CGP_CHECK(!whole.used() && whole.offset <= offset && offset < whole.offset + whole.length);
  if (whole.offset == offset) return id;
  Node right = whole;
  right.offset = offset;
  right.length = whole.offset + whole.length - offset;
  const NodeId right_id = NewNode(right);
  LinkBehindFence(right_id);
  at(id).length = offset - whole.offset;
  Splice(right_id, whole.next);
  Splice(id, right_id);
  Page& page = pages_[Index(whole.page)];
  if (page.last == id) page.last = right_id;
  return right_id;
}

void PageSpace::AbsorbNext(NodeId id) {
  const NodeId next = at(id).next;
  at(id).length += at(next).length;
  SetFence(id, at(next).fence);
  SetFence(next, FenceId::kOpen);
  Splice(id, at(next).next);
  Page& page = pages_[Index(at(id).page)];
  if (page.last == next) page.last = id;
  spare_nodes_.push_back(next);
}

void PageSpace::SetFence(NodeId id, FenceId fence) {
  Node& node = at(id);
  if (node.fence == fence) return;
  if (node.fence_next != NodeId::kNone) at(node.fence_next).fence_prev = node.fence_prev;
  if (node.fence_prev != NodeId::kNone) {
    at(node.fence_prev).fence_next = node.fence_next;
  } else if (node.fence != FenceId::kOpen && node.fence != FenceId::kUsed) {
    behind_[Index(node.fence)] = node.fence_next;
  }
  node.fence = fence;
  LinkBehindFence(id);
}

// pre: the node is in no list; its links may be anything.
void PageSpace::LinkBehindFence(NodeId id) {
  Node& node = at(id);
  node.fence_prev = node.fence_next = NodeId::kNone;
  if (node.fence == FenceId::kOpen || node.fence == FenceId::kUsed) return;
  NodeId& first = behind_[Index(node.fence)];
  node.fence_next = first;
  if (first != NodeId::kNone) at(first).fence_prev = id;
  first = id;
}

void PageSpace::Check() const {
  uint64_t free_granules = 0;
  std::size_t seen = 0;
  std::size_t used = 0;
  std::size_t fenced = 0;
  for (uint32_t p = 0; p < page_count(); ++p) {
    uint32_t end = 0;
    NodeId before = NodeId::kNone;
    for (NodeId id = pages_[p].first; id != NodeId::kNone; id = node(id).next) {
      const Node& here = node(id);
      CGP_CHECK(Index(here.page) == p && here.prev == before);
      CGP_CHECK(here.offset == end && here.length > 0);
      if (before != NodeId::kNone && !here.used()) CGP_CHECK(node(before).fence != here.fence);
      if (!here.used()) free_granules += here.length;
      fenced += here.used() || here.fence == FenceId::kOpen ? 0 : 1;
      end += here.length;
      before = id;
      ++seen;
      used += here.used() ? 1 : 0;
    }
    CGP_CHECK(end == page_granules_ && pages_[p].last == before);
  }
  CGP_CHECK(free_granules == free_granules_);
  CGP_CHECK(seen + spare_nodes_.size() == nodes_.size());
  CGP_CHECK(used == used_nodes_ && seen - used == free_extents());
  CGP_CHECK(behind_[Index(FenceId::kOpen)] == NodeId::kNone);
  for (uint32_t fence = 1; fence < behind_.size(); ++fence) {
    NodeId before = NodeId::kNone;
    ForEachBehind(FenceId{fence}, [&](NodeId id) {
      CGP_CHECK(Index(node(id).fence) == fence && node(id).fence_prev == before);
      before = id;
      --fenced;
    });
  }
  CGP_CHECK(fenced == 0);
}

}  // namespace cgp
