// A small pool for the tests of placement.h: pages of four granules as one stream sees them, and
// what can be said of them by looking at every granule.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "core/memory/shared_space.h"
#include "core/placement/placement.h"
#include "testing/host_driver.h"

namespace cgp {

class SmallPool : public ::testing::Test {
 protected:
  static constexpr uint32_t kP = 4;  // granules of a page
  static constexpr Granules kPageSize{kP};
  static constexpr PageId kNew = MappingPlan::kNewPage;

  SlotId Map(const MappingPlan& plan) { return bytes_.Map(plan); }

  // A new range of new pages that look like this: '.' is a free granule and 'x' a used one. Each is
  // a handle of its own.
  SlotId MapNew(const std::vector<std::string>& pages) {
    return MapNew(std::vector(pages.size(), kNew), pages);
  }
  // The same in one handle.
  SlotId MapNewHandle(const std::vector<std::string>& pages) {
    return MapNew({MappingPlan::NewHandle(static_cast<uint32_t>(pages.size()))}, pages);
  }
  SlotId MapNew(std::vector<PageId> handles, const std::vector<std::string>& pages) {
    const uint32_t first_page = space_.page_count();
    const SlotId first = Map({.range = {}, .handles = std::move(handles)});
    for (uint32_t i = 0; i < pages.size(); ++i) {
      for (uint32_t g = 0; g < kP; ++g) {
        if (pages[i][g] == 'x') Take(PageId{first_page + i}, g, 1);
      }
    }
    return first;
  }
  SlotId MapOld(std::vector<PageId> pages) { return Map({.range = {}, .handles = pages}); }

  void Take(PageId page, uint32_t offset, uint32_t length) {
    Site site{{ranges_.slots_of(page).front(), offset}};
    bytes_.ReserveTake();
    bytes_.Take(site, Granules(length));
    used_.push_back(site.node);
  }

  void Give(std::size_t which) {
    std::swap(used_[which], used_.back());
    Give(used_.back());
    used_.pop_back();
  }
  void Give(NodeId used) {
    bytes_.Give({{}, used}, Granules(space_.node(used).length), FenceId::kOpen);
  }

  std::optional<Placement> Find(uint64_t length, Slack slack) {
    return FindMapped(view_, Granules(length), slack);
  }
  GrowthPlan Plan(uint64_t length, Slack slack) {
    return PlanGrowth(view_, Granules(length), slack, /*several_streams=*/false);
  }

  // --- The same by brute force. Granules are counted through all slots: slot * kP + offset. ---

  bool IsFree(PageId page, uint32_t offset) const {
    NodeId id = space_.first(page);
    while (space_.node(id).offset + space_.node(id).length <= offset) id = space_.node(id).next;
    return !space_.node(id).used();
  }
  bool IsFree(uint64_t granule) const {
    const SlotId slot{static_cast<uint32_t>(granule / kP)};
    return IsFree(ranges_.page_at(slot), static_cast<uint32_t>(granule % kP));
  }
  bool IsWholePage(PageId page) const {
    bool whole = true;
    for (uint32_t g = 0; g < kP; ++g) whole = whole && IsFree(page, g);
    return whole;
  }
  uint64_t begin(uint32_t r) const {
    return uint64_t{Index(ranges_.range(RangeId{r}).begin())} * kP;
  }
  uint64_t end(uint32_t r) const { return uint64_t{Index(ranges_.range(RangeId{r}).end())} * kP; }

  bool BruteFits(uint32_t r, uint64_t start, uint64_t length) const {
    if (start < begin(r) || start + length > end(r)) return false;
    for (uint64_t g = start; g < start + length; ++g) {
      if (!IsFree(g)) return false;
    }
    return true;
  }

  bool Fits(Placement start, uint64_t length) const {
    return BruteFits(Index(ranges_.range_of(start.slot)),
                     uint64_t{Index(start.slot)} * kP + start.offset, length);
  }

  bool IsWholeHandle(PageId handle) const {
    bool whole = true;
    for (uint32_t p = Index(handle); p < Index(ranges_.handle_end(handle)); ++p) {
      whole = whole && IsWholePage(PageId{p});
    }
    return whole;
  }

  // How many pages of wholly free handles a fitting block leaves over.
  uint64_t Leftover(uint64_t start, uint64_t length) const {
    std::map<PageId, uint64_t> touched;
    for (uint64_t slot = start / kP; slot * kP < start + length; ++slot) {
      ++touched[ranges_.handle_begin(ranges_.page_at(SlotId{static_cast<uint32_t>(slot)}))];
    }
    uint64_t left = 0;
    for (const auto& [handle, pages] : touched) {
      if (IsWholeHandle(handle)) left += ranges_.handle_pages(handle) - pages;
    }
    return left;
  }

  // How many whole pages a fitting block touches.
  uint64_t WholeTouched(uint64_t start, uint64_t length) const {
    uint64_t whole = 0;
    for (uint64_t slot = start / kP; slot * kP < start + length; ++slot) {
      whole += IsWholePage(ranges_.page_at(SlotId{static_cast<uint32_t>(slot)})) ? 1 : 0;
    }
    return whole;
  }

  HostDriver driver_{{.granularity = kP * kGranuleBytes, .map_memory = false}};
  RangeTable ranges_{driver_, kPageSize};
  SharedSpace bytes_{ranges_};
  const PageSpace& space_ = bytes_.space();
  FreeView& view_ = bytes_.AddView(StreamId{1}, FenceId{1});
  std::vector<NodeId> used_;
};

}  // namespace cgp
