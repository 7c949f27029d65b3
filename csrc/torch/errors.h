// The core's and the driver's errors as torch's, which Python sees as RuntimeError.
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <stdexcept>
#include <string>

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

// Runs what tells others of something that has happened and cannot be undone: an error of theirs
// becomes a warning, which says that `whose` failed.
template <typename Function>
void WithWarnings(const std::string& whose, const Function& function) {
  const auto warn = [&](const std::string& error) {
    TORCH_WARN("cudagraph_pool: " + whose + " failed: " + error);
  };
  try {
    function();
  } catch (const c10::Error& error) {
    warn(error.what_without_backtrace());
  } catch (const std::exception& error) {
    warn(error.what());
  }
}

}  // namespace cgp
