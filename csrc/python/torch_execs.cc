#include "python/torch_execs.h"

#include <ATen/cuda/CUDAGraph.h>
#include <pybind11/stl.h>

#include <memory>

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
      .def(py::init(&MakeExecCache), py::arg("device"), py::arg("max_execs"), no_gil)
      .def("stats", [](const ExecCache& cache) { return ToDict(cache.stats()); });
  py::class_<SharedGraph>(m, "SharedGraph")
      .def(py::init<std::shared_ptr<ExecCache>, CUDAGraph&, c10::DeviceIndex>(), py::arg("cache"),
           py::arg("graph"), py::arg("device"), no_gil)
      .def("__enter__", &SharedGraph::Lend, no_gil)
      .def(
          "__exit__",
          [](SharedGraph& graph, py::handle error, py::handle, py::handle) {
            const bool launched = error.is_none();
            const py::gil_scoped_release no_gil_now;
            graph.TakeBack(launched);
          },
          py::arg("exc_type"), py::arg("exc_value"), py::arg("traceback"))
      .def("prepare", &SharedGraph::Prepare, no_gil);
}

}  // namespace cgp
