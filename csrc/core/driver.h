// The contract between the pool, which decides, and whatever makes memory real.
//
// The contract has the shape of CUDA's virtual memory management. Addresses are reserved, physical
// handles are created, and a handle is mapped as often as wanted. CudaDriver (driver/) does this on
// a GPU, HostDriver (testing/) by mmap, for tests, and NumberDriver (driver/) only counts.
//
// Rules for every call:
//  - Sizes and addresses are bytes and multiples of granularity(), unless said otherwise; sizes are
//    not zero.
//  - A failed call throws DriverError and changes nothing.
//  - Calls may come from any thread. A driver serialises what it must; the caller never holds two
//    calls that touch the same addresses at once.
//  - A "capture-legal" call may be made while a stream of this process captures a graph.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "core/base/error.h"

namespace cgp {

// An opaque stream: the value of a cudaStream_t or, on the host, any number below 2^56. Equal
// values are one stream of the driver's device; StreamOn() names streams of other devices.
enum class StreamId : uint64_t {};

// A stream of the given device. A cudaStream_t does not name its device, and default streams of all
// devices have the same value. So the device stands in the top byte, which addresses leave unused.
constexpr StreamId StreamOn(int device, StreamId stream) {
  return StreamId{static_cast<uint64_t>(device + 1) << 56 | static_cast<uint64_t>(stream)};
}
// The device that StreamOn() named; nullopt: the driver's own.
constexpr std::optional<int> DeviceOf(StreamId stream) {
  const auto device = static_cast<int>(static_cast<uint64_t>(stream) >> 56);
  return device == 0 ? std::nullopt : std::optional(device - 1);
}
// The stream as its own device names it.
constexpr StreamId WithoutDevice(StreamId stream) {
  return StreamId{static_cast<uint64_t>(stream) & ((uint64_t{1} << 56) - 1)};
}

// A device virtual address.
using Address = uint64_t;

// Addresses [begin, end).
struct AddressSpan {
  Address begin = 0;
  Address end = 0;
};

// One piece of physical memory. No handle is reused while it is mapped or held.
enum class Handle : uint64_t {};

// A point in a stream's work.
enum class Event : uint64_t {};

// Names a capture as CUDA does: the ids of a process are unique (cudaStreamGetCaptureInfo() says
// "unique over the lifetime of the process").
using CaptureId = unsigned long long;
inline constexpr CaptureId kNoCapture = 0;

// A node of the graph that a capture makes.
enum class GraphNode : uint64_t {};

// A stream's frontier: the nodes on which the next captured node of the stream will depend.
struct Frontier {
  CaptureId capture = kNoCapture;  // not capturing, or the capture has been invalidated
  std::vector<GraphNode> nodes;    // empty without a capture
  bool waits = true;               // until all are complete, see Driver::Dependencies()
  // No event may be recorded on the stream now: that would break a capture. Either a capture holds
  // the stream, even an invalidated one that nobody has ended, or it is the legacy stream.
  bool held = false;
};

struct MemoryInfo {
  uint64_t free_bytes;
  uint64_t total_bytes;
};

class Driver {
 public:
  Driver() = default;
  Driver(const Driver&) = delete;
  Driver& operator=(const Driver&) = delete;
  virtual ~Driver() = default;

  // The device that this driver serves.
  virtual int device() const noexcept = 0;

  // Size and alignment of all that is created and mapped. It is a power of two and never changes.
  virtual uint64_t granularity() const noexcept = 0;

  // Returns addresses with nothing behind them: an access faults. Capture-legal.
  virtual Address Reserve(uint64_t bytes) = 0;

  // pre: exactly what one Reserve() returned, with nothing mapped. Not capture-legal, except to
  // undo a Reserve().
  virtual void FreeAddresses(Address address, uint64_t bytes) = 0;

  // Returns physical memory that is not mapped; its content is undefined. Capture-legal.
  virtual Handle Create(uint64_t bytes) = 0;

  // Gives the memory back once nothing maps it. Capture-legal for a handle that was never mapped.
  virtual void Release(Handle handle) = 0;

  // Maps the whole handle at [address, address + bytes). No access until SetAccess().
  // Capture-legal. pre: bytes is the handle's size; the addresses lie in one reservation, and
  // nothing is mapped there.
  virtual void Map(Address address, uint64_t bytes, Handle handle) = 0;

  // Lets this device, and every peer named by AddPeer(), read and write the addresses.
  // Capture-legal. pre: the addresses are those of whole mappings, side by side. May be repeated.
  virtual void SetAccess(Address address, uint64_t bytes) = 0;

  // pre: exactly what one Map() mapped, and the device has finished with it (see Quiesce()): a
  // running kernel is not waited for. Not capture-legal, except to undo a Map() that nothing has
  // used.
  virtual void Unmap(Address address, uint64_t bytes) = 0;

  // From now on SetAccess() also lets `peer` in; earlier mappings need SetAccess() again. An
  // implementation may let others in from the start.
  virtual void AddPeer(int peer) = 0;

  // Waits for all work submitted so far to this device, and to other devices whose streams were
  // given to Capture() or RecordEvent(). Not capture-legal.
  virtual void Quiesce() = 0;

  // Whether Quiesce() and RecordDeviceEvent() would break no capture that this driver knows of.
  virtual bool MayQuiesce() noexcept = 0;

  // Says where the stream stands in its capture. Capture-legal. pre: no other thread may be ending
  // that capture, or cuStreamGetCaptureInfo() crashes (seen with driver 580.159).
  virtual void Capture(StreamId stream, Frontier* frontier) = 0;

  // Sets *nodes to the direct dependencies of `node`. Returns whether it waits until all of them
  // are complete, as all nodes do except behind a programmatic dependent launch. Capture-legal.
  virtual bool Dependencies(GraphNode node, std::vector<GraphNode>* nodes) = 0;

  // Marks the work submitted to `stream` so far. pre: not Frontier::held.
  virtual Event RecordEvent(StreamId stream) = 0;

  // Marks all work submitted so far to the devices that Quiesce() waits for, on whatever stream,
  // even one that is gone. Not capture-legal: it breaks the captures of all streams of these
  // devices.
  virtual Event RecordDeviceEvent() = 0;

  // Whether the marked work is done. Capture-legal: the implementation sees to that.
  virtual bool EventDone(Event event) = 0;

  // Makes later work on `stream` begin after the marked work. The host does not wait, and the event
  // may be destroyed at once. pre: not Frontier::held.
  virtual void WaitEvent(StreamId stream, Event event) = 0;

  virtual void DestroyEvent(Event event) noexcept = 0;

  virtual MemoryInfo Info() = 0;
};

// "device 0 has 1.00 GiB free of 80.00 GiB", for an error's text.
inline std::string FreeMemoryOn(Driver& driver) {
  const std::string device = "device " + std::to_string(driver.device());
  try {
    const MemoryInfo info = driver.Info();
    return device + " has " + Size(info.free_bytes) + " free of " + Size(info.total_bytes);
  } catch (const DriverError&) {
    return device + " does not say what it has free";
  }
}

}  // namespace cgp
