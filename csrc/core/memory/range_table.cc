#include "core/memory/range_table.h"

#include <algorithm>

#include "core/base/error.h"

namespace cgp {
// What a Map() has done so far, undone in reverse unless it succeeds. Undoing is legal in a
// capture, since nothing can have used what it takes back.
class RangeTable::Undo {
 public:
  explicit Undo(RangeTable& table) : table_(table) {}
  Undo(const Undo&) = delete;
  Undo& operator=(const Undo&) = delete;

  ~Undo() {
    if (succeeded) return;
    // Shrink() tries again what the driver fails to undo: the error that brought us here is the one
    // to report. There is room to record it.
    bool is_stuck = false;
    for (const Mapping& mapping : mapped) {
      if (Attempt([&] { table_.driver_.Unmap(mapping.address, mapping.bytes); })) continue;
      table_.stuck_mappings_.push_back(mapping);
      is_stuck = true;
    }
    if (is_stuck && room != nullptr) *room = 0;
    if (reserved) {
      const Range& range = table_.ranges_.back();
      Reservation& all = table_.reservations_.back();
      all.ranges = 0;
      if (!is_stuck && Attempt([&] { table_.driver_.FreeAddresses(all.address, all.bytes); }))
        table_.reservations_.pop_back();
      table_.page_at_.resize(Index(range.first));
      table_.range_of_group_.resize(Index(range.first) / kVpageGroup);
      table_.ranges_.pop_back();
    }
    for (; created > 0; --created) {
      const PhysicalHandle& handle = table_.handles_.back();
      if (!table_.Release(handle)) table_.unreleased_.push_back(handle);
      table_.pages_.resize(Index(handle.first));
      table_.handles_.pop_back();
    }
  }

  bool succeeded = false;
  uint32_t created = 0;
  bool reserved = false;
  uint32_t* room = nullptr;  // at the end that grows of a range that was there before
  std::vector<Mapping> mapped;

 private:
  RangeTable& table_;
};

RangeTable::RangeTable(Driver& driver, Granules page_size, bool borrows)
    : driver_(driver), page_bytes_(page_size.bytes()), borrows_(borrows) {}

// What the driver does not take back is leaked: a destructor can tell nobody.
RangeTable::~RangeTable() {
  Attempt([this] { Shrink(*PrepareShrink(std::vector<bool>(vpage_limit()))); });
}

VirtualPage RangeTable::Map(const MappingPlan& plan) {
  CGP_CHECK(!plan.handles.empty());
  const uint32_t count = PagesOf(plan);
  Undo undo(*this);
  undo.mapped.reserve(plan.handles.size());
  ReserveMore(stuck_mappings_, plan.handles.size());
  ReserveMore(unreleased_, plan.handles.size());

  // Physical memory comes first: it is what runs out, and undoing it unmaps nothing.
  std::vector<PageId> handles = plan.handles;
  for (PageId& handle : handles) {
    if (!MappingPlan::IsNew(handle)) continue;
    const uint32_t pages = MappingPlan::NewPages(handle);
    handle = static_cast<PageId>(page_count());
    CreateHandle(pages, undo);
  }
  for (const PageId handle : handles) {
    CGP_CHECK(handle_begin(handle) == handle);
    for (PageId page = handle; page < handle_end(handle); ++page) {
      ReserveMore(pages_[Index(page)].vpages, 1);
    }
  }
  const RangeId id = plan.range ? *plan.range : ReserveRange(plan, undo);
  Range& range = ranges_[Index(id)];
  uint32_t& room = plan.at_front ? range.room_front : range.room_back;
  CGP_CHECK(count <= room);
  if (plan.range) undo.room = &room;

  const uint32_t begin = plan.at_front ? range.mapped_begin - count : range.mapped_end;
  const Address address = range.address + begin * page_bytes_;
  Address next = address;
  for (const PageId handle : handles) {
    const uint64_t bytes = handle_pages(handle) * page_bytes_;
    const Handle mapped = handles_[pages_[Index(handle)].handle].handle;
    driver_.Map(next, bytes, mapped);
    undo.mapped.push_back({next, bytes, mapped});
    next += bytes;
  }
  driver_.SetAccess(address, count * page_bytes_);
  undo.succeeded = true;

  const VirtualPage first = range.first + begin;
  VirtualPage vpage = first;
  for (const PageId handle : handles) {
    for (PageId page = handle; page < handle_end(handle); ++page, ++vpage) {
      page_at_[Index(vpage)] = page;
      std::vector<VirtualPage>& vpages = pages_[Index(page)].vpages;
      vpages.insert(std::ranges::upper_bound(vpages, vpage), vpage);
    }
  }
  for (const PageId handle : handles) {
    const uint32_t end = Index(handle_end(handle));
    NoteRow(Index(handle));
    row_begins_.SetRange(Index(handle) + 1, end, false);
    if (end < page_count()) NoteRow(end);
  }
  (plan.at_front ? range.mapped_begin : range.mapped_end) = plan.at_front ? begin : begin + count;
  room -= count;
  mapping_count_ += handles.size();
  return first;
}

uint32_t RangeTable::PagesOf(const MappingPlan& plan) const {
  uint32_t pages = 0;
  for (const PageId handle : plan.handles) {
    pages += MappingPlan::IsNew(handle) ? MappingPlan::NewPages(handle) : handle_pages(handle);
  }
  return pages;
}

void RangeTable::CreateHandle(uint32_t pages, Undo& undo) {
  const auto first = static_cast<PageId>(page_count());
  const auto number = static_cast<uint32_t>(handles_.size());
  ReserveMore(handles_, 1);
  ReserveMore(pages_, pages);
  row_begins_.Resize(static_cast<uint32_t>(pages_.capacity()));
  const Handle handle = borrows_ ? TakeOffered(pages) : driver_.Create(pages * page_bytes_);
  handles_.push_back({.handle = handle, .first = first, .pages = pages});
  pages_.resize(pages_.size() + pages, Page{number, {}});
  ++undo.created;
}

Handle RangeTable::TakeOffered(uint32_t pages) {
  if (offered_.empty()) {
    throw DriverError(DriverStatus::kOutOfMemory, "a loan", 0, "nothing more is lent",
                      pages * page_bytes_, driver_.device());
  }
  const Handle handle = offered_.front();
  offered_.erase(offered_.begin());
  return handle;
}

uint32_t RangeTable::RoomInFront(uint32_t pages) { return (pages + kVpageGroup) / 2; }

uint32_t RangeTable::CapacityFor(const MappingPlan& plan) const {
  // Addresses are nearly free, so a range gets room to double, at either end.
  const uint32_t pages = PagesOf(plan);
  const uint32_t front = RoomInFront(pages);
  const uint32_t room = std::max(plan.room, ranges_.empty() ? kRoomOfFirst : 0);
  const uint32_t wanted = front + pages + std::max(front, room);
  return (wanted + kVpageGroup - 1) / kVpageGroup * kVpageGroup;
}

uint32_t RangeTable::MostVpagesAfter(const MappingPlan& plan) const {
  return vpage_limit() + (plan.range ? 0 : CapacityFor(plan));
}

RangeId RangeTable::ReserveRange(const MappingPlan& plan, Undo& undo) {
  Range range;
  range.capacity = CapacityFor(plan);
  range.apart = plan.room > 0;
  range.first = VirtualPage{vpage_limit()};
  range.mapped_begin = range.mapped_end = RoomInFront(PagesOf(plan));
  range.room_front = range.mapped_begin;
  range.room_back = range.capacity - range.mapped_end;
  CGP_CHECK(uint64_t{vpage_limit()} + range.capacity <
            Index(MappingPlan::NewHandle(MappingPlan::kMaxNewPages)));

  ReserveMore(ranges_, 1);
  ReserveMore(reservations_, 1);
  ReserveMore(page_at_, range.capacity);
  ReserveMore(range_of_group_, range.capacity / kVpageGroup);
  range.address = driver_.Reserve(range.capacity * page_bytes_);
  range.reservation = static_cast<uint32_t>(reservations_.size());
  page_at_.resize(page_at_.size() + range.capacity);
  range_of_group_.resize(page_at_.size() / kVpageGroup, static_cast<RangeId>(ranges_.size()));
  ranges_.push_back(range);
  reservations_.push_back({range.address, range.capacity * page_bytes_, 1});
  undo.reserved = true;
  return static_cast<RangeId>(ranges_.size() - 1);
}

std::optional<AddressSpan> RangeTable::ReservationAround(Address address) const {
  for (const Reservation& one : reservations_) {
    if (address - one.address < one.bytes) return AddressSpan{one.address, one.address + one.bytes};
  }
  return std::nullopt;
}

void RangeTable::RefreshAccess() {
  for (const Range& range : ranges_) {
    for (VirtualPage vpage = range.begin(); vpage < range.end();) {
      const auto is_there = [&] { return vpage < range.end() && is_present(page_at(vpage)); };
      const VirtualPage begin = vpage;
      while (is_there()) ++vpage;
      if (begin < vpage) {
        driver_.SetAccess(AddressOf({begin}), (Index(vpage) - Index(begin)) * page_bytes_);
      }
      while (vpage < range.end() && !is_there()) ++vpage;
    }
  }
}

bool RangeTable::Evict(PageId page, std::exception_ptr* error) noexcept {
  PhysicalHandle& handle = handles_[pages_[Index(page)].handle];
  const std::vector<VirtualPage>& vpages = vpages_of(handle.first);
  for (; handle.unmapped < vpages.size(); ++handle.unmapped) {
    const Address address = AddressOf({vpages[handle.unmapped]});
    if (!Attempt([&] { driver_.Unmap(address, handle.pages * page_bytes_); }, error)) return false;
  }
  handle.denied = false;
  if (handle.released) return true;
  if (!Release(handle, error)) return false;
  handle.released = true;
  away_pages_ += handle.pages;
  ++away_handles_;
  return true;
}

void RangeTable::BringBack(PageId page) {
  PhysicalHandle& handle = handles_[pages_[Index(page)].handle];
  const uint64_t bytes = handle.pages * page_bytes_;
  if (handle.released) {
    handle.handle = driver_.Create(bytes);
    handle.released = false;
    away_pages_ -= handle.pages;
    --away_handles_;
  }
  const std::vector<VirtualPage>& vpages = vpages_of(handle.first);
  for (; handle.unmapped > 0; --handle.unmapped) {
    driver_.Map(AddressOf({vpages[handle.unmapped - 1]}), bytes, handle.handle);
    handle.denied = true;
  }
  if (!handle.denied) return;
  for (const VirtualPage vpage : vpages) driver_.SetAccess(AddressOf({vpage}), bytes);
  handle.denied = false;
}

bool RangeTable::Release(const PhysicalHandle& handle, std::exception_ptr* error) noexcept {
  const auto shows = [&](const Mapping& mapping) { return mapping.handle == handle.handle; };
  return borrows_ || (std::ranges::none_of(stuck_mappings_, shows) &&
                      Attempt([&] { driver_.Release(handle.handle); }, error));
}

bool RangeTable::BeginsRow(uint32_t page) const {
  if (page == 0) return true;
  const auto beside = [this](VirtualPage before, VirtualPage vpage) {
    return Index(before) + 1 == Index(vpage) && range_of(before) == range_of(vpage);
  };
  return !std::ranges::equal(pages_[page - 1].vpages, pages_[page].vpages, beside);
}

void RangeTable::NoteRow(uint32_t page) { row_begins_.SetRange(page, page + 1, BeginsRow(page)); }

std::optional<RangeId> RangeTable::NewestWithRoom(uint32_t pages) const {
  if (page_count() == 0) return std::nullopt;
  const RangeId newest = range_of(vpages_of(PageId{page_count() - 1}).front());
  const bool has_room = range(newest).room_back >= pages && !range(newest).apart;
  return has_room ? std::optional(newest) : std::nullopt;
}

bool RangeTable::Shows(RangeId range, PageId page) const {
  const auto vpage = std::ranges::lower_bound(vpages_of(page), ranges_[Index(range)].first);
  return vpage != vpages_of(page).end() && range_of(*vpage) == range;
}

void RangeTable::Check() const {
  std::vector<std::vector<VirtualPage>> vpages(page_count());
  for (uint32_t r = 0; r < range_count(); ++r) {
    const Range& here = ranges_[r];
    CGP_CHECK(here.mapped_begin < here.mapped_end && here.mapped_end <= here.capacity);
    CGP_CHECK(here.room_front <= here.mapped_begin);
    CGP_CHECK(here.room_back <= here.capacity - here.mapped_end);
    const Reservation& around = reservations_[here.reservation];
    const Address front = here.address + (here.mapped_begin - here.room_front) * page_bytes_;
    const Address back = here.address + (here.mapped_end + here.room_back) * page_bytes_;
    CGP_CHECK(around.address <= front && back <= around.address + around.bytes);
    CGP_CHECK(Index(here.first) % kVpageGroup == 0 && here.capacity % kVpageGroup == 0);
    for (VirtualPage vpage = here.begin(); vpage < here.end(); ++vpage) {
      CGP_CHECK(Index(range_of(vpage)) == r && Index(page_at(vpage)) < page_count());
      vpages[Index(page_at(vpage))].push_back(vpage);
    }
  }
  const auto together = [this](VirtualPage a, VirtualPage b) { return range_of(a) == range_of(b); };
  for (uint32_t p = 0; p < page_count(); ++p) {
    CGP_CHECK(!vpages[p].empty() && vpages[p] == pages_[p].vpages);
    CGP_CHECK(std::ranges::adjacent_find(vpages[p], together) == vpages[p].end());
    CGP_CHECK(row_begins_.Contains(p) == BeginsRow(p));
  }
  uint64_t ranges = 0;
  for (const Reservation& reservation : reservations_) ranges += reservation.ranges;
  CGP_CHECK(ranges == range_count());

  uint64_t mappings = 0;
  uint64_t away = 0;
  uint32_t end = 0;
  for (uint32_t h = 0; h < handles_.size(); ++h) {
    const PhysicalHandle& handle = handles_[h];
    CGP_CHECK(Index(handle.first) == end && handle.pages > 0);
    CGP_CHECK(handle.lease != kNoLease || is_present(handle.first));
    CGP_CHECK(!handle.released || handle.unmapped == vpages_of(handle.first).size());
    away += handle.released ? handle.pages : 0;
    end += handle.pages;
    mappings += vpages_of(handle.first).size();
    for (uint32_t page = Index(handle.first); page < end; ++page) {
      CGP_CHECK(pages_[page].handle == h);
      CGP_CHECK(page == Index(handle.first) || !BeginsRow(page));
    }
  }
  CGP_CHECK(end == page_count() && mappings == mapping_count_ && away == away_pages_);
}

}  // namespace cgp
