// The adapter for Python: cudagraph_pool._torch_2_11 and so on, one for each release of torch. It
// has no logic: csrc/torch or the package decides.
#include <pybind11/pybind11.h>

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "driver/cuda_driver.h"
#include "python/torch_parts.h"
#include "python/values.h"
#include "torch/device_pools.h"
#include "torch/graph_allocator.h"
#include "torch/install.h"

namespace py = pybind11;
using py::literals::operator""_a;

namespace {

using c10::DeviceIndex;
using cgp::PoolId;

// The pools of `device` that exist.
std::vector<cgp::DevicePools*> PoolsOf(DeviceIndex device) {
  std::vector<cgp::DevicePools*> made;
  for (const cgp::PoolsOwner owner : cgp::kPoolsOwners) {
    if (auto* const pools = cgp::DevicePools::Find(device, owner)) made.push_back(pools);
  }
  return made;
}

// The set that has the pool; that of GraphAllocator if none does.
cgp::PoolSet& Pools(DeviceIndex device, PoolId id) {
  auto* const plain = cgp::DevicePools::Find(device, cgp::PoolsOwner::kPluggableAllocator);
  if (plain != nullptr && plain->set.Contains(id)) return plain->set;
  return cgp::DevicePools::For(device).set;
}

py::dict ToDict(const cgp::PoolStats& stats) {
  py::dict result;
  for (const auto& [name, value] : cgp::kStatsFields) result[name] = stats.*value;
  result["asleep"] = stats.asleep;
  return result;
}

py::dict ToDict(const cgp::PoolSnapshot& snapshot) {
  py::list blocks;
  for (const auto& [block, pieces] : snapshot.blocks) {
    blocks.append(py::dict("address"_a = block.address, "bytes"_a = block.bytes,
                           "requested_bytes"_a = block.requested_bytes, "stream"_a = block.stream,
                           "pieces"_a = pieces));
  }
  py::list ranges;
  for (const auto& [address, pages] : snapshot.ranges) {
    ranges.append(py::dict("address"_a = address, "pages"_a = pages));
  }
  return py::dict("stats"_a = ToDict(snapshot.stats), "blocks"_a = blocks, "ranges"_a = ranges,
                  "gone"_a = snapshot.gone);
}

const cgp::CaptureScopes::Counts& Counts() {
  static const cgp::CaptureScopes::Counts none;
  cgp::GraphAllocator* const allocator = cgp::GraphAllocator::Find();
  return allocator == nullptr ? none : allocator->scopes().counts;
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
  m.def("capture_counts",
        [] { return py::dict("ours"_a = Counts().ours.load(), "base"_a = Counts().bases.load()); });
  // The captures that went to the base, by reason.
  m.def("base_captures", [] {
    const uint64_t stopped = Counts().while_stopped;
    const uint64_t mempools = Counts().in_mempools;
    return py::dict("disabled"_a = stopped, "mempool"_a = mempools,
                    "older_pool"_a = Counts().bases - stopped - mempools);
  });
  // The peaks of all pools together: reserved bytes, and allocated ones.
  m.def("most_bytes", [](DeviceIndex device) {
    std::pair<uint64_t, uint64_t> most;
    for (cgp::DevicePools* const pools : PoolsOf(device)) {
      const cgp::SetUsage usage = pools->set.Usage();
      most = std::max(most, {usage.reserved_bytes.most, usage.all.bytes.most});
    }
    return most;
  });
  const auto def_of_pool = [&](const char* name, auto function, const auto&... guard) {
    m.def(name, function, py::arg("device"), py::arg("id"), guard...);
  };
  const auto scopes = []() -> cgp::CaptureScopes& { return cgp::GetGraphAllocator()->scopes(); };
  def_of_pool(
      "end_failed_capture",
      [=](DeviceIndex device, const c10::MempoolId_t& id) { scopes().EndFailed(device, id); },
      no_gil);
  def_of_pool(
      "register_pool", [=](DeviceIndex device, PoolId id) { scopes().Register(device, id); },
      no_gil);
  def_of_pool(
      "unregister_pool",
      [=](DeviceIndex device, const c10::MempoolId_t& id) { scopes().Release(device, id); },
      no_gil);
  def_of_pool(
      "is_mempool",
      [=](DeviceIndex device, PoolId id) {
        return cgp::GraphAllocator::Find() != nullptr && scopes().IsMemPool(device, id);
      },
      no_gil);
  def_of_pool("captures",
              [](DeviceIndex device, PoolId id) { return Pools(device, id).Captures(id); });
  def_of_pool("use_count",
              [](DeviceIndex device, PoolId id) { return Pools(device, id).UseCount(id); });
  def_of_pool("stats", [](DeviceIndex device, PoolId id) {
    cgp::PoolSet& set = Pools(device, id);
    py::dict stats = ToDict(set.Stats(id));
    stats["lendable_bytes"] = set.LendableBytes(id);
    return stats;
  });
  def_of_pool("snapshot",
              [](DeviceIndex device, PoolId id) { return ToDict(Pools(device, id).Snapshot(id)); });
  m.def("pool_ids", [](DeviceIndex device) {
    std::vector<PoolId> ids;
    for (cgp::DevicePools* const pools : PoolsOf(device)) {
      for (const PoolId id : pools->set.ids()) ids.push_back(id);
    }
    return ids;
  });
  m.def("pool_of", [](DeviceIndex device, uint64_t address) -> std::optional<PoolId> {
    for (cgp::DevicePools* const pools : PoolsOf(device)) {
      if (const auto owned = pools->set.At(address)) return owned->id;
    }
    return std::nullopt;
  });
  m.def("driver_calls", [](DeviceIndex device) {
    cgp::CudaDriver::CallTimes sum;
    for (cgp::DevicePools* const pools : PoolsOf(device)) {
      for (const auto& [name, call] :
           static_cast<cgp::CudaDriver&>(pools->driver.inner()).calls()) {
        sum[name].first += call.first;
        sum[name].second += call.second;
      }
    }
    return sum;
  });
  cgp::BindExecs(m);
  cgp::BindLeases(m);
  cgp::BindWeights(m);
  cgp::BindWorkspaces(m);
}
