// Makes a call of the core's fail in every way it can, before it goes through.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "testing/faulty_driver.h"

namespace cgp {

enum class FaultKind : uint8_t {
  kAllocation,  // of memory on the heap: it alone, and all from it on
  kDriverCall,  // it alone; pre: a call that fails so has changed nothing
};

// `call` is made with its first such thing failing, then its second, until it goes through. Returns
// what is wrong if a call that failed has changed what `describe` returns, else nothing. Passes on
// what `call` throws without a fault.
std::string FailEach(FaultKind kind, FaultyDriver& driver, const std::function<void()>& call,
                     const std::function<std::string()>& describe);

}  // namespace cgp
