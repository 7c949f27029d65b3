#include "exec/cuda_graph_driver.h"

namespace cgp {
namespace {

// As PyTorch instantiates, so that a graph does the same whichever of us made its executable.
constexpr unsigned long long kFlags =
    CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH | CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;

CUgraph ToCuda(Graph graph) { return reinterpret_cast<CUgraph>(graph); }
CUgraphExec ToCuda(GraphExec exec) { return reinterpret_cast<CUgraphExec>(exec); }

}  // namespace

GraphExec CudaGraphDriver::Instantiate(Graph graph) {
  const Calling calling(context_);
  CUgraphExec exec = nullptr;
  Check("cuGraphInstantiateWithFlags",
        api().cuGraphInstantiateWithFlags(&exec, ToCuda(graph), kFlags));
  return GraphExec{reinterpret_cast<uintptr_t>(exec)};
}

bool CudaGraphDriver::Update(GraphExec exec, Graph graph) {
  const Calling calling(context_);
  CUgraphExecUpdateResultInfo info{};
  const CUresult code = api().cuGraphExecUpdate(ToCuda(exec), ToCuda(graph), &info);
  if (code == CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE) return false;
  Check("cuGraphExecUpdate", code);
  return true;
}

void CudaGraphDriver::Upload(GraphExec exec, StreamId stream) {
  const Calling calling(context_);
  Check("cuGraphUpload", api().cuGraphUpload(ToCuda(exec), reinterpret_cast<CUstream>(stream)));
}

void CudaGraphDriver::Destroy(GraphExec exec) noexcept {
  // Nobody could act on an error: it is one of earlier work, or CUDA has shut down at the end of
  // the process.
  const UnsafeCallsAllowed allowed(api());
  api().cuGraphExecDestroy(ToCuda(exec));
}

}  // namespace cgp
