#include "core/range_table.h"

#include <algorithm>

#include "core/error.h"

namespace cgp {

// What a Map() has done so far, undone in reverse unless it is kept. Undoing is legal during a
// capture because nothing can have used what it takes back.
class RangeTable::Undo {
 public:
  explicit Undo(RangeTable& table) : table_(table) {}
  Undo(const Undo&) = delete;
  Undo& operator=(const Undo&) = delete;

  ~Undo() {
    if (kept_) return;
    // A driver that fails to undo leaves the memory behind: the error that brought us here is the
    // one to report.
    const auto attempt = [](auto&& call) {
      try {
        call();
        return true;
      } catch (const DriverError&) {
        return false;
      }
    };
    bool unmapped = true;
    for (const Mapping& mapping : mapped) {
      unmapped &= attempt([&] { table_.driver_.Unmap(mapping.address, mapping.bytes); });
    }
    if (!unmapped && extended != nullptr) {
      (at_front ? extended->room_front : extended->room_back) = 0;
      table_.reservations_[extended->reservation].stuck = true;
    }
    if (reserved) {
      const Range& range = table_.ranges_.back();
      attempt([&] {
        table_.driver_.FreeAddresses(range.address, range.capacity * table_.page_bytes_);
      });
      table_.reservations_.pop_back();
      table_.page_at_.resize(Index(range.first));
      table_.range_of_group_.resize(Index(range.first) / kSlotGroup);
      table_.ranges_.pop_back();
    }
    for (; created > 0; --created) {
      const PhysicalHandle& handle = table_.handles_.back();
      attempt([&] { table_.driver_.Release(handle.handle); });
      table_.pages_.resize(Index(handle.first));
      table_.handles_.pop_back();
    }
  }

  void Keep() { kept_ = true; }

  struct Mapping {
    Address address = 0;
    uint64_t bytes = 0;
  };
  uint32_t created = 0;
  bool reserved = false;
  Range* extended = nullptr;  // the range that was there before, and at which end
  bool at_front = false;
  std::vector<Mapping> mapped;

 private:
  RangeTable& table_;
  bool kept_ = false;
};

RangeTable::RangeTable(Driver& driver, Granules page_size)
    : driver_(driver), page_bytes_(page_size.bytes()) {}

RangeTable::~RangeTable() {
  const auto attempt = [](auto&& call) {
    try {
      call();
    } catch (const DriverError&) {
      // Leaked: a destructor has nobody to tell.
    }
  };
  for (const Range& range : ranges_) {
    for (uint32_t i = range.mapped_begin; i < range.mapped_end;) {
      const uint32_t pages = handle_pages(page_at(SlotId{Index(range.first) + i}));
      attempt([&] { driver_.Unmap(range.address + i * page_bytes_, pages * page_bytes_); });
      i += pages;
    }
  }
  for (const Reservation& reservation : reservations_) {
    attempt([&] { driver_.FreeAddresses(reservation.address, reservation.bytes); });
  }
  for (const auto* const handles : {&handles_, &unreleased_}) {
    for (const PhysicalHandle& handle : *handles) {
      attempt([&] { driver_.Release(handle.handle); });
    }
  }
}

SlotId RangeTable::Map(const MappingPlan& plan) {
  CGP_CHECK(!plan.handles.empty());
  const uint32_t count = PagesOf(plan);
  Undo undo(*this);
  undo.mapped.reserve(plan.handles.size());

  // Physical memory first: it is what runs out, and it is undone without unmapping.
  std::vector<PageId> handles = plan.handles;
  for (PageId& handle : handles) {
    if (!MappingPlan::IsNew(handle)) continue;
    const uint32_t pages = MappingPlan::NewPages(handle);
    handle = static_cast<PageId>(page_count());
    CreateHandle(pages, undo);
  }
  for (const PageId handle : handles) {
    CGP_CHECK(handle_begin(handle) == handle);
    for (uint32_t p = Index(handle); p < Index(handle_end(handle)); ++p) {
      std::vector<SlotId>& slots = pages_[p].slots;
      if (slots.size() == slots.capacity())
        slots.reserve(std::max<std::size_t>(2, 2 * slots.size()));
    }
  }
  const RangeId id = plan.range        ? *plan.range
                     : ranges_.empty() ? ReserveFirstRange(count, undo)
                                       : ReserveRange(count, plan.room, undo);
  Range& range = ranges_[Index(id)];
  CGP_CHECK(count <= (plan.at_front ? range.room_front : range.room_back));
  undo.extended = plan.range ? &range : nullptr;
  undo.at_front = plan.at_front;

  const uint32_t begin = plan.at_front ? range.mapped_begin - count : range.mapped_end;
  const Address address = range.address + begin * page_bytes_;
  Address next = address;
  for (const PageId handle : handles) {
    const uint64_t bytes = handle_pages(handle) * page_bytes_;
    driver_.Map(next, bytes, handles_[pages_[Index(handle)].handle].handle);
    undo.mapped.push_back({next, bytes});
    next += bytes;
  }
  driver_.SetAccess(address, count * page_bytes_);
  undo.Keep();

  const SlotId first{Index(range.first) + begin};
  uint32_t slot = Index(first);
  for (const PageId handle : handles) {
    for (uint32_t p = Index(handle); p < Index(handle_end(handle)); ++p, ++slot) {
      page_at_[slot] = PageId{p};
      pages_[p].slots.push_back(SlotId{slot});
    }
  }
  (plan.at_front ? range.mapped_begin : range.mapped_end) = plan.at_front ? begin : begin + count;
  (plan.at_front ? range.room_front : range.room_back) -= count;
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
  handles_.push_back({.handle = {}, .first = first, .pages = pages});
  try {
    pages_.resize(pages_.size() + pages, Page{number, {}});
    handles_.back().handle = driver_.Create(pages * page_bytes_);
  } catch (...) {
    pages_.resize(Index(first));
    handles_.pop_back();
    throw;
  }
  ++undo.created;
}

// Where thousands of pools have used up the addresses, one is not refused for the sake of room.
RangeId RangeTable::ReserveFirstRange(uint32_t pages, Undo& undo) {
  try {
    return ReserveRange(pages, kRoomOfFirst, undo);
  } catch (const DriverError& error) {
    if (error.status() != DriverStatus::kOutOfAddresses) throw;
    return ReserveRange(pages, 0, undo);
  }
}

RangeId RangeTable::ReserveRange(uint32_t pages, uint32_t room, Undo& undo) {
  // Addresses are nearly free, so a range gets room to double, at either end.
  const uint32_t front = (pages + kSlotGroup) / 2;
  const uint32_t wanted = front + pages + std::max(front, room);
  Range range;
  range.capacity = (wanted + kSlotGroup - 1) / kSlotGroup * kSlotGroup;
  range.first = SlotId{slot_limit()};
  range.mapped_begin = range.mapped_end = front;
  range.room_front = range.mapped_begin;
  range.room_back = range.capacity - range.mapped_end;
  CGP_CHECK(uint64_t{slot_limit()} + range.capacity <
            Index(MappingPlan::NewHandle(MappingPlan::kMaxNewPages)));

  if (ranges_.size() == ranges_.capacity())
    ranges_.reserve(std::max<std::size_t>(8, 2 * ranges_.size()));
  if (reservations_.size() == reservations_.capacity())
    reservations_.reserve(std::max<std::size_t>(8, 2 * reservations_.size()));
  range.reservation = static_cast<uint32_t>(reservations_.size());
  page_at_.resize(page_at_.size() + range.capacity);
  range_of_group_.resize(page_at_.size() / kSlotGroup, static_cast<RangeId>(ranges_.size()));
  try {
    range.address = driver_.Reserve(range.capacity * page_bytes_);
  } catch (...) {
    page_at_.resize(Index(range.first));
    range_of_group_.resize(Index(range.first) / kSlotGroup);
    throw;
  }
  ranges_.push_back(range);
  reservations_.push_back({range.address, range.capacity * page_bytes_, 1, false});
  undo.reserved = true;
  return static_cast<RangeId>(ranges_.size() - 1);
}

void RangeTable::RefreshAccess() {
  for (const Range& range : ranges_) {
    driver_.SetAccess(range.address + range.mapped_begin * page_bytes_,
                      range.mapped() * page_bytes_);
  }
}

bool RangeTable::Shows(RangeId range, PageId page) const {
  const std::vector<SlotId>& slots = slots_of(page);
  return std::any_of(slots.begin(), slots.end(),
                     [&](SlotId slot) { return range_of(slot) == range; });
}

Address RangeTable::AddressOf(SlotId slot, Granules offset) const {
  const Range& home = range(range_of(slot));
  return home.address + (Index(slot) - Index(home.first)) * page_bytes_ + offset.bytes();
}

void RangeTable::Check() const {
  uint64_t mapped = 0;
  std::vector<uint32_t> last_range_of_page(page_count(), ~uint32_t{0});
  for (uint32_t r = 0; r < range_count(); ++r) {
    const Range& here = ranges_[r];
    CGP_CHECK(here.mapped_begin < here.mapped_end && here.mapped_end <= here.capacity);
    CGP_CHECK(here.room_front <= here.mapped_begin);
    CGP_CHECK(here.room_back <= here.capacity - here.mapped_end);
    const Reservation& around = reservations_[here.reservation];
    const Address front = here.address + (here.mapped_begin - here.room_front) * page_bytes_;
    const Address back = here.address + (here.mapped_end + here.room_back) * page_bytes_;
    CGP_CHECK(around.address <= front && back <= around.address + around.bytes);
    CGP_CHECK(Index(here.first) % kSlotGroup == 0 && here.capacity % kSlotGroup == 0);
    for (uint32_t s = Index(here.begin()); s < Index(here.end()); ++s) {
      const PageId page = page_at_[s];
      CGP_CHECK(Index(range_of(SlotId{s})) == r && Index(page) < page_count());
      CGP_CHECK(last_range_of_page[Index(page)] != r);
      last_range_of_page[Index(page)] = r;
      const std::vector<SlotId>& slots = slots_of(page);
      CGP_CHECK(std::count(slots.begin(), slots.end(), SlotId{s}) == 1);
    }
    mapped += here.mapped();
  }
  uint64_t shown = 0;
  for (const Page& page : pages_) {
    CGP_CHECK(!page.slots.empty());
    shown += page.slots.size();
  }
  CGP_CHECK(mapped == shown);
  uint64_t ranges = 0;
  for (const Reservation& reservation : reservations_) ranges += reservation.ranges;
  CGP_CHECK(ranges == range_count());

  uint64_t mappings = 0;
  uint32_t end = 0;
  for (uint32_t h = 0; h < handles_.size(); ++h) {
    const PhysicalHandle& handle = handles_[h];
    CGP_CHECK(Index(handle.first) == end && handle.pages > 0);
    end += handle.pages;
    const std::vector<SlotId>& slots = slots_of(handle.first);
    mappings += slots.size();
    for (uint32_t i = 0; i < handle.pages; ++i) {
      const PageId page{Index(handle.first) + i};
      CGP_CHECK(pages_[Index(page)].handle == h && slots_of(page).size() == slots.size());
      for (std::size_t m = 0; m < slots.size(); ++m) {
        CGP_CHECK(Index(slots_of(page)[m]) == Index(slots[m]) + i);
        CGP_CHECK(range_of(slots_of(page)[m]) == range_of(slots[m]));
      }
    }
  }
  CGP_CHECK(end == page_count() && mappings == mapping_count_);
}

}  // namespace cgp
