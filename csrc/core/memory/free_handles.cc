#include "core/memory/free_handles.h"

#include "core/base/error.h"
#include "core/memory/free_view.h"

namespace cgp {

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
  last_end_ = PageId{0};
}

void FreeHandles::Update(const FreeView& view) {
  last_end_ = PageId{0};
  for (auto page = changed_.Next(0); page; page = changed_.Next(*page)) {
    const PageId handle = ranges_.handle_begin(PageId{*page});
    if (const Known now = Look(view, handle); now != known_[Index(handle)]) {
      Remove(handle);
      Enter(now, handle);
    }
    changed_.EraseRange(Index(handle), Index(ranges_.handle_end(handle)));
  }
}

FreeHandles::Known FreeHandles::Look(const FreeView& view, PageId handle) const {
  const PageId end = ranges_.handle_end(handle);
  PageId page = handle;
  Granules head;
  for (; page != end && view.IsWhole(page); ++page) head += view.page_size();
  if (page == end) return {.is_whole = true};
  head += view.Head(page);
  page = end - 1;
  Granules tail;
  for (; view.IsWhole(page); page = page - 1) tail += view.page_size();
  tail += view.Tail(page);
  return {static_cast<uint32_t>(head.count()), static_cast<uint32_t>(tail.count()), false};
}

// pre: nothing of the handle is in the sets. Throws with what is known of it true.
void FreeHandles::Enter(const Known& now, PageId handle) {
  Known& known = known_[Index(handle)];
  if (now.is_whole) wholes_.insert({ranges_.handle_pages(handle), handle});
  known.is_whole = now.is_whole;
  if (now.head > 0) heads_.insert({now.head, handle});
  known.head = now.head;
  if (now.tail > 0) tails_.insert({now.tail, handle});
  known.tail = now.tail;
}

void FreeHandles::Remove(PageId handle) {
  Known& known = known_[Index(handle)];
  if (known.is_whole) wholes_.erase({ranges_.handle_pages(handle), handle});
  if (known.head > 0) heads_.erase({known.head, handle});
  if (known.tail > 0) tails_.erase({known.tail, handle});
  known = {};
}

void FreeHandles::Check(const FreeView& view) const {
  std::size_t heads = 0;
  std::size_t tails = 0;
  std::size_t wholes = 0;
  for (PageId handle{0}; Index(handle) < ranges_.page_count();
       handle = ranges_.handle_end(handle)) {
    const Known& known = known_[Index(handle)];
    const auto changed = changed_.Next(Index(handle));
    const bool is_up_to_date = !changed || *changed >= Index(ranges_.handle_end(handle));
    CGP_CHECK(!is_up_to_date || known == Look(view, handle));
    CGP_CHECK(known.head == 0 || heads_.contains({known.head, handle}));
    CGP_CHECK(known.tail == 0 || tails_.contains({known.tail, handle}));
    CGP_CHECK(!known.is_whole || wholes_.contains({ranges_.handle_pages(handle), handle}));
    heads += known.head > 0 ? 1 : 0;
    tails += known.tail > 0 ? 1 : 0;
    wholes += known.is_whole ? 1 : 0;
  }
  CGP_CHECK(heads == heads_.size() && tails == tails_.size() && wholes == wholes_.size());
}

}  // namespace cgp
