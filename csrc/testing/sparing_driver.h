// A driver that forwards to another one, whose allocations are spared (allocation_faults.h): how a
// driver copes with a lack of memory is no question of the core's.
#pragma once

#include "driver/forwarding_driver.h"
#include "testing/allocation_faults.h"

namespace cgp {

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
