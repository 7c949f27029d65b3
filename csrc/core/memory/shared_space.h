// The bytes of a pool's pages and the streams that share them: a PageSpace, and a FreeList for each
// stream, which are changed together.
//
//     space    which bytes are free, and behind which fence
//     lists    what one stream may take of them, indexed for searching
//
// invariants:
//   what free list f has  ==  the free bytes of the space whose fence f.Passes()
//   free bytes are behind kLeased  <=>  their page is in leased_
//   space().page_count() == the table's page_count()
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <utility>
#include <vector>

#include "core/base/index_set.h"
#include "core/base/units.h"
#include "core/driver.h"
#include "core/memory/free_list.h"
#include "core/memory/page_space.h"
#include "core/memory/range_table.h"

namespace cgp {

// Where a block lies.
struct Site : Placement {
  // The node of a block that lies in one extent. Of a block below a page that is yet to be taken:
  // the node of one page that holds its first byte, if that is known.
  NodeId node = NodeId::kNone;
};

class SharedSpace {
 public:
  // Only this changes `ranges`, except for who leases what.
  explicit SharedSpace(RangeTable& ranges) : space_(ranges.page_size()), ranges_(ranges) {}
  SharedSpace(const SharedSpace&) = delete;
  SharedSpace& operator=(const SharedSpace&) = delete;

  const PageSpace& space() const { return space_; }
  Granules page_size() const { return space_.page_size(); }

  // --- Streams ---

  // The number of streams; they are numbered from 0 in the order in which they were added.
  std::size_t stream_count() const { return stream_count_; }
  bool has_several_streams() const { return stream_count_ > 1; }
  FreeList& free_list(std::size_t number) const { return *free_lists_[number]; }
  // pre: own != kOpen. Throws with nothing changed.
  FreeList& AddFreeList(StreamId stream, FenceId own);
  // Drops all free lists without a stream.
  void DropSpareFreeLists() { free_lists_.resize(stream_count_); }
  // Removes all streams. Their free lists stay up to date until other streams take them over, so
  // captures that follow one another index only what changes. Does not throw after
  // ReserveOpening().
  void RemoveStreams();

  // How many streams' free lists meet the condition.
  template <typename Condition>
  uint32_t CountStreams(Condition&& condition) const {
    const auto streams = std::span(free_lists_).first(stream_count_);
    return static_cast<uint32_t>(std::ranges::count_if(
        streams, [&](const auto& list) { return condition(std::as_const(*list)); }));
  }

  // --- Blocks ---

  // Whether the free place has whole pages behind no fence: if several streams allocate, no one has
  // had those in this scope.
  bool HasUntouchedPages(const Site& site, Granules length) const;

  // Makes room, so that the next Take() of so many blocks cannot throw if nothing is mapped before.
  // Give() cannot throw after ReserveFence(), nor Open() after ReserveOpening(), of their fences.
  void ReserveTake(std::size_t blocks = 1);
  void ReserveFence(FenceId fence) { space_.ReserveFence(fence); }

  // Makes `length` granules from the site on used. pre: they are free; ReserveTake().
  void Take(Site& site, Granules length);
  // Frees them behind the fence. pre: ReserveFence().
  void Give(const Site& site, Granules length, FenceId fence);

  // Calls function(page, offset, length) for each page that has a part of the block, in the order
  // of its addresses.
  template <typename Function>
  void ForEachPiece(const Site& site, Granules length, Function&& function) const {
    ForEachExtent(site, length, [&](PageId page, Granules offset, Granules left) {
      for (; left > Granules(0); ++page) {
        const Granules piece = std::min(left, page_size());
        function(page, offset, piece);
        left -= piece;
      }
    });
  }
  // Calls function(node) for the nodes of a block in use; or, for a site without a node, for the
  // free nodes in which it begins and ends, and those between. An extent has several where pages
  // between them are gone.
  template <typename Function>
  void ForEachNode(const Site& site, Granules length, Function&& function) const {
    if (site.node != NodeId::kNone) {
      function(site.node);
      return;
    }
    ForEachExtent(site, length, [&](PageId page, Granules offset, Granules extent) {
      if (extent < page_size()) {
        // A block of several extents leaves a page at its end and enters one at its start.
        function(offset == Granules(0) ? space_.first(page) : space_.last(page));
        return;
      }
      const PageId end = page + static_cast<uint32_t>(extent / page_size());
      while (page < end) {
        const NodeId id = space_.first(page);
        page = space_.end(id);
        function(id);
      }
    });
  }

  // --- Pages ---

  // RangeTable::Map() and Shrink(). The former throws with nothing changed.
  VirtualPage Map(const MappingPlan& plan);
  std::shared_ptr<RangeTable::Shrinking> PrepareShrink(std::vector<bool> keep);
  RangeTable::Renumbering Shrink(RangeTable::Shrinking& prepared) noexcept;

  // --- Fences ---

  // Makes room for opening any of so many fences, as long as no node is freed.
  void ReserveOpening(std::size_t fence_limit);
  // Makes one free list pass these fences or not. O(nodes behind them). pre: ReserveOpening().
  void SetPasses(FreeList& list, std::span<const FenceId> fences, bool passes);
  // Gives everyone what is behind these fences, or puts it behind `now`. O(nodes behind them). pre:
  // ReserveOpening(), ReserveFence(now).
  void Open(std::span<const FenceId> opened, FenceId now = FenceId::kOpen);
  // Makes room for Hold(), and for opening what it cuts in two.
  void ReserveHold();
  // Puts the free bytes of the pages behind the fence, but not those of a lease. pre: `pages` has
  // room for all; ReserveFence(), ReserveHold().
  void Hold(const IndexSet& pages, FenceId fence);

  // --- Leases ---

  // Hides the free bytes of the pages, and what is freed there from now on; or gives them to
  // everyone. pre: `pages` has room for all; ReserveHold().
  bool has_leased() const { return has_leased_; }
  void SetLeased(const IndexSet& pages, bool leased);

  void Check() const;

 private:
  void ReserveWoken();
  // Consecutive whole pages are one extent.
  template <typename Function>
  void ForEachExtent(const Site& site, Granules length, Function&& function) const {
    Granules offset(site.offset);
    for (VirtualPage vpage = site.vpage; length > Granules(0);) {
      const PageId page = ranges_.page_at(vpage);
      const uint64_t most = offset == Granules(0) ? length / page_size() : 0;
      uint32_t pages = 1;
      while (pages < most && ranges_.page_at(vpage + pages) == page + pages) ++pages;
      const Granules extent =
          most > 0 ? page_size() * pages : std::min(length, page_size() - offset);
      function(page, offset, extent);
      vpage = vpage + pages;
      length -= extent;
      offset = Granules(0);
    }
  }
  NodeId TakePiece(NodeId within, PageId page, Granules offset, Granules length, bool large);
  NodeId TakePages(PageId page, Granules length);
  void GivePiece(NodeId id, FenceId fence, bool large);

  PageSpace space_;
  RangeTable& ranges_;
  // Those of the streams, then those without a stream, which pass kOpen alone.
  std::vector<std::unique_ptr<FreeList>> free_lists_;
  std::size_t stream_count_ = 0;
  IndexSet leased_;  // pages; with room for all
  bool has_leased_ = false;
  std::vector<NodeId> woken_;  // by SetPasses(); only reuses its memory
};

}  // namespace cgp
