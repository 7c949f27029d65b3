// The adapter, for Python: cudagraph_pool._torch_2_11 and so on, one for each release of torch. No
// logic: what is decided is decided in csrc/torch or in the package.
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <map>
#include <string>
#include <utility>

#include "python/torch_parts.h"
#include "torch/device_pools.h"
#include "torch/graph_allocator.h"
#include "torch/install.h"
#include "torch/runtime.h"

namespace py = pybind11;

namespace {

using Id = std::pair<uint64_t, uint64_t>;

cgp::PoolId ToPoolId(const Id& id) { return {id.first, id.second}; }

// The set that has the pool; that of GraphAllocator if none does.
cgp::PoolSet& Pools(int device, const Id& id) {
  const auto index = static_cast<c10::DeviceIndex>(device);
  auto* const plain = cgp::DevicePools::Find(index, cgp::PoolsOwner::kPluggableAllocator);
  if (plain != nullptr && plain->set().Contains(ToPoolId(id))) return plain->set();
  return cgp::DevicePools::For(index).set();
}

py::dict ToDict(const cgp::PoolStats& stats) {
  py::dict result;
  result["page_bytes"] = stats.page_bytes;
  result["pages"] = stats.pages;
  result["reserved_bytes"] = stats.reserved_bytes;
  result["allocated_bytes"] = stats.allocated_bytes;
  result["requested_bytes"] = stats.requested_bytes;
  result["live_blocks"] = stats.live_blocks;
  result["peak_reserved_bytes"] = stats.peak_reserved_bytes;
  result["peak_allocated_bytes"] = stats.peak_allocated_bytes;
  result["scope_peak_bytes"] = stats.scope_peak_bytes;
  result["ranges"] = stats.ranges;
  result["page_mappings"] = stats.page_mappings;
  result["allocations"] = stats.allocations;
  result["frees"] = stats.frees;
  return result;
}

py::dict ToDict(const cgp::PoolSnapshot& snapshot) {
  py::list blocks;
  for (const auto& live : snapshot.blocks) {
    py::list pieces;
    for (const auto& piece : live.pieces) {
      pieces.append(py::make_tuple(cgp::Index(piece.page), piece.offset_bytes, piece.length_bytes));
    }
    py::dict block;
    block["address"] = live.block.address;
    block["bytes"] = live.block.bytes;
    block["requested_bytes"] = live.block.requested_bytes;
    block["stream"] = static_cast<uint64_t>(live.block.stream);
    block["pieces"] = pieces;
    blocks.append(block);
  }
  py::list ranges;
  for (const auto& range : snapshot.ranges) {
    py::list pages;
    for (const auto page : range.pages) pages.append(cgp::Index(page));
    py::dict entry;
    entry["address"] = range.address;
    entry["pages"] = pages;
    ranges.append(entry);
  }
  py::dict result;
  result["stats"] = ToDict(snapshot.stats);
  result["blocks"] = blocks;
  result["ranges"] = ranges;
  return result;
}

py::dict ToDict(const cgp::CaptureStats& capture) {
  py::dict result;
  result["added_bytes"] = capture.added_bytes;
  result["live_before_bytes"] = capture.live_before_bytes;
  result["peak_bytes"] = capture.peak_bytes;
  result["first_allocation"] = capture.first_allocation;
  result["allocations"] = capture.allocations;
  return result;
}

// Calls to the driver so far, and the nanoseconds they took: {"Map_calls": ..., "Map_ns": ...,
// ...}.
py::dict DriverStats(int device) {
  std::map<std::string, uint64_t> sums;
  for (const cgp::PoolsOwner owner : cgp::kPoolsOwners) {
    auto* pools = cgp::DevicePools::Find(static_cast<c10::DeviceIndex>(device), owner);
    if (pools == nullptr) continue;
    const cgp::CudaDriverStats stats = cgp::StatsOf(pools->driver().inner());
    for (size_t i = 0; i < cgp::kDriverCallKinds; ++i) {
      const auto call = static_cast<cgp::DriverCall>(i);
      const std::string name(cgp::Name(call));
      sums[name + "_calls"] += stats[call].calls;
      sums[name + "_ns"] += stats[call].nanoseconds;
    }
  }
  py::dict result;
  for (const auto& [name, sum] : sums) result[py::str(name)] = sum;
  return result;
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  const auto no_gil = py::call_guard<py::gil_scoped_release>();
  m.def(
      "enable",
      [](bool share_captures, bool mempools, bool exportable) {
        cgp::Enable({share_captures, mempools, exportable});
      },
      py::arg("share_captures"), py::arg("mempools"), py::arg("exportable"), no_gil);
  m.def("disable", &cgp::Disable, no_gil);
  m.def("is_enabled", &cgp::IsEnabled);
  m.def("allocator",
        []() -> std::shared_ptr<cgp::CUDAAllocator> { return cgp::GetGraphAllocator(); });
  m.def(
      "end_failed_capture",
      [](int device, const Id& id) {
        cgp::GetGraphAllocator()->EndFailedCapture(static_cast<c10::DeviceIndex>(device), id);
      },
      py::arg("device"), py::arg("id"), no_gil);
  m.def(
      "register_pool",
      [](int device, const Id& id) {
        cgp::GetGraphAllocator()->RegisterPool(static_cast<c10::DeviceIndex>(device), ToPoolId(id));
      },
      py::arg("device"), py::arg("id"), no_gil);
  m.def(
      "unregister_pool",
      [](int device, const Id& id) {
        cgp::GetGraphAllocator()->UnregisterPool(static_cast<c10::DeviceIndex>(device),
                                                 ToPoolId(id));
      },
      py::arg("device"), py::arg("id"), no_gil);
  m.def("capture_counts", [] {
    const cgp::GraphAllocator* allocator = cgp::FindGraphAllocator();
    const auto counts =
        allocator == nullptr ? cgp::GraphAllocator::CaptureCounts{} : allocator->capture_counts();
    py::dict result;
    result["ours"] = counts.ours;
    result["base"] = counts.bases;
    return result;
  });
  // The captures that went to the base, by reason.
  m.def("base_captures", [] {
    const cgp::GraphAllocator* allocator = cgp::FindGraphAllocator();
    const auto counts =
        allocator == nullptr ? cgp::GraphAllocator::CaptureCounts{} : allocator->capture_counts();
    py::dict result;
    result["disabled"] = counts.while_stopped;
    result["mempool"] = counts.in_mempools;
    result["older_pool"] = counts.bases - counts.while_stopped - counts.in_mempools;
    return result;
  });
  m.def(
      "is_mempool",
      [](int device, const Id& id) {
        const cgp::GraphAllocator* allocator = cgp::FindGraphAllocator();
        return allocator != nullptr &&
               allocator->IsMemPool(static_cast<c10::DeviceIndex>(device), ToPoolId(id));
      },
      py::arg("device"), py::arg("id"), no_gil);
  m.def(
      "captures",
      [](int device, const Id& id) {
        py::list result;
        for (const auto& capture : Pools(device, id).Captures(ToPoolId(id))) {
          result.append(ToDict(capture));
        }
        return result;
      },
      py::arg("device"), py::arg("id"));
  m.def(
      "pool_ids",
      [](int device) {
        std::vector<Id> ids;
        for (const cgp::PoolsOwner owner : cgp::kPoolsOwners) {
          auto* pools = cgp::DevicePools::Find(static_cast<c10::DeviceIndex>(device), owner);
          if (pools == nullptr) continue;
          for (const cgp::PoolId id : pools->set().ids()) ids.emplace_back(id.first, id.second);
        }
        return ids;
      },
      py::arg("device"));
  m.def(
      "pool_of",
      [](int device, uint64_t address) -> std::optional<Id> {
        for (const cgp::PoolsOwner owner : cgp::kPoolsOwners) {
          auto* const pools = cgp::DevicePools::Find(static_cast<c10::DeviceIndex>(device), owner);
          if (pools == nullptr) continue;
          if (const auto id = pools->set().PoolOf(address)) return Id{id->first, id->second};
        }
        return std::nullopt;
      },
      py::arg("device"), py::arg("address"));
  m.def(
      "use_count",
      [](int device, const Id& id) { return Pools(device, id).UseCount(ToPoolId(id)); },
      py::arg("device"), py::arg("id"));
  m.def(
      "stats",
      [](int device, const Id& id) { return ToDict(Pools(device, id).Stats(ToPoolId(id))); },
      py::arg("device"), py::arg("id"));
  m.def(
      "snapshot",
      [](int device, const Id& id) { return ToDict(Pools(device, id).Snapshot(ToPoolId(id))); },
      py::arg("device"), py::arg("id"));
  m.def("driver_stats", &DriverStats, py::arg("device"));
  cgp::BindExecs(m);
  cgp::BindCalls(m);
  cgp::BindWeights(m);
}
