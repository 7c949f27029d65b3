// A torch.cuda.CUDAGraph whose capture is a template, and which runs by shared executables.
//
// PyTorch's own replay() does the launch, since only it knows what belongs to one (the states of
// random generators, hooks of newer releases). Meanwhile the CUDAGraph leases an executable of the
// cache, and takes it for its own.
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

// Sets whether the end of a capture leaves the template and makes no executable: `keep_graph` of
// torch.cuda.CUDAGraph(). Returns the earlier value.
bool SetKeepsTemplate(at::cuda::CUDAGraph& graph, bool keeps);

class SharedGraph {
 public:
  // `graph` must outlive this, with its capture. Throws DriverError, and UsageError if there is no
  // template.
  SharedGraph(std::shared_ptr<ExecCache> cache, at::cuda::CUDAGraph& graph,
              c10::DeviceIndex device);
  ~SharedGraph();

  // Between the two the CUDAGraph has an executable, for a launch on the current stream. They nest.
  // A returned lease counts as a launch: an error may have come after that. Throws UsageError if
  // the CUDAGraph was given an executable, or lost its template, by somebody else.
  void Lease();
  void Return();
  // The CUDAGraph will be reset, and must not destroy the executable that it may have leased.
  void Withdraw();

  // Makes the next launch on the current stream ready. Throws as Lease().
  void Prepare();

 private:
  const std::shared_ptr<ExecCache> cache_;
  at::cuda::CUDAGraph& graph_;
  const c10::DeviceIndex device_;
  const GraphNumber number_;
  std::mutex mutex_;
  int leases_ = 0;  // now
  bool withdrawn_ = false;
};

// For the graphs of one pool on `device`. Throws DriverError.
std::shared_ptr<ExecCache> MakeExecCache(c10::DeviceIndex device,
                                         std::optional<std::size_t> max_execs,
                                         uint64_t budget_bytes);
// ExecCache::MakeDropped() for launches on the device's current stream.
void MakeDroppedExecs(ExecCache& cache, c10::DeviceIndex device);

}  // namespace cgp
