#include "driver/faulty_driver.h"

#include <string>

namespace cgp {
namespace {

// The code that CUDA gives for each status, and its symbol.
int Code(DriverStatus status) { return status == DriverStatus::kFailed ? 999 : 2; }

std::string_view Symbol(DriverStatus status) {
  return status == DriverStatus::kFailed ? "CUDA_ERROR_UNKNOWN" : "CUDA_ERROR_OUT_OF_MEMORY";
}

}  // namespace

void FaultyDriver::Arm(const Fault& fault) {
  const std::lock_guard lock(mutex_);
  fault_ = fault;
  calls_.clear();
  counted_ = 0;
  failed_.clear();
}

std::monostate FaultyDriver::Around(DriverCall call, uint64_t bytes) {
  meanwhile_(call);
  const std::lock_guard lock(mutex_);
  calls_.push_back(call);
  if (fault_.only && *fault_.only != call) return {};
  ++counted_;
  const bool fails =
      fault_.for_good ? counted_ >= fault_.call_number : counted_ == fault_.call_number;
  if (!fails) return {};
  failed_.push_back(call);
  throw DriverError(fault_.status, Name(call), Code(fault_.status), Symbol(fault_.status), bytes,
                    device(), "made to fail as call " + std::to_string(counted_));
}

}  // namespace cgp
