#include <c10/core/Allocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <dlfcn.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <cstdint>
#include <map>
#include <mutex>
#include <shared_mutex>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "python/torch_parts.h"
#include "torch/runtime.h"
#include "torch/torch_version.h"

namespace py = pybind11;

namespace cgp {
namespace {

// By handle, which is a thread's, and stream. Since 2.13 each workspace has its size.
using Workspace =
    std::conditional_t<(kTorchMinor < 13), at::DataPtr, std::pair<at::DataPtr, size_t>>;
using WorkspaceMap = std::map<std::tuple<void*, void*>, Workspace>;

// As at::cuda::WorkspaceMapWithMutex, whose header (ATen/cuda/CUDAContextLight.h) needs cuBLAS's.
// build_wheels.sh compares the two.
struct Workspaces {
  WorkspaceMap map;
  std::shared_mutex mutex;
};

// Where a workspace is, its bytes, and the stream it is for.
using Span = std::tuple<uintptr_t, size_t, uintptr_t>;

template <typename AnyWorkspace>
Span SpanOf(const AnyWorkspace& workspace, size_t chosen_bytes, void* stream) {
  const auto plain = [](const void* address) { return reinterpret_cast<uintptr_t>(address); };
  if constexpr (requires { workspace.second; }) {
    return {plain(workspace.first.get()), workspace.second, plain(stream)};
  } else {
    return {plain(workspace.get()), chosen_bytes, plain(stream)};
  }
}

template <typename Function>
Function* FindInTorch(const char* name) {
  // torch has loaded it. By name at run time, as wheels are built without so large a library.
  void* const library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  return library == nullptr ? nullptr : reinterpret_cast<Function*>(dlsym(library, name));
}

void AddSpans(const char* map_name, const char* size_name, std::vector<Span>& spans) {
  auto* const find_map = FindInTorch<Workspaces&()>(map_name);
  auto* const find_size = FindInTorch<size_t()>(size_name);
  if (find_map == nullptr || find_size == nullptr) return;
  Workspaces& workspaces = find_map();
  const std::shared_lock lock(workspaces.mutex);
  for (const auto& [key, workspace] : workspaces.map) {
    spans.push_back(SpanOf(workspace, find_size(), std::get<1>(key)));
  }
}

std::vector<Span> BlasWorkspaces() {
  std::vector<Span> spans;
  AddSpans("_ZN2at4cuda33cublas_handle_stream_to_workspaceEv",
           "_ZN2at4cuda22getChosenWorkspaceSizeEv", spans);
  AddSpans("_ZN2at4cuda35cublaslt_handle_stream_to_workspaceEv",
           "_ZN2at4cuda26getCUDABlasLtWorkspaceSizeEv", spans);
  return spans;
}

uintptr_t MakeStream(c10::DeviceIndex device) {
  const c10::cuda::CUDAGuard guard(device);
  const RelaxedCaptureMode relaxed;
  cudaStream_t stream = nullptr;
  C10_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return reinterpret_cast<uintptr_t>(stream);
}

}  // namespace

void BindWorkspaces(py::module_& m) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  m.def("blas_workspaces", &BlasWorkspaces, no_gil);
  m.def("make_stream", &MakeStream, py::arg("device"), no_gil);
}

}  // namespace cgp
