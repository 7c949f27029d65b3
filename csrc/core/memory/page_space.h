// Which bytes of a pool's pages are free, and behind which fence. It is a plain value, which knows
// no addresses (range_table.h), nor which stream may take what (free_list.h).
//
// Nodes tile the pages, one behind the other. A node is a part of one page, or a run of whole
// pages, which costs as much as one page does:
//
//     page    0                                     1          2          3          4
//             | used | free, fence 0 |   used   |      used      |  free, fence 2  | used | ...
//
// invariants:
//   a page's nodes, in the order of their offsets, tile it; next and prev are each other's inverse
//   or it is one of the whole pages of a node, which has neither
//   no two neighbours are both free with the same fence: in a page, or two of whole pages
//   p is in begins_  <=>  no node of whole pages that begins before p holds it
//   free() == sum of length over free nodes
//   a node is in the list of fence f != kOpen  <=>  it is free behind f
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <vector>

#include "core/base/index_set.h"
#include "core/base/units.h"

namespace cgp {

// Names what must have happened before free bytes may be taken; fences.h knows what each number
// means. kOpen: nothing. kRing: only blocks that alternate may take them (ring.h). kRingLater: the
// same, once the capture ends. kLeased: a lease has their pages, so nobody takes them before it
// ends. kUsed: they are not free.
enum class FenceId : uint32_t {
  kOpen = 0,
  kRing = 1,
  kRingLater = 2,
  kLeased = 3,
  kUsed = std::numeric_limits<uint32_t>::max()
};
// How many always exist: those named but kUsed. The others come and go (fences.h).
inline constexpr std::size_t kNamedFences = 4;

enum class NodeId : uint32_t { kNone = std::numeric_limits<uint32_t>::max() };

class PageSpace {
 public:
  // Two to a cache line, none across two.
  struct alignas(32) Node {
    PageId page{};        // the first, of whole pages
    uint32_t offset = 0;  // in granules, from the page's start
    uint32_t length = 0;  // in granules; of whole pages a multiple of a page's
    NodeId prev = NodeId::kNone;
    NodeId next = NodeId::kNone;
    FenceId fence = FenceId::kOpen;
    // In the list of those behind the fence; none behind kOpen and kUsed.
    NodeId fence_prev = NodeId::kNone;
    NodeId fence_next = NodeId::kNone;

    bool used() const { return fence == FenceId::kUsed; }
  };

  explicit PageSpace(Granules page_size);

  Granules page_size() const { return Granules(page_granules_); }
  uint32_t page_count() const { return static_cast<uint32_t>(pages_.size()); }
  Granules free() const { return Granules(free_granules_); }
  // How many free nodes there are.
  uint64_t free_extents() const { return nodes_.size() - spare_nodes_.size() - used_nodes_; }

  const Node& node(NodeId id) const { return nodes_[Index(id)]; }
  // The page's first and last node. A page inside a node of whole pages has that one as both.
  NodeId first(PageId page) const { return pages_[begins_.Last(Index(page))].first; }
  NodeId last(PageId page) const { return pages_[begins_.Last(Index(page))].last; }
  // The node that holds the granule, searched from the nearer end of the page; kNone if that is
  // more than `most` nodes away.
  NodeId NodeAt(PageId page, Granules offset,
                uint32_t most = std::numeric_limits<uint32_t>::max()) const;
  bool IsOfWholePages(NodeId id) const { return node(id).length >= page_granules_; }
  // The page behind its last.
  PageId end(NodeId id) const {
    return node(id).page + std::max(node(id).length / page_granules_, 1u);
  }
  // Calls function(node) for all nodes in the order of pages and offsets.
  template <typename Function>
  void ForEachNode(Function&& function) const {
    for (auto p = begins_.Next(0); p; p = begins_.Next(*p + 1)) {
      for (NodeId id = pages_[*p].first; id != NodeId::kNone; id = node(id).next) function(id);
    }
  }
  // How many blocks of a page or more have a piece below a page in this page. Small blocks prefer
  // pages without: outliving a large neighbour, they would keep its page from being whole. pre: the
  // page is not part of a node of whole pages.
  uint32_t large_pieces(PageId page) const { return pages_[Index(page)].large_pieces; }
  bool holds_large(PageId page) const { return large_pieces(page) > 0; }
  void AddLargePiece(PageId page) { ++pages_[Index(page)].large_pieces; }
  void DropLargePiece(PageId page) { --pages_[Index(page)].large_pieces; }
  // Calls function(node) for each free node behind the fence, in no order. pre: not kOpen.
  template <typename Function>
  void ForEachBehind(FenceId fence, Function&& function) const {
    if (Index(fence) >= behind_.size()) return;
    for (NodeId id = behind_[Index(fence)]; id != NodeId::kNone; id = node(id).fence_next) {
      function(id);
    }
  }
  // An upper limit on node numbers, for tables indexed by them.
  std::size_t node_limit() const { return nodes_.size(); }
  // The same until the next ReservePages() that allocates.
  std::size_t node_room() const { return nodes_.capacity(); }

  // Allocates what the next AddPage() calls, a Take() for each of these pages, and the Take() calls
  // of `blocks` blocks need, so that these cannot throw. Give() and OpenFence() never do.
  void ReservePages(uint32_t more_pages, std::size_t blocks = 1) {
    const std::size_t splits = kMostSplits * blocks;
    if (more_pages > 0 || most_nodes() + splits > nodes_.capacity()) GrowBy(more_pages, splits);
  }

  // A new page, free and without a fence, numbered page_count().
  void AddPage();

  // Makes [offset, offset + length) of the page one used node and returns it. A length of a page or
  // more takes in the pages behind it. pre: these granules are free, and lie in one page or are
  // whole pages; `within` is the node that holds the first of them.
  NodeId Take(NodeId within, PageId page, Granules offset, Granules length);

  // Allocates what Give() needs behind the fence, so that it cannot throw.
  void ReserveFence(FenceId fence) {
    if (Index(fence) >= behind_.size())
      behind_.resize(Index(fence) + std::size_t{1}, NodeId::kNone);
  }

  // Frees a used node behind `fence` and joins it to neighbours of the same fence. Returns the node
  // that now holds it. pre: ReserveFence(fence).
  NodeId Give(NodeId used, FenceId fence);

  // Moves all that is behind the fence behind `now`, joining neighbours; the first of joined nodes
  // survives. O(nodes behind it). pre: not kOpen; ReserveFence(now).
  void OpenFence(FenceId fence, FenceId now = FenceId::kOpen);

  // Puts the free bytes of the pages behind the fence, joining neighbours as OpenFence() does. pre:
  // `pages` has room for all; ReserveFence(fence), and ReservePages(0).
  void Hold(const IndexSet& pages, FenceId fence);

  // Renumbers page p to number[p]. Pages numbered RangeTable::Renumbering::kGone, which are free,
  // go. pre: the numbers of the others follow one another from 0.
  void Renumber(const std::vector<uint32_t>& number) noexcept;

  // Recomputes the invariants; throws InternalError.
  void Check() const;

 private:
  struct Page {
    NodeId first = NodeId::kNone;
    NodeId last = NodeId::kNone;
    uint32_t large_pieces = 0;
  };

  // The most nodes below a page that a block adds: three each in its first and its last page.
  static constexpr std::size_t kMostSplits = 6;

  // However nodes of whole pages are cut, there are no more of them than pages.
  std::size_t most_nodes() const { return nodes_.size() - spare_nodes_.size() + page_count(); }
  void GrowBy(uint32_t more_pages, std::size_t splits);
  Node& at(NodeId id) { return nodes_[Index(id)]; }
  NodeId NewNode(const Node& node);
  void Splice(NodeId left, NodeId right);  // makes them neighbours
  // The neighbours of the node in its page; of whole pages, also in the pages around.
  NodeId Before(NodeId id) const;
  NodeId Behind(NodeId id) const;
  NodeId SplitAt(NodeId id, PageId page, uint32_t offset);
  NodeId Gather(NodeId within, PageId page, uint32_t begin, uint32_t end);
  void AbsorbNext(NodeId id);
  bool Joins(NodeId left, NodeId right) const;
  NodeId Join(NodeId id);
  void Discard(NodeId id);
  void SetFence(NodeId id, FenceId fence);
  void LinkBehindFence(NodeId id);

  uint32_t page_granules_;
  uint64_t free_granules_ = 0;
  uint64_t used_nodes_ = 0;
  std::vector<Page> pages_;  // of those in begins_
  IndexSet begins_;
  std::vector<Node> nodes_;
  std::vector<NodeId> spare_nodes_;  // its capacity is that of nodes_ at least
  // By fence: the first of the list.
  std::vector<NodeId> behind_ = std::vector(kNamedFences, NodeId::kNone);
};

}  // namespace cgp
