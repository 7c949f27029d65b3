#include "core/memory/free_handles.h"

#include "core/base/error.h"
#include "core/memory/free_view.h"

namespace cgp {
namespace {

// What the set has of the handle becomes `now`, if not 0. Throws with `known` true.
template <typename Set>
void Replace(Set& set, PageId handle, uint32_t& known, uint32_t now) {
  if (known == now) return;
  if (known > 0) set.erase({known, handle});
  known = 0;
  if (now > 0) set.insert({now, handle});
  known = now;
}

}  // namespace

void FreeHandles::Resize(uint32_t pages) {
  changed_.Resize(pages);
  if (known_.size() < pages) known_.resize(pages);
}

void FreeHandles::Clear(uint32_t pages) {
  known_.assign(known_.size(), Known{});
  heads_.clear();
  tails_.clear();
  wholes_.clear();
  changed_.Clear();
  changed_.InsertRange(0, pages);
}

void FreeHandles::Update(const FreeView& view) {
  for (auto page = changed_.Next(0); page; page = changed_.Next(*page)) {
    const PageId handle = ranges_.handle_begin(PageId{*page});
    const Known now = Look(view, handle);
    Known& known = known_[Index(handle)];
    Replace(heads_, handle, known.head, now.head);
    Replace(tails_, handle, known.tail, now.tail);
    Replace(wholes_, handle, known.whole, now.whole);
    changed_.EraseRange(Index(handle), Index(ranges_.handle_end(handle)));
  }
}

FreeHandles::Known FreeHandles::Look(const FreeView& view, PageId handle) const {
  const PageId end = ranges_.handle_end(handle);
  PageId page = handle;
  Granules head;
  for (; page != end && view.IsWhole(page); ++page) head += view.page_size();
  if (page == end) return {.whole = ranges_.handle_pages(handle)};
  head += view.Head(page);
  page = end - 1;
  Granules tail;
  for (; view.IsWhole(page); page = page - 1) tail += view.page_size();
  tail += view.Tail(page);
  return {static_cast<uint32_t>(head.count()), static_cast<uint32_t>(tail.count()), 0};
}

void FreeHandles::Check(const FreeView& view) const {
  std::size_t entries = 0;
  for (PageId handle{0}; Index(handle) < ranges_.page_count();
       handle = ranges_.handle_end(handle)) {
    const Known& known = known_[Index(handle)];
    const auto changed = changed_.Next(Index(handle));
    const bool is_up_to_date = !changed || *changed >= Index(ranges_.handle_end(handle));
    CGP_CHECK(!is_up_to_date || known == Look(view, handle));
    CGP_CHECK(known.head == 0 || heads_.contains({known.head, handle}));
    CGP_CHECK(known.tail == 0 || tails_.contains({known.tail, handle}));
    CGP_CHECK(known.whole == 0 || wholes_.contains({known.whole, handle}));
    entries += std::size_t{known.head > 0} + (known.tail > 0) + (known.whole > 0);
  }
  CGP_CHECK(entries == heads_.size() + tails_.size() + wholes_.size());
}

}  // namespace cgp
