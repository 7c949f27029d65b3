// What nobody needs any more is unmapped.
#include <algorithm>
#include <exception>
#include <utility>

#include "core/base/error.h"
#include "core/pool_state.h"

namespace cgp {

uint64_t Pool::spare_bytes() const {
  const State& s = *state_;
  const std::vector<bool> in_use = s.HandlesInUse();
  const auto spare = static_cast<uint64_t>(std::ranges::count(in_use, false));
  return (spare + s.ranges.unreleased_pages()) * s.memory.bytes().page_size().bytes();
}

bool Pool::has_remains() const { return state_->ranges.has_remains(); }

void Pool::PrepareGiveBack() {
  State& s = *state_;
  CGP_CHECK(!in_scope());
  s.next_identity = std::make_shared<const char>();
  s.memory.ReserveOpenAll();
  s.shrinking = s.memory.bytes().PrepareShrink(s.SlotsInUse());
}

void Pool::GiveBack() {
  State& s = *state_;
  CGP_CHECK(!in_scope() && s.shrinking);
  s.stats.peak_reserved_bytes = std::max(s.stats.peak_reserved_bytes, reserved_bytes());
  s.memory.OpenAll();
  s.ranges.UnpinAll();
  s.identity = std::move(s.next_identity);
  if (const std::exception_ptr error = s.Shrink()) std::rethrow_exception(error);
}

bool Pool::HasStaleMappings() const {
  const State& s = *state_;
  return s.memory.scope() == ScopeKind::kEager && s.ranges.mapping_count() > s.mapping_limit;
}

void Pool::UnmapStale() {
  State& s = *state_;
  CGP_CHECK(s.memory.scope() == ScopeKind::kEager);
  std::vector<bool> keep = s.SlotsInUse();
  uint64_t mapped = 0;
  for (uint32_t p = 0; p < s.ranges.page_count(); ++p) {
    const std::vector<SlotId>& slots = s.ranges.slots_of(PageId{p});
    mapped += slots.size();
    bool any = false;
    for (const SlotId slot : slots) {
      if (s.ranges.range(s.ranges.range_of(slot)).pinned) keep[Index(slot)] = true;
      any |= keep[Index(slot)];
    }
    // The oldest mapping is in the range that shows most.
    if (!any) keep[Index(slots.front())] = true;
  }
  std::exception_ptr error;
  if (static_cast<uint64_t>(std::ranges::count(keep, true)) < mapped) {
    s.shrinking = s.memory.bytes().PrepareShrink(std::move(keep));
    error = s.Shrink();
  }
  s.mapping_limit = std::max(State::kLeastMappingLimit, 2 * s.ranges.mapping_count());
  if (error) std::rethrow_exception(error);
}

// By page whether a live block has a byte of its handle.
std::vector<bool> Pool::State::HandlesInUse() const {
  const PageSpace& space = memory.bytes().space();
  std::vector<bool> in_use(ranges.page_count());
  for (PageId handle{0}; Index(handle) < ranges.page_count(); handle = ranges.handle_end(handle)) {
    bool any = false;
    for (uint32_t p = Index(handle); p < Index(ranges.handle_end(handle)); ++p) {
      for (NodeId id = space.first(PageId{p}); id != NodeId::kNone; id = space.node(id).next) {
        any |= space.node(id).used();
      }
    }
    std::fill_n(in_use.begin() + Index(handle), ranges.handle_pages(handle), any);
  }
  return in_use;
}

// By slot whether a live block lies there, or in another slot of the same mapping.
std::vector<bool> Pool::State::SlotsInUse() const {
  const Granules page_size = memory.bytes().page_size();
  std::vector<bool> in_use(ranges.slot_limit());
  blocks.ForEach([&](Address, const LiveBlock& live) {
    const Granules end = Granules(live.site.offset) + live.length();
    const uint32_t last =
        Index(live.site.slot) + static_cast<uint32_t>((end - Granules(1)) / page_size);
    for (uint32_t slot = Index(live.site.slot); slot <= last;) {
      const PageId page = ranges.page_at(SlotId{slot});
      const uint32_t begin = slot - (Index(page) - Index(ranges.handle_begin(page)));
      const uint32_t pages = ranges.handle_pages(page);
      std::fill_n(in_use.begin() + begin, pages, true);
      slot = begin + pages;
    }
  });
  return in_use;
}

// All that names slots by their numbers gets the new ones, or forgets them. Does not throw: returns
// the driver's error. pre: `shrinking` is prepared.
std::exception_ptr Pool::State::Shrink() {
  const RangeTable::Renumbering renumbering = memory.bytes().Shrink(*shrinking);
  shrinking.reset();
  blocks.ForEach(
      [&](Address, LiveBlock& live) { live.site.slot = renumbering.Of(live.site.slot); });
  placer.Forget();
  return renumbering.error;
}

}  // namespace cgp
