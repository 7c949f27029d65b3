// A driver that forwards each call to another one. `Derived` overrides the calls that it changes.
// It may define Around(call, bytes), which runs before each call that can fail; its result lives as
// long as the call takes.
#pragma once

#include <cstdint>
#include <variant>
#include <vector>

#include "core/driver.h"
#include "driver/driver_call.h"

namespace cgp {

template <typename Derived>
class ForwardingDriver : public Driver {
 public:
  // `inner` must outlive this.
  explicit ForwardingDriver(Driver& inner) : inner_(inner) {}

  Driver& inner() const { return inner_; }

  int device() const noexcept override { return inner_.device(); }
  uint64_t granularity() const noexcept override { return inner_.granularity(); }
  Address Reserve(uint64_t bytes) override {
    return Forward(DriverCall::kReserve, bytes, &Driver::Reserve, bytes);
  }
  void FreeAddresses(Address address, uint64_t bytes) override {
    Forward(DriverCall::kFreeAddresses, bytes, &Driver::FreeAddresses, address, bytes);
  }
  Handle Create(uint64_t bytes) override {
    return Forward(DriverCall::kCreate, bytes, &Driver::Create, bytes);
  }
  void Release(Handle handle) override {
    Forward(DriverCall::kRelease, 0, &Driver::Release, handle);
  }
  void Map(Address address, uint64_t bytes, Handle handle) override {
    Forward(DriverCall::kMap, bytes, &Driver::Map, address, bytes, handle);
  }
  void SetAccess(Address address, uint64_t bytes) override {
    Forward(DriverCall::kSetAccess, bytes, &Driver::SetAccess, address, bytes);
  }
  void Unmap(Address address, uint64_t bytes) override {
    Forward(DriverCall::kUnmap, bytes, &Driver::Unmap, address, bytes);
  }
  void AddPeer(int peer) override { Forward(DriverCall::kAddPeer, 0, &Driver::AddPeer, peer); }
  void Quiesce() override { Forward(DriverCall::kQuiesce, 0, &Driver::Quiesce); }
  bool MayQuiesce() noexcept override { return inner_.MayQuiesce(); }
  void Capture(StreamId stream, Frontier* frontier) override {
    Forward(DriverCall::kCapture, 0, &Driver::Capture, stream, frontier);
  }
  bool Dependencies(GraphNode node, std::vector<GraphNode>* nodes) override {
    return Forward(DriverCall::kDependencies, 0, &Driver::Dependencies, node, nodes);
  }
  Event RecordEvent(StreamId stream) override {
    return Forward(DriverCall::kRecordEvent, 0, &Driver::RecordEvent, stream);
  }
  Event RecordDeviceEvent() override {
    return Forward(DriverCall::kRecordDeviceEvent, 0, &Driver::RecordDeviceEvent);
  }
  bool EventDone(Event event) override {
    return Forward(DriverCall::kEventDone, 0, &Driver::EventDone, event);
  }
  void WaitEvent(StreamId stream, Event event) override {
    Forward(DriverCall::kWaitEvent, 0, &Driver::WaitEvent, stream, event);
  }
  void DestroyEvent(Event event) noexcept override { inner_.DestroyEvent(event); }
  MemoryInfo Info() override { return Forward(DriverCall::kInfo, 0, &Driver::Info); }

  std::monostate Around(DriverCall, uint64_t) { return {}; }

 private:
  template <typename Function, typename... Arguments>
  auto Forward(DriverCall call, uint64_t bytes, Function function, Arguments... arguments) {
    [[maybe_unused]] const auto around = static_cast<Derived*>(this)->Around(call, bytes);
    return (inner_.*function)(arguments...);
  }

  Driver& inner_;
};

}  // namespace cgp
