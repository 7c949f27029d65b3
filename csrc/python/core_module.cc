// cudagraph_pool._core: the core on numbers, for machines with neither torch nor a GPU. It only
// converts; core/pool_set.h and driver/number_driver.h say what the members do.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <memory>
#include <utility>

#include "core/base/error.h"
#include "core/driver.h"
#include "core/pool_set.h"
#include "driver/number_driver.h"
#include "python/values.h"

namespace py = pybind11;

namespace {

void BindErrors(py::module_& module) {
  py::register_local_exception<cgp::UsageError>(module, "UsageError", PyExc_RuntimeError);
  py::register_local_exception<cgp::OutOfMemoryError>(module, "OutOfMemoryError",
                                                      PyExc_MemoryError);
  py::register_local_exception<cgp::DriverError>(module, "DriverError", PyExc_RuntimeError);
  py::register_local_exception<cgp::InternalError>(module, "InternalError", PyExc_RuntimeError);
}

void BindDriver(py::module_& module) {
  py::class_<cgp::NumberDriver>(module, "NumberDriver")
      .def(py::init([](int device, uint64_t granularity, uint64_t physical_limit_bytes,
                       uint64_t address_limit_bytes) {
             return std::make_unique<cgp::NumberDriver>(
                 cgp::NumberDriverOptions{.device = device,
                                          .granularity = granularity,
                                          .physical_limit_bytes = physical_limit_bytes,
                                          .address_limit_bytes = address_limit_bytes});
           }),
           py::kw_only(), py::arg("device") = cgp::NumberDriverOptions{}.device,
           py::arg("granularity") = cgp::NumberDriverOptions{}.granularity,
           py::arg("physical_limit_bytes") = cgp::NumberDriverOptions{}.physical_limit_bytes,
           py::arg("address_limit_bytes") = cgp::NumberDriverOptions{}.address_limit_bytes)
      .def_property_readonly("device", &cgp::NumberDriver::device)
      .def_property_readonly("granularity", &cgp::NumberDriver::granularity)
      .def("info", [](cgp::NumberDriver& driver) {
        const cgp::MemoryInfo info = driver.Info();
        return std::pair(info.free_bytes, info.total_bytes);
      });
}

void BindValues(py::module_& module) {
  py::enum_<cgp::ScopeKind>(module, "ScopeKind")
      .value("CAPTURE", cgp::ScopeKind::kCapture)
      .value("EAGER", cgp::ScopeKind::kEager);

  py::class_<cgp::Block>(module, "Block")
      .def_readonly("address", &cgp::Block::address)
      .def_readonly("bytes", &cgp::Block::bytes)
      .def_readonly("requested_bytes", &cgp::Block::requested_bytes)
      .def_readonly("stream", &cgp::Block::stream);

  py::class_<cgp::PoolStats> stats(module, "PoolStats");
  for (const auto& [name, value] : cgp::kStatsFields) stats.def_readonly(name, value);
  stats.def_readonly("asleep", &cgp::PoolStats::asleep);

  using cgp::PoolSnapshot;
  py::class_<PoolSnapshot::LiveBlock>(module, "LiveBlock")
      .def_readonly("block", &PoolSnapshot::LiveBlock::block)
      .def_readonly("pieces", &PoolSnapshot::LiveBlock::pieces);
  py::class_<PoolSnapshot::Range>(module, "Range")
      .def_readonly("address", &PoolSnapshot::Range::address)
      .def_readonly("pages", &PoolSnapshot::Range::pages);
  py::class_<PoolSnapshot>(module, "PoolSnapshot")
      .def_readonly("stats", &PoolSnapshot::stats)
      .def_readonly("blocks", &PoolSnapshot::blocks)
      .def_readonly("ranges", &PoolSnapshot::ranges);
}

void BindPoolSet(py::module_& module) {
  using cgp::PoolSet;
  py::class_<PoolSet>(module, "PoolSet")
      .def(py::init([](cgp::NumberDriver& driver, uint64_t page_bytes) {
             return std::make_unique<PoolSet>(driver, cgp::PoolOptions{.page_bytes = page_bytes});
           }),
           py::arg("driver"), py::kw_only(), py::arg("page_bytes") = 0, py::keep_alive<1, 2>())
      .def("retain", &PoolSet::Retain)
      .def("begin_scope",
           [](PoolSet& set, cgp::PoolId id, cgp::ScopeKind kind) { set.BeginScope(id, kind); })
      .def("end_scope", [](PoolSet& set, cgp::PoolId id) { set.EndScope(id); })
      .def("release", &PoolSet::Release)
      .def("allocate", [](PoolSet& set, cgp::PoolId id, uint64_t bytes,
                          cgp::StreamId stream) { return set.Allocate(id, bytes, stream); })
      .def("free", &PoolSet::Free)
      .def("record_use", &PoolSet::RecordUse)
      .def("find", &PoolSet::Find)
      .def("pieces", &PoolSet::Pieces)
      .def("trim", [](PoolSet& set) { return set.Trim(); })
      .def("trimmable_bytes", &PoolSet::TrimmableBytes)
      .def("contains", &PoolSet::Contains)
      .def("use_count", &PoolSet::UseCount)
      .def("ids", &PoolSet::ids)
      .def("stats", &PoolSet::Stats)
      .def("snapshot", &PoolSet::Snapshot)
      .def("captures", &PoolSet::Captures)
      .def("check", &PoolSet::Check);
}

}  // namespace

PYBIND11_MODULE(_core, module) {
  module.doc() = "The allocator's core on numbers.";
  module.attr("__version__") = CGP_VERSION;
  BindErrors(module);
  BindDriver(module);
  BindValues(module);
  BindPoolSet(module);
}
