// What is mapped where: the pool's physical pages, and the ranges of addresses that show them.
//
// The driver makes and maps handles: a handle is a run of pages, always mapped together and in
// order, for the price of one page. All else here is counted in pages.
//
// A range is one reservation of addresses. A virtual page (`vpage`) is one page's width of it. A
// run of the range's virtual pages is mapped, and may grow at both ends until the reservation is
// used up. Virtual pages are numbered through all ranges, so one flat table says which page each
// shows:
//
//     vpages     0 ........ 63 | 64 ............... 191 | ...
//     range      r0            | r1                     |
//     mapped        [p0 p1]    |       [p1 p2 p0 p3]    |   (a page may stand in several)
//
// invariants:
//   page_at(v) == p  <=>  v is in vpages_of(p)  <=>  v is mapped
//   the mapped virtual pages of a range are consecutive
//   no page stands twice in one range, so a block never meets itself
//   the handles tile the pages; wherever a handle's first page stands, its others follow
//   mapping_count() == sum over handles of |vpages_of(first page)|
//   sum of |vpages_of(p)| == sum of the ranges' mapped lengths
//   p is in row_begins_  <=>  p or the page before it stands somewhere without the other beside it
//   sum of reservations_[i].ranges == range_count(); each range's addresses lie in its reservation
//   away_pages() == sum of pages over handles that are released
// This is a resource: what Map() adds stays until Shrink() or the destructor unmaps it. Shrink()
// renumbers what is left, so pages, virtual pages and ranges are always counted from 0 without a
// gap. A range that loses mappings in its middle becomes several ranges of one reservation.
//
// A handle that a lease has (pool_leases.cc) may be evicted: its memory is the device's, while its virtual
// pages stay what they are. BringBack() puts new memory behind them.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>
#include <limits>
#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "core/base/index_set.h"
#include "core/base/units.h"
#include "core/driver.h"

namespace cgp {

// Names who has a handle's pages for a time.
using LeaseId = uint32_t;
inline constexpr LeaseId kNoLease = 0;

// Where bytes begin: `offset` granules into the virtual page. They go on through those that follow.
struct Placement {
  VirtualPage vpage{};
  uint32_t offset = 0;

  // The granule of that number, counted through all virtual pages.
  static Placement OfGranule(uint64_t number, Granules page_size) {
    return {VirtualPage{static_cast<uint32_t>(Granules(number) / page_size)},
            static_cast<uint32_t>((Granules(number) % page_size).count())};
  }
  bool operator==(const Placement&) const = default;
};

// Which handles to map where.
struct MappingPlan {
  // Stands for a new handle of that many pages. pre: 1 <= pages <= kMaxNewPages.
  static constexpr PageId NewHandle(uint32_t pages) { return PageId{~uint32_t{0} - (pages - 1)}; }
  static constexpr PageId kNewPage{~uint32_t{0}};  // NewHandle(1)
  static constexpr uint32_t kMaxNewPages = 1 << 16;
  static constexpr bool IsNew(PageId handle) {
    return Index(handle) >= Index(NewHandle(kMaxNewPages));
  }
  // pre: IsNew(handle).
  static constexpr uint32_t NewPages(PageId handle) { return ~uint32_t{0} - Index(handle) + 1; }

  std::optional<RangeId> range;  // none: a new range
  // A new range gets room for at least so many more pages behind. NewestWithRoom() leaves that room
  // to whoever asked for it.
  uint32_t room = 0;
  bool at_front = false;  // before the range's first page rather than behind its last
  // In the order of addresses: new handles, and existing ones that the range does not show yet,
  // each named by its first page.
  std::vector<PageId> handles;

  // How many new pages the plan makes.
  uint32_t new_pages() const {
    uint32_t pages = 0;
    for (const PageId handle : handles) pages += IsNew(handle) ? NewPages(handle) : 0;
    return pages;
  }
};

class RangeTable {
 public:
  struct Range {
    Address address = 0;    // of virtual page `first`
    VirtualPage first{};    // the first virtual page of the reservation
    uint32_t capacity = 0;  // virtual pages reserved
    // [mapped_begin, mapped_end) of these are mapped, counted from `first`.
    uint32_t mapped_begin = 0;
    uint32_t mapped_end = 0;

    // How many more may be mapped at either end: what the reservation has left, or none where an
    // undo failed and something may still be mapped.
    uint32_t room_front = 0;
    uint32_t room_back = 0;
    uint32_t reservation = 0;
    bool apart = false;  // see MappingPlan::room

    uint32_t mapped() const { return mapped_end - mapped_begin; }
    VirtualPage begin() const { return first + mapped_begin; }
    VirtualPage end() const { return first + mapped_end; }
  };

  // Ranges get virtual pages in groups, so that one entry for each group says whose they are.
  static constexpr uint32_t kVpageGroup = 64;

  // The virtual pages that the first range reserves behind its end, so that it can come to show a
  // whole pool. They are 8 GiB of pages of 2 MiB; a process has 128 TiB of addresses.
  static constexpr uint32_t kRoomOfFirst = 4096;

  // If it `borrows`, its new handles are those of Offer(), and it releases none.
  RangeTable(Driver& driver, Granules page_size, bool borrows = false);
  ~RangeTable();
  RangeTable(const RangeTable&) = delete;
  RangeTable& operator=(const RangeTable&) = delete;

  // Makes the new handles of the plan, whose pages are numbered from page_count() on in the order
  // of the plan, and maps all its handles. Returns the virtual page of the first page. A failed
  // driver call, or a lack of memory, throws with all earlier steps undone. What the driver then
  // fails to undo is left to Shrink() and the destructor.
  VirtualPage Map(const MappingPlan& plan);
  // An upper limit on vpage_limit() once the plan is carried out.
  uint32_t MostVpagesAfter(const MappingPlan& plan) const;

  // The new numbers of pages and virtual pages; kGone for those that went.
  struct Renumbering {
    static constexpr uint32_t kGone = std::numeric_limits<uint32_t>::max();
    std::vector<uint32_t> pages;
    std::vector<uint32_t> vpages;
    std::exception_ptr error;  // of the driver, which still has what it failed to let go of

    VirtualPage Of(VirtualPage vpage) const { return VirtualPage{vpages[Index(vpage)]}; }
  };
  // Unmaps all virtual pages that `keep` does not name, releases the handles that are then mapped
  // nowhere, and gives back addresses where nothing is mapped any more. Where the driver fails,
  // everything else still goes. What it failed to let go of stays for the next Shrink(), and so
  // does what an undo failed to give back. pre: the virtual pages of one mapping go together; the
  // device has finished with what goes, and nothing captures.
  //
  // Shrink() does not throw: PrepareShrink() makes room for it, and for no other change of the
  // table.
  class Shrinking;
  std::shared_ptr<Shrinking> PrepareShrink(std::vector<bool> keep);
  Renumbering Shrink(Shrinking& prepared) noexcept;
  // Upper limits on vpage_limit() and range_count() after a Shrink().
  uint32_t MostVpagesAfterShrink() const;
  uint32_t MostRangesAfterShrink() const { return static_cast<uint32_t>(mapping_count_); }
  // The pages of handles that the driver failed to release or to unmap.
  uint64_t unreleased_pages() const {
    uint64_t pages = 0;
    for (const PhysicalHandle& handle : unreleased_) pages += handle.pages;
    return pages;
  }
  // Whether the driver failed to take back something that nobody has mapped.
  bool has_remains() const;

  // --- Leases ---

  // The handles that the next Map() gets as new ones, in the order of its plan. They are somebody
  // else's, who releases them once this table has unmapped them. pre: the table borrows.
  void Offer(std::vector<Handle> handles) { offered_ = std::move(handles); }

  bool borrows() const { return borrows_; }

  LeaseId lease_of(PageId page) const { return handles_[pages_[Index(page)].handle].lease; }
  void SetLease(PageId page, LeaseId lease) { handles_[pages_[Index(page)].handle].lease = lease; }
  Handle physical(PageId page) const { return handles_[pages_[Index(page)].handle].handle; }
  // Whether all its memory and mappings are there.
  bool is_present(PageId page) const {
    const PhysicalHandle& handle = handles_[pages_[Index(page)].handle];
    return !handle.released && !handle.denied && handle.unmapped == 0;
  }
  // Whether the device has its memory.
  bool is_released(PageId page) const { return handles_[pages_[Index(page)].handle].released; }
  // Unmaps the page's handle everywhere, and releases it. Returns whether the driver did all of it,
  // and notes its first error. Another call goes on where this one ended. pre: the device has
  // finished with it, and nothing captures.
  bool Evict(PageId page, std::exception_ptr* error) noexcept;
  // Undoes Evict(), with memory of undefined content. After an error another call goes on where
  // this one ended. Capture-legal.
  void BringBack(PageId page);
  uint64_t away_pages() const { return away_pages_; }

  // Ranges by their addresses, for many look-ups; valid until the next Map() or Shrink().
  using AddressIndex = std::map<Address, RangeId>;
  AddressIndex ByAddress() const;
  // pre: the address is mapped.
  Placement At(Address address, const AddressIndex& index) const;

  // The reservation that the address lies in, if any.
  std::optional<AddressSpan> ReservationAround(Address address) const;

  // Repeats Driver::SetAccess() for all that is mapped.
  void RefreshAccess();

  Granules page_size() const { return Granules(page_bytes_ / kGranuleBytes); }
  uint32_t page_count() const { return static_cast<uint32_t>(pages_.size()); }
  // Includes those that the driver failed to take back.
  std::size_t handle_count() const { return handles_.size() + unreleased_.size() - away_handles_; }
  uint32_t range_count() const { return static_cast<uint32_t>(ranges_.size()); }
  // How many handles are mapped, each counted once for each mapping. Those away count too.
  uint64_t mapping_count() const { return mapping_count_; }
  uint32_t vpage_limit() const { return static_cast<uint32_t>(page_at_.size()); }

  const Range& range(RangeId id) const { return ranges_[Index(id)]; }
  RangeId range_of(VirtualPage vpage) const { return range_of_group_[Index(vpage) / kVpageGroup]; }
  // pre: the virtual page is mapped.
  PageId page_at(VirtualPage vpage) const { return page_at_[Index(vpage)]; }
  // The virtual pages that show the page, those of older ranges first; never empty.
  const std::vector<VirtualPage>& vpages_of(PageId page) const {
    return pages_[Index(page)].vpages;
  }
  bool Shows(RangeId range, PageId page) const;
  // The range of the newest page, if so many more have room behind it (see MappingPlan::room).
  std::optional<RangeId> NewestWithRoom(uint32_t pages) const;
  // The end of a *row*: from `page` to here, pages stand side by side wherever one of them stands.
  PageId RowEnd(PageId page) const {
    return PageId{std::min(row_begins_.Next(Index(page) + 1).value_or(~0U), page_count())};
  }

  // The handle that holds the page.
  PageId handle_begin(PageId page) const { return handles_[pages_[Index(page)].handle].first; }
  uint32_t handle_pages(PageId page) const { return handles_[pages_[Index(page)].handle].pages; }
  PageId handle_end(PageId page) const { return handle_begin(page) + handle_pages(page); }
  // How many pages the plan maps.
  uint32_t PagesOf(const MappingPlan& plan) const;

  Address AddressOf(Placement place) const {
    const Range& owner = range(range_of(place.vpage));
    return owner.address + (Index(place.vpage) - Index(owner.first)) * page_bytes_ +
           Granules(place.offset).bytes();
  }

  // Recomputes the invariants; throws InternalError.
  void Check() const;

 private:
  struct Page {
    uint32_t handle = 0;  // in handles_
    std::vector<VirtualPage> vpages;
  };
  struct PhysicalHandle {
    Handle handle{};
    PageId first{};
    uint32_t pages = 0;
    LeaseId lease = kNoLease;
    // Of the first page's vpages so many, the first ones, are not mapped now.
    uint32_t unmapped = 0;
    bool denied = false;    // some that are mapped may have no access
    bool released = false;  // the device has its memory
  };

  struct Mapping {
    Address address = 0;
    uint64_t bytes = 0;
    Handle handle{};
  };
  struct Reservation {
    Address address = 0;
    uint64_t bytes = 0;
    uint32_t ranges = 0;  // 0: the driver failed to take it back
  };

  class Undo;

  // Returns whether the call succeeded; the first error is recorded in *error.
  template <typename Call>
  static bool Attempt(Call&& call, std::exception_ptr* error = nullptr) noexcept {
    try {
      call();
      return true;
    } catch (const std::exception&) {
      if (error != nullptr && !*error) *error = std::current_exception();
      return false;
    }
  }
  // Returns false if the pool still has it, or an undo failed to unmap it.
  bool Release(const PhysicalHandle& handle, std::exception_ptr* error = nullptr) noexcept;
  bool BeginsRow(uint32_t page) const;
  void NoteRow(uint32_t page);
  static uint32_t RoomInFront(uint32_t pages);
  uint32_t CapacityFor(const MappingPlan& plan) const;  // of a new range
  void CreateHandle(uint32_t pages, Undo& undo);
  Handle TakeOffered(uint32_t pages);
  RangeId ReserveRange(const MappingPlan& plan, Undo& undo);

  Driver& driver_;
  const uint64_t page_bytes_;
  const bool borrows_;
  std::vector<Handle> offered_;
  std::vector<Page> pages_;
  IndexSet row_begins_;  // nothing is said of pages from page_count() on
  std::vector<PhysicalHandle> handles_;
  // Has room for handles_ too while a Shrink() is prepared.
  std::vector<PhysicalHandle> unreleased_;
  std::vector<Range> ranges_;
  std::vector<Reservation> reservations_;
  std::vector<PageId> page_at_;          // by virtual page
  std::vector<RangeId> range_of_group_;  // by virtual page / kVpageGroup
  uint64_t mapping_count_ = 0;
  uint64_t away_pages_ = 0;
  uint64_t away_handles_ = 0;
  std::vector<Mapping> stuck_mappings_;  // that an undo failed to unmap
};

}  // namespace cgp
