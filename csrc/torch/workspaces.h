// cuBLAS's workspaces. Until torch 2.15, torch holds one for each stream that a thread has
// multiplied on. Work captured on the stream computes in it too, whatever pool the capture names.
//
// In torch 2.12 to 2.14 a CUDAGraph that is destroyed takes the workspaces of its stream out of
// torch's maps. Other graphs captured on the stream go on computing there (pytorch#193402). So
// graphs hold them beside the maps, and the next capture on the stream finds them there again.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <shared_mutex>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "torch/torch_version.h"

namespace cgp {

// Since 2.13 each has its size with it.
using SizedWorkspace = std::pair<at::DataPtr, size_t>;
using Workspace = std::conditional_t<(kTorchMinor < 13), at::DataPtr, SizedWorkspace>;

// Equal to at::cuda::WorkspaceMapWithMutex, whose header (ATen/cuda/CUDAContextLight.h) needs
// cuBLAS's. build_wheels.sh compares the two.
struct WorkspaceMap {
  std::map<std::tuple<void*, void*>, Workspace> map;  // by handle, which is a thread's, and stream
  std::shared_mutex mutex;
};

// One of torch's maps, cuBLAS's or cuBLASLt's. `bytes` asks the device for the bytes of each, if
// they do not say it themselves. runtime.cc finds them; nullptr if torch has none.
struct TorchWorkspaces {
  WorkspaceMap* workspaces = nullptr;
  size_t (*bytes)() = nullptr;
};
TorchWorkspaces FindWorkspaces(bool of_cublaslt);

// The address of each workspace, its bytes, and its stream.
std::vector<std::tuple<uintptr_t, size_t, uintptr_t>> BlasWorkspaces();

// Frees those at addresses for which `goes` is true. pre: nobody computes in them, or is about to.
void FreeWorkspaces(const std::function<bool(uintptr_t)>& goes);

// The stream's workspaces, which live as long as the result or torch's map has them. Earlier
// results that still live but have left the maps come back first. If it throws std::bad_alloc, the
// maps hold what they held.
std::vector<std::shared_ptr<Workspace>> HoldWorkspaces(uintptr_t stream);

}  // namespace cgp
