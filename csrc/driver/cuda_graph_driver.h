// Executables on an NVIDIA GPU.
#pragma once

#include <memory>

#include "driver/graph_driver.h"

namespace cgp {

struct CudaApi;
class CudaContext;

class CudaGraphDriver final : public GraphDriver {
 public:
  // `device` is an ordinal as the CUDA runtime and PyTorch count. Throws DriverError where there is
  // no such device, or no driver. Makes no context.
  explicit CudaGraphDriver(int device);
  // With other functions than those of the driver of this machine; `api` must outlive this.
  CudaGraphDriver(int device, const CudaApi& api);
  ~CudaGraphDriver() override;

  GraphKind KindOf(Graph graph) override;
  GraphExec Instantiate(Graph graph) override;
  bool Update(GraphExec exec, Graph graph) override;
  void Upload(GraphExec exec, StreamId stream) override;
  void Destroy(GraphExec exec) noexcept override;

 private:
  // Calls `function` with the device's context current and unsafe calls allowed: what has nothing
  // to do with a capture must not break one.
  template <typename Function>
  int Call(Function function);
  void Check(const char* call, int code) const;

  std::unique_ptr<CudaContext> context_;
};

}  // namespace cgp
