#include "testing/world.h"

#include <new>
#include <sstream>

#include "core/base/error.h"
#include "core/base/units.h"
#include "testing/text.h"

namespace cgp {
namespace {

// Whether the call goes through without its thing number `number`.
bool GoesThrough(FaultKind kind, uint64_t number, bool for_good, FaultyDriver& driver,
                 const Action& call) {
  const bool of_driver = kind == FaultKind::kDriverCall;
  std::optional<AllocationFault> fault;
  if (of_driver) driver.Arm({.call_number = number});
  if (!of_driver) fault.emplace(number, for_good);
  const auto mend = [&] {
    const bool fired = of_driver ? driver.failures() > 0 : fault->fired();
    fault.reset();
    if (of_driver) driver.Disarm();
    return fired;
  };
  try {
    call();
  } catch (const std::exception& error) {
    const bool ours = of_driver ? dynamic_cast<const DriverError*>(&error) != nullptr
                                : dynamic_cast<const std::bad_alloc*>(&error) != nullptr;
    if (!mend() || !ours) throw;
    return false;
  }
  mend();
  return true;
}

}  // namespace

World::Books World::TakeBooks() const {
  std::ostringstream text;
  uint64_t peak = 0;
  for (const PoolId id : set->ids()) {
    const PoolSnapshot snapshot = set->Snapshot(id);
    const PoolStats& stats = snapshot.stats;
    text << ToString(id) << ": users " << set->UseCount(id) << " pages " << stats.pages
         << " allocated " << stats.allocated_bytes << " requested " << stats.requested_bytes
         << " peaks " << stats.peak_allocated_bytes << "/" << stats.scope_peak_bytes << " mappings "
         << stats.page_mappings << " calls " << stats.allocations << "/" << stats.frees;
    peak += stats.peak_reserved_bytes;
    for (const auto& live : snapshot.blocks) {
      text << "\n  block " << live.block.address << "+" << live.block.bytes;
      for (const auto& piece : live.pieces) {
        text << " " << Index(piece.page) << ":" << piece.offset_bytes;
      }
    }
    for (const auto& range : snapshot.ranges) {
      text << "\n  range " << range.address;
      for (const PageId page : range.pages) text << " " << Index(page);
    }
    text << "\n";
  }
  HostUsage usage = host.usage();
  usage.events = 0;  // one found to be done may be let go of by a call that fails later
  return {text.str(), peak, usage};
}

void World::FailEach(FaultKind kind, const Action& call,
                     const std::function<std::string()>& describe) {
  const std::string before = describe();
  // The larger the number, the more are passed over: a call may make thousands.
  for (uint64_t number = 1;; number += 1 + number / 32) {
    for (const bool for_good : {true, false}) {
      if (kind == FaultKind::kDriverCall && for_good) continue;
      if (GoesThrough(kind, number, for_good, faulty, call)) return;
      const std::string after = describe();
      if (after == before) continue;
      throw InternalError(Text(kind == FaultKind::kDriverCall ? "driver call " : "allocation ",
                               number, " failed", for_good ? " for good" : "",
                               ", which changed the state from\n", before, "to\n", after));
    }
  }
}

void World::FailEach(FaultKind kind, const Action& call) {
  FailEach(kind, call, [this] {
    set->Check();
    return ToString(TakeBooks());
  });
}

std::string ToString(const World::Books& books) {
  const HostUsage& driver = books.driver;
  return Text(books.set, "peak ", books.peak_reserved_bytes, ", ", driver.handles, " handles of ",
              driver.physical_bytes, " bytes, ", driver.mappings, " mappings of ",
              driver.mapped_bytes, ", ", driver.reservations, " reservations of ",
              driver.reserved_bytes, "\n");
}

}  // namespace cgp
