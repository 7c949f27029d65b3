// A driver that forwards to another one, and fails on demand before the other one is called.
#pragma once

#include <cstdint>
#include <functional>
#include <mutex>
#include <optional>
#include <utility>
#include <variant>
#include <vector>

#include "core/driver.h"
#include "driver/driver_call.h"
#include "driver/forwarding_driver.h"

namespace cgp {

// What FaultyDriver fails.
struct Fault {
  uint64_t call_number = 1;  // counted from 1; 0: none fails
  DriverStatus status = DriverStatus::kFailed;
  bool for_good = false;  // every call from that one on fails, and not it alone
  std::optional<DriverCall> only = std::nullopt;  // counts and fails only calls of this kind
};

// Every call counts except those that cannot fail: device(), granularity(), MayQuiesce() and
// DestroyEvent().
class FaultyDriver final : public ForwardingDriver<FaultyDriver> {
 public:
  using ForwardingDriver::ForwardingDriver;

  // Sets the fault instead of an earlier one, and begins the count and the record of calls anew.
  void Arm(const Fault& fault);
  // Fails nothing any more, and begins the count and the record of calls anew.
  void Disarm() { Arm(kNoFault); }

  // Runs before each call, as another thread might at that moment. It must not call this driver.
  void Meanwhile(std::function<void(DriverCall)> happens) { meanwhile_ = std::move(happens); }

  // The calls since the last Arm() or Disarm(), failed ones included, in order.
  std::vector<DriverCall> calls() const { return Locked(calls_); }
  uint64_t call_count() const { return calls().size(); }
  // The calls among them that were made to fail.
  std::vector<DriverCall> failed() const { return Locked(failed_); }
  uint64_t failures() const { return failed().size(); }

  // Records the call, and throws if the fault says so.
  std::monostate Around(DriverCall call, uint64_t bytes);

 private:
  static constexpr Fault kNoFault{.call_number = 0};
  std::vector<DriverCall> Locked(const std::vector<DriverCall>& member) const {
    const std::lock_guard lock(mutex_);
    return member;
  }

  std::function<void(DriverCall)> meanwhile_ = [](DriverCall) {};
  mutable std::mutex mutex_;
  Fault fault_ = kNoFault;
  std::vector<DriverCall> calls_;
  uint64_t counted_ = 0;  // of the kind that the fault counts
  std::vector<DriverCall> failed_;
};

}  // namespace cgp
