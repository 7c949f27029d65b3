#include "torch/device_driver.h"

#include <atomic>
#include <stdexcept>
#include <string>

namespace cgp {
namespace {

std::atomic<bool> exports{false};

[[noreturn]] void Refuse(int device, const std::string& reason) {
  throw std::runtime_error("cudagraph_pool cannot be enabled for GPU " + std::to_string(device) +
                           ": " + reason);
}

}  // namespace

std::unique_ptr<Driver> MakeDriver(int device) {
  return std::make_unique<CudaDriver>(device, &exports);
}

void SetExportable(bool exportable) { exports = exportable; }

CudaDriverStats StatsOf(const Driver& driver) {
  return static_cast<const CudaDriver&>(driver).stats();
}

void RequireDriverSupport(int device, bool exportable) {
  const CudaProbe probe = CudaDriver::Probe(device);
  if (!probe.vmm_supported || !probe.reason.empty()) Refuse(device, probe.reason);
  if (exportable && !probe.exports) {
    Refuse(device, "its driver cannot export memory as file descriptors; leave exportable out");
  }
}

}  // namespace cgp
