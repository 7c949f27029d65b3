// A torch.cuda.CUDAGraph that keeps what it captured as a template and runs by shared executables.
//
// PyTorch's own replay() does the launch, since it alone knows what belongs to one (the states of
// random generators, hooks of newer releases): for its duration the CUDAGraph is given an
// executable of the cache, and takes it for its own.
#pragma once

#include <c10/core/Device.h>

#include <cstddef>
#include <memory>
#include <mutex>
#include <optional>

#include "exec/exec_cache.h"

namespace at::cuda {
struct CUDAGraph;
}

namespace cgp {

// Whether the end of a capture leaves the template, and makes no executable of it: the `keep_graph`
// of torch.cuda.CUDAGraph(). Returns what was so before.
bool SetKeepsTemplate(at::cuda::CUDAGraph& graph, bool keeps);

class SharedGraph {
 public:
  // `graph` must outlive this, and keep what it has captured as long. Throws DriverError, and
  // UsageError if there is no template.
  SharedGraph(std::shared_ptr<ExecCache> cache, at::cuda::CUDAGraph& graph,
              c10::DeviceIndex device);
  ~SharedGraph();

  // Between the two the CUDAGraph has an executable, for a launch on the current stream. They nest.
  // What is taken back counts as launched: an error of the launch may have come after it. Throws
  // UsageError if the CUDAGraph has been given an executable, or lost its template, behind our
  // back.
  void Lease();
  void Return();
  // The CUDAGraph will be reset, and must not destroy what it was leased, should it be leased one
  // now.
  void Withdraw();

  // Makes ready what the next launch on the current stream needs. Throws as Lease().
  void Prepare();

 private:
  const std::shared_ptr<ExecCache> cache_;
  at::cuda::CUDAGraph& graph_;
  const c10::DeviceIndex device_;
  const GraphNumber number_;
  std::mutex mutex_;
  int leases_ = 0;  // how often
  bool withdrawn_ = false;
};

// For the graphs of one pool on `device`. Throws DriverError.
std::shared_ptr<ExecCache> MakeExecCache(c10::DeviceIndex device,
                                         std::optional<std::size_t> max_execs,
                                         uint64_t budget_bytes);

}  // namespace cgp
