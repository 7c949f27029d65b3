#include "driver/driver_call.h"

namespace cgp {

std::string_view Name(DriverCall call) {
  static constexpr std::array<std::string_view, kDriverCallKinds> kNames = {"Reserve",
                                                                            "FreeAddresses",
                                                                            "Create",
                                                                            "Release",
                                                                            "Map",
                                                                            "SetAccess",
                                                                            "Unmap",
                                                                            "AddPeer",
                                                                            "Quiesce",
                                                                            "Capture",
                                                                            "Dependencies",
                                                                            "RecordEvent",
                                                                            "RecordDeviceEvent",
                                                                            "EventDone",
                                                                            "WaitEvent",
                                                                            "DestroyEvent",
                                                                            "Info"};
  static_assert(!kNames.back().empty(), "every call has a name");
  return kNames[static_cast<size_t>(call)];
}

}  // namespace cgp
