// Devices as the adapter's fuzzer judges them: which eager operation runs behind which, whenever the
// program lets one run (testing/timelines.h); what captures record (testing/capture_dag.h); and
// drivers that tell of both, over those of fake_cuda.cc, and of which memory lies below an address.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <ostream>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "driver/forwarding_driver.h"
#include "testing/capture_dag.h"
#include "testing/host_graphs.h"
#include "testing/text.h"
#include "testing/timelines.h"
#include "torch/runtime.h"
#include "torch/testing/fake_cuda.h"
#include "torch/testing/fake_faults.h"

namespace cgp {

inline std::ostream& operator<<(std::ostream& out, StreamId stream) {
  return out << "stream " << static_cast<uint64_t>(stream) / 0x100;
}

namespace simulated {

inline constexpr c10::DeviceIndex kDevices = 2;
inline constexpr int kStreams = 4;  // of each

inline StreamId StreamOf(c10::DeviceIndex device, uint64_t number) {
  return ToStreamId(fake_cuda::Stream(1 + static_cast<uintptr_t>(device) * kStreams + number));
}
inline cudaStream_t ToCuda(StreamId stream) {
  return reinterpret_cast<cudaStream_t>(static_cast<uintptr_t>(WithoutDevice(stream)));
}
inline c10::DeviceIndex DeviceIndexOf(StreamId stream) {
  return static_cast<c10::DeviceIndex>((static_cast<uint64_t>(stream) / 0x100 - 1) / kStreams);
}
inline std::vector<StreamId> StreamsOf(c10::DeviceIndex device) {
  std::vector<StreamId> streams;
  for (uint64_t number = 0; number < kStreams; ++number) {
    streams.push_back(StreamOf(device, number));
  }
  return streams;
}

// Physical memory below a part of a block; `mapping` differs each time that it is mapped.
struct Piece {
  int device = 0;
  Handle handle{};
  uint64_t begin = 0;
  uint64_t end = 0;
  uint64_t mapping = 0;
  bool operator==(const Piece&) const = default;
};
using Pieces = std::vector<Piece>;
inline bool Overlap(const Pieces& some, const Pieces& others) {
  for (const Piece& a : some) {
    for (const Piece& b : others) {
      if (a.device == b.device && a.handle == b.handle && a.begin < b.end && b.begin < a.end) {
        return true;
      }
    }
  }
  return false;
}

class SimulatedDriver;
inline Timelines timelines;
inline HostGraphs graphs;
inline CaptureDag dag{graphs};
inline std::map<int, SimulatedDriver*> drivers;
inline std::string complaint;  // the first one; empty: all is well

template <typename... Parts>
void Complain(const Parts&... parts) {
  const faults::Within spared;
  if (complaint.empty()) complaint = Text(parts...);
}

inline bool IsHeld(StreamId stream) { return dag.IsCapturing(stream); }
inline Clock AllOf(c10::DeviceIndex device) {
  Clock clock;
  for (const StreamId stream : StreamsOf(device)) Join(&clock, timelines.Now(stream));
  return clock;
}

class SimulatedDriver final : public ForwardingDriver<SimulatedDriver> {
 public:
  explicit SimulatedDriver(std::unique_ptr<Driver> inner)
      : ForwardingDriver(*inner), inner_(std::move(inner)) {
    drivers[device()] = this;
  }

  void Capture(StreamId stream, Frontier* frontier) override {
    ForwardingDriver::Capture(stream, frontier);
    const faults::Within spared;
    graphs.Capture(Known(stream), frontier);
  }
  bool Dependencies(GraphNode node, std::vector<GraphNode>* nodes) override {
    const faults::Within spared;
    return graphs.Dependencies(node, nodes);
  }
  void Quiesce() override {
    ForwardingDriver::Quiesce();
    timelines.Finish(OfDevice("Quiesce"));
  }
  Event RecordEvent(StreamId stream) override {
    const Event event = ForwardingDriver::RecordEvent(stream);
    const faults::Within spared;
    events_[event] = timelines.Now(Known(stream));
    return event;
  }
  Event RecordDeviceEvent() override {
    const Event event = ForwardingDriver::RecordDeviceEvent();
    const faults::Within spared;
    events_[event] = OfDevice("RecordDeviceEvent");
    return event;
  }
  bool EventDone(Event event) override {
    ForwardingDriver::EventDone(event);
    const faults::Within spared;
    return timelines.Passed(events_.at(event));
  }
  void WaitEvent(StreamId stream, Event event) override {
    ForwardingDriver::WaitEvent(stream, event);
    const faults::Within spared;
    if (IsHeld(Known(stream))) Complain("WaitEvent() on a stream that is capturing");
    timelines.Wait(Known(stream), events_.at(event));
  }
  void DestroyEvent(Event event) noexcept override {
    ForwardingDriver::DestroyEvent(event);
    if (events_.erase(event) == 0) Complain("an event destroyed that does not exist");
  }
  void Map(Address address, uint64_t bytes, Handle handle) override {
    ForwardingDriver::Map(address, bytes, handle);
    const faults::Within spared;
    mappings_[address] = {device(), handle, 0, bytes, ++last_mapping_};
  }
  void Unmap(Address address, uint64_t bytes) override {
    ForwardingDriver::Unmap(address, bytes);
    mappings_.erase(address);
  }

  // Nothing if not all of it is mapped.
  Pieces Below(Address address, uint64_t bytes) const {
    Pieces pieces;
    while (bytes > 0) {
      auto mapping = mappings_.upper_bound(address);
      if (mapping == mappings_.begin()) return {};
      --mapping;
      Piece piece = mapping->second;
      piece.begin = address - mapping->first;
      if (piece.begin >= piece.end) return {};
      piece.end = std::min(piece.end, piece.begin + bytes);
      address += piece.end - piece.begin;
      bytes -= piece.end - piece.begin;
      pieces.push_back(piece);
    }
    return pieces;
  }

 private:
  // Whoever marks the device marks those too whose streams it was told of.
  StreamId Known(StreamId id) {
    const StreamId stream = WithoutDevice(id);
    marked_.insert(DeviceIndexOf(stream));
    return stream;
  }
  Clock OfDevice(const char* call) {
    const faults::Within spared;
    Clock clock;
    for (const c10::DeviceIndex device : marked_) {
      if (std::ranges::any_of(StreamsOf(device), IsHeld)) Complain(call, "() in a capture");
      Join(&clock, AllOf(device));
    }
    return clock;
  }

  const std::unique_ptr<Driver> inner_;
  std::map<Event, Clock> events_;
  std::map<Address, Piece> mappings_;
  std::set<c10::DeviceIndex> marked_{static_cast<c10::DeviceIndex>(device())};
  uint64_t last_mapping_ = 0;
};

}  // namespace simulated
}  // namespace cgp
