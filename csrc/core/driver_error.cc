#include "core/driver.h"

namespace cgp {
namespace {

std::string_view Advice(DriverStatus status) {
  switch (status) {
    case DriverStatus::kOutOfMemory:
      return ". The device has no memory left for this: free tensors or graphs, or give back what "
             "is cached (torch.cuda.empty_cache()), and try again.";
    case DriverStatus::kOutOfAddresses:
      return ". No virtual addresses are left, however much memory is free: release graph pools "
             "that are no longer used.";
    case DriverStatus::kFailed:
      break;
  }
  return ".";
}

std::string Message(DriverStatus status, std::string_view call, int code, std::string_view name,
                    uint64_t bytes, int device, std::string_view detail) {
  std::string message(call);
  if (bytes != 0) message += " of " + std::to_string(bytes) + " bytes";
  message += " on device " + std::to_string(device) + " failed: ";
  message += name;
  message += " (" + std::to_string(code) + ")";
  if (!detail.empty()) {
    message += ": ";
    message += detail;
  }
  message += Advice(status);
  return message;
}

}  // namespace

DriverError::DriverError(DriverStatus status, std::string_view call, int code,
                         std::string_view name, uint64_t bytes, int device, std::string_view detail)
    : std::runtime_error(Message(status, call, code, name, bytes, device, detail)),
      status_(status),
      call_(call),
      code_(code),
      bytes_(bytes),
      device_(device) {}

}  // namespace cgp
