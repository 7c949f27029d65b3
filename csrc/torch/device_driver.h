// The driver behind a device's pools; apart from the rest, so that tests of the adapter bring another.
#pragma once

#include <memory>

#include "driver/cuda_driver.h"
#include "driver/driver.h"

namespace cgp {

std::unique_ptr<Driver> MakeDriver(int device);

// Whether memory that drivers of MakeDriver() take from now on can be exported to other processes.
void SetExportable(bool exportable);

// What a driver of MakeDriver() has done so far.
CudaDriverStats StatsOf(const Driver& driver);

// Throws std::runtime_error with the reason where MakeDriver() would fail, or the memory cannot be
// exported that must be `exportable`.
void RequireDriverSupport(int device, bool exportable);

}  // namespace cgp
