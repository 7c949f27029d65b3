// Whose a block is, for tests.
#pragma once

#include <optional>

#include "core/pool_set.h"

namespace cgp {

// The pool of the live block that starts at `address`.
inline std::optional<PoolId> PoolOf(const PoolSet& set, Address address) {
  const std::optional<PoolSet::Owned> owned = set.At(address);
  return owned ? std::optional(owned->id) : std::nullopt;
}

}  // namespace cgp
