// What tests call alike. A compiler sees several of them as one file, so what only one of them calls so stands in its fixture.
#pragma once

#include "core/pool_set.h"

namespace cgp {

inline constexpr StreamId kA{1};
inline constexpr StreamId kB{2};
inline constexpr StreamId kC{3};
inline constexpr PoolId kPool{0, 1};
inline constexpr uint64_t kGranule = kGranuleBytes;
inline constexpr uint64_t kPage = 4096;

}  // namespace cgp
