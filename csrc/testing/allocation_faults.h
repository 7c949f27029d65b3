// Lets an allocation on the heap fail: a program that this is linked into has its own global
// operator new, which throws std::bad_alloc on demand. Each thread has its own faults.
#pragma once

#include <cstdint>

#include "driver/forwarding_driver.h"

namespace cgp {

// While it lives, this thread's allocation number `number` (from 1) fails, and with `for_good` all
// that follow. pre: there is no other in this thread.
class AllocationFault {
 public:
  explicit AllocationFault(uint64_t number, bool for_good = false);
  ~AllocationFault();
  AllocationFault(const AllocationFault&) = delete;
  AllocationFault& operator=(const AllocationFault&) = delete;

  bool fired() const;
};

// While it lives, this thread's allocations neither count nor fail: those of what a test consists
// of.
class AllocationsSpared {
 public:
  AllocationsSpared();
  ~AllocationsSpared();
  AllocationsSpared(const AllocationsSpared&) = delete;
  AllocationsSpared& operator=(const AllocationsSpared&) = delete;
};

// Forwards to another driver, and spares its allocations: how a driver copes with a lack of memory
// is no question of the core's.
class SparingDriver final : public ForwardingDriver<SparingDriver> {
 public:
  using ForwardingDriver::ForwardingDriver;

  static AllocationsSpared Around(DriverCall, uint64_t) { return {}; }
  // It cannot fail, but whoever watches it may allocate.
  void DestroyEvent(Event event) noexcept override {
    const AllocationsSpared spared;
    inner().DestroyEvent(event);
  }
};

}  // namespace cgp
