#include "core/memory/page_space.h"

#include "core/base/error.h"

namespace cgp {

PageSpace::PageSpace(Granules page_size)
    : page_granules_(static_cast<uint32_t>(page_size.count())) {
  CGP_CHECK(page_size.count() > 0 && page_size.count() < std::numeric_limits<uint32_t>::max());
}

void PageSpace::GrowBy(uint32_t more_pages, std::size_t splits) {
  ReserveMore(pages_, more_pages);
  begins_.Resize(static_cast<uint32_t>(pages_.capacity()));
  // A new page brings a node, may be cut from others, and is split at most twice when taken from.
  const std::size_t nodes = most_nodes() + 4 * std::size_t{more_pages} + splits;
  if (nodes <= nodes_.capacity()) return;
  const std::size_t room = std::max(nodes, 2 * nodes_.capacity());
  spare_nodes_.reserve(room);  // first, since any node may be spare
  nodes_.reserve(room);
}

void PageSpace::AddPage() {
  const auto page = static_cast<PageId>(page_count());
  begins_.Resize(page_count() + 1);
  const NodeId whole = NewNode({.page = page, .length = page_granules_});
  pages_.push_back({.first = whole, .last = whole});
  begins_.Insert(Index(page));
  free_granules_ += page_granules_;
  Join(whole);
}

NodeId PageSpace::Take(NodeId within, PageId page, Granules offset, Granules length) {
  const auto begin = static_cast<uint32_t>(offset.count());
  const auto end = static_cast<uint32_t>((offset + length).count());
  CGP_CHECK(length < page_size() || (begin == 0 && end % page_granules_ == 0));
  if (length < page_size() && IsOfWholePages(within)) {
    within = Gather(within, page, 0, page_granules_);
  }
  const NodeId taken = Gather(within, page, begin, end);
  const Node& node = at(taken);
  CGP_CHECK(!node.used() && node.page == page && node.offset == begin &&
            node.offset + node.length == end);
  SetFence(taken, FenceId::kUsed);
  ++used_nodes_;
  free_granules_ -= length.count();
  return taken;
}

// Makes free granules of one page, or whole pages, one node. Its fence is one of theirs, which the
// caller replaces; what is cut off keeps its own fence.
NodeId PageSpace::Gather(NodeId within, PageId page, uint32_t begin, uint32_t end) {
  const NodeId gathered = SplitAt(within, page, begin);
  while (at(gathered).offset + at(gathered).length < end) AbsorbNext(gathered);
  if (at(gathered).offset + at(gathered).length > end) {
    SplitAt(gathered, page + end / page_granules_, end % page_granules_);
  }
  return gathered;
}

NodeId PageSpace::Give(NodeId used, FenceId fence) {
  CGP_CHECK(at(used).used() && Index(fence) < behind_.size());
  SetFence(used, fence);
  --used_nodes_;
  free_granules_ += at(used).length;
  return Join(used);
}

void PageSpace::OpenFence(FenceId fence, FenceId now) {
  if (Index(fence) >= behind_.size()) return;
  while (behind_[Index(fence)] != NodeId::kNone) {
    const NodeId id = behind_[Index(fence)];
    SetFence(id, now);
    Join(id);
  }
}

void PageSpace::Hold(const IndexSet& pages, FenceId fence) {
  for (auto p = begins_.Next(0); p; p = begins_.Next(*p + 1)) {
    const bool held = pages.Contains(*p);
    for (NodeId id = pages_[*p].first; id != NodeId::kNone; id = at(id).next) {
      if (at(id).used() || at(id).fence == fence) continue;
      const uint32_t limit = Index(end(id));
      const uint32_t stop = held ? pages.NextMissing(*p, limit) : pages.Next(*p).value_or(limit);
      if (stop < limit) SplitAt(id, PageId{stop}, 0);
      if (!held) continue;
      SetFence(id, fence);
      id = Join(id);
    }
  }
}

void PageSpace::Renumber(const std::vector<uint32_t>& number) noexcept {
  constexpr uint32_t kGone = std::numeric_limits<uint32_t>::max();
  uint32_t left = 0;
  for (auto p = begins_.Next(0); p; p = begins_.Next(*p + 1)) {
    const Page page = pages_[*p];
    const uint32_t count = Index(end(page.first)) - *p;
    const auto gone =
        static_cast<uint32_t>(std::count(number.begin() + *p, number.begin() + *p + count, kGone));
    begins_.Erase(*p);
    if (gone < count) {
      begins_.Insert(left);
      pages_[left] = page;
    }
    for (NodeId id = page.first; id != NodeId::kNone;) {
      const NodeId next = at(id).next;
      at(id).page = PageId{left};
      if (gone == count) {
        free_granules_ -= at(id).length;
        Discard(id);
      } else if (gone > 0) {
        free_granules_ -= uint64_t{gone} * page_granules_;
        at(id).length -= gone * page_granules_;
      }
      id = next;
    }
    left += count - gone;
  }
  pages_.resize(left);
  for (auto p = begins_.Next(0); p; p = begins_.Next(*p + 1)) Join(pages_[*p].first);
}

// pre: `right` stands behind `left`, if both exist.
bool PageSpace::Joins(NodeId left, NodeId right) const {
  return left != NodeId::kNone && right != NodeId::kNone && !node(left).used() &&
         node(left).fence == node(right).fence && IsOfWholePages(left) == IsOfWholePages(right);
}

// Joins the node with neighbours that are free behind the same fence.
NodeId PageSpace::Join(NodeId id) {
  while (true) {
    if (Joins(id, Behind(id))) {
      AbsorbNext(id);
    } else if (const NodeId before = Before(id); Joins(before, id)) {
      AbsorbNext(before);
      id = before;
    } else {
      return id;
    }
  }
}

NodeId PageSpace::NodeAt(PageId page, Granules offset, uint32_t most) const {
  NodeId id = first(page);
  if (offset * 2 < page_size()) {
    for (; Granules(node(id).offset + node(id).length) <= offset; id = node(id).next) {
      if (most-- == 0) return NodeId::kNone;
    }
  } else {
    for (id = last(page); Granules(node(id).offset) > offset; id = node(id).prev) {
      if (most-- == 0) return NodeId::kNone;
    }
  }
  return id;
}

NodeId PageSpace::Before(NodeId id) const {
  const Node& here = node(id);
  return IsOfWholePages(id) && here.page > PageId{0} ? last(here.page - 1) : here.prev;
}

NodeId PageSpace::Behind(NodeId id) const {
  const NodeId next = node(id).next;
  if (next != NodeId::kNone || !IsOfWholePages(id)) return next;
  return Index(end(id)) < page_count() ? first(end(id)) : NodeId::kNone;
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

// Cuts off what begins at the offset of the page, and returns it: the whole node if it begins
// there. pre: a node of whole pages is cut between two of them.
NodeId PageSpace::SplitAt(NodeId id, PageId page, uint32_t offset) {
  const Node whole = at(id);
  const uint32_t left = (Index(page) - Index(whole.page)) * page_granules_ + offset - whole.offset;
  CGP_CHECK(!whole.used() && left < whole.length);
  if (left == 0) return id;
  Node right = whole;
  right.page = page;
  right.offset = offset;
  right.length = whole.length - left;
  const NodeId right_id = NewNode(right);
  LinkBehindFence(right_id);
  at(id).length = left;
  if (page != whole.page) {
    pages_[Index(page)] = {.first = right_id, .last = right_id};
    begins_.Insert(Index(page));
    return right_id;
  }
  Splice(right_id, whole.next);
  Splice(id, right_id);
  Page& in = pages_[Index(page)];
  if (in.last == id) in.last = right_id;
  return right_id;
}

// pre: there is a next one, and both are free.
void PageSpace::AbsorbNext(NodeId id) {
  const NodeId next = Behind(id);
  CGP_CHECK(next != NodeId::kNone && !at(id).used() && !at(next).used());
  if (at(next).offset == 0) begins_.Erase(Index(at(next).page));
  at(id).length += at(next).length;
  SetFence(id, at(next).fence);
  Splice(id, at(next).next);
  if (at(id).next == NodeId::kNone) pages_[Index(at(id).page)].last = id;
  Discard(next);
}

void PageSpace::Discard(NodeId id) {
  SetFence(id, FenceId::kOpen);
  spare_nodes_.push_back(id);
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
  for (uint32_t p = 0; p < page_count();) {
    CGP_CHECK(begins_.Contains(p));
    uint32_t end = 0;
    NodeId before = NodeId::kNone;
    for (NodeId id = pages_[p].first; id != NodeId::kNone; id = node(id).next) {
      const Node& here = node(id);
      CGP_CHECK(Index(here.page) == p && here.prev == before);
      CGP_CHECK(here.offset == end && here.length > 0 && !Joins(Before(id), id));
      if (!here.used()) free_granules += here.length;
      fenced += here.used() || here.fence == FenceId::kOpen ? 0 : 1;
      end += here.length;
      before = id;
      ++seen;
      used += here.used() ? 1 : 0;
    }
    const bool whole = IsOfWholePages(before);
    CGP_CHECK(pages_[p].last == before && end % page_granules_ == 0);
    CGP_CHECK(whole ? pages_[p].first == before : end == page_granules_);
    const uint32_t next = p + end / page_granules_;
    CGP_CHECK(begins_.Next(p + 1).value_or(page_count()) == next);
    p = next;
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
