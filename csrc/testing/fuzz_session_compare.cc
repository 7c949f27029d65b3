// How a FuzzSession compares the real set with the model.
#include <algorithm>
#include <iterator>
#include <map>
#include <string>
#include <vector>

#include "testing/fuzz_session.h"
#include "testing/pool_of.h"

namespace cgp {
namespace {

struct Figure {
  const char* name;
  uint64_t PoolStats::*value;
  bool modelled = true;       // the model says it too
  bool with_remains = false;  // but not what could not be undone
};
constexpr Figure kFigures[] = {{"pages", &PoolStats::pages},
                               {"page_bytes", &PoolStats::page_bytes},
                               {"reserved", &PoolStats::reserved_bytes, true, true},
                               {"allocated", &PoolStats::allocated_bytes},
                               {"requested", &PoolStats::requested_bytes},
                               {"live blocks", &PoolStats::live_blocks},
                               {"ranges", &PoolStats::ranges, false},
                               {"page mappings", &PoolStats::page_mappings, false},
                               {"peak reserved", &PoolStats::peak_reserved_bytes, true, true},
                               {"peak allocated", &PoolStats::peak_allocated_bytes},
                               {"peak in the scope", &PoolStats::scope_peak_bytes},
                               {"allocations", &PoolStats::allocations},
                               {"frees", &PoolStats::frees},
                               {"away", &PoolStats::away_bytes},
                               {"lent", &PoolStats::lent_bytes},
                               {"unnamed captures", &PoolStats::unnamed_captures, true, true}};

bool SamePieces(const std::vector<PhysicalPiece>& a, const std::vector<PhysicalPiece>& b) {
  return std::equal(a.begin(), a.end(), b.begin(), b.end(), [](const auto& x, const auto& y) {
    return x.page == y.page && x.offset_bytes == y.offset_bytes && x.length_bytes == y.length_bytes;
  });
}

}  // namespace

void FuzzSession::CompareStats() {
  const std::vector<PoolId> ids = Ids();
  const std::vector<PoolId> expected = model_.ids();
  if (!std::ranges::includes(ids, expected)) Complain("other pools exist than expected");
  PoolStats sum;
  bool any_leased = false;  // so that mappings may be away
  for (const PoolId id : ids) {
    const PoolStats stats = set_.Stats(id);
    if (!std::ranges::binary_search(expected, id)) {
      // It stays for what could not be undone, until that can be given back.
      const bool empty = stats.pages == 0 && stats.live_blocks == 0 && set_.UseCount(id) == 0;
      if (!leaky_ || !empty) Complain("other pools exist than expected");
    } else {
      PoolStats modelled = model_.Stats(id);
      if (model_.HasLoan(id)) {
        modelled.lent_bytes = model_.Stats(PoolModel::LoanOf(id)).allocated_bytes;
      }
      any_leased |= model_.PagesWith(id, 0) > 0;
      if (stats.asleep != model_.IsAsleep(id)) Complain(ToString(id), " sleeps or not");
      for (const auto& [name, value, is_modelled, with_remains] : kFigures) {
        // A loan that could not begin had lent for a moment.
        if (PoolModel::IsLoan(id) && value == &PoolStats::peak_reserved_bytes) continue;
        if (!is_modelled || (with_remains && leaky_) || stats.*value == modelled.*value) continue;
        Complain(ToString(id), " says ", stats.*value, " ", name, ", expected ", modelled.*value);
      }
    }
    if (set_.UseCount(id) != model_.UseCount(id)) Complain(ToString(id) + ": wrong use count");
    for (const Figure& one : kFigures) sum.*one.value += stats.*one.value;
  }
  CompareUsage(sum);
  const PoolModel::Trimmable trimmable = model_.TrimmableBytes();
  const uint64_t remains = sum.reserved_bytes - sum.pages * setup_.page_bytes;
  if (set_.TrimmableBytes() < trimmable.least || set_.TrimmableBytes() > trimmable.most + remains) {
    Complain("wrong trimmable bytes");
  }
  const HostUsage held = host_.usage();
  const bool rest =
      (held.mappings == sum.page_mappings || any_leased) && held.reservations <= sum.ranges;
  if (held.physical_bytes != sum.reserved_bytes || !(rest || leaky_)) {
    Complain("the driver holds ", held.physical_bytes, " bytes, ", held.mappings, " mappings and ",
             held.reservations, " reservations; the set says ", sum.reserved_bytes, ", ",
             sum.page_mappings, " and ", sum.ranges, " ranges");
  }
}

// No operation goes higher than where it ends. `sum`: over all pools.
void FuzzSession::CompareUsage(const PoolStats& sum) {
  const SetUsage usage = set_.Usage();
  const auto judge = [&](const Gauge& gauge, uint64_t PoolStats::*value) {
    most_.*value = std::max(most_.*value, sum.*value);
    if (gauge.current != sum.*value || gauge.peak != most_.*value ||
        gauge.added - gauge.removed != sum.*value) {
      Complain("the usage is not that of the pools, or its peaks are not what there was");
    }
  };
  judge(usage.all.count, &PoolStats::live_blocks);
  judge(usage.all.bytes, &PoolStats::allocated_bytes);
  judge(usage.all.requested_bytes, &PoolStats::requested_bytes);
  judge(usage.reserved_bytes, &PoolStats::reserved_bytes);
}

void FuzzSession::CompareSnapshot(PoolId id) {
  const PoolSnapshot snapshot = set_.Snapshot(id);
  std::map<Address, const PoolSnapshot::Range*> ranges;
  uint64_t mapped = 0;
  for (const auto& range : snapshot.ranges) {
    ranges[range.address] = &range;
    mapped += range.pages.size();
  }
  if (snapshot.ranges.size() != snapshot.stats.ranges || mapped < snapshot.stats.page_mappings) {
    Complain("the snapshot's ranges are not those of its stats");
  }
  const auto same = [](const auto& told, const PoolModel::LiveBlock& live) {
    return told.block == live.block && SamePieces(told.pieces, live.pieces);
  };
  std::vector<PoolModel::LiveBlock> expected;
  if (model_.Contains(id)) expected = model_.TakeCheckpoint(id).blocks;
  if (!std::ranges::equal(snapshot.blocks, expected, same)) {
    Complain("the snapshot holds other blocks than expected");
  }
  for (const auto& live : snapshot.blocks) {
    Address address = live.block.address;
    for (const PhysicalPiece& piece : live.pieces) {
      const auto after = ranges.upper_bound(address);
      if (after == ranges.begin()) Complain("a block outside of all ranges");
      const PoolSnapshot::Range& range = *std::prev(after)->second;
      const uint64_t vpage = (address - range.address) / setup_.page_bytes;
      if (vpage >= range.pages.size() || range.pages[vpage] != piece.page) {
        Complain("the snapshot maps another page at ", address);
      }
      address += piece.length_bytes;
    }
  }
}

void FuzzSession::ComparePeers() {
  if (!peers_settled_) return;
  for (const PoolId id : Ids()) {
    for (const auto& range : set_.Snapshot(id).ranges) {
      for (uint64_t vpage = 0; vpage < range.pages.size(); ++vpage) {
        if (model_.Contains(id) && model_.LeaseOf(id, Index(range.pages[vpage])) != 0) continue;
        const auto place = watch_.At(range.address + vpage * setup_.page_bytes);
        if (!place || !place->accessible || place->peers != watch_.peers()) {
          Complain("a page of ", ToString(id), " lacks access for a peer");
        }
      }
    }
  }
}

void FuzzSession::Inspect() {
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
    Complain("Check(): ", error.what());
  }
  for (const PoolId id : Ids()) {
    CompareSnapshot(id);
    CompareMappings(id);
  }
  CompareOwners();
  for (const auto& [address, live] : model_.live()) {
    Read(live);
    const std::optional<Block> last = set_.Find(address + live.block.bytes - 1);
    if (!last || *last != live.block) Complain("Find() misses b", live.label);
    if (PoolOf(set_, address) != live.pool) Complain("PoolOf() misses b", live.label);
    if (PoolOf(set_, address + 1)) Complain("PoolOf() takes the inside of b", live.label);
    const PoolModel::LiveBlock* next = model_.Holding(address + live.block.bytes);
    if (set_.Find(address + live.block.bytes).has_value() != (next != nullptr)) {
      Complain("Find() is wrong behind b", live.label);
    }
  }
  ComparePeers();
}

}  // namespace cgp
