// The core's and the driver's errors as torch's, which Python sees as RuntimeError.
#pragma once

#include <c10/util/Exception.h>

#include <stdexcept>

#include "core/error.h"
#include "driver/driver.h"

namespace cgp {

// Runs what may throw them.
template <typename Function>
decltype(auto) AsTorchErrors(Function function) {
  try {
    return function();
  } catch (const std::logic_error& error) {
    TORCH_CHECK(false, error.what());
  } catch (const DriverError& error) {
    TORCH_CHECK(false, error.what());
  }
}

}  // namespace cgp
