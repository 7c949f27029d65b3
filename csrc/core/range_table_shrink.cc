// How a RangeTable gets smaller.
#include <algorithm>
#include <numeric>

#include "core/error.h"
#include "core/range_table.h"

namespace cgp {

// First the driver lets go of what it can, then the books are written anew from what it did. All memory
// that takes is allocated before the driver is called.
class RangeTable::Shrinking {
 public:
  Shrinking(RangeTable& table, const Keep& keep);

  Renumbering Run() {
    try {
      LetGo();
    } catch (const DriverError&) {
      result_.error = std::current_exception();
    }
    MoveRanges();
    MoveHandles();
    DropReservations();
    return std::move(result_);
  }

 private:
  void LetGo();
  void LetGoOf(std::size_t number);
  void ReleaseUnreleased();
  void FreeReservations();
  void MoveRanges() noexcept;
  void MovePieces(const Range& range) noexcept;
  void AddPiece(Range piece, SlotId from) noexcept;
  void MoveHandles() noexcept;
  void DropReservations() noexcept;

  RangeTable& table_;
  const Keep& keep_;
  Renumbering result_;
  std::vector<bool> unmapped_;        // by slot
  std::vector<bool> let_go_;          // by handle: mapped nowhere any more
  std::vector<bool> addresses_gone_;  // by reservation
  std::vector<uint32_t> mapped_in_;   // by reservation: how many slots are mapped
  std::vector<Range> ranges_;
  std::vector<PageId> page_at_;
  std::vector<RangeId> range_of_group_;
};

RangeTable::Shrinking::Shrinking(RangeTable& table, const Keep& keep)
    : table_(table),
      keep_(keep),
      unmapped_(table.slot_limit()),
      let_go_(table.handles_.size()),
      addresses_gone_(table.reservations_.size()),
      mapped_in_(table.reservations_.size()) {
  result_.pages.assign(table.page_count(), Renumbering::kGone);
  result_.slots.assign(table.slot_limit(), Renumbering::kGone);
  // No more pieces than there are mappings, each of whole groups.
  const std::size_t pieces = table.mapping_count_;
  const std::size_t groups = table.range_of_group_.size() + pieces;
  ranges_.reserve(pieces);
  page_at_.reserve(groups * kSlotGroup);
  range_of_group_.reserve(groups);
  table.unreleased_.reserve(table.unreleased_.size() + table.handles_.size());
  for (const Range& range : table.ranges_) mapped_in_[range.reservation] += range.mapped();
}

void RangeTable::Shrinking::LetGo() {
  ReleaseUnreleased();
  for (std::size_t number = 0; number < table_.handles_.size(); ++number) LetGoOf(number);
  FreeReservations();
}

void RangeTable::Shrinking::ReleaseUnreleased() {
  for (std::vector<PhysicalHandle>& left = table_.unreleased_; !left.empty(); left.pop_back()) {
    table_.driver_.Release(left.back().handle);
  }
}

void RangeTable::Shrinking::LetGoOf(std::size_t number) {
  const PhysicalHandle& handle = table_.handles_[number];
  for (const SlotId slot : table_.slots_of(handle.first)) {
    if (keep_.slots[Index(slot)]) continue;
    table_.driver_.Unmap(table_.AddressOf(slot, Granules(0)), handle.pages * table_.page_bytes_);
    std::fill_n(unmapped_.begin() + Index(slot), handle.pages, true);
    mapped_in_[table_.range(table_.range_of(slot)).reservation] -= handle.pages;
    --table_.mapping_count_;
  }
  if (keep_.pages[Index(handle.first)]) return;
  let_go_[number] = true;
  table_.unreleased_.push_back(handle);
  table_.driver_.Release(handle.handle);
  table_.unreleased_.pop_back();
}

void RangeTable::Shrinking::FreeReservations() {
  for (std::size_t i = 0; i < table_.reservations_.size(); ++i) {
    const Reservation& reservation = table_.reservations_[i];
    if (mapped_in_[i] > 0 || reservation.stuck) continue;
    table_.driver_.FreeAddresses(reservation.address, reservation.bytes);
    addresses_gone_[i] = true;
  }
}

void RangeTable::Shrinking::MoveRanges() noexcept {
  for (Reservation& reservation : table_.reservations_) reservation.ranges = 0;
  for (const Range& range : table_.ranges_) MovePieces(range);
}

// Each run of slots that are still mapped becomes a range, with the room up to the next one.
void RangeTable::Shrinking::MovePieces(const Range& range) noexcept {
  const uint32_t first = Index(range.first);
  const auto next = [&](uint32_t from, bool unmapped) {
    while (from < range.mapped_end && unmapped_[first + from] != unmapped) ++from;
    return from;
  };
  const uint32_t limit = range.mapped_end + range.room_back;
  uint32_t room_from = range.mapped_begin - range.room_front;
  uint32_t base = 0;  // the first keeps the addresses in front of it
  for (uint32_t begin = next(range.mapped_begin, false); begin < range.mapped_end;) {
    const uint32_t end = next(begin, true);
    const uint32_t behind = next(end, false);
    const uint32_t room_end = behind < range.mapped_end ? behind : limit;
    Range piece = range;
    piece.address = range.address + base * table_.page_bytes_;
    piece.mapped_begin = begin - base;
    piece.mapped_end = end - base;
    piece.room_front = begin - room_from;
    piece.room_back = room_end - end;
    piece.capacity = (room_end - base + kSlotGroup - 1) / kSlotGroup * kSlotGroup;
    AddPiece(piece, SlotId{first + begin});
    begin = base = room_from = behind;
  }
}

// `from`: the slot that its first mapped one was.
void RangeTable::Shrinking::AddPiece(Range piece, SlotId from) noexcept {
  piece.first = SlotId{static_cast<uint32_t>(page_at_.size())};
  page_at_.resize(page_at_.size() + piece.capacity);
  range_of_group_.resize(page_at_.size() / kSlotGroup, static_cast<RangeId>(ranges_.size()));
  for (uint32_t i = 0; i < piece.mapped(); ++i) {
    result_.slots[Index(from) + i] = Index(piece.begin()) + i;
  }
  ++table_.reservations_[piece.reservation].ranges;
  ranges_.push_back(piece);
}

void RangeTable::Shrinking::MoveHandles() noexcept {
  uint32_t pages = 0;
  std::size_t handles = 0;
  for (std::size_t number = 0; number < table_.handles_.size(); ++number) {
    PhysicalHandle handle = table_.handles_[number];
    if (let_go_[number]) continue;
    for (uint32_t i = 0; i < handle.pages; ++i, ++pages) {
      Page page = std::move(table_.pages_[Index(handle.first) + i]);
      std::erase_if(page.slots, [&](SlotId slot) { return unmapped_[Index(slot)]; });
      for (SlotId& slot : page.slots) {
        slot = result_.Of(slot);
        page_at_[Index(slot)] = PageId{pages};
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
}

void RangeTable::Shrinking::DropReservations() noexcept {
  std::vector<uint32_t>& number = mapped_in_;  // from now on
  uint32_t left = 0;
  for (std::size_t i = 0; i < addresses_gone_.size(); ++i) {
    number[i] = left;
    if (!addresses_gone_[i]) table_.reservations_[left++] = table_.reservations_[i];
  }
  table_.reservations_.resize(left);
  for (Range& range : table_.ranges_) range.reservation = number[range.reservation];
}

RangeTable::Renumbering RangeTable::Shrink(const Keep& keep) {
  return Shrinking(*this, keep).Run();
}

uint64_t RangeTable::unreleased_pages() const {
  return std::accumulate(
      unreleased_.begin(), unreleased_.end(), uint64_t{0},
      [](uint64_t sum, const PhysicalHandle& handle) { return sum + handle.pages; });
}

void RangeTable::UnpinAll() {
  for (Range& range : ranges_) range.pinned = false;
}

RangeTable::AddressIndex RangeTable::ByAddress() const {
  AddressIndex index;
  for (uint32_t r = 0; r < range_count(); ++r) {
    index.emplace_back(AddressOf(ranges_[r].begin(), Granules(0)), RangeId{r});
  }
  std::ranges::sort(index);
  return index;
}

std::pair<SlotId, Granules> RangeTable::At(Address address, const AddressIndex& index) const {
  const auto behind =
      std::ranges::upper_bound(index, address, {}, &AddressIndex::value_type::first);
  CGP_CHECK(behind != index.begin());
  const auto& [start, id] = *(behind - 1);
  const uint64_t slots = (address - start) / page_bytes_;
  CGP_CHECK(slots < range(id).mapped());
  return {SlotId{Index(range(id).begin()) + static_cast<uint32_t>(slots)},
          Granules((address - start) % page_bytes_ / kGranuleBytes)};
}

}  // namespace cgp
