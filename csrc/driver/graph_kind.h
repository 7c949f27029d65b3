// Which graphs an executable can hold in turn, as far as CUDA lets that be seen.
//
// An update of an executable is refused by the driver where it knows that it cannot be made, but
// some of what it does not carry over it keeps silently: the launch would run with the cluster size
// of another graph. So the key holds all that an update does not carry over, refused or not;
// docs/graph_updates.md has the list, tried on GPUs by benchmarks/graph_updates.py.
#pragma once

#include "driver/cuda_context.h"
#include "driver/graph_driver.h"

namespace cgp {

// Throws DriverError.
GraphKind KindOf(CudaContext& context, CUgraph graph);

}  // namespace cgp
