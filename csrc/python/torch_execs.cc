#include <ATen/cuda/CUDAGraph.h>

#include <cstddef>
#include <exception>
#include <memory>
#include <optional>

#include "python/torch_parts.h"
#include "python/values.h"
#include "torch/shared_graph.h"

namespace py = pybind11;

namespace cgp {

static py::dict ToPlain(const ExecCache::Stats& stats) {
  using py::literals::operator""_a;
  return py::dict("execs"_a = stats.execs, "exec_instantiations"_a = stats.instantiations,
                  "exec_updates"_a = stats.updates, "exec_alone"_a = stats.alone);
}

}  // namespace cgp

template <>
struct py::detail::type_caster<cgp::ExecCache::Stats> : cgp::PlainCaster<cgp::ExecCache::Stats> {};

namespace cgp {

// The cache must be asked without the GIL: it may wait for the device, which may wait for a
// callback in Python.
static py::object RunWithExec(SharedGraph& graph, const py::function& function) {
  const auto without_gil = [&](void (SharedGraph::*step)()) {
    const py::gil_scoped_release no_gil_now;
    (graph.*step)();
  };
  without_gil(&SharedGraph::Lease);
  const auto result = py::reinterpret_steal<py::object>(PyObject_CallNoArgs(function.ptr()));
  if (!result) {
    const py::error_already_set error;
    try {
      without_gil(&SharedGraph::Return);
    } catch (const std::exception&) {  // the lease has ended, and the first error says more
    }
    throw error;
  }
  without_gil(&SharedGraph::Return);
  return result;
}

void BindExecs(py::module_& m) {
  using at::cuda::CUDAGraph;
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  m.def("set_keeps_template", &SetKeepsTemplate, py::arg("graph"), py::arg("keeps"));
  py::class_<ExecCache, std::shared_ptr<ExecCache>>(m, "ExecCache")
      // pybind11 registers what a factory makes within its guard, and needs the GIL for that.
      .def(py::init([](c10::DeviceIndex device, std::optional<std::size_t> max_execs,
                       uint64_t budget_bytes) {
             const py::gil_scoped_release no_gil_now;
             return MakeExecCache(device, max_execs, budget_bytes);
           }),
           py::arg("device"), py::arg("max_execs"), py::arg("budget_bytes"))
      .def("drop_idle", &ExecCache::DropIdle, no_gil)
      .def("make_dropped", &MakeDroppedExecs, py::arg("device"), no_gil)
      .def("stats", &ExecCache::stats, no_gil);
  py::class_<SharedGraph>(m, "SharedGraph", py::release_gil_before_calling_cpp_dtor())
      .def(py::init<std::shared_ptr<ExecCache>, CUDAGraph&, c10::DeviceIndex>(), py::arg("cache"),
           py::arg("graph"), py::arg("device"), no_gil)
      .def("run", &RunWithExec, py::arg("function"))
      .def("prepare", &SharedGraph::Prepare, no_gil)
      .def("withdraw", &SharedGraph::Withdraw, no_gil);
}

}  // namespace cgp
