// The free list of one stream: the free bytes of a PageSpace whose fences are open to the stream,
// indexed for searching.
//
// A *hole* is a run of neighbouring free nodes in a page that the stream may take, whatever their
// fences. So one stream's fences do not cut up memory for another:
//
//     page   |  used  | open | fence 2 | fence 3 | open |
//                     [---- hole ------]         [hole]    as the owner of fence 2 sees it
//
// A hole that covers its page makes the page *whole*, and makes free every virtual page that shows
// it. Bins hold all other holes by their length, for an exact best fit. All of this is derived from
// the PageSpace and the RangeTable, and can be rebuilt from them.
//
// A page that becomes whole, or stops being whole, flips one bit for each virtual page that shows
// it. That is done only when a search comes by, since most large blocks are freed before. Likewise
// the longest run of free virtual pages of a range is computed only when a search looks at the
// range. Until then the range has an upper bound:
//
//     a virtual page is in free_vpages_  <=>  its page is in shown_
//     a page that is not in stale_ is in shown_  <=>  it is whole
//     run_bounds_[r] >= length of the longest run of r's virtual pages in free_vpages_
//
// Taking a page leaves the bound valid. Freeing one raises it to the range's whole length, and
// looking at the range makes it exact. So an earlier free has paid for each vain look at a range.
//
// What handles have to offer is computed on demand, for those that changed: O(log n) for each.
#pragma once

#include <compare>
#include <cstdint>
#include <optional>
#include <set>
#include <vector>

#include "core/base/index_set.h"
#include "core/base/units.h"
#include "core/driver.h"
#include "core/memory/page_space.h"
#include "core/memory/range_table.h"

namespace cgp {

// The free granules at the start or the end of a handle that is not wholly free:
//
//     handle    | free | used | free |      head 1 page, tail 1 page
struct PartialHandle {
  uint64_t length = 0;
  PageId handle{};

  // By length; among equals the first handle comes first.
  auto operator<=>(const PartialHandle&) const = default;
};

// A handle that is wholly free.
struct WholeHandle {
  uint64_t pages = 0;
  PageId handle{};

  bool operator==(const WholeHandle&) const = default;
  // Largest first; among equals the first handle.
  bool operator<(const WholeHandle& other) const {
    return pages != other.pages ? pages > other.pages : handle < other.handle;
  }
};

// What the handles offer to one stream.
struct FreeHandles {
  std::set<PartialHandle> heads;
  std::set<PartialHandle> tails;
  std::set<WholeHandle> wholes;

  bool operator==(const FreeHandles&) const = default;
};

// A maximal run of mapped virtual pages of one range whose pages are whole.
struct FreeRun {
  VirtualPage begin{};
  uint32_t length = 0;

  VirtualPage end() const { return begin + length; }
};

class FreeList {
 public:
  // `stream` may take what is open, what is behind `own`, and what it is granted.
  FreeList(const PageSpace& space, const RangeTable& ranges, StreamId stream, FenceId own);

  StreamId stream() const { return stream_; }
  FenceId own_fence() const { return own_; }

  // Hands the free list to another stream. pre: it passes kOpen alone; it is yet to pass `own`.
  void Assign(StreamId stream, FenceId own) {
    stream_ = stream;
    own_ = own;
  }

  // Whether the stream may take what is behind the fence: kOpen, its own fence, and granted ones.
  bool Passes(FenceId fence) const {
    return Index(fence) < passes_.size() && passes_[Index(fence)] != 0;
  }
  // pre: no node of the space is behind the fence, or all such nodes and their neighbours are
  // unindexed. Does not throw after MakeRoomForFence().
  void SetPasses(FenceId fence, bool passes);

  // These make room, so that what follows cannot throw. It is room for as many nodes as the space
  // has room for; for so many new pages, in a table of so many virtual pages and ranges; or for
  // SetPasses().
  void MakeRoomForNodes() {
    if (links_.size() < space_.node_room()) links_.resize(space_.node_room());
  }
  void MakeRoomForMapping(uint32_t more_pages, uint32_t vpages, uint32_t ranges);
  void MakeRoomForFence(FenceId fence) {
    if (passes_.capacity() <= Index(fence)) passes_.reserve(2 * (Index(fence) + std::size_t{1}));
  }

  // Indexes everything anew.
  void Rebuild();

  // UnindexNodes() comes before a change strictly between two nodes of one page, or from its first
  // node or up to its last. IndexNodes() comes after it. They cover the holes that touch [first,
  // last]; of a node of whole pages only this page. pre: both get the same span, and nodes at its
  // ends that are not the page's do not change.
  void UnindexNodes(PageId page, NodeId first, NodeId last);
  void IndexNodes(PageId page, NodeId first, NodeId last);

  // Unindexes all that is free in pages that are about to be taken whole. O(nodes among them).
  void UnindexPages(PageId begin, PageId end);
  // Indexes whole pages that the stream may take.
  void IndexPages(PageId begin, PageId end) { SetWhole(begin, end, true); }

  // Indexes pages that were added or mapped. `first` is the first of `count` new virtual pages;
  // pages from `old_page_count` on are new.
  void IndexMapping(VirtualPage first, uint32_t count, uint32_t old_page_count);

  // Calls function(first node) for holes of at least `length` in partly used pages, until it
  // returns false. The shortest come first, those in pages of small blocks alone before all others.
  template <typename Function>
  void ForEachFit(Granules length, Function&& function) const {
    const auto page = static_cast<uint32_t>(page_size().count());
    const auto wanted = static_cast<uint32_t>(length.count());
    const auto next = [&](uint32_t from) {
      const auto bin = filled_bins_.Next(from);
      return bin && *bin >= page && *bin < page + wanted ? filled_bins_.Next(page + wanted) : bin;
    };
    for (auto bin = next(wanted); bin; bin = next(*bin + 1)) {
      for (NodeId hole = bins_[*bin]; hole != NodeId::kNone; hole = links_[Index(hole)].next) {
        if (!function(hole)) return;
      }
    }
  }

  bool IsWhole(PageId page) const { return whole_pages_.Contains(Index(page)); }
  // Whether all of [begin, end) are.
  bool AreWhole(PageId begin, PageId end) const {
    return whole_pages_.NextMissing(Index(begin), Index(end)) >= Index(end);
  }
  uint32_t whole_page_count() const { return whole_page_count_; }
  // The first whole page from `from` on.
  std::optional<PageId> NextWhole(PageId from) const;
  // May throw, with nothing changed. Valid until anything changes.
  const FreeHandles& Handles();

  const RangeTable& ranges() const { return ranges_; }
  Granules page_size() const { return space_.page_size(); }
  // The free granules at the start, and at the end, of a page.
  Granules Head(PageId page) const;
  Granules Tail(PageId page) const;
  Granules HoleLength(NodeId start) const;
  // Whether the stream may take all of [offset, offset + length) of the page. Returns false in a
  // page of more than kMostNodes nodes: callers have other candidates.
  bool IsFree(PageId page, Granules offset, Granules length) const;

  // The oldest range, from `from` on, that may have a run of at least `pages`.
  std::optional<RangeId> OldestMayHold(uint32_t pages, RangeId from);
  // The free runs of the range in the order of addresses. Makes the range's bound exact.
  const std::vector<FreeRun>& Runs(RangeId range);
  // The length of the run that touches the range's front, or its back.
  uint32_t FreeAtEnd(RangeId range, bool at_front);
  // Whether all virtual pages of [begin, end) are free. O(rows of their pages, see RowEnd()).
  bool AllFree(VirtualPage begin, VirtualPage end) const;

  // Recomputes the index and compares; throws InternalError.
  void Check() const;

 private:
  static constexpr uint32_t kMostNodes = 64;  // looked at
  static constexpr uint32_t kRangeGroup = 64;

  struct Link {
    NodeId prev = NodeId::kNone;
    NodeId next = NodeId::kNone;
  };

  // A handle's entry in handles_: its free head and tail, or its pages if it is wholly free.
  struct Offer {
    uint32_t head = 0;
    uint32_t tail = 0;
    uint32_t whole = 0;
    bool operator==(const Offer&) const = default;
  };

  bool Available(NodeId id) const { return Passes(space_.node(id).fence); }
  Offer OfferOf(PageId handle) const;
  std::vector<std::vector<NodeId>> Holes() const;
  NodeId HoleStart(NodeId id) const;
  // The node after the hole, kNone at the page's end.
  NodeId HoleEnd(NodeId start) const;
  template <typename Function>
  void ForEachHole(NodeId first, NodeId last, Function&& function) const;
  void SetWhole(PageId begin, PageId end, bool whole);
  void RaiseBound(VirtualPage vpage);
  void RefreshVpages();
  uint32_t BinOf(PageId page, uint32_t length) const;
  void LinkHole(PageId page, NodeId start, uint32_t length);
  void UnlinkHole(PageId page, NodeId start, uint32_t length);

  const PageSpace& space_;
  const RangeTable& ranges_;
  StreamId stream_{};
  FenceId own_ = FenceId::kOpen;
  std::vector<uint8_t> passes_;  // by FenceId
  IndexSet whole_pages_;
  uint32_t whole_page_count_ = 0;
  IndexSet shown_;                      // pages whose virtual pages are in free_vpages_
  IndexSet stale_;                      // pages whose entry in shown_ may be out of date
  IndexSet free_vpages_;                // none where nothing is mapped
  std::vector<uint32_t> run_bounds_;    // by range; with 0 up to a whole group
  std::vector<uint32_t> group_bounds_;  // of kRangeGroup ranges none has more
  std::vector<FreeRun> runs_;           // what Runs() returned last
  FreeHandles handles_;
  // By a handle's first page, but where one of its pages is in changed_.
  std::vector<Offer> offers_;
  IndexSet changed_;  // pages
  IndexSet filled_bins_;
  std::vector<NodeId> bins_;  // see BinOf(): the newest hole
  std::vector<Link> links_;   // by node
};

}  // namespace cgp
