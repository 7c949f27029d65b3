#include <c10/core/Allocator.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <dlfcn.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
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

// Since 2.13 each has its size.
using Sized = std::pair<at::DataPtr, size_t>;
using Workspace = std::conditional_t<(kTorchMinor < 13), at::DataPtr, Sized>;
// By handle, which is a thread's, and stream.
using WorkspaceMap = std::map<std::tuple<void*, void*>, Workspace>;

// As at::cuda::WorkspaceMapWithMutex, whose header (ATen/cuda/CUDAContextLight.h) needs cuBLAS's.
// build_wheels.sh compares the two.
struct Workspaces {
  WorkspaceMap map;
  std::shared_mutex mutex;
};

const char* const kMaps[] = {"_ZN2at4cuda33cublas_handle_stream_to_workspaceEv",
                             "_ZN2at4cuda35cublaslt_handle_stream_to_workspaceEv"};
const char* const kSizes[] = {"_ZN2at4cuda22getChosenWorkspaceSizeEv",
                              "_ZN2at4cuda26getCUDABlasLtWorkspaceSizeEv"};

// Where a workspace is, its bytes, and the stream it is for.
using Span = std::tuple<uintptr_t, size_t, uintptr_t>;

[[maybe_unused]] at::DataPtr& DataOf(at::DataPtr& data) { return data; }
[[maybe_unused]] at::DataPtr& DataOf(Sized& workspace) { return workspace.first; }
[[maybe_unused]] size_t SizeOf(const at::DataPtr& /*data*/, size_t chosen) { return chosen; }
[[maybe_unused]] size_t SizeOf(const Sized& workspace, size_t /*chosen*/) {
  return workspace.second;
}
[[maybe_unused]] void SetSize(at::DataPtr& /*to*/, const at::DataPtr& /*from*/) {}
[[maybe_unused]] void SetSize(Sized& to, const Sized& from) { to.second = from.second; }

template <typename Function>
Function* FindInTorch(const char* name) {
  // torch has loaded it. By name at run time, as wheels are built without so large a library.
  void* const library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
  return library == nullptr ? nullptr : reinterpret_cast<Function*>(dlsym(library, name));
}

std::vector<Span> BlasWorkspaces() {
  std::vector<Span> spans;
  for (const int kind : {0, 1}) {
    auto* const find_map = FindInTorch<Workspaces&()>(kMaps[kind]);
    auto* const find_size = FindInTorch<size_t()>(kSizes[kind]);
    if (find_map == nullptr || find_size == nullptr) continue;
    Workspaces& workspaces = find_map();
    const std::shared_lock lock(workspaces.mutex);
    for (auto& [key, workspace] : workspaces.map) {
      spans.emplace_back(reinterpret_cast<uintptr_t>(DataOf(workspace).get()),
                         SizeOf(workspace, find_size()),
                         reinterpret_cast<uintptr_t>(std::get<1>(key)));
    }
  }
  return spans;
}

// --- Workspaces that graphs hold ---
//
// From torch 2.12 to 2.14 a CUDAGraph that goes takes the workspace of its stream out of torch's
// map, and others that were captured on the stream go on computing in it (pytorch#193402). So these
// hold it, beside the map, and who captures on the stream next finds it in the map again.

using Held = std::shared_ptr<Workspace>;

void DropHeld(void* held) { delete static_cast<Held*>(held); }

// The map's from now on: the same bytes.
void Lend(const Held& held, Workspace& to) {
  const at::DataPtr& data = DataOf(*held);
  auto context = std::make_unique<Held>(held);
  DataOf(to) = at::DataPtr(data.get(), context.release(), &DropHeld, data.device());
}

// Those of the stream, as what graphs hold from now on. What graphs hold and the map has lost is
// there again.
std::vector<Held> HoldWorkspaces(uintptr_t stream) {
  static std::mutex mutex;
  static std::array<std::map<WorkspaceMap::key_type, std::weak_ptr<Workspace>>, 2> known;
  std::vector<Held> all;
  const std::lock_guard lock(mutex);
  for (const int kind : {0, 1}) {
    auto* const find_map = FindInTorch<Workspaces&()>(kMaps[kind]);
    if (find_map == nullptr) continue;
    Workspaces& workspaces = find_map();
    const std::unique_lock map_lock(workspaces.mutex);
    std::erase_if(known[kind], [](const auto& entry) { return entry.second.expired(); });
    for (const auto& [key, weak] : known[kind]) {
      const Held held = weak.lock();
      if (held == nullptr || workspaces.map.contains(key)) continue;
      Workspace workspace;
      SetSize(workspace, *held);
      Lend(held, workspace);
      workspaces.map.emplace(key, std::move(workspace));
    }
    for (auto& [key, workspace] : workspaces.map) {
      if (reinterpret_cast<uintptr_t>(std::get<1>(key)) != stream) continue;
      std::weak_ptr<Workspace>& weak = known[kind][key];
      Held& held = all.emplace_back(weak.lock());
      if (held != nullptr && DataOf(*held).get() == DataOf(workspace).get()) continue;
      held = std::make_shared<Workspace>();
      SetSize(*held, workspace);
      std::swap(DataOf(*held), DataOf(workspace));
      weak = held;
      Lend(held, workspace);
    }
  }
  return all;
}

uintptr_t MakeStream(c10::DeviceIndex device) {
  const c10::cuda::CUDAGuard guard(device);
  const RelaxedCaptureMode relaxed;
  cudaStream_t stream = nullptr;
  C10_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return reinterpret_cast<uintptr_t>(stream);
}

// What keeps them as long as it lives.
py::capsule Hold(uintptr_t stream) {
  auto all = std::make_unique<std::vector<Held>>();
  {
    const py::gil_scoped_release no_gil;  // who frees one may wait for it
    *all = HoldWorkspaces(stream);
  }
  return {all.release(), [](void* held) { delete static_cast<std::vector<Held>*>(held); }};
}

}  // namespace

void BindWorkspaces(py::module_& m) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  m.def("blas_workspaces", &BlasWorkspaces, no_gil);
  m.def("hold_workspaces", &Hold, py::arg("stream"));
  m.def("make_stream", &MakeStream, py::arg("device"), no_gil);
}

}  // namespace cgp
