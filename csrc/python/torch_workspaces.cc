#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <memory>

#include "python/torch_parts.h"
#include "torch/runtime.h"
#include "torch/workspaces.h"

namespace py = pybind11;

namespace cgp {
namespace {

uintptr_t MakeStream(c10::DeviceIndex device) {
  const c10::cuda::CUDAGuard guard(device);
  const RelaxedCaptureMode relaxed;
  cudaStream_t stream = nullptr;
  C10_CUDA_CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
  return reinterpret_cast<uintptr_t>(stream);
}

// What holds them as long as it lives.
py::capsule Hold(uintptr_t stream) {
  using All = decltype(HoldWorkspaces(stream));
  auto all = std::make_unique<All>();
  {
    const py::gil_scoped_release no_gil;  // who frees one may wait for it
    *all = HoldWorkspaces(stream);
  }
  return {all.release(), [](void* held) { delete static_cast<All*>(held); }};
}

}  // namespace

void BindWorkspaces(py::module_& m) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  m.def("blas_workspaces", &BlasWorkspaces, no_gil);
  m.def("hold_workspaces", &Hold, py::arg("stream"));
  m.def("make_stream", &MakeStream, py::arg("device"), no_gil);
}

}  // namespace cgp
