// cudagraph_pool._core: the core on the host driver, for machines with neither torch nor a GPU.
// Conversions only; what the members do is said in core/pool_set.h and driver/host_driver.h.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <exception>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "core/base/error.h"
#include "core/base/units.h"
#include "core/pool.h"
#include "core/pool_set.h"
#include "driver/driver.h"
#include "driver/host_driver.h"

namespace py = pybind11;

namespace {

using PyPoolId = std::pair<uint64_t, uint64_t>;
using PyPiece = std::tuple<uint32_t, uint64_t, uint64_t>;

cgp::PoolId FromPython(PyPoolId id) { return {id.first, id.second}; }
PyPoolId ToPython(cgp::PoolId id) { return {id.first, id.second}; }

std::vector<PyPiece> ToPython(const std::vector<cgp::PhysicalPiece>& pieces) {
  std::vector<PyPiece> result;
  result.reserve(pieces.size());
  for (const cgp::PhysicalPiece& piece : pieces) {
    result.emplace_back(cgp::Index(piece.page), piece.offset_bytes, piece.length_bytes);
  }
  return result;
}

std::vector<uint32_t> ToPython(const std::vector<cgp::PageId>& pages) {
  std::vector<uint32_t> result;
  result.reserve(pages.size());
  for (const cgp::PageId page : pages) result.push_back(cgp::Index(page));
  return result;
}

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
      .def_property_readonly(
          "stream", [](const cgp::Block& block) { return static_cast<uint64_t>(block.stream); });

  py::class_<cgp::PoolStats>(module, "PoolStats")
      .def_readonly("page_bytes", &cgp::PoolStats::page_bytes)
      .def_readonly("pages", &cgp::PoolStats::pages)
      .def_readonly("reserved_bytes", &cgp::PoolStats::reserved_bytes)
      .def_readonly("allocated_bytes", &cgp::PoolStats::allocated_bytes)
      .def_readonly("requested_bytes", &cgp::PoolStats::requested_bytes)
      .def_readonly("live_blocks", &cgp::PoolStats::live_blocks)
      .def_readonly("peak_reserved_bytes", &cgp::PoolStats::peak_reserved_bytes)
      .def_readonly("peak_allocated_bytes", &cgp::PoolStats::peak_allocated_bytes)
      .def_readonly("scope_peak_bytes", &cgp::PoolStats::scope_peak_bytes)
      .def_readonly("ranges", &cgp::PoolStats::ranges)
      .def_readonly("page_mappings", &cgp::PoolStats::page_mappings)
      .def_readonly("allocations", &cgp::PoolStats::allocations)
      .def_readonly("frees", &cgp::PoolStats::frees);

  py::class_<cgp::PoolSnapshot::LiveBlock>(module, "LiveBlock")
      .def_readonly("block", &cgp::PoolSnapshot::LiveBlock::block)
      .def_property_readonly(
          "pieces", [](const cgp::PoolSnapshot::LiveBlock& live) { return ToPython(live.pieces); });

  py::class_<cgp::PoolSnapshot::Range>(module, "Range")
      .def_readonly("address", &cgp::PoolSnapshot::Range::address)
      .def_property_readonly(
          "pages", [](const cgp::PoolSnapshot::Range& range) { return ToPython(range.pages); });

  py::class_<cgp::PoolSnapshot>(module, "PoolSnapshot")
      .def_readonly("stats", &cgp::PoolSnapshot::stats)
      .def_readonly("blocks", &cgp::PoolSnapshot::blocks)
      .def_readonly("ranges", &cgp::PoolSnapshot::ranges);
}

void BindPoolSet(py::module_& module) {
  using cgp::PoolSet;
  py::class_<PoolSet>(module, "PoolSet")
      .def(py::init([](cgp::HostDriver& driver, uint64_t page_bytes) {
             return std::make_unique<PoolSet>(driver, cgp::PoolOptions{.page_bytes = page_bytes});
           }),
           py::arg("driver"), py::kw_only(), py::arg("page_bytes") = 0, py::keep_alive<1, 2>())
      .def("retain", [](PoolSet& set, PyPoolId id) { set.Retain(FromPython(id)); })
      .def("begin_scope", [](PoolSet& set, PyPoolId id,
                             cgp::ScopeKind kind) { set.BeginScope(FromPython(id), kind); })
      .def("end_scope", [](PoolSet& set, PyPoolId id) { set.EndScope(FromPython(id)); })
      .def("release", [](PoolSet& set, PyPoolId id) { set.Release(FromPython(id)); })
      .def("allocate",
           [](PoolSet& set, PyPoolId id, uint64_t bytes, uint64_t stream) {
             return set.Allocate(FromPython(id), bytes, cgp::StreamId(stream));
           })
      .def("free", &PoolSet::Free)
      .def("record_use", [](PoolSet& set, cgp::Address address,
                            uint64_t stream) { set.RecordUse(address, cgp::StreamId(stream)); })
      .def("find", &PoolSet::Find)
      .def("pool_of",
           [](const PoolSet& set, cgp::Address address) -> std::optional<PyPoolId> {
             const std::optional<cgp::PoolId> id = set.PoolOf(address);
             return id ? std::optional(ToPython(*id)) : std::nullopt;
           })
      .def("pieces",
           [](const PoolSet& set, cgp::Address address) { return ToPython(set.Pieces(address)); })
      .def("trim", [](PoolSet& set) { return set.Trim(); })
      .def("trimmable_bytes", &PoolSet::TrimmableBytes)
      .def("contains", [](const PoolSet& set, PyPoolId id) { return set.Contains(FromPython(id)); })
      .def("use_count",
           [](const PoolSet& set, PyPoolId id) { return set.UseCount(FromPython(id)); })
      .def("ids",
           [](const PoolSet& set) {
             std::vector<PyPoolId> ids;
             for (const cgp::PoolId id : set.ids()) ids.push_back(ToPython(id));
             return ids;
           })
      .def("stats", [](const PoolSet& set, PyPoolId id) { return set.Stats(FromPython(id)); })
      .def("snapshot", [](const PoolSet& set, PyPoolId id) { return set.Snapshot(FromPython(id)); })
      .def("captures",
           [](const PoolSet& set, PyPoolId id) {
             std::vector<std::map<std::string, uint64_t>> captures;
             for (const cgp::CaptureStats& took : set.Captures(FromPython(id))) {
               captures.push_back({{"added_bytes", took.added_bytes},
                                   {"live_before_bytes", took.live_before_bytes},
                                   {"peak_bytes", took.peak_bytes},
                                   {"first_allocation", took.first_allocation},
                                   {"allocations", took.allocations}});
             }
             return captures;
           })
      .def("total_stats", &PoolSet::TotalStats)
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
