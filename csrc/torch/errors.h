// What to do about errors: what the base may lack, and errors of callbacks. Errors of the core and
// the driver go to torch as they are: Python sees a RuntimeError.
#pragma once

#include <c10/util/Exception.h>

#include <exception>
#include <optional>
#include <string>

#include "core/base/error.h"

namespace cgp {

// What `ask`, a question to the pools, returns, or nothing if memory does not suffice.
template <typename Ask>
auto IfMemorySuffices(const Ask& ask) -> std::optional<decltype(ask())> {
  try {
    return ask();
  } catch (const OutOfMemoryError&) {
    return std::nullopt;
  } catch (const DriverError& error) {
    if (error.status() != DriverStatus::kOutOfMemory) throw;
    return std::nullopt;
  }
}

// Returns what `ask`, a question to the base, returns, or `otherwise` if the base does not support
// it: CUDAPluggableAllocator has neither statistics nor fractions. It says so by a plain
// c10::Error, torch's for errors of any kind; errors of CUDA are thrown on.
template <typename Function, typename... Otherwise>
auto IfSupported(const Function& ask, Otherwise... otherwise) -> decltype(ask()) {
  try {
    return ask();
  } catch (const c10::AcceleratorError&) {
    throw;
  } catch (const c10::Error&) {
    return decltype(ask())(otherwise...);
  }
}

// Runs what tells others of something that has happened and cannot be undone. Their error becomes a
// warning, which says that `whose` failed.
template <typename Function>
void WithWarnings(const char* whose, const Function& function) noexcept {
  try {
    try {
      function();
    } catch (const std::exception& error) {
      const auto* const of_torch = dynamic_cast<const c10::Error*>(&error);
      TORCH_WARN(std::string("cudagraph_pool: ") + whose + " failed: " +
                 (of_torch != nullptr ? of_torch->what_without_backtrace() : error.what()));
    }
  } catch (...) {  // NOLINT(bugprone-empty-catch): warnings may have been turned into errors
  }
}

// The same, tried twice, for what torch does not ask for, or cannot be told the error of.
template <typename Function>
void TryTwice(const char* what, const Function& function) noexcept {
  bool done = false;
  for (int attempt = 0; attempt < 2 && !done; ++attempt) {
    WithWarnings(what, [&] {
      function();
      done = true;
    });
  }
}

// Runs a step. If it throws, `undo` takes back what was done before it; an error of `undo` is
// dropped.
template <typename Step, typename Undo>
decltype(auto) OrUndo(const Step& step, const Undo& undo) {
  try {
    return step();
  } catch (...) {
    try {
      undo();
    } catch (...) {  // NOLINT(bugprone-empty-catch): the error that led here is the one to know
    }
    throw;
  }
}

}  // namespace cgp
