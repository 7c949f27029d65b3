// How a FuzzSession compares the real set with the model.
#include <algorithm>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "testing/fuzz_session.h"
#include "testing/text.h"

namespace cgp {
namespace {

struct Figure {
  const char* name;
  uint64_t PoolStats::*value;
};
// What the model says too, of each pool.
constexpr Figure kModelled[] = {{"pages", &PoolStats::pages},
                                {"page_bytes", &PoolStats::page_bytes},
                                {"reserved", &PoolStats::reserved_bytes},
                                {"allocated", &PoolStats::allocated_bytes},
                                {"requested", &PoolStats::requested_bytes},
                                {"live blocks", &PoolStats::live_blocks},
                                {"peak reserved", &PoolStats::peak_reserved_bytes},
                                {"peak allocated", &PoolStats::peak_allocated_bytes},
                                {"peak in the scope", &PoolStats::scope_peak_bytes},
                                {"allocations", &PoolStats::allocations},
                                {"frees", &PoolStats::frees}};
// What is the sum over the pools.
constexpr uint64_t PoolStats::*kSummed[] = {&PoolStats::pages,
                                            &PoolStats::reserved_bytes,
                                            &PoolStats::allocated_bytes,
                                            &PoolStats::requested_bytes,
                                            &PoolStats::live_blocks,
                                            &PoolStats::ranges,
                                            &PoolStats::page_mappings,
                                            &PoolStats::peak_reserved_bytes,
                                            &PoolStats::peak_allocated_bytes,
                                            &PoolStats::allocations,
                                            &PoolStats::frees};

bool SamePieces(const std::vector<PhysicalPiece>& a, const std::vector<PhysicalPiece>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return x.page == y.page && x.offset_bytes == y.offset_bytes && x.length_bytes == y.length_bytes;
  });
}

}  // namespace

std::string FuzzSession::CompareStats() {
  const std::vector<PoolId> ids = set_.ids();
  const std::vector<PoolId> expected = model_.ids();
  if (!std::ranges::includes(ids, expected)) return "other pools exist than expected";
  PoolStats sum;
  for (const PoolId id : ids) {
    const PoolStats stats = set_.Stats(id);
    if (!std::ranges::binary_search(expected, id)) {
      // It stays for what could not be undone, until that can be given back.
      const bool empty = stats.pages == 0 && stats.live_blocks == 0 && set_.UseCount(id) == 0;
      if (!leaky_ || !empty) return "other pools exist than expected";
    } else {
      const PoolStats modelled = model_.Stats(id);
      for (const auto& [name, value] : kModelled) {
        if (stats.*value == modelled.*value) continue;
        return Text(ToString(id), " says ", stats.*value, " ", name, ", expected ",
                    modelled.*value);
      }
    }
    if (set_.UseCount(id) != model_.UseCount(id)) return ToString(id) + ": wrong use count";
    for (const auto value : kSummed) sum.*value += stats.*value;
  }
  const PoolStats total = set_.TotalStats();
  const auto differs = [&](auto value) { return total.*value != sum.*value; };
  if (std::ranges::any_of(kSummed, differs)) return "the total is not the sum of the pools";
  if (std::string complaint = CompareUsage(sum); !complaint.empty()) return complaint;
  const PoolModel::Trimmable trimmable = model_.TrimmableBytes();
  if (set_.TrimmableBytes() < trimmable.least || set_.TrimmableBytes() > trimmable.most) {
    return "wrong trimmable bytes";
  }
  if (leaky_) return {};
  const HostUsage held = host_.usage();
  if (held.physical_bytes != total.reserved_bytes || held.mappings != total.page_mappings ||
      held.reservations > total.ranges) {
    return Text("the driver holds ", held.physical_bytes, " bytes, ", held.mappings,
                " mappings and ", held.reservations, " reservations; the set says ",
                total.reserved_bytes, ", ", total.page_mappings, " and ", total.ranges, " ranges");
  }
  return {};
}

// No operation goes higher than where it ends. `sum`: over all pools.
std::string FuzzSession::CompareUsage(const PoolStats& sum) {
  most_.live_blocks = std::max(most_.live_blocks, sum.live_blocks);
  most_.allocated_bytes = std::max(most_.allocated_bytes, sum.allocated_bytes);
  most_.requested_bytes = std::max(most_.requested_bytes, sum.requested_bytes);
  most_.reserved_bytes = std::max(most_.reserved_bytes, sum.reserved_bytes);
  const SetUsage usage = set_.Usage();
  const auto right = [](const Gauge& gauge, uint64_t current, uint64_t peak) {
    return gauge.current == current && gauge.peak == peak && gauge.added - gauge.removed == current;
  };
  const bool all_right =
      right(usage.all.count, sum.live_blocks, most_.live_blocks) &&
      right(usage.all.bytes, sum.allocated_bytes, most_.allocated_bytes) &&
      right(usage.all.requested_bytes, sum.requested_bytes, most_.requested_bytes) &&
      right(usage.reserved_bytes, sum.reserved_bytes, most_.reserved_bytes);
  return all_right ? "" : "the usage is not that of the pools, or its peaks are not what there was";
}

std::string FuzzSession::CompareSnapshot(PoolId id) {
  const PoolSnapshot snapshot = set_.Snapshot(id);
  std::map<Address, const PoolSnapshot::Range*> ranges;
  uint64_t mapped = 0;
  for (const auto& range : snapshot.ranges) {
    ranges[range.address] = &range;
    mapped += range.pages.size();
  }
  if (snapshot.ranges.size() != snapshot.stats.ranges || mapped < snapshot.stats.page_mappings) {
    return "the snapshot's ranges are not those of its stats";
  }
  auto expected = model_.live().begin();
  const auto skip_others = [&] {
    while (expected != model_.live().end() && expected->second.pool != id) ++expected;
  };
  for (const auto& live : snapshot.blocks) {
    skip_others();
    if (expected == model_.live().end() || live.block != expected->second.block ||
        !SamePieces(live.pieces, expected->second.pieces)) {
      return Text("the snapshot holds another block than expected at ", live.block.address);
    }
    ++expected;
    Address address = live.block.address;
    for (const PhysicalPiece& piece : live.pieces) {
      const auto after = ranges.upper_bound(address);
      if (after == ranges.begin()) return "a block outside of all ranges";
      const PoolSnapshot::Range& range = *std::prev(after)->second;
      const uint64_t slot = (address - range.address) / setup_.page_bytes;
      if (slot >= range.pages.size() || range.pages[slot] != piece.page) {
        return Text("the snapshot maps another page at ", address);
      }
      address += piece.length_bytes;
    }
  }
  skip_others();
  return expected == model_.live().end() ? "" : "the snapshot lacks a live block";
}

std::string FuzzSession::ComparePeers() {
  if (!peers_settled_) return {};
  for (const PoolId id : set_.ids()) {
    for (const auto& range : set_.Snapshot(id).ranges) {
      for (uint64_t slot = 0; slot < range.pages.size(); ++slot) {
        const auto place = watch_.At(range.address + slot * setup_.page_bytes);
        if (!place || !place->accessible || place->peers != watch_.peers()) {
          return Text("a page of ", ToString(id), " lacks access for a peer");
        }
      }
    }
  }
  return {};
}

std::string FuzzSession::Inspect() {
  for (const PoolId id : set_.ids()) {
    if (!setup_.fail_each) break;
    world_.FailEach(FaultKind::kAllocation, [&] {
      set_.Snapshot(id);
      set_.Stats(id);
      set_.ReservedByPool();
    });
  }
  try {
    set_.Check();
  } catch (const std::exception& error) {
    return Text("Check(): ", error.what());
  }
  for (const PoolId id : set_.ids()) {
    std::string complaint = CompareSnapshot(id);
    if (!complaint.empty()) return complaint;
  }
  for (const auto& [address, live] : model_.live()) {
    std::string complaint = Read(live);
    if (!complaint.empty()) return complaint;
    const std::optional<Block> last = set_.Find(address + live.block.bytes - 1);
    if (!last || *last != live.block) return Text("Find() misses b", live.label);
    if (set_.PoolOf(address) != live.pool) return Text("PoolOf() misses b", live.label);
    if (set_.PoolOf(address + 1)) return Text("PoolOf() takes the inside of b", live.label);
    const PoolModel::LiveBlock* next = model_.Holding(address + live.block.bytes);
    if (set_.Find(address + live.block.bytes).has_value() != (next != nullptr)) {
      return Text("Find() is wrong behind b", live.label);
    }
  }
  return ComparePeers();
}

}  // namespace cgp
