#include "torch/device_driver.h"

#include <stdexcept>
#include <string>

namespace cgp {

std::unique_ptr<Driver> MakeDriver(int device) { return std::make_unique<CudaDriver>(device); }

CudaDriverStats StatsOf(const Driver& driver) {
  return static_cast<const CudaDriver&>(driver).stats();
}

void RequireDriverSupport(int device) {
  const CudaProbe probe = CudaDriver::Probe(device);
  if (probe.vmm_supported && probe.reason.empty()) return;
  throw std::runtime_error("cudagraph_pool cannot be enabled for GPU " + std::to_string(device) +
                           ": " + probe.reason);
}

}  // namespace cgp
