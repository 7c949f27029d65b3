// Where a block goes, and what is mapped for it: as was predicted, if that holds (predictor.h);
// else a small block into the best fit, and a large one as placement.h has it.
//
// invariant: a block that was placed is used in the memory; whatever failed has mapped nothing
#pragma once

#include <cstdint>
#include <optional>
#include <string_view>

#include "core/base/units.h"
#include "core/driver.h"
#include "core/memory/free_view.h"
#include "core/memory/live_block.h"
#include "core/memory/range_table.h"
#include "core/memory/stream_memory.h"
#include "core/placement/placement.h"
#include "core/planning/predictor.h"
#include "core/pool_values.h"

namespace cgp {

class Placer {
 public:
  Placer(Driver& driver, const RangeTable& ranges, StreamMemory& memory, Predictor& predictor)
      : driver_(driver), ranges_(ranges), memory_(memory), predictor_(predictor) {}

  // Gives a block of its `block.bytes`, in a pool with these figures, a site where all bytes are
  // the view's to take, and takes them; the predictor learns of it. pre: the view is what
  // StreamMemory::BeginTake() returned last.
  void Place(FreeView& view, LiveBlock& live, const PoolStats& stats);

 private:
  struct Found {
    Placement start;
    NodeId node = NodeId::kNone;  // that holds its first granule, where that is known
  };

  Found Find(FreeView& view, Granules length, const PoolStats& stats,
             const Predictor::Advice& advice);
  std::optional<Placement> Follow(const Predictor::Advice& advice, Granules length);
  Found FindSmall(FreeView& view, Granules length, Slack slack);
  std::optional<NodeId> FindChain(const FreeView& view, Granules length) const;
  TakersOf Takers() const;
  Placement Stitch(FreeView& view, Granules length, Slack slack);
  uint32_t PagesAhead(const FreeView& view, Granules length) const;
  void CheckAgainstDevice(Granules length) const;
  [[noreturn]] void ThrowOutOfMemory(std::string_view reason, uint64_t bytes) const;

  const PageSpace& space() const { return memory_.bytes().space(); }
  Granules page_size() const { return memory_.bytes().page_size(); }
  bool several_streams() const { return memory_.bytes().has_several_streams(); }

  Driver& driver_;
  const RangeTable& ranges_;
  StreamMemory& memory_;
  Predictor& predictor_;
};

}  // namespace cgp
