// What the handles of a pool have to offer to one stream, which sees it through a FreeView: the
// wholly free ones, and the *edges* of the others, which are the free granules at their ends.
//
//     handle    | free | used | free |      head 1 page, tail 1 page
//
// Whatever changes in a page is noted, and looked at when somebody asks: a search costs O(log n)
// for each handle that has changed since the last one.
//
// invariants, of each handle that no page is noted of:
//   known_[first page] says what of it is in which set, and that is what the view sees
#pragma once

#include <compare>
#include <cstdint>
#include <set>
#include <vector>

#include "core/base/index_set.h"
#include "core/base/units.h"
#include "core/memory/range_table.h"

namespace cgp {

class FreeView;

// The free granules at the start or the end of a handle that is not wholly free.
struct Edge {
  uint64_t length = 0;
  PageId handle{};

  // By length; of equals the first handle.
  auto operator<=>(const Edge&) const = default;
};

// A handle that is wholly free.
struct WholeHandle {
  uint64_t pages = 0;
  PageId handle{};

  // Largest first; of equals the first handle.
  bool operator<(const WholeHandle& other) const {
    return pages != other.pages ? pages > other.pages : handle < other.handle;
  }
};

class FreeHandles {
 public:
  explicit FreeHandles(const RangeTable& ranges) : ranges_(ranges) {}

  // Makes room for so many pages: what follows cannot throw then, but Update().
  void Resize(uint32_t pages);
  // Something in these pages may have changed.
  void Note(PageId begin, PageId end) { changed_.InsertRange(Index(begin), Index(end)); }
  void Note(PageId page) { changed_.Insert(Index(page)); }
  // Nothing is known of any of so many pages.
  void Clear(uint32_t pages);

  // Brings up to date what follows. May throw: then it is not all up to date yet.
  void Update(const FreeView& view);
  const std::set<Edge>& heads() const { return heads_; }
  const std::set<Edge>& tails() const { return tails_; }
  const std::set<WholeHandle>& wholes() const { return wholes_; }

  // Recomputes the invariants; throws InternalError.
  void Check(const FreeView& view) const;

 private:
  // What is in the sets of a handle: the lengths of its edges, or its pages if it is wholly free.
  struct Known {
    uint32_t head = 0;
    uint32_t tail = 0;
    uint32_t whole = 0;
    bool operator==(const Known&) const = default;
  };

  Known Look(const FreeView& view, PageId handle) const;

  const RangeTable& ranges_;
  IndexSet changed_;          // pages
  std::vector<Known> known_;  // by a handle's first page
  std::set<Edge> heads_;
  std::set<Edge> tails_;
  std::set<WholeHandle> wholes_;
};

}  // namespace cgp
