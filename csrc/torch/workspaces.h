// cuBLAS's workspaces: until torch 2.15 one for each stream that a thread has multiplied on, kept by
// torch. What is captured on the stream computes in it too, whatever pool the capture names.
//
// From torch 2.12 to 2.14 a CUDAGraph that goes takes the workspaces of its stream out of torch's
// maps, and others that were captured on the stream go on computing there (pytorch#193402). So
// graphs hold them beside the maps, and who captures on the stream next finds them there again.
#pragma once

#include <c10/core/Allocator.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <shared_mutex>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "torch/torch_version.h"

namespace cgp {

// Since 2.13 each has its size.
using SizedWorkspace = std::pair<at::DataPtr, size_t>;
using Workspace = std::conditional_t<(kTorchMinor < 13), at::DataPtr, SizedWorkspace>;

// As at::cuda::WorkspaceMapWithMutex, whose header (ATen/cuda/CUDAContextLight.h) needs cuBLAS's.
// build_wheels.sh compares the two.
struct WorkspaceMap {
  std::map<std::tuple<void*, void*>, Workspace> map;  // by handle, which is a thread's, and stream
  std::shared_mutex mutex;
};

// One of torch's, cuBLAS's or cuBLASLt's, and who says the bytes of each where they do not: he asks
// the device. runtime.cc finds them; nullptr where torch has none.
struct TorchWorkspaces {
  WorkspaceMap* workspaces = nullptr;
  size_t (*bytes)() = nullptr;
};
TorchWorkspaces FindWorkspaces(bool of_cublaslt);

// Where each workspace is, its bytes, and the stream it is for.
std::vector<std::tuple<uintptr_t, size_t, uintptr_t>> BlasWorkspaces();

// Those of the stream, which live as long as what is returned or torch's map has them. What was
// returned before, lives and has left the maps is there again first. Throws std::bad_alloc; then
// the maps hold what they held.
std::vector<std::shared_ptr<Workspace>> HoldWorkspaces(uintptr_t stream);

}  // namespace cgp
