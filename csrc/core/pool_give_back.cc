// What nobody needs any more is unmapped.
#include <algorithm>
#include <exception>
#include <utility>

#include "core/base/error.h"
#include "core/pool.h"

namespace cgp {

uint64_t Pool::spare_bytes() const {
  const PageSpace& space = memory_.bytes().space();
  uint64_t pages = ranges_.unreleased_pages();
  for (PageId handle{0}; Index(handle) < ranges_.page_count();
       handle = ranges_.handle_end(handle)) {
    bool used = false;
    for (PageId page = handle; page < ranges_.handle_end(handle); ++page) {
      for (NodeId id = space.first(page); id != NodeId::kNone; id = space.node(id).next) {
        used |= space.node(id).used();
      }
    }
    if (!used) pages += ranges_.handle_pages(handle);
  }
  return BytesOf(pages);
}

void Pool::PrepareGiveBack() {
  CGP_CHECK(!in_scope());
  memory_.DissolveRing();
  next_identity_ = std::make_shared<const char>();
  memory_.ReserveOpening();
  shrinking_ = memory_.bytes().PrepareShrink(SlotsInUse());
}

void Pool::GiveBack() {
  CGP_CHECK(!in_scope() && shrinking_);
  stats_.peak_reserved_bytes = std::max(stats_.peak_reserved_bytes, reserved_bytes());
  memory_.OpenAll();
  ranges_.UnpinAll();
  blocks_.ForEach([](Address, LiveBlock& live) { live.pinned = false; });
  unpinned_ = blocks_.size();
  identity_ = std::move(next_identity_);
  if (const std::exception_ptr error = Shrink()) std::rethrow_exception(error);
}

void Pool::UnmapStale() {
  CGP_CHECK(memory_.scope() == ScopeKind::kEager);
  memory_.DissolveRing();
  std::vector<bool> keep = SlotsInUse();
  uint64_t mapped = 0;
  for (PageId page{0}; Index(page) < ranges_.page_count(); ++page) {
    const std::vector<SlotId>& slots = ranges_.slots_of(page);
    mapped += slots.size();
    bool any = false;
    for (const SlotId slot : slots) {
      if (ranges_.range(ranges_.range_of(slot)).pinned) keep[Index(slot)] = true;
      any |= keep[Index(slot)];
    }
    // The oldest mapping is in the range that shows most.
    if (!any) keep[Index(slots.front())] = true;
  }
  std::exception_ptr error;
  if (static_cast<uint64_t>(std::ranges::count(keep, true)) < mapped) {
    shrinking_ = memory_.bytes().PrepareShrink(std::move(keep));
    error = Shrink();
  }
  mapping_limit_ = std::max(kLeastMappingLimit, 2 * ranges_.mapping_count());
  if (error) std::rethrow_exception(error);
}

// By slot whether a live block lies there, or in another slot of the same mapping.
std::vector<bool> Pool::SlotsInUse() const {
  const Granules page_size = memory_.bytes().page_size();
  std::vector<bool> in_use(ranges_.slot_limit());
  blocks_.ForEach([&](Address, const LiveBlock& live) {
    const Granules end = Granules(live.site.offset) + live.length();
    const uint32_t last =
        Index(live.site.slot) + static_cast<uint32_t>((end - Granules(1)) / page_size);
    for (uint32_t slot = Index(live.site.slot); slot <= last;) {
      const PageId page = ranges_.page_at(SlotId{slot});
      const uint32_t begin = slot - (Index(page) - Index(ranges_.handle_begin(page)));
      const uint32_t pages = ranges_.handle_pages(page);
      std::fill_n(in_use.begin() + begin, pages, true);
      slot = begin + pages;
    }
  });
  return in_use;
}

// All that names slots by their numbers gets the new ones, or forgets them. Does not throw: returns
// the driver's error. pre: `shrinking_` is prepared.
std::exception_ptr Pool::Shrink() {
  const RangeTable::Renumbering renumbering = memory_.bytes().Shrink(*shrinking_);
  shrinking_.reset();
  blocks_.ForEach(
      [&](Address, LiveBlock& live) { live.site.slot = renumbering.Of(live.site.slot); });
  placer_.Forget();
  return renumbering.error;
}

}  // namespace cgp
