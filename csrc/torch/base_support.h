// What the base allocator may lack. Only torch's native one has everything: a CUDAPluggableAllocator
// knows neither statistics nor fractions.
#pragma once

#include <c10/util/Exception.h>

#include <optional>

namespace cgp {

// What `ask`, a question to the base, says; nothing if the base does not support it. It says so by a
// c10::Error, torch's plain one for errors of any kind; what CUDA says goes on.
template <typename Function>
auto IfSupported(Function ask) -> std::optional<decltype(ask())> {
  try {
    return ask();
  } catch (const c10::AcceleratorError&) {
    throw;
  } catch (const c10::Error&) {
    return std::nullopt;
  }
}

}  // namespace cgp
