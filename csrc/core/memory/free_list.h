// What one stream may take: the free bytes of a PageSpace whose fences are open to it, indexed for
// searching.
//
// Neighbouring free nodes that the stream may take count as one *hole*, whatever their fences, so
// that one stream's fences do not cut up memory for another:
//
//     page   |  used  | open | fence 2 | fence 3 | open |
//                     [---- hole ------]         [hole]    as the owner of fence 2 sees it
//
// A hole that covers its page makes the page *whole*, and free every virtual page that shows the
// page; all other holes are in bins by their length, for an exact best fit. Everything here is
// derived from the PageSpace and the RangeTable and can be rebuilt from them.
//
// A page that becomes whole, or no longer is, flips one bit for each virtual page that shows it,
// when a search comes by: most large blocks are freed before that. How long a range's longest run
// of free virtual pages has become is worked out only when the search looks at it. Until then the
// range has an upper bound:
//
//     a virtual page is in free_vpages_  <=>  its page is in shown_
//     a page that is not in stale_ is in shown_  <=>  it is whole
//     run_bounds_[r] >= length of the longest run of r's virtual pages in free_vpages_
//
// Taking a page leaves the bound valid, freeing one raises it to the range's whole length, looking
// at the range makes it exact. So each time a search looks at a range in vain, an earlier free has
// paid for it.
//
// What the handles have to offer is looked at when somebody asks, of those in which something has
// changed: O(log n) for each.
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

  // By length; of equals the first handle.
  auto operator<=>(const PartialHandle&) const = default;
};

// A handle that is wholly free.
struct WholeHandle {
  uint64_t pages = 0;
  PageId handle{};

  bool operator==(const WholeHandle&) const = default;
  // Largest first; of equals the first handle.
  bool operator<(const WholeHandle& other) const {
    return pages != other.pages ? pages > other.pages : handle < other.handle;
  }
};

// What the handles have to offer to one stream.
struct FreeHandles {
  std::set<PartialHandle> heads;
  std::set<PartialHandle> tails;
  std::set<WholeHandle> wholes;

  bool operator==(const FreeHandles&) const = default;
};

// Consecutive mapped virtual pages of one range whose pages are whole; maximal: its neighbours' are
// not.
struct FreeRun {
  VirtualPage begin{};
  uint32_t length = 0;

  VirtualPage end() const { return begin + length; }
};

class FreeList {
 public:
  // A free list for `stream`, which may take what is open, what is behind `own`, and what it is
  // granted.
  FreeList(const PageSpace& space, const RangeTable& ranges, StreamId stream, FenceId own);

  StreamId stream() const { return stream_; }
  FenceId own_fence() const { return own_; }

  // Hands the free list to another stream. pre: it passes kOpen alone; it is yet to pass `own`.
  void Assign(StreamId stream, FenceId own) {
    stream_ = stream;
    own_ = own;
  }

  // Whether the stream may take what is behind the fence: it passes kOpen, its own, and those that
  // it was granted.
  bool Passes(FenceId fence) const {
    return Index(fence) < passes_.size() && passes_[Index(fence)] != 0;
  }
  // pre: no node of the space is behind the fence, or all of them are unindexed, and those beside
  // them. Does not throw after MakeRoomForFence().
  void SetPasses(FenceId fence, bool passes);

  // Makes room for what is about to be told: what follows cannot throw then. For nodes as many as
  // the space has room for; for so many new pages, in a table of so many virtual pages and ranges;
  // and for SetPasses() of the fence.
  void MakeRoomForNodes() {
    if (links_.size() < space_.node_room()) links_.resize(space_.node_room());
  }
  void MakeRoomForMapping(uint32_t more_pages, uint32_t vpages, uint32_t ranges);
  void MakeRoomForFence(FenceId fence) {
    if (passes_.capacity() <= Index(fence)) passes_.reserve(2 * (Index(fence) + std::size_t{1}));
  }

  // Indexes everything anew.
  void Rebuild();

  // The space is about to change strictly between two nodes of one page, or from its first or up to
  // its last: unindexes the holes that touch [first, last], then indexes those that do afterwards;
  // of a node of whole pages that page's alone. pre: both are told the same span, and nodes at its
  // ends that are not the page's stay as they are.
  void UnindexNodes(PageId page, NodeId first, NodeId last);
  void IndexNodes(PageId page, NodeId first, NodeId last);

  // Whole pages are about to be taken: unindexes all that is free in them. O(nodes among them).
  void UnindexPages(PageId begin, PageId end);
  // Whole pages that the stream may take: indexes them.
  void IndexPages(PageId begin, PageId end) { SetWhole(begin, end, true); }

  // Pages were added or mapped: indexes them. `first` is the first of `count` new virtual pages;
  // pages from `old_page_count` on are new.
  void IndexMapping(VirtualPage first, uint32_t count, uint32_t old_page_count);

  // Calls function(first node) for the holes of at least `length` in pages that are partly used,
  // as long as that returns true: the shortest first, those in pages of small blocks alone before
  // the others.
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
  // The first whole page numbered at least `from`.
  std::optional<PageId> NextWhole(PageId from) const;
  // May throw, with nothing changed. Valid until something does.
  const FreeHandles& Handles();

  const RangeTable& ranges() const { return ranges_; }
  Granules page_size() const { return space_.page_size(); }
  // Free granules at the start and at the end of a page.
  Granules Head(PageId page) const;
  Granules Tail(PageId page) const;
  Granules HoleLength(NodeId start) const;
  // Whether the stream may take all of [offset, offset + length) of the page. Amid a page of very
  // many nodes it is not said to: who asks has other places.
  bool IsFree(PageId page, Granules offset, Granules length) const;

  // The oldest range, numbered at least `from`, that may hold a run of at least `pages`.
  std::optional<RangeId> OldestMayHold(uint32_t pages, RangeId from);
  // The runs of the range in the order of addresses; makes the range's bound exact.
  const std::vector<FreeRun>& Runs(RangeId range);
  // The length of the run that touches the range's front, or its back.
  uint32_t FreeAtEnd(RangeId range, bool at_front);
  // Whether all virtual pages of [begin, end) are free. O(rows of their pages
  // (RangeTable::RowEnd())).
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

  // What is in handles_ of a handle: the lengths of its free head and tail, or its pages if it is
  // wholly free.
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
  IndexSet stale_;                      // pages of which that is yet to be looked at
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
