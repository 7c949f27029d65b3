// The best fit as a view has it, for tests.
#pragma once

#include <optional>

#include "core/memory/free_view.h"

namespace cgp {

inline std::optional<NodeId> BestFit(const FreeView& view, Granules length) {
  std::optional<NodeId> best;
  view.ForEachFit(length, [&](NodeId chain) {
    best = chain;
    return false;
  });
  return best;
}

}  // namespace cgp
