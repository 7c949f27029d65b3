#include "driver/cuda_graph_driver.h"

#include "driver/cuda_context.h"
#include "driver/graph_kind.h"

namespace cgp {
namespace {

// As PyTorch instantiates, so that a graph does the same whoever made its executable.
constexpr unsigned long long kFlags =
    CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH | CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY;

CUgraph ToCuda(Graph graph) { return reinterpret_cast<CUgraph>(graph); }
CUgraphExec ToCuda(GraphExec exec) { return reinterpret_cast<CUgraphExec>(exec); }

CUdevice DeviceOf(const CudaApi& api, int device) {
  CUdevice found = 0;
  CheckCuda(api, device, "cuInit", api.cuInit(0));
  CheckCuda(api, device, "cuDeviceGet", api.cuDeviceGet(&found, device));
  return found;
}

}  // namespace

CudaGraphDriver::CudaGraphDriver(int device) : CudaGraphDriver(device, CudaApiOrThrow(device)) {}

CudaGraphDriver::CudaGraphDriver(int device, const CudaApi& api)
    : context_(std::make_unique<CudaContext>(api, device, DeviceOf(api, device))) {}

CudaGraphDriver::~CudaGraphDriver() = default;

template <typename Function>
int CudaGraphDriver::Call(Function function) {
  const CurrentContext current(*context_);
  const UnsafeCallsAllowed allowed(context_->api());
  return function(context_->api());
}

void CudaGraphDriver::Check(const char* call, int code) const {
  CheckCuda(context_->api(), context_->device(), call, static_cast<CUresult>(code),
            DriverStatus::kOutOfMemory);
}

GraphKind CudaGraphDriver::KindOf(Graph graph) { return cgp::KindOf(*context_, ToCuda(graph)); }

GraphExec CudaGraphDriver::Instantiate(Graph graph) {
  CUgraphExec exec = nullptr;
  Check("cuGraphInstantiateWithFlags", Call([&](const CudaApi& api) {
          return api.cuGraphInstantiateWithFlags(&exec, ToCuda(graph), kFlags);
        }));
  return GraphExec{reinterpret_cast<uintptr_t>(exec)};
}

bool CudaGraphDriver::Update(GraphExec exec, Graph graph) {
  CUgraphExecUpdateResultInfo info{};
  const int code = Call([&](const CudaApi& api) {
    return api.cuGraphExecUpdate(ToCuda(exec), ToCuda(graph), &info);
  });
  if (code == CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE) return false;
  Check("cuGraphExecUpdate", code);
  return true;
}

void CudaGraphDriver::Upload(GraphExec exec, StreamId stream) {
  Check("cuGraphUpload", Call([&](const CudaApi& api) {
          return api.cuGraphUpload(ToCuda(exec), reinterpret_cast<CUstream>(stream));
        }));
}

void CudaGraphDriver::Destroy(GraphExec exec) noexcept {
  // Nobody could act on an error, which can only be that of earlier work, or of CUDA having shut
  // down at the end of the process.
  const UnsafeCallsAllowed allowed(context_->api());
  context_->api().cuGraphExecDestroy(ToCuda(exec));
}

}  // namespace cgp
