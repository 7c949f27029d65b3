// How a RangeTable gets smaller.
#include <algorithm>
#include <functional>
#include <numeric>
#include <utility>

#include "core/base/error.h"
#include "core/memory/range_table.h"

namespace cgp {

// First the driver lets go of what it can. Then the tables are written anew from what it did. All
// memory for this is allocated in advance.
class RangeTable::Shrinking {
 public:
  Shrinking(RangeTable& table, std::vector<bool> keep);

  Renumbering Run() noexcept {
    RetryRemains();
    for (PhysicalHandle& handle : table_.handles_) LetGoOf(handle);
    for (Reservation& reservation : table_.reservations_) reservation.ranges = 0;
    for (const Range& range : table_.ranges_) MovePieces(range);
    MoveHandles();
    FreeReservations();
    return std::move(result_);
  }

 private:
  template <typename Call>
  bool Attempt(Call&& call) noexcept {
    return RangeTable::Attempt(call, &result_.error);
  }
  void RetryRemains() noexcept;
  void LetGoOf(PhysicalHandle& handle) noexcept;
  void MovePieces(const Range& range) noexcept;
  void MoveHandles() noexcept;
  void FreeReservations() noexcept;
  bool IsStuck(const Reservation& reservation) const noexcept;

  RangeTable& table_;
  std::vector<bool> keep_;  // by virtual page; those that the driver does not let go of stay too
  Renumbering result_;
  std::vector<uint32_t> reservations_;  // the new number of each
  std::vector<Range> ranges_;
  std::vector<PageId> page_at_;
  std::vector<RangeId> range_of_group_;
};

RangeTable::Shrinking::Shrinking(RangeTable& table, std::vector<bool> keep)
    : table_(table), keep_(std::move(keep)), reservations_(table.reservations_.size()) {
  result_.pages.assign(table.page_count(), Renumbering::kGone);
  result_.vpages.assign(table.vpage_limit(), Renumbering::kGone);
  ranges_.reserve(table.MostRangesAfterShrink());
  page_at_.reserve(table.MostVpagesAfterShrink());
  range_of_group_.reserve(table.MostVpagesAfterShrink() / kVpageGroup);
  table.unreleased_.reserve(table.unreleased_.size() + table.handles_.size());
}

void RangeTable::Shrinking::RetryRemains() noexcept {
  std::erase_if(table_.stuck_mappings_, [&](const Mapping& mapping) {
    return Attempt([&] { table_.driver_.Unmap(mapping.address, mapping.bytes); });
  });
  std::erase_if(table_.unreleased_, [&](const PhysicalHandle& handle) {
    return table_.Release(handle, &result_.error);
  });
}

void RangeTable::Shrinking::LetGoOf(PhysicalHandle& handle) noexcept {
  const uint64_t bytes = handle.pages * table_.page_bytes_;
  bool mapped = false;
  uint32_t stay_unmapped = 0;
  uint32_t number = 0;
  for (const VirtualPage vpage : table_.vpages_of(handle.first)) {
    const bool unmapped = number++ < handle.unmapped;
    if (!keep_[Index(vpage)] &&
        (unmapped || Attempt([&] { table_.driver_.Unmap(table_.AddressOf({vpage}), bytes); }))) {
      --table_.mapping_count_;
    } else {
      mapped = true;
      stay_unmapped += unmapped ? 1 : 0;
      std::fill_n(keep_.begin() + Index(vpage), handle.pages, true);
    }
  }
  handle.unmapped = stay_unmapped;
  if (mapped) return;
  if (handle.released) {
    table_.away_pages_ -= handle.pages;
    --table_.away_handles_;
  } else if (!table_.Release(handle, &result_.error)) {
    table_.unreleased_.push_back(handle);
  }
}

// Each run of virtual pages that stay mapped becomes a range, with the room up to the next one.
void RangeTable::Shrinking::MovePieces(const Range& range) noexcept {
  const uint32_t first = Index(range.first);
  const auto next = [&](uint32_t from, bool stays) {
    while (from < range.mapped_end && keep_[first + from] != stays) ++from;
    return from;
  };
  const uint32_t limit = range.mapped_end + range.room_back;
  uint32_t room_from = range.mapped_begin - range.room_front;
  uint32_t base = 0;  // the first has the addresses in front of it
  for (uint32_t begin = next(range.mapped_begin, true); begin < range.mapped_end;) {
    const uint32_t end = next(begin, false);
    const uint32_t behind = next(end, true);
    const uint32_t room_end = behind < range.mapped_end ? behind : limit;
    Range piece = range;
    piece.address = range.address + base * table_.page_bytes_;
    piece.mapped_begin = begin - base;
    piece.mapped_end = end - base;
    piece.room_front = begin - room_from;
    piece.room_back = room_end - end;
    piece.capacity = (room_end - base + kVpageGroup - 1) / kVpageGroup * kVpageGroup;
    piece.first = VirtualPage{static_cast<uint32_t>(page_at_.size())};
    page_at_.resize(page_at_.size() + piece.capacity);
    range_of_group_.resize(page_at_.size() / kVpageGroup, static_cast<RangeId>(ranges_.size()));
    const auto vpages = result_.vpages.begin() + first;
    std::iota(vpages + begin, vpages + end, Index(piece.begin()));
    ++table_.reservations_[piece.reservation].ranges;
    ranges_.push_back(piece);
    begin = base = room_from = behind;
  }
}

void RangeTable::Shrinking::MoveHandles() noexcept {
  uint32_t pages = 0;
  std::size_t handles = 0;
  for (PhysicalHandle handle : table_.handles_) {
    const auto stays = [&](VirtualPage vpage) { return keep_[Index(vpage)]; };
    if (std::ranges::none_of(table_.vpages_of(handle.first), stays)) continue;
    for (uint32_t i = 0; i < handle.pages; ++i, ++pages) {
      Page page = std::move(table_.pages_[Index(handle.first) + i]);
      std::erase_if(page.vpages, std::not_fn(stays));
      for (VirtualPage& vpage : page.vpages) {
        vpage = result_.Of(vpage);
        page_at_[Index(vpage)] = PageId{pages};
      }
      page.handle = static_cast<uint32_t>(handles);
      result_.pages[Index(handle.first) + i] = pages;
      table_.pages_[pages] = std::move(page);
    }
    handle.first = PageId{pages - handle.pages};
    table_.handles_[handles++] = handle;
  }
  table_.pages_.resize(pages);
  table_.handles_.resize(handles);
  table_.ranges_ = std::move(ranges_);
  table_.page_at_ = std::move(page_at_);
  table_.range_of_group_ = std::move(range_of_group_);
  for (uint32_t page = 0; page < pages; ++page) table_.NoteRow(page);
}

void RangeTable::Shrinking::FreeReservations() noexcept {
  uint32_t left = 0;
  for (std::size_t i = 0; i < reservations_.size(); ++i) {
    const Reservation one = table_.reservations_[i];
    reservations_[i] = left;
    if (one.ranges == 0 && !IsStuck(one) &&
        Attempt([&] { table_.driver_.FreeAddresses(one.address, one.bytes); }))
      continue;
    table_.reservations_[left++] = one;
  }
  table_.reservations_.resize(left);
  for (Range& range : table_.ranges_) range.reservation = reservations_[range.reservation];
}

// Whether something that an undo failed to unmap is still mapped there.
bool RangeTable::Shrinking::IsStuck(const Reservation& reservation) const noexcept {
  return std::ranges::any_of(table_.stuck_mappings_, [&](const Mapping& mapping) {
    return mapping.address - reservation.address < reservation.bytes;
  });
}

std::shared_ptr<RangeTable::Shrinking> RangeTable::PrepareShrink(std::vector<bool> keep) {
  return std::make_shared<Shrinking>(*this, std::move(keep));
}

RangeTable::Renumbering RangeTable::Shrink(Shrinking& prepared) noexcept { return prepared.Run(); }

// A range becomes no more ranges than it has mappings, each of whole groups of virtual pages.
uint32_t RangeTable::MostVpagesAfterShrink() const {
  return vpage_limit() + MostRangesAfterShrink() * kVpageGroup;
}

bool RangeTable::has_remains() const {
  return !unreleased_.empty() || !stuck_mappings_.empty() ||
         std::ranges::any_of(reservations_, [](const auto& one) { return one.ranges == 0; });
}

RangeTable::AddressIndex RangeTable::ByAddress() const {
  AddressIndex index;
  for (uint32_t r = 0; r < range_count(); ++r) {
    index.emplace(AddressOf({ranges_[r].begin()}), RangeId{r});
  }
  return index;
}

Placement RangeTable::At(Address address, const AddressIndex& index) const {
  auto at = index.upper_bound(address);
  CGP_CHECK(at != index.begin());
  const auto& [start, id] = *--at;
  const uint64_t vpages = (address - start) / page_bytes_;
  CGP_CHECK(vpages < range(id).mapped());
  return {range(id).begin() + static_cast<uint32_t>(vpages),
          static_cast<uint32_t>((address - start) % page_bytes_ / kGranuleBytes)};
}

}  // namespace cgp
