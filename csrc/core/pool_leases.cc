// The leases of one pool: what they take, and what comes back.
//
//     handle       free and open        live bytes
//     no lease     anyone's             the blocks'
//     asleep       the device's         the blocks'; with keeps_live they keep the handle awake
//     of blocks    the device's         its blocks'
//     lent         another pool's       none
#include <algorithm>
#include <optional>
#include <string>
#include <utility>

#include "core/base/error.h"
#include "core/pool.h"

namespace cgp {

IndexSet Pool::PagesOf(const std::vector<LentHandle>& handles) const {
  IndexSet pages;
  pages.Resize(ranges_.page_count());
  for (const LentHandle& handle : handles) {
    pages.SetRange(Index(handle.first), Index(handle.first + handle.pages), true);
  }
  return pages;
}

IndexSet Pool::ReserveLease(const std::vector<LentHandle>& handles) {
  memory_.ReserveOpening();
  memory_.bytes().ReserveHold();
  return PagesOf(handles);
}

void Pool::SetLease(const std::vector<LentHandle>& handles, const IndexSet& pages, LeaseId lease) {
  if (handles.empty()) return;
  stats_.peak_reserved_bytes = std::max(stats_.peak_reserved_bytes, reserved_bytes());
  for (const LentHandle& handle : handles) ranges_.SetLease(handle.first, lease);
  memory_.bytes().SetLeased(pages, lease != kNoLease);
  lent_ = CountLeased(kLent);
  memory_.NoteShared();
}

// Takes the handles away. Their bytes are hidden first, so a failing driver leaves them in the
// lease.
Leased Pool::Evict(const std::vector<LentHandle>& handles, LeaseId lease,
                   std::exception_ptr* error) {
  SetLease(handles, ReserveLease(handles), lease);
  Leased leased;
  for (const LentHandle& handle : handles) {
    if (!ranges_.Evict(handle.first, error)) continue;
    ++leased.handles;
    leased.bytes += BytesOf(handle.pages);
    leased.mappings += ranges_.vpages_of(handle.first).size();
  }
  return leased;
}

Leased Pool::Sleep(bool keeps_live, std::exception_ptr* error) {
  CGP_CHECK(!in_scope());
  memory_.OpenIdle();
  memory_.DissolveRing();
  const std::vector<BytesOfHandle> live = LiveBytes({});
  std::vector<LentHandle> handles;
  ForEachHandle([&](PageId handle) {
    const LeaseId lease = ranges_.lease_of(handle);
    const bool goes = lease == kNoLease ? !keeps_live || live[Index(handle)].others == 0
                                        : lease == kAsleep && !ranges_.is_released(handle);
    if (goes) handles.push_back(AsLent(handle));
  });
  const Leased leased = Evict(handles, kAsleep, error);
  asleep_ = true;
  return leased;
}

Leased Pool::Wake() {
  const Leased back = BringBack(kAsleep);
  asleep_ = false;
  return back;
}

// The handles in which the blocks have bytes, and no other block has.
Leased Pool::EvictBlocks(LeaseId lease, const std::vector<Address>& blocks,
                         std::exception_ptr* error) {
  CGP_CHECK(!in_scope());
  memory_.OpenIdle();
  memory_.DissolveRing();
  const std::vector<BytesOfHandle> live = LiveBytes(blocks);
  std::vector<LentHandle> handles;
  ForEachHandle([&](PageId handle) {
    const BytesOfHandle& bytes = live[Index(handle)];
    const LeaseId has = ranges_.lease_of(handle);
    const bool is_due = (has == kNoLease || has == lease) && bytes.named > 0 && bytes.others == 0;
    if (is_due) handles.push_back(AsLent(handle));
  });
  return Evict(handles, lease, error);
}

// All or nothing: after an error what this call has made goes again, as far as the driver lets it.
// Other mappings may be in use as far as the driver knows.
Leased Pool::BringBack(LeaseId lease) {
  CGP_CHECK(!in_scope());
  const std::vector<LentHandle> handles = HandlesOf(lease);
  const IndexSet pages = ReserveLease(handles);
  std::vector<LentHandle> anew = handles;
  std::erase_if(anew, [&](const LentHandle& handle) { return !ranges_.is_released(handle.first); });
  Leased back;
  try {
    for (const LentHandle& handle : handles) {
      if (ranges_.is_present(handle.first)) continue;
      ranges_.BringBack(handle.first);
      ++back.handles;
      back.bytes += BytesOf(handle.pages);
      back.mappings += ranges_.vpages_of(handle.first).size();
    }
  } catch (...) {  // also where the host's memory does not suffice for a driver's error
    // While something captures nothing may be unmapped: it stays until the next sleep.
    for (const LentHandle& handle : anew) {
      if (memory_.MayQuiesce()) ranges_.Evict(handle.first, nullptr);
    }
    throw;
  }
  SetLease(handles, pages, kNoLease);
  return back;
}

Leased Pool::TrimToNeeds(std::exception_ptr* error) {
  CGP_CHECK(!in_scope());
  memory_.OpenIdle();
  memory_.DissolveRing();
  std::vector<bool> keep = VpagesInUse();
  AddNeeded(keep);
  shrinking_ = memory_.bytes().PrepareShrink(std::move(keep));
  stats_.peak_reserved_bytes = std::max(stats_.peak_reserved_bytes, reserved_bytes());
  const uint64_t mappings = ranges_.mapping_count();
  const uint64_t handle_count = handles();
  const uint64_t reserved = reserved_bytes();
  *error = Shrink();
  return {.bytes = reserved - reserved_bytes(),
          .handles = handle_count - handles(),
          .mappings = mappings - ranges_.mapping_count()};
}

// By the first page of each handle, how much of it the named blocks have, and how much others.
std::vector<Pool::BytesOfHandle> Pool::LiveBytes(const std::vector<Address>& named) const {
  std::vector<BytesOfHandle> live(ranges_.page_count());
  blocks_.ForEach([&](Address address, const LiveBlock& block) {
    const bool is_named = std::ranges::find(named, address) != named.end();
    memory_.bytes().ForEachPiece(block.site, block.length(),
                                 [&](PageId page, Granules, Granules length) {
                                   BytesOfHandle& of = live[Index(ranges_.handle_begin(page))];
                                   (is_named ? of.named : of.others) += length.bytes();
                                 });
  });
  return live;
}

// Those without a byte in use and, if told, with all bytes behind the fence.
std::vector<Pool::LentHandle> Pool::WithoutLease(std::optional<FenceId> fence) const {
  const auto is_free = [&](const PageSpace::Node& node) {
    return fence ? node.fence == *fence : !node.used();
  };
  std::vector<LentHandle> found;
  ForEachHandle([&](PageId handle) {
    if (ranges_.lease_of(handle) == kNoLease && AllNodes(handle, is_free)) {
      found.push_back(AsLent(handle));
    }
  });
  return found;
}

std::vector<Pool::LentHandle> Pool::FreeHandles() const {
  std::vector<LentHandle> free = WithoutLease(FenceId::kOpen);
  const IndexSet left = PagesIn<&GraphNeeds::Needs::left>();
  std::erase_if(free, [&](const LentHandle& handle) {
    const std::optional<uint32_t> next = left.Next(Index(handle.first));
    return next && *next < Index(handle.first) + handle.pages;
  });
  return free;
}

std::vector<Pool::LentHandle> Pool::HandlesOf(LeaseId lease) const {
  std::vector<LentHandle> found;
  ForEachHandle([&](PageId handle) {
    if (ranges_.lease_of(handle) == lease) found.push_back(AsLent(handle));
  });
  return found;
}

void Pool::Adopt(const std::vector<LentHandle>& handles) {
  if (handles.empty()) return;
  MappingPlan plan;
  std::vector<Handle> offered;
  uint32_t pages = 0;
  for (const LentHandle& handle : handles) {
    plan.handles.push_back(MappingPlan::NewHandle(handle.pages));
    offered.push_back(handle.physical);
    pages += handle.pages;
  }
  plan.range = ranges_.NewestWithRoom(pages);
  ranges_.Offer(std::move(offered));
  try {
    memory_.bytes().Map(plan);
  } catch (...) {
    ranges_.Offer({});
    throw;
  }
  // All this is in use for the first time, so it is not stale.
  mapping_limit_ = std::max(mapping_limit_, 2 * ranges_.mapping_count());
}

Pool::Count Pool::CountLeased(LeaseId lease) const {
  Count count;
  ForEachHandle([&](PageId handle) {
    if (ranges_.lease_of(handle) != lease) return;
    ++count.handles;
    count.pages += ranges_.handle_pages(handle);
  });
  return count;
}

// A checkpoint's block lives where nothing is lent or away.
void Pool::RequirePresent(const LiveBlock& live) const {
  memory_.bytes().ForEachPiece(live.site, live.length(), [&](PageId page, Granules, Granules) {
    if (ranges_.lease_of(page) == kNoLease) return;
    throw UsageError("cudagraph_pool: the checkpoint has a block of " + Size(live.block.bytes) +
                     " at " + Hex(live.block.address) +
                     ", where memory is lent or released: free what was borrowed, or restore the "
                     "lease, before the checkpoint.");
  });
}

void Pool::CheckLeases() const {
  bool any_asleep = false;
  for (uint32_t p = 0; p < ranges_.page_count(); ++p) {
    any_asleep |= ranges_.lease_of(PageId{p}) == kAsleep;
    CGP_CHECK(ranges_.lease_of(PageId{p}) != kLent || ranges_.is_present(PageId{p}));
  }
  CGP_CHECK(asleep_ || !any_asleep);
  CGP_CHECK(lent_ == CountLeased(kLent));
}

}  // namespace cgp
