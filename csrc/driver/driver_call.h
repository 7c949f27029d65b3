// The calls of a Driver, as values: to count them, to time them, to fail them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <numeric>
#include <string_view>

namespace cgp {

enum class DriverCall : uint8_t {
  kReserve,
  kFreeAddresses,
  kCreate,
  kRelease,
  kMap,
  kSetAccess,
  kUnmap,
  kAddPeer,
  kQuiesce,
  kCapture,
  kDependencies,
  kRecordEvent,
  kRecordDeviceEvent,
  kEventDone,
  kWaitEvent,
  kDestroyEvent,
  kInfo,
};

inline constexpr size_t kDriverCallKinds = static_cast<size_t>(DriverCall::kInfo) + 1;

// The name of the member function, e.g. "SetAccess".
std::string_view Name(DriverCall call);

// How often each call was made.
class CallCounts {
 public:
  void Add(DriverCall call) { ++counts_[static_cast<size_t>(call)]; }

  uint64_t operator[](DriverCall call) const { return counts_[static_cast<size_t>(call)]; }
  uint64_t total() const { return std::accumulate(counts_.begin(), counts_.end(), uint64_t{0}); }

  bool operator==(const CallCounts&) const = default;

 private:
  std::array<uint64_t, kDriverCallKinds> counts_{};
};

}  // namespace cgp
