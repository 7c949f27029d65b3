#include <ATen/cuda/CUDAGraph.h>
#include <pybind11/stl.h>

#include <cstddef>
#include <memory>
#include <optional>

#include "python/torch_parts.h"
#include "torch/shared_graph.h"

namespace py = pybind11;

namespace cgp {
namespace {

py::dict ToDict(const ExecCache::Stats& stats) {
  py::dict result;
  result["execs"] = stats.execs;
  result["exec_instantiations"] = stats.instantiations;
  result["exec_updates"] = stats.updates;
  return result;
}

}  // namespace

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
      .def("stats", [](const ExecCache& cache) {
        ExecCache::Stats stats;
        {
          const py::gil_scoped_release no_gil_now;
          stats = cache.stats();
        }
        return ToDict(stats);
      });
  // Nobody may ask the cache with the GIL: who asks it may wait for the device, and that for a
  // callback in Python.
  py::class_<SharedGraph>(m, "SharedGraph", py::release_gil_before_calling_cpp_dtor())
      .def(py::init<std::shared_ptr<ExecCache>, CUDAGraph&, c10::DeviceIndex>(), py::arg("cache"),
           py::arg("graph"), py::arg("device"), no_gil)
      .def("__enter__", &SharedGraph::Lend, no_gil)
      .def(
          "__exit__",
          [](SharedGraph& graph, py::handle, py::handle, py::handle) {
            const py::gil_scoped_release no_gil_now;
            graph.TakeBack();
          },
          py::arg("exc_type"), py::arg("exc_value"), py::arg("traceback"))
      .def("prepare", &SharedGraph::Prepare, no_gil)
      .def("withdraw", &SharedGraph::Withdraw, no_gil);
}

}  // namespace cgp
