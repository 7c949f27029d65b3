// The route of a capture in torch's own allocator of pinned host memory, which a CUDAGraph opens and
// closes together with ours.
#pragma once

#include <c10/core/Allocator.h>

namespace cgp {

// Closes the route of a capture that failed, if torch left it open (before 2.14 it does): with it,
// no other capture could begin in the same pool.
void EndHostRoute(c10::MempoolId_t id);

}  // namespace cgp
