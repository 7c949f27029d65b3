#include "testing/fail_each.h"

#include <new>
#include <optional>

#include "testing/allocation_faults.h"
#include "testing/text.h"

namespace cgp {
namespace {

// Whether the call goes through without its thing number `number`.
bool GoesThrough(FaultKind kind, uint64_t number, bool for_good, FaultyDriver& driver,
                 const std::function<void()>& call) {
  const bool of_driver = kind == FaultKind::kDriverCall;
  std::optional<AllocationFault> fault;
  if (of_driver) driver.Arm({.call_number = number});
  if (!of_driver) fault.emplace(number, for_good);
  const auto mend = [&] {
    const bool fired = of_driver ? driver.failures() > 0 : fault->fired();
    fault.reset();
    if (of_driver) driver.Disarm();
    return fired;
  };
  try {
    call();
  } catch (const std::exception& error) {
    const bool ours = of_driver ? dynamic_cast<const DriverError*>(&error) != nullptr
                                : dynamic_cast<const std::bad_alloc*>(&error) != nullptr;
    if (!mend() || !ours) throw;
    return false;
  }
  mend();
  return true;
}

}  // namespace

std::string FailEach(FaultKind kind, FaultyDriver& driver, const std::function<void()>& call,
                     const std::function<std::string()>& describe) {
  const std::string before = describe();
  // The larger the number, the more are passed over: a call may make thousands.
  for (uint64_t number = 1;; number += 1 + number / 32) {
    for (const bool for_good : {true, false}) {
      if (kind == FaultKind::kDriverCall && for_good) continue;
      if (GoesThrough(kind, number, for_good, driver, call)) return {};
      const std::string after = describe();
      if (after == before) continue;
      return Text(kind == FaultKind::kDriverCall ? "driver call " : "allocation ", number,
                  " failed", for_good ? " for good" : "", ", which changed the state from\n",
                  before, "to\n", after);
    }
  }
}

}  // namespace cgp
