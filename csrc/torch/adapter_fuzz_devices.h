// Devices as the adapter's fuzzer judges them: which eager operation runs behind which, by vector
// clocks, whenever the program lets one run; what captures record (driver/host_graphs.h); and
// drivers that tell of both, over those of fake_cuda.cc, and of which memory lies below an address.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "driver/forwarding_driver.h"
#include "driver/host_graphs.h"
#include "testing/text.h"
#include "torch/fake_cuda.h"
#include "torch/fake_faults.h"

namespace cgp::simulated {

inline constexpr c10::DeviceIndex kDevices = 2;
inline constexpr int kStreams = 4;  // of each

inline cudaStream_t StreamOf(c10::DeviceIndex device, uint64_t number) {
  return fake_cuda::Stream(1 + static_cast<uintptr_t>(device) * kStreams + number);
}
inline c10::DeviceIndex DeviceOf(cudaStream_t stream) {
  return static_cast<c10::DeviceIndex>((reinterpret_cast<uintptr_t>(stream) / 0x100 - 1) /
                                       kStreams);
}
inline std::vector<cudaStream_t> StreamsOf(c10::DeviceIndex device) {
  std::vector<cudaStream_t> streams;
  for (uint64_t number = 0; number < kStreams; ++number) {
    streams.push_back(StreamOf(device, number));
  }
  return streams;
}

// So many operations of each stream, from its first.
using Clock = std::map<cudaStream_t, uint64_t>;
inline void Join(Clock* clock, const Clock& other) {
  for (const auto& [stream, count] : other) (*clock)[stream] = std::max((*clock)[stream], count);
}

class Timelines {
 public:
  // What the stream's next operation runs behind.
  const Clock& Now(cudaStream_t stream) { return streams_[stream].behind_next; }
  void Wait(cudaStream_t stream, const Clock& clock) { Join(&streams_[stream].behind_next, clock); }
  uint64_t Launch(cudaStream_t stream) {
    Stream& of = streams_[stream];
    of.behind.push_back(of.behind_next);
    return of.behind_next[stream] = of.behind.size();
  }
  bool IsDone(const Clock& clock) {
    return std::ranges::all_of(
        clock, [this](const auto& part) { return streams_[part.first].done >= part.second; });
  }
  // Runs the stream's next operation unless that waits for others.
  void Step(cudaStream_t stream) {
    Stream& of = streams_[stream];
    if (of.done < of.behind.size() && IsDone(of.behind[of.done])) ++of.done;
  }
  void Finish(const Clock& clock) {
    for (const auto& [stream, count] : clock) {
      Stream& of = streams_[stream];
      for (; of.done < count; ++of.done) Finish(of.behind[of.done]);
    }
  }
  Clock AllOf(c10::DeviceIndex device) {
    Clock clock;
    for (cudaStream_t stream : StreamsOf(device)) Join(&clock, Now(stream));
    return clock;
  }

 private:
  struct Stream {
    std::vector<Clock> behind;  // by operation
    Clock behind_next;
    uint64_t done = 0;
  };
  std::map<cudaStream_t, Stream> streams_;
};

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
inline std::map<int, SimulatedDriver*> drivers;
inline std::string complaint;  // the first one; empty: all is well

template <typename... Parts>
void Complain(const Parts&... parts) {
  const faults::Within spared;
  if (complaint.empty()) complaint = Text(parts...);
}

inline bool IsHeld(cudaStream_t stream) { return graphs.Contains(ToStreamId(stream)); }

class SimulatedDriver final : public ForwardingDriver<SimulatedDriver> {
 public:
  explicit SimulatedDriver(std::unique_ptr<Driver> inner)
      : ForwardingDriver(*inner), inner_(std::move(inner)) {
    drivers[device()] = this;
  }

  void Capture(StreamId stream, Frontier* frontier) override {
    ForwardingDriver::Capture(stream, frontier);
    const faults::Within spared;
    graphs.Capture(ToStreamId(Known(stream)), frontier);
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
    return timelines.IsDone(events_.at(event));
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
  cudaStream_t Known(StreamId id) {
    auto* const stream = reinterpret_cast<cudaStream_t>(static_cast<uintptr_t>(WithoutDevice(id)));
    marked_.insert(DeviceOf(stream));
    return stream;
  }
  Clock OfDevice(const char* call) {
    const faults::Within spared;
    Clock clock;
    for (const c10::DeviceIndex device : marked_) {
      if (std::ranges::any_of(StreamsOf(device), IsHeld)) Complain(call, "() in a capture");
      Join(&clock, timelines.AllOf(device));
    }
    return clock;
  }

  const std::unique_ptr<Driver> inner_;
  std::map<Event, Clock> events_;
  std::map<Address, Piece> mappings_;
  std::set<c10::DeviceIndex> marked_{static_cast<c10::DeviceIndex>(device())};
  uint64_t last_mapping_ = 0;
};

}  // namespace cgp::simulated
