// Our pools as torch.cuda.memory_snapshot() shows memory: segments tiled by blocks.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <optional>
#include <vector>

#include "core/pool_set.h"
#include "torch/device_pools.h"

namespace cgp {

// Appends the pool `only`, or all pools, of `pools`.
//
// A page may stand behind several addresses, a segment may not: each page is shown once, at the
// first address it is mapped at, and consecutive pages of a range form a segment. So the segments
// sum up to what is reserved and their blocks to what is allocated. A block that lies in pages
// shown elsewhere appears there, in as many pieces as it has.
void AppendSegments(DevicePools& pools, std::optional<PoolId> only,
                    std::vector<c10::CachingDeviceAllocator::SegmentInfo>& segments);

}  // namespace cgp
