// Putting the allocator in and taking it out, at any time, also after CUDA is initialised.
//
// torch reads its CUDA allocator from an atomic pointer at each call, so storing another one there
// is a hot swap: what was allocated before keeps the deleter it has. Errors are std::runtime_error,
// with nothing changed.
#pragma once

#include <memory>

#include "torch/graph_allocator.h"

namespace cgp {

// The process's GraphAllocator, made around the allocator installed now if need be. It is never
// destroyed: DataPtrs, storages and torch's own globals point to it until the process ends.
std::shared_ptr<GraphAllocator> GetGraphAllocator();

// What is to come: it says nothing of pools, captures and memory that there are.
struct Options {
  bool share_captures = false;  // captures that name no pool share one
  bool mempools = true;         // or every MemPool is the base's
  bool exportable = false;      // memory can be exported to other processes
};

// From now on captures allocate in our pools. Where that is so already only the options change.
// Refuses where the current device cannot map memory, or export what is to be exportable, while a
// capture is under way, and where some other allocator was installed meanwhile.
void Enable(const Options& options);

// From now on captures allocate in the base. We stay there, passing on: pools may live, and the
// statistics are ours to merge. Refuses while a capture is under way.
void Disable();

// Whether captures allocate in our pools now.
bool IsEnabled();

// Makes c10's registry, which torch.accelerator asks, agree with CUDACachingAllocator::get().
void RegisterWithC10(CUDAAllocator& allocator);

}  // namespace cgp
