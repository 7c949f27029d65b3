// Places a block, and maps what that needs: at a known place (known_places.h), or a small block
// into the best fit, or as placement.h decides.
//
// invariant: a placed block's bytes are used; a failed placement has mapped nothing
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "core/base/units.h"
#include "core/driver.h"
#include "core/memory/free_list.h"
#include "core/memory/range_table.h"
#include "core/memory/stream_memory.h"
#include "core/placement/known_places.h"
#include "core/placement/placement.h"
#include "core/placement/ring.h"
#include "core/pool_values.h"

namespace cgp {

class Placer {
 public:
  Placer(Driver& driver, const RangeTable& ranges, StreamMemory& memory, const LiveBlocks& blocks)
      : driver_(driver), ranges_(ranges), memory_(memory), blocks_(blocks), ring_(ranges, memory) {}

  void BeginScope(ScopeKind kind);
  // Drops all places: virtual pages have new numbers.
  void Clear() {
    known_.Clear();
    ring_.Clear();
  }

  bool InRing(VirtualPage vpage) const { return ring_.Holds(vpage); }
  // Notes that the block that starts there is freed.
  void Freed(Address address) { dropped_ |= address == like_ && !memory_.scope(); }

  // Places a block of `block.bytes` at a site where the free list's stream may take all bytes,
  // takes them, and notes the place. `stats` are the pool's. pre: the free list is what
  // StreamMemory::BeginTake() returned last.
  void Place(FreeList& list, LiveBlock& live, const PoolStats& stats);

 private:
  Site Find(FreeList& list, LiveBlock& live, const PoolStats& stats, KnownPlaces::Places& again,
            const KnownPlaces::Places* alike);
  const LiveBlock* LikeAt(Placement place, uint32_t key) const;
  Slack SlackFor(const FreeList& list, Granules length, const PoolStats& stats) const;
  // Blocks of one size can take each other's places.
  uint64_t SizeOf(Granules length) const {
    return length < page_size() ? length.count() : PagesFor(length, page_size()) << 32;
  }
  Site FindSmall(FreeList& list, Granules length, Slack slack);
  std::optional<NodeId> FindHole(const FreeList& list, Granules length) const;
  TakersOf Takers() const;
  Placement Stitch(FreeList& list, Granules length, Slack slack);
  uint32_t PagesAhead(const FreeList& list, Granules length) const;
  [[noreturn]] void ThrowOutOfMemory(std::string_view reason, uint64_t bytes) const;

  const PageSpace& space() const { return memory_.bytes().space(); }
  Granules page_size() const { return memory_.bytes().page_size(); }
  bool several_streams() const { return memory_.bytes().has_several_streams(); }

  Driver& driver_;
  const RangeTable& ranges_;
  StreamMemory& memory_;
  const LiveBlocks& blocks_;
  KnownPlaces known_;
  Ring ring_;
  // The last block whose like lived when it was placed elsewhere: its like's address, and its own.
  Address like_ = 0;
  Address successor_ = 0;  // 0: of the block that is placed next
  bool dropped_ = false;   // the like was freed between scopes
  // The newest tenure when this capture began, and when the one before it did.
  uint32_t before_ = 0;
  uint32_t before_last_ = 0;
  bool alternates_ = false;  // whether blocks that captures leave alive take turns with their likes
};

}  // namespace cgp
