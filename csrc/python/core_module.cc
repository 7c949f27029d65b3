// cudagraph_pool._core: the core on the host driver, for machines with neither torch nor a GPU.
// Conversions only; what the members do is said in core/pool_set.h and driver/host_driver.h.
#include <pybind11/pybind11.h>

#include <cstdint>
#include <exception>
#include <memory>
#include <string>
#include <utility>

#include "core/base/error.h"
#include "core/driver.h"
#include "core/pool_set.h"
#include "driver/host_driver.h"
#include "python/values.h"

namespace py = pybind11;

namespace {

const char* ToPython(cgp::DriverStatus status) {
  switch (status) {
    case cgp::DriverStatus::kOutOfMemory:
      return "out of memory";
    case cgp::DriverStatus::kOutOfAddresses:
      return "out of addresses";
    case cgp::DriverStatus::kFailed:
      return "failed";
  }
  return "failed";
}

// The exception types live as long as the interpreter, since translators cannot be taken back.
struct ErrorTypes {
  py::handle usage;
  py::handle out_of_memory;
  py::handle driver;
  py::handle internal;
};

ErrorTypes& Errors() {
  static ErrorTypes types;
  return types;
}

void RaiseDriverError(const cgp::DriverError& error) {
  py::object instance = Errors().driver(error.what());
  instance.attr("status") = ToPython(error.status());
  instance.attr("call") = error.call();
  instance.attr("code") = error.code();
  instance.attr("bytes") = error.bytes();
  instance.attr("device") = error.device();
  PyErr_SetObject(Errors().driver.ptr(), instance.ptr());
}

void RaiseOutOfMemoryError(const cgp::OutOfMemoryError& error) {
  py::object instance = Errors().out_of_memory(error.what());
  instance.attr("requested_bytes") = error.requested_bytes();
  PyErr_SetObject(Errors().out_of_memory.ptr(), instance.ptr());
}

void Translate(std::exception_ptr pending) {
  try {
    if (pending) std::rethrow_exception(pending);
  } catch (const cgp::UsageError& error) {
    PyErr_SetString(Errors().usage.ptr(), error.what());
  } catch (const cgp::OutOfMemoryError& error) {
    RaiseOutOfMemoryError(error);
  } catch (const cgp::DriverError& error) {
    RaiseDriverError(error);
  } catch (const cgp::InternalError& error) {
    PyErr_SetString(Errors().internal.ptr(), error.what());
  }
}

py::handle NewError(py::module_& module, const char* name, PyObject* base) {
  const std::string qualified = "cudagraph_pool._core." + std::string(name);
  PyObject* type = PyErr_NewException(qualified.c_str(), base, nullptr);
  if (type == nullptr) throw py::error_already_set();
  module.add_object(name, type);
  return type;
}

void BindErrors(py::module_& module) {
  Errors() = {.usage = NewError(module, "UsageError", PyExc_RuntimeError),
              .out_of_memory = NewError(module, "OutOfMemoryError", PyExc_MemoryError),
              .driver = NewError(module, "DriverError", PyExc_RuntimeError),
              .internal = NewError(module, "InternalError", PyExc_RuntimeError)};
  py::register_local_exception_translator(&Translate);
}

void BindDriver(py::module_& module) {
  py::class_<cgp::HostDriver>(module, "HostDriver")
      .def(py::init([](int device, uint64_t granularity, uint64_t physical_limit_bytes,
                       uint64_t address_limit_bytes, bool map_memory) {
             return std::make_unique<cgp::HostDriver>(
                 cgp::HostDriverOptions{.device = device,
                                        .granularity = granularity,
                                        .physical_limit_bytes = physical_limit_bytes,
                                        .address_limit_bytes = address_limit_bytes,
                                        .map_memory = map_memory});
           }),
           py::kw_only(), py::arg("device") = cgp::HostDriverOptions{}.device,
           py::arg("granularity") = cgp::HostDriverOptions{}.granularity,
           py::arg("physical_limit_bytes") = cgp::HostDriverOptions{}.physical_limit_bytes,
           py::arg("address_limit_bytes") = cgp::HostDriverOptions{}.address_limit_bytes,
           py::arg("map_memory") = cgp::HostDriverOptions{}.map_memory)
      .def_property_readonly("device", &cgp::HostDriver::device)
      .def_property_readonly("granularity", &cgp::HostDriver::granularity)
      .def("info", [](cgp::HostDriver& driver) {
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
      .def(py::init([](cgp::HostDriver& driver, uint64_t page_bytes) {
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
      .def("pool_of", &PoolSet::PoolOf)
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
  module.doc() = "The allocator's core on the host driver.";
  module.attr("__version__") = CGP_VERSION;
  BindErrors(module);
  BindDriver(module);
  BindValues(module);
  BindPoolSet(module);
}
