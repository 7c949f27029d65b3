#include "torch/shared_graph.h"

#include <ATen/cuda/CUDAGraph.h>

#include <chrono>
#include <utility>

#include "core/base/error.h"
#include "exec/cuda_graph_driver.h"
#include "torch/device_pools.h"
#include "torch/runtime.h"

namespace cgp {
namespace {

constexpr std::chrono::milliseconds kLongestWait{100};

// CUDAGraph shows these only to its heirs, by which they can be named.
struct Members : at::cuda::CUDAGraph {
  static constexpr auto kTemplate = &Members::graph_;
  static constexpr auto kExec = &Members::graph_exec_;
  static constexpr auto kHasTemplate = &Members::has_graph_;
  static constexpr auto kHasExec = &Members::has_graph_exec_;
  static constexpr auto kKeepsTemplate = &Members::keep_graph_;
};

void SetExec(at::cuda::CUDAGraph& graph, cudaGraphExec_t exec) {
  graph.*Members::kExec = exec;
  graph.*Members::kHasExec = exec != nullptr;
}

Graph TemplateOf(const at::cuda::CUDAGraph& graph) {
  if (!(graph.*Members::kHasTemplate) || graph.*Members::kHasExec) {
    throw UsageError(
        "an executable can be shared only by a CUDAGraph that has captured, with keep_graph=True, "
        "and that has made none of its own");
  }
  return Graph{reinterpret_cast<uintptr_t>(graph.*Members::kTemplate)};
}

// A launch on the current stream.
ExecCache::Launch LaunchNow(c10::DeviceIndex device) {
  return {.stream = ToStreamId(CurrentStream(device)), .stream_lasts = CurrentStreamLasts(device)};
}

}  // namespace

bool SetKeepsTemplate(at::cuda::CUDAGraph& graph, bool keeps) {
  return std::exchange(graph.*Members::kKeepsTemplate, keeps);
}

SharedGraph::SharedGraph(std::shared_ptr<ExecCache> cache, at::cuda::CUDAGraph& graph,
                         c10::DeviceIndex device)
    : cache_(std::move(cache)),
      graph_(graph),
      device_(device),
      number_(cache_->Add(TemplateOf(graph))) {}

SharedGraph::~SharedGraph() { cache_->Remove(number_); }

void SharedGraph::Lease() {
  const std::lock_guard lock(mutex_);
  if (leases_ == 0) TemplateOf(graph_);
  const GraphExec exec = cache_->Lease(number_, ToStreamId(CurrentStream(device_)));
  if (leases_++ == 0) SetExec(graph_, reinterpret_cast<cudaGraphExec_t>(exec));
}

void SharedGraph::Return() {
  const std::lock_guard lock(mutex_);
  // After Withdraw() the graph may have captured anew.
  if (--leases_ == 0 && !withdrawn_) SetExec(graph_, nullptr);
  cache_->Return(number_, LaunchNow(device_));
}

void SharedGraph::Withdraw() {
  const std::lock_guard lock(mutex_);
  if (leases_ != 0) SetExec(graph_, nullptr);
  withdrawn_ = true;
}

void SharedGraph::Prepare() {
  const std::lock_guard lock(mutex_);
  if (leases_ == 0) TemplateOf(graph_);
  cache_->Prepare(number_, LaunchNow(device_));
}

std::shared_ptr<ExecCache> MakeExecCache(c10::DeviceIndex device,
                                         std::optional<std::size_t> max_execs,
                                         uint64_t budget_bytes) {
  return std::make_shared<ExecCache>(std::make_unique<CudaGraphDriver>(device),
                                     DevicePools::For(device).driver, max_execs, budget_bytes,
                                     kLongestWait);
}

void MakeDroppedExecs(ExecCache& cache, c10::DeviceIndex device) {
  cache.MakeDropped(LaunchNow(device));
}

}  // namespace cgp
