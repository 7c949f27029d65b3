// A driver that passes everything to another one, whose allocations are spared (allocation_faults.h):
// how a driver copes with a lack of memory is no question of the core's.
#pragma once

#include <vector>

#include "driver/driver.h"
#include "testing/allocation_faults.h"

namespace cgp {

class SparingDriver final : public Driver {
 public:
  // `inner` must outlive this.
  explicit SparingDriver(Driver& inner) : inner_(inner) {}

  int device() const noexcept override { return inner_.device(); }
  uint64_t granularity() const noexcept override { return inner_.granularity(); }
  Address Reserve(uint64_t bytes) override {
    const AllocationsSpared spared;
    return inner_.Reserve(bytes);
  }
  void FreeAddresses(Address address, uint64_t bytes) override {
    const AllocationsSpared spared;
    inner_.FreeAddresses(address, bytes);
  }
  Handle Create(uint64_t bytes) override {
    const AllocationsSpared spared;
    return inner_.Create(bytes);
  }
  void Release(Handle handle) override {
    const AllocationsSpared spared;
    inner_.Release(handle);
  }
  void Map(Address address, uint64_t bytes, Handle handle) override {
    const AllocationsSpared spared;
    inner_.Map(address, bytes, handle);
  }
  void SetAccess(Address address, uint64_t bytes) override {
    const AllocationsSpared spared;
    inner_.SetAccess(address, bytes);
  }
  void Unmap(Address address, uint64_t bytes) override {
    const AllocationsSpared spared;
    inner_.Unmap(address, bytes);
  }
  void AddPeer(int peer) override {
    const AllocationsSpared spared;
    inner_.AddPeer(peer);
  }
  void Quiesce() override {
    const AllocationsSpared spared;
    inner_.Quiesce();
  }
  bool MayQuiesce() noexcept override {
    const AllocationsSpared spared;
    return inner_.MayQuiesce();
  }
  void Capture(StreamId stream, Frontier* frontier) override {
    const AllocationsSpared spared;
    inner_.Capture(stream, frontier);
  }
  bool Dependencies(GraphNode node, std::vector<GraphNode>* nodes) override {
    const AllocationsSpared spared;
    return inner_.Dependencies(node, nodes);
  }
  Event RecordEvent(StreamId stream) override {
    const AllocationsSpared spared;
    return inner_.RecordEvent(stream);
  }
  Event RecordDeviceEvent() override {
    const AllocationsSpared spared;
    return inner_.RecordDeviceEvent();
  }
  bool EventDone(Event event) override {
    const AllocationsSpared spared;
    return inner_.EventDone(event);
  }
  void WaitEvent(StreamId stream, Event event) override {
    const AllocationsSpared spared;
    inner_.WaitEvent(stream, event);
  }
  void DestroyEvent(Event event) noexcept override {
    const AllocationsSpared spared;
    inner_.DestroyEvent(event);
  }
  MemoryInfo Info() override {
    const AllocationsSpared spared;
    return inner_.Info();
  }

 private:
  Driver& inner_;
};

}  // namespace cgp
