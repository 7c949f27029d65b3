// Executables on an NVIDIA GPU.
#pragma once

#include <array>
#include <atomic>

#include "driver/cuda_context.h"
#include "exec/graph_driver.h"

namespace cgp {

class CudaGraphDriver final : public GraphDriver {
 public:
  // A bit for each kernel attribute that the driver has refused to tell, so that it is asked once.
  using Refused = std::atomic<uint64_t>;

  // `device` is an ordinal as the CUDA runtime and PyTorch count. Throws DriverError if there is no
  // such device or no driver. Makes no context.
  explicit CudaGraphDriver(int device)
      : CudaGraphDriver(device, CudaApiOrThrow(device), refused_on_[device & 255]) {}
  // Uses other functions than those of this machine's driver. Both must outlive this.
  CudaGraphDriver(int device, const CudaApi& api, Refused& refused)
      : context_(api, device), refused_(refused) {}

  GraphKind KindOf(Graph graph) override;  // cuda_graph_kind.cc
  GraphExec Instantiate(Graph graph) override;
  bool Update(GraphExec exec, Graph graph) override;
  void Upload(GraphExec exec, StreamId stream) override;
  void Destroy(GraphExec exec) noexcept override;

 private:
  // These calls belong to no capture, and must not break one.
  struct Calling {
    explicit Calling(CudaContext& context) : current(context), allowed(context.api()) {}
    const CurrentContext current;
    const UnsafeCallsAllowed allowed;
  };
  const CudaApi& api() const { return context_.api(); }
  void Check(const char* call, CUresult code) const {
    context_.Check(call, code, DriverStatus::kOutOfMemory);
  }

  static inline constinit std::array<Refused, 256> refused_on_{};  // each device, by the process
  CudaContext context_;
  Refused& refused_;
};

}  // namespace cgp
