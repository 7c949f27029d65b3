#include "core/memory/ring.h"

#include <algorithm>

#include "core/base/reserve.h"

namespace cgp {
namespace {

// How many extents are looked at for a block: a bound on the time.
constexpr std::size_t kLookedAt = 4096;

}  // namespace

uint64_t Ring::Seek(Granules length, bool first_of_kind) {
  ReserveAdd(2);
  place_ = Fit(length.count());
  uint64_t missing = place_ ? 0 : length.count();
  if (!place_ && !extents_.empty()) {
    const bool at_end = extents_.back().end == Index(ranges_.range(*part_).end()) * page();
    if (at_end) missing -= std::min(missing, extents_.back().length());
  }
  if (first_of_kind) {
    uint64_t free = 0;
    for (const Extent& extent : extents_) free += extent.length();
    const uint64_t wanted = length.count() + std::max(most_placed_, placed_ + length.count()) +
                            std::max(largest_, length.count());
    missing = std::max(missing, wanted - std::min(wanted, free));
  }
  return PagesFor(Granules(missing), bytes_.page_size());
}

// The first place behind the last block, or behind those that still live there.
std::optional<uint64_t> Ring::Fit(uint64_t length) {
  auto extent = std::ranges::upper_bound(extents_, next_, {}, &Extent::end);
  for (std::size_t left = std::min(extents_.size() + 1, kLookedAt); left > 0; --left, ++extent) {
    if (extent == extents_.end()) extent = extents_.begin();
    if (extent == extents_.end()) break;
    const bool holds_next = extent->begin <= next_ && next_ < extent->end;
    const uint64_t begin = holds_next && left > 1 ? next_ : extent->begin;
    if (extent->end - begin >= length) return begin;
  }
  if (extent != extents_.end()) next_ = extent->begin;
  return std::nullopt;
}

void Ring::Grow(SlotId first, uint64_t pages) {
  part_ = ranges_.range_of(first);
  Keep(Index(first) * page(), (Index(first) + pages) * page());
}

Site Ring::Take(Granules length) {
  if (!place_) place_ = extents_.back().begin;
  const auto extent = std::ranges::upper_bound(extents_, *place_, {}, &Extent::end);
  const auto [begin, end, site] = *extent;
  Give(extent);
  const uint64_t place_end = *place_ + length.count();
  if (begin < *place_) Keep(begin, *place_);
  if (place_end < end) Keep(place_end, end);
  next_ = place_end;
  placed_ += length.count();
  most_placed_ = std::max(most_placed_, placed_);
  largest_ = std::max(largest_, length.count());
  return SiteAt(*place_);
}

void Ring::ReserveAdd(std::size_t blocks) {
  ReserveMore(extents_, blocks);
  bytes_.ReserveTake(3);  // what an extent leaves on both sides, and the block
}

void Ring::Add(const Site& site, Granules length) {
  bytes_.Give(site, length, FenceId::kOpen);
  const uint64_t begin = Index(site.slot) * page() + site.offset;
  Keep(begin, begin + length.count());
}

// What is open is an extent, with those that adjoin it.
void Ring::Keep(uint64_t begin, uint64_t end) {
  const auto adjoins = [&](const Extent& extent) {
    return (extent.end == begin || extent.begin == end) &&
           ranges_.range_of(extent.site.slot) == ranges_.range_of(SiteAt(begin).slot);
  };
  auto at = std::ranges::lower_bound(extents_, begin, {}, &Extent::begin);
  if (at != extents_.end() && adjoins(*at)) {
    end = at->end;
    at = Give(at);
  }
  if (at != extents_.begin() && adjoins(*(at - 1))) {
    begin = (--at)->begin;
    at = Give(at);
  }
  Site site = SiteAt(begin);
  bytes_.Take(site, Granules(end - begin));
  extents_.insert(at, {begin, end, site});
}

std::vector<Ring::Extent>::iterator Ring::Give(std::vector<Extent>::iterator extent) {
  bytes_.Give(extent->site, Granules(extent->length()), FenceId::kOpen);
  return extents_.erase(extent);
}

void Ring::Dissolve() {
  if (!empty()) Lose();
  while (!extents_.empty()) Give(extents_.end() - 1);
  part_.reset();
}

Site Ring::SiteAt(uint64_t granule) const {
  return {.slot = SlotId{static_cast<uint32_t>(granule / page())},
          .offset = static_cast<uint32_t>(granule % page())};
}

}  // namespace cgp
