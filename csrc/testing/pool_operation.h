// What can be done to a PoolSet, as printable values: a failing sequence prints as the C++ that
// repeats it.
#pragma once

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "core/pool.h"
#include "driver/driver.h"
#include "driver/driver_call.h"

namespace cgp {

// Pools, streams and peers are small numbers; a block is named by the label of the operation that
// allocated it, so that a sequence still means something when operations are taken out of it.
struct RetainOp {
  uint64_t pool = 0;
};
struct BeginOp {
  uint64_t pool = 0;
  ScopeKind kind = ScopeKind::kCapture;
};
struct EndOp {
  uint64_t pool = 0;
};
// A graph that was captured into the pool runs on the stream; left out while a scope of the pool is open.
struct ReplayOp {
  uint64_t pool = 0;
  uint64_t stream = 0;
};
struct ReleaseOp {
  uint64_t pool = 0;
};
struct AllocateOp {
  uint64_t label = 0;  // unique in a sequence, not 0
  uint64_t pool = 0;
  uint64_t bytes = 0;
  uint64_t stream = 0;
};
// A block that was freed before is freed again: bad input.
struct FreeOp {
  uint64_t label = 0;
};
// Frees an address within the block, which is not its start: bad input.
struct FreeInsideOp {
  uint64_t label = 0;
};
// Frees an address at which no live block starts: bad input.
struct FreeWildOp {
  uint64_t address = 0;
};
struct RecordUseOp {
  uint64_t label = 0;
  uint64_t stream = 0;
};
// Keeps what lives in the pool under a number, in place of what was kept under it before.
struct CheckpointOp {
  uint64_t number = 0;
  uint64_t pool = 0;
};
// Bad input where the checkpoint is one of another pool.
struct RestoreOp {
  uint64_t number = 0;
  uint64_t pool = 0;
};
struct TrimOp {};
// The device does up to `count` more of the stream's work.
struct ProgressOp {
  uint64_t stream = 0;
  uint64_t count = 0;
};
struct EnablePeerOp {
  int peer = 0;
};
// The driver call after `after` others fails, once or until MendOp; of one kind only, if that is given.
struct FailOp {
  uint64_t after = 0;
  DriverStatus status = DriverStatus::kFailed;
  bool for_good = false;
  std::optional<DriverCall> only = std::nullopt;
};
struct MendOp {};
// Of the next call to the set, so many allocations on the heap go through and the one after them
// fails, or all after them do.
struct FailAllocationOp {
  uint64_t after = 0;
  bool for_good = false;
};
// Compares everything that is too slow to be compared after each operation.
struct InspectOp {};

using PoolOperation =
    std::variant<RetainOp, BeginOp, EndOp, ReplayOp, ReleaseOp, AllocateOp, FreeOp, FreeInsideOp,
                 FreeWildOp, RecordUseOp, CheckpointOp, RestoreOp, TrimOp, ProgressOp, EnablePeerOp,
                 FailOp, MendOp, FailAllocationOp, InspectOp>;

template <typename... Operations>
std::vector<PoolOperation> Sequence(const Operations&... operations) {
  return {operations...};
}

std::string ToString(const PoolOperation& operation);

// One operation a line, as the arguments of Sequence().
std::string ToString(const std::vector<PoolOperation>& operations);

// For gtest.
std::ostream& operator<<(std::ostream& out, const PoolOperation& operation);

}  // namespace cgp
