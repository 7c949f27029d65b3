// What a session runs on: a set of pools, and below it drivers that spare its own allocations, fail
// on demand and watch what is called.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "core/pool_set.h"
#include "driver/faulty_driver.h"
#include "testing/allocation_faults.h"
#include "testing/driver_watch.h"
#include "testing/host_driver.h"

namespace cgp {

using Action = std::function<void()>;

enum class FaultKind : uint8_t {
  kAllocation,  // of memory on the heap: it alone, and all from it on
  kDriverCall,  // it alone; pre: a call that fails so has changed nothing
};

struct World {
  World(const HostDriverOptions& options, const PoolOptions& of_set)
      : host(options), set(std::in_place, sparing, of_set) {}

  // What the set and the driver hold: a call that fails leaves it as it was.
  struct Books {
    std::string set;
    uint64_t peak_reserved_bytes = 0;
    HostUsage driver;
  };
  Books TakeBooks() const;
  // Makes the call with its first such thing failing, then its second, until it goes through.
  // Throws InternalError if one that failed has changed what `describe` returns (without: the
  // books), and what the call throws without a fault.
  void FailEach(FaultKind kind, const Action& call, const std::function<std::string()>& describe);
  void FailEach(FaultKind kind, const Action& call);

  HostDriver host;
  DriverWatch watch{host};
  FaultyDriver faulty{watch};
  SparingDriver sparing{faulty};
  std::optional<PoolSet> set;
};

std::string ToString(const World::Books& books);

}  // namespace cgp
