#include "testing/world.h"

#include <sstream>

#include "core/base/error.h"
#include "core/base/units.h"
#include "testing/text.h"

namespace cgp {

World::Books World::TakeBooks() const {
  std::ostringstream text;
  for (const PoolId id : set->ids()) {
    const PoolSnapshot snapshot = set->Snapshot(id);
    const PoolStats& stats = snapshot.stats;
    text << ToString(id) << ": users " << set->UseCount(id) << " pages " << stats.pages
         << " allocated " << stats.allocated_bytes << " requested " << stats.requested_bytes
         << " peaks " << stats.peak_reserved_bytes << "/" << stats.peak_allocated_bytes << "/"
         << stats.scope_peak_bytes << " mappings " << stats.page_mappings << " calls "
         << stats.allocations << "/" << stats.frees;
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
  return {text.str(), usage};
}

void World::FailEach(FaultKind kind, const std::function<void()>& call) {
  const auto describe = [this] {
    set->Check();
    return ToString(TakeBooks());
  };
  const std::string complaint = cgp::FailEach(kind, faulty, call, describe);
  if (!complaint.empty()) throw InternalError(complaint);
}

std::string ToString(const World::Books& books) {
  const HostUsage& driver = books.driver;
  return Text(books.set, driver.handles, " handles of ", driver.physical_bytes, " bytes, ",
              driver.mappings, " mappings of ", driver.mapped_bytes, ", ", driver.reservations,
              " reservations of ", driver.reserved_bytes, "\n");
}

}  // namespace cgp
