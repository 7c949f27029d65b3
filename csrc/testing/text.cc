#include "testing/text.h"

#include <sstream>

#include "core/base/units.h"

namespace cgp {

std::string Describe(const PoolSet& set) {
  std::ostringstream text;
  for (const PoolId id : set.ids()) {
    const PoolSnapshot snapshot = set.Snapshot(id);
    const PoolStats& stats = snapshot.stats;
    text << ToString(id) << ": users " << set.UseCount(id) << " pages " << stats.pages
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
  return text.str();
}

}  // namespace cgp
