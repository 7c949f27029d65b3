// The driver for an NVIDIA GPU, by CUDA's virtual memory management.
//
// Mappings are open to all devices that can reach this one and had a context when the driver was
// made. torch asks for access between two devices only once, maybe before that.
//
// Every call makes the device's context (cuda_context.h) current while it runs. So calls may come
// from any thread, even one without a context.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <map>
#include <mutex>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "core/driver.h"
#include "driver/cuda_context.h"

namespace cgp {

class CudaDriver final : public Driver {
 public:
  // `device` is an ordinal as the CUDA runtime and PyTorch count (CUDA_VISIBLE_DEVICES applies).
  // Throws DriverError with the reason if it cannot be used. Makes no context. Handles made while
  // `exportable`, if given, is set can be exported as file descriptors; it must outlive this.
  explicit CudaDriver(int device, const std::atomic<bool>* exportable = nullptr)
      : CudaDriver(device, CudaApiOrThrow(device), exportable) {}
  // Uses other functions than those of this machine's driver; `api` must outlive this. What is
  // still mapped or held at its end stays so until the process ends.
  CudaDriver(int device, const CudaApi& api, const std::atomic<bool>* exportable = nullptr);

  // Whether memory of the device can be exported as file descriptors.
  bool CanExport() const;

  // By the name of each CUDA function: how often it was called, failed calls included, and the
  // nanoseconds that took.
  using CallTimes = std::map<std::string_view, std::pair<uint64_t, uint64_t>>;
  CallTimes calls() const;

  int device() const noexcept override { return context_.device(); }
  uint64_t granularity() const noexcept override { return granularity_; }
  Address Reserve(uint64_t bytes) override;
  void FreeAddresses(Address address, uint64_t bytes) override;
  Handle Create(uint64_t bytes) override;
  void Release(Handle handle) override;
  void Map(Address address, uint64_t bytes, Handle handle) override;
  void SetAccess(Address address, uint64_t bytes) override;
  void Unmap(Address address, uint64_t bytes) override;
  void AddPeer(int peer) override;
  void Quiesce() override;
  // CUDA does not tell of captures.
  bool MayQuiesce() noexcept override { return true; }
  void Capture(StreamId stream, Frontier* frontier) override;
  bool Dependencies(GraphNode node, std::vector<GraphNode>* nodes) override;
  Event RecordEvent(StreamId stream) override;
  // With a driver older than CUDA 12.5 it waits for the device instead.
  Event RecordDeviceEvent() override;
  bool EventDone(Event event) override;
  void WaitEvent(StreamId stream, Event event) override;
  void DestroyEvent(Event event) noexcept override;
  MemoryInfo Info() override;

 private:
  // Returns what `call` returns; calls() counts it under the name.
  template <typename Function>
  CUresult Timed(std::string_view name, const Function& call);
  // Calls `function` with the context current, and times it. Throws its error, with the bytes that
  // it was for and what out-of-memory means.
  struct Error {
    uint64_t bytes = 0;
    DriverStatus out_of_memory = DriverStatus::kFailed;
  };
  template <typename... Parameters>
  void Call(CudaContext& context, Error error,
            const CudaFunction<CUresult(Parameters...)>& function,
            std::type_identity_t<Parameters>... arguments);

  // The context of the stream's device.
  CudaContext& ContextOf(StreamId stream);
  int Attribute(CUdevice_attribute attribute) const;
  bool CanReach(CUdevice peer) const;
  void LetActiveDevicesIn();
  CUmemAllocationProp HandleProperties() const;
  std::vector<CudaContext*> Contexts();

  // Calls record(context, CUDA event) for each context, with a new event.
  template <typename Record>
  Event NewEvent(const std::vector<CudaContext*>& contexts, Record record);

  const CudaApi& api_;
  const std::atomic<bool>* const exportable_;
  CudaContext context_;
  uint64_t granularity_ = 0;
  bool rdma_capable_ = false;

  std::mutex others_mutex_;
  std::map<int, CudaContext> others_;  // of other devices, once a stream was theirs

  std::mutex peers_mutex_;
  std::vector<CUdevice> peers_;

  mutable std::mutex calls_mutex_;
  // More entries than there are functions; those without a name are unused. Counting takes no
  // memory.
  std::array<std::pair<std::string_view, CallTimes::mapped_type>, 32> calls_{};
};

}  // namespace cgp
