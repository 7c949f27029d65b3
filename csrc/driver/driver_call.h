// The calls of a Driver as values, to count or to fail them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

namespace cgp {

#define CGP_DRIVER_CALLS(X) \
  X(Reserve)                \
  X(FreeAddresses)          \
  X(Create)                 \
  X(Release)                \
  X(Map)                    \
  X(SetAccess)              \
  X(Unmap)                  \
  X(AddPeer)                \
  X(Quiesce)                \
  X(Capture)                \
  X(Dependencies)           \
  X(RecordEvent)            \
  X(RecordDeviceEvent)      \
  X(EventDone)              \
  X(WaitEvent)              \
  X(DestroyEvent)           \
  X(Info)

enum class DriverCall : uint8_t {
#define CGP_DRIVER_CALL(name) k##name,
  CGP_DRIVER_CALLS(CGP_DRIVER_CALL)
#undef CGP_DRIVER_CALL
};

inline constexpr std::array kDriverCallNames = {
#define CGP_DRIVER_CALL(name) std::string_view(#name),
    CGP_DRIVER_CALLS(CGP_DRIVER_CALL)
#undef CGP_DRIVER_CALL
};

inline constexpr size_t kDriverCallKinds = kDriverCallNames.size();

// The name of the member function, e.g. "SetAccess".
constexpr std::string_view Name(DriverCall call) {
  return kDriverCallNames[static_cast<size_t>(call)];
}

}  // namespace cgp
