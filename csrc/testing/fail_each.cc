#include "testing/fail_each.h"

#include <new>

#include "testing/allocation_faults.h"
#include "testing/text.h"

namespace cgp {
namespace {

bool GoesThroughWithout(uint64_t allocation, bool for_good, const std::function<void()>& call) {
  const AllocationFault fault(allocation, for_good);
  try {
    call();
    return true;
  } catch (const std::bad_alloc&) {
    if (!fault.fired()) throw;
    return false;
  }
}

bool GoesThroughWithoutCall(uint64_t number, FaultyDriver& driver,
                            const std::function<void()>& call) {
  driver.Arm({.call_number = number});
  bool fired = false;
  const auto mend = [&] {
    fired = driver.failures() > 0;
    driver.Disarm();
  };
  try {
    call();
    mend();
    return true;
  } catch (const DriverError&) {
    mend();
    if (!fired) throw;
    return false;
  } catch (...) {
    mend();
    throw;
  }
}

}  // namespace

std::string FailEach(FaultKind kind, FaultyDriver& driver, const std::function<void()>& call,
                     const std::function<std::string()>& describe) {
  const std::string before = describe();
  // The larger the number, the more are passed over: a call may make thousands.
  for (uint64_t number = 1;; number += 1 + number / 32) {
    const bool of_driver = kind == FaultKind::kDriverCall;
    for (const bool for_good : {true, false}) {
      if (of_driver && for_good) continue;
      const bool through = of_driver ? GoesThroughWithoutCall(number, driver, call)
                                     : GoesThroughWithout(number, for_good, call);
      if (through) return {};
      const std::string after = describe();
      if (after != before) {
        return Text(of_driver ? "driver call " : "allocation ", number, " failed",
                    for_good ? " for good" : "", ", which changed the state from\n", before, "to\n",
                    after);
      }
    }
  }
}

}  // namespace cgp
