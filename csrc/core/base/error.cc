#include "core/base/error.h"

#include <array>
#include <charconv>
#include <cstdio>
#include <iterator>

namespace cgp {
namespace {

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
  switch (status) {
    case DriverStatus::kOutOfMemory:
      return message +
             ". The device has no memory left for this: free tensors or graphs, or give back what "
             "is cached (torch.cuda.empty_cache()), and try again.";
    case DriverStatus::kOutOfAddresses:
      return message +
             ". No virtual addresses are left, however much memory is free: release graph pools "
             "that are no longer used.";
    case DriverStatus::kFailed:
      break;
  }
  return message + ".";
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

std::string Hex(uint64_t value) {
  char digits[16];
  char* const end = std::to_chars(std::begin(digits), std::end(digits), value, 16).ptr;
  return "0x" + std::string(std::begin(digits), end);
}

std::string Size(uint64_t bytes) {
  constexpr std::array kUnits{"bytes", "KiB", "MiB", "GiB"};
  auto size = static_cast<double>(bytes);
  std::size_t unit = 0;
  for (; size > 1024 && unit + 1 < kUnits.size(); ++unit) size /= 1024;
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.2f %s", size, kUnits[unit]);
  return text;
}

void FailCheck(const char* condition, const char* file, int line) {
  throw InternalError("cudagraph_pool: internal check failed: " + std::string(condition) + " at " +
                      file + ":" + std::to_string(line) + ". This is a bug: please report it.");
}

}  // namespace cgp
