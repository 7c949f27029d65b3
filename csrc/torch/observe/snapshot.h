// Our pools as torch.cuda.memory_snapshot() shows memory: segments tiled by blocks.
#pragma once

#include <c10/core/CachingDeviceAllocator.h>

#include <optional>
#include <vector>

#include "core/pool_set.h"
#include "torch/device_pools.h"
#include "torch/observe/history.h"

namespace cgp {

// Appends the pool `only`, or all pools, of `pools`, with what `history` knows of their blocks.
//
// A byte may stand behind several addresses, but must be shown once: one of a live block at the
// block's address, a free one at the first address that its page was mapped at. Bytes shown side by
// side form a segment, up to the first live block of another stream. So live blocks stand where
// they are, whole; the segments sum up to what is reserved and their blocks to what is allocated;
// and a segment is of one stream and any number of bytes long. But what history tells of pages that
// are mapped is not what segments look like: PyTorch's viewer cannot always go back in time.
void AppendSegments(DevicePools& pools, std::optional<PoolId> only, const History& history,
                    std::vector<c10::CachingDeviceAllocator::SegmentInfo>& segments);

}  // namespace cgp
