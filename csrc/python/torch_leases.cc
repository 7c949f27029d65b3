#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <cstdint>
#include <optional>
#include <utility>
#include <vector>

#include "python/torch_parts.h"
#include "python/values.h"
#include "torch/device_pools.h"
#include "torch/install.h"

namespace py = pybind11;

namespace cgp {
namespace {

using c10::DeviceIndex;
using c10::MempoolId_t;

CaptureScopes& OurScopes() { return GetGraphAllocator()->scopes(); }

// Bytes, handles and mappings.
std::tuple<uint64_t, uint64_t, uint64_t> ToTuple(const Leased& leased) {
  return {leased.bytes, leased.handles, leased.mappings};
}

}  // namespace

void BindLeases(py::module_& m) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  // torch's own translators serve torch's modules alone.
  py::register_local_exception_translator([](std::exception_ptr thrown) {
    try {
      if (thrown) std::rethrow_exception(thrown);
    } catch (const c10::OutOfMemoryError& error) {
      py::set_error(py::module_::import("torch").attr("OutOfMemoryError"),
                    error.what_without_backtrace());
    }
  });
  const auto def_of_pool = [&](const char* name, auto function, const auto&... arguments) {
    m.def(name, function, py::arg("device"), py::arg("id"), arguments..., no_gil);
  };
  def_of_pool(
      "sleep",
      [](DeviceIndex device, const MempoolId_t& id, bool keeps_live) {
        return ToTuple(OurScopes().Sleep(device, id, keeps_live));
      },
      py::arg("keeps_live"));
  def_of_pool("wake", [](DeviceIndex device, const MempoolId_t& id) {
    return ToTuple(OurScopes().Wake(device, id));
  });
  def_of_pool("note_filled",
              [](DeviceIndex device, PoolId id) { OurScopes().NoteFilled(device, id); });
  def_of_pool("trim", [](DeviceIndex device, const MempoolId_t& id) {
    return ToTuple(OurScopes().Take(
        device, id, [](PoolSet& set, PoolId pool) { return set.TrimToNeeds(pool); }));
  });
  def_of_pool(
      "begin_lease",
      [](DeviceIndex device, const MempoolId_t& id, const std::vector<Address>& blocks) {
        uint64_t lease = 0;
        OurScopes().Take(device, id, [&](PoolSet& set, PoolId pool) {
          lease = set.Lease(pool, blocks);
          return Leased{};
        });
        return lease;
      },
      py::arg("blocks"));
  def_of_pool(
      "release_lease",
      [](DeviceIndex device, const MempoolId_t& id, uint64_t lease) {
        return ToTuple(OurScopes().Take(
            device, id, [&](PoolSet& set, PoolId pool) { return set.ReleaseLease(pool, lease); }));
      },
      py::arg("lease"));
  def_of_pool(
      "restore_lease",
      [](DeviceIndex device, const MempoolId_t& id, uint64_t lease) {
        return ToTuple(OurScopes().Bring(
            device, id, [&](PoolSet& set, PoolId pool) { return set.RestoreLease(pool, lease); }));
      },
      py::arg("lease"));
  def_of_pool(
      "end_lease",
      [](DeviceIndex device, const MempoolId_t& id, uint64_t lease) {
        OurScopes().Bring(device, id, [&](PoolSet& set, PoolId pool) {
          set.EndLease(pool, lease);
          return Leased{};
        });
      },
      py::arg("lease"));
  def_of_pool("begin_loan", [](DeviceIndex device, const MempoolId_t& id) {
    return OurScopes().BeginLoan(device, id);
  });
  def_of_pool("end_loan", [](DeviceIndex device, PoolId id) { OurScopes().EndLoan(device, id); });
  m.def("lend_on_oom", [](bool enabled) { OurScopes().lends_on_oom = enabled; });
  // Address and bytes of the live blocks that borrow from the pool.
  def_of_pool("borrowed", [](DeviceIndex device, PoolId id) {
    std::vector<std::pair<Address, uint64_t>> borrowed;
    DevicePools* const pools = DevicePools::Find(device);
    if (pools == nullptr || !pools->set.Contains(id)) return borrowed;
    for (const Block& block : pools->set.Borrowed(id)) {
      borrowed.emplace_back(block.address, block.bytes);
    }
    return borrowed;
  });
  def_of_pool("name_capture", [](DeviceIndex device, const MempoolId_t& id) {
    return OurScopes().NameCapture(device, id);
  });
  def_of_pool(
      "drop_capture",
      [](DeviceIndex device, PoolId id, uint64_t capture) {
        if (DevicePools* const pools = DevicePools::Find(device)) {
          pools->set.DropCapture(id, capture);
        }
      },
      py::arg("capture"));
  m.def(
      "begin_replay",
      [](std::optional<DeviceIndex> device, const MempoolId_t& id, uint64_t capture,
         uint64_t place) { OurScopes().BeginReplay(device, id, capture, place); },
      py::arg("device"), py::arg("id"), py::arg("capture"), py::arg("place"), no_gil);
}

}  // namespace cgp
