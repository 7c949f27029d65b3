// Putting the allocator in and taking it out, at any time, also after CUDA is initialised.
//
// torch reads its CUDA allocator from an atomic pointer at each call, so storing another one there
// is a hot swap: what was allocated before keeps the deleter it has. Errors are std::runtime_error,
// with nothing changed.
#pragma once

#include "torch/graph_allocator.h"

namespace cgp {

// From now on captures allocate in our pools. Does nothing if that is so already. Refuses where the
// current device cannot map memory, while a capture is under way, and where some other allocator
// was installed meanwhile.
// With `share_captures` those that name no pool share one. Without `mempools` every MemPool that is
// made from now on is the base's.
void Enable(bool share_captures, bool mempools);

// From now on captures allocate in the base. If there never was a pool of ours the base is installed
// again, else we stay there, passing on: pools may live, and the statistics are ours to merge.
// Refuses while a capture is under way.
void Disable();

// Whether captures allocate in our pools now.
bool IsEnabled();

// Makes c10's registry, which torch.accelerator asks, agree with CUDACachingAllocator::get().
void RegisterWithC10(CUDAAllocator& allocator);

}  // namespace cgp
