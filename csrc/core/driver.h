// The contract between the pool, which decides, and whatever makes memory real.
//
// It has the shape of CUDA's virtual memory management: addresses are reserved, physical handles
// are created, and a handle is mapped behind addresses as often as wanted. driver/cuda_driver.h
// does it on a GPU, driver/number_driver.h counts, and for tests testing/host_driver.h does it with
// mmap.
//
// Rules for every call:
//  - Sizes and addresses are bytes and multiples of granularity(), unless said otherwise; sizes are
//    not zero.
//  - A call that fails throws DriverError and has changed nothing.
//  - Calls may come from any thread. A driver serialises what it must; the caller never holds two
//    calls that touch the same addresses at once.
//  - "capture-legal" marks what may be called while a stream of this process is capturing a graph.
#pragma once

#include <cstdint>
#include <optional>
#include <vector>

#include "core/base/error.h"

namespace cgp {

// An opaque stream: the value of a cudaStream_t, or any number on the host, below 2^56. Equal
// values are the same stream, one of the device that it is told to the driver of; StreamOn() names
// those of other devices.
enum class StreamId : uint64_t {};

// The stream of a certain device. A cudaStream_t does not say whose it is, and the default streams
// of all devices have the same value. The device stands in the top byte, which no address in a
// process needs.
constexpr StreamId StreamOn(int device, StreamId stream) {
  return StreamId{static_cast<uint64_t>(device + 1) << 56 | static_cast<uint64_t>(stream)};
}
// The device that StreamOn() named; nothing: the driver's own.
constexpr std::optional<int> DeviceOf(StreamId stream) {
  const auto device = static_cast<int>(static_cast<uint64_t>(stream) >> 56);
  return device == 0 ? std::nullopt : std::optional(device - 1);
}
// As the stream's own device calls it.
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

// One piece of physical memory. Never reused while mapped or held.
enum class Handle : uint64_t {};

// A point in a stream's work.
enum class Event : uint64_t {};

// Names a capture, as CUDA does: no two captures of a process have the same one ("unique over the
// lifetime of the process", says cudaStreamGetCaptureInfo()).
using CaptureId = unsigned long long;
inline constexpr CaptureId kNoCapture = 0;

// A node of the graph that a capture makes.
enum class GraphNode : uint64_t {};

// The frontier of a stream: the nodes on which what is captured on it next will depend.
struct Frontier {
  CaptureId capture = kNoCapture;  // not capturing, or the capture has been invalidated
  std::vector<GraphNode> nodes;    // empty without a capture
  bool waits = true;               // until all of them are complete, see Driver::Dependencies()
  // No event may be recorded on the stream now: a capture holds it, be it an invalidated one that
  // nobody has ended yet, or it is the legacy stream, and that would break a capture.
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

  // Size and alignment of what can be created and mapped; a power of two, the same for the driver's
  // lifetime.
  virtual uint64_t granularity() const noexcept = 0;

  // Addresses with nothing behind them: an access faults. Capture-legal.
  virtual Address Reserve(uint64_t bytes) = 0;

  // pre: exactly what one Reserve() returned, with nothing mapped. Not capture-legal, but to undo a
  // Reserve().
  virtual void FreeAddresses(Address address, uint64_t bytes) = 0;

  // Physical memory, behind no address yet; its content is undefined. Capture-legal.
  virtual Handle Create(uint64_t bytes) = 0;

  // Gives the memory back once nothing maps it any more. Capture-legal for a handle that was never
  // mapped.
  virtual void Release(Handle handle) = 0;

  // Maps the whole handle at [address, address + bytes). No access until SetAccess().
  // Capture-legal. pre: bytes is the handle's size; the addresses lie in one reservation, and
  // nothing is mapped there.
  virtual void Map(Address address, uint64_t bytes, Handle handle) = 0;

  // Lets this device, and every peer named by AddPeer(), read and write the addresses.
  // Capture-legal. pre: the addresses are those of whole mappings, side by side. May be repeated.
  virtual void SetAccess(Address address, uint64_t bytes) = 0;

  // pre: exactly what one Map() mapped. The device must have finished with the addresses (see
  // Quiesce()); a running kernel is not waited for. Not capture-legal, but to undo a Map() that
  // nothing has used.
  virtual void Unmap(Address address, uint64_t bytes) = 0;

  // From now on SetAccess() lets `peer` in too; what was mapped before needs SetAccess() again. An
  // implementation may let others in from the start.
  virtual void AddPeer(int peer) = 0;

  // Waits until the device has done all the work submitted so far, and so have other devices of
  // whose streams Capture() or RecordEvent() were asked. Not capture-legal.
  virtual void Quiesce() = 0;

  // Whether Quiesce() and RecordDeviceEvent() would break no capture that this driver knows of.
  virtual bool MayQuiesce() noexcept = 0;

  // Where the stream stands in the capture that it takes part in. Capture-legal. pre: no other
  // thread may be ending that capture: cuStreamGetCaptureInfo() crashes then (seen with driver
  // 580.159).
  virtual void Capture(StreamId stream, Frontier* frontier) = 0;

  // In *nodes those that `node` depends on directly. Returns whether it waits until all of them are
  // complete, as it does but for programmatic dependent launch. Capture-legal.
  // pre: the capture that made the node is under way.
  virtual bool Dependencies(GraphNode node, std::vector<GraphNode>* nodes) = 0;

  // Marks the work submitted to `stream` so far. pre: not Frontier::held.
  virtual Event RecordEvent(StreamId stream) = 0;

  // Marks all the work submitted to the device so far, and to the others that Quiesce() waits for,
  // on whatever stream, be it one that is gone by now. Not capture-legal: it breaks the captures of
  // all streams of these devices.
  virtual Event RecordDeviceEvent() = 0;

  // Whether the marked work is done. Capture-legal (an implementation takes care of that).
  virtual bool EventDone(Event event) = 0;

  // What is submitted to `stream` from now on begins when the marked work is done. Nobody waits on
  // the host, and the event may be destroyed at once. pre: not Frontier::held.
  virtual void WaitEvent(StreamId stream, Event event) = 0;

  virtual void DestroyEvent(Event event) noexcept = 0;

  virtual MemoryInfo Info() = 0;
};

}  // namespace cgp
