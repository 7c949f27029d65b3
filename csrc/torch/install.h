// Installs the allocator and takes it out, at any time, even after CUDA is initialised.
//
// torch reads its CUDA allocator from an atomic pointer at each call, so another one can be stored
// there at any time: earlier memory has its old deleter. Errors are std::runtime_error, with
// nothing changed.
#pragma once

#include <memory>

#include "torch/graph_allocator.h"

namespace cgp {

// The process's GraphAllocator, made now if need be, around the installed allocator. It is never
// destroyed: DataPtrs, storages and torch's own globals point to it until the process ends.
std::shared_ptr<GraphAllocator> GetGraphAllocator();

// For what comes later: existing pools, captures and memory stay as they are.
struct Options {
  bool share_captures = false;  // captures that name no pool share one
  bool mempools = true;         // MemPools are ours, else the base's
  bool exportable = false;      // memory can be exported to other processes
};

// From now on captures allocate in our pools. If they do already, only the options change. Refuses
// if the current device cannot map memory, or not export it as `exportable` asks; while a capture
// is under way; and if some other allocator was installed meanwhile.
void Enable(const Options& options);

// From now on captures allocate in the base. The allocator stays installed and passes on: pools may
// live, and it merges the statistics. Refuses while a capture is under way.
void Disable();

// Whether captures allocate in our pools now.
bool IsEnabled();

// Makes c10's registry, which torch.accelerator asks, agree with CUDACachingAllocator::get().
void RegisterWithC10(CUDAAllocator& allocator);

}  // namespace cgp
