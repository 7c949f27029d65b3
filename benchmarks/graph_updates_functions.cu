// The cases of graph_updates about the functions that kernel nodes run, and the shapes they run in.
#include <cuda_runtime_api.h>

#include <cstdlib>
#include <string>
#include <utility>
#include <vector>

#include "graph_updates.h"

namespace {

__device__ void Write(unsigned* board, unsigned tag, unsigned function) {
  if (threadIdx.x != 0 || blockIdx.x != 0) return;
  unsigned cluster = 1;
  unsigned shared = 0;
#if __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(cluster));
#endif
  asm volatile("mov.u32 %0, %%dynamic_smem_size;" : "=r"(shared));
  board[kTested] = tag;
  board[kFunction] = function;
  board[kCluster] = cluster;
  board[kGrid] = gridDim.x;
  board[kBlock] = blockDim.x;
  board[kShared] = shared;
}

__global__ void Plain(unsigned* board, unsigned tag) { Write(board, tag, 1); }

__global__ void Other(unsigned* board, unsigned tag) { Write(board, tag, 2); }

// Uses the shared memory that it was launched with up to its last word.
__global__ void Shared(unsigned* board, unsigned tag) {
  extern __shared__ unsigned words[];
  unsigned bytes = 0;
  asm volatile("mov.u32 %0, %%dynamic_smem_size;" : "=r"(bytes));
  for (unsigned i = threadIdx.x; i < bytes / 4; i += blockDim.x) words[i] = i ^ tag;
  __syncthreads();
  for (unsigned i = threadIdx.x; i < bytes / 4; i += blockDim.x) {
    if (words[i] != (i ^ tag)) atomicAdd(board + kErrors, 1);
  }
  Write(board, tag, 3);
}

// More parameters than Plain, of other sizes; writes their sum for its function: 7 if they came.
__global__ void MoreParameters(unsigned* board, unsigned tag, double four, unsigned char one,
                               unsigned long long two) {
  Write(board, tag, static_cast<unsigned>(four) + one + static_cast<unsigned>(two));
}

// 8 KiB of local memory a thread.
__global__ void MuchLocalMemory(unsigned* board, unsigned tag) {
  constexpr unsigned kWords = 2048;
  unsigned local[kWords];
  for (unsigned i = 0; i < kWords; ++i) local[(i * 5 + threadIdx.x) % kWords] = i ^ tag;
  for (unsigned i = 0; i < kWords; ++i) {
    if (local[(i * 5 + threadIdx.x) % kWords] != (i ^ tag)) atomicAdd(board + kErrors, 1);
  }
  Write(board, tag, 5);
}

#if __CUDA_ARCH__ >= 900 || !defined(__CUDA_ARCH__)
__global__ void __cluster_dims__(2, 1, 1) ClustersOfTwo(unsigned* board, unsigned tag) {
  Write(board, tag, 6);
}
#else
__global__ void ClustersOfTwo(unsigned* board, unsigned tag) { Write(board, tag, 6); }
#endif

const char* const kGroup = "function and shape";

const void* Symbol(void (*kernel)(unsigned*, unsigned)) {
  return reinterpret_cast<const void*>(kernel);
}

// What was in effect of everything that Write() writes.
Run ReadsAll() {
  return [](const Device& device, CUgraphExec exec) {
    Board board = LaunchAndRead(device, exec);
    std::string property = "function " + std::to_string(board[kFunction]);
    property += ", grid " + std::to_string(board[kGrid]);
    property += ", block " + std::to_string(board[kBlock]);
    property += ", shared " + std::to_string(board[kShared]);
    property += ", cluster " + std::to_string(board[kCluster]);
    if (board[kErrors] != 0) property += ", WRONG WORDS " + std::to_string(board[kErrors]);
    return Seen{std::move(property), std::move(board)};
  };
}

struct Variant {
  const void* kernel;
  Shape shape{};
  Attributes attributes{};
  // Set on the function before the graph is built; negative: left as it is.
  int max_shared = -1;
  int non_portable = -1;
};

void SetAttributes(const Variant& variant) {
  const CUfunction function = Handle(variant.kernel);
  if (variant.max_shared >= 0) {
    Check(cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES,
                             variant.max_shared),
          "cuFuncSetAttribute");
  }
  if (variant.non_portable >= 0) {
    Check(cuFuncSetAttribute(function, CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED,
                             variant.non_portable),
          "cuFuncSetAttribute");
  }
}

Case FunctionCase(const std::string& name, const std::string& documented, const Variant& a,
                  const Variant& b) {
  Build build = Captured([=](const Device& device, CUstream stream, bool is_b, unsigned tag) {
    const Variant& variant = is_b ? b : a;
    SetAttributes(variant);
    Launch(stream, variant.kernel, variant.shape, variant.attributes, device.board, tag);
  });
  return {kGroup, name, documented, std::move(build), ReadsAll()};
}

Attributes Cluster(unsigned size) {
  return {Attribute(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, [=](auto& value) {
    value.clusterDim.x = size;
    value.clusterDim.y = value.clusterDim.z = 1;
  })};
}

Case ParametersCase(const std::string& name, bool more_in_b) {
  Build build = Captured([=](const Device& device, CUstream stream, bool b, unsigned tag) {
    if (b == more_in_b) {
      const unsigned char one = 1;
      const unsigned long long two = 2;
      Launch(stream, reinterpret_cast<const void*>(MoreParameters), Shape{}, {}, device.board, tag,
             4.0, one, two);
    } else {
      Launch(stream, Symbol(Plain), Shape{}, {}, device.board, tag);
    }
  });
  return {kGroup, name, "carried", std::move(build), ReadsAll()};
}

CUkernel KernelHandle(const void* symbol) {
  cudaKernel_t kernel = nullptr;
  const cudaError_t error = cudaGetKernel(&kernel, symbol);
  if (error != cudaSuccess) {
    Say("error", std::string("cudaGetKernel: ") + cudaGetErrorName(error));
    std::_Exit(3);
  }
  return kernel;
}

// The node names its function by a CUfunction or by a CUkernel, which belongs to no context.
Case HandleCase(const std::string& name, const void* in_a, const void* in_b, bool kernel_in_b) {
  Build build =
      Added([=](const Device& device, CUgraph graph, CUgraphNode before, bool b, unsigned tag) {
        CUdeviceptr board = device.board;
        void* arguments[] = {&board, &tag};
        CUDA_KERNEL_NODE_PARAMS params{};
        if (b == kernel_in_b) {
          params.kern = KernelHandle(b ? in_b : in_a);
        } else {
          params.func = Handle(b ? in_b : in_a);
        }
        params.gridDimX = 4;
        params.blockDimX = 32;
        params.gridDimY = params.gridDimZ = params.blockDimY = params.blockDimZ = 1;
        params.kernelParams = arguments;
        CUgraphNode node = nullptr;
        Check(cuGraphAddKernelNode(&node, graph, &before, 1, &params), "cuGraphAddKernelNode");
        return std::vector<CUgraphNode>{node};
      });
  return {kGroup, name, "carried", std::move(build), ReadsAll()};
}

}  // namespace

std::vector<Case> FunctionCases() {
  const void* const plain = Symbol(Plain);
  const void* const shared = Symbol(Shared);
  const void* const much_local = Symbol(MuchLocalMemory);
  const void* const of_two = Symbol(ClustersOfTwo);
  constexpr int kOptIn = 200 << 10;
  // Enough blocks to fill the GPU, which local memory must be there for.
  const Shape wide{528, 256, 0};
  return {
      FunctionCase("grid 4 to 8", "carried", {plain, {4}}, {plain, {8}}),
      FunctionCase("grid 1 to 100000", "carried", {plain, {1}}, {plain, {100'000}}),
      FunctionCase("block 32 to 1024", "carried", {plain, {4, 32}}, {plain, {4, 1024}}),
      FunctionCase("another function, same parameters", "carried", {plain}, {Symbol(Other)}),
      ParametersCase("another function, more parameters", true),
      ParametersCase("another function, fewer parameters", false),
      FunctionCase("another function, much local memory", "carried", {plain, wide},
                   {much_local, wide}),
      FunctionCase("shared memory 1 to 32 KiB", "carried", {shared, {4, 32, 1 << 10}},
                   {shared, {4, 32, 32 << 10}}),
      FunctionCase("shared memory 32 to 64 KiB, opted in before", "carried",
                   {shared, {4, 32, 32 << 10}, {}, kOptIn},
                   {shared, {4, 32, 64 << 10}, {}, kOptIn}),
      FunctionCase("shared memory 64 to 160 KiB, limit raised between", "carried",
                   {shared, {4, 32, 64 << 10}, {}, 64 << 10},
                   {shared, {4, 32, 160 << 10}, {}, 160 << 10}),
      FunctionCase("shared memory 64 KiB, limit lowered between", "carried",
                   {shared, {4, 32, 64 << 10}, {}, kOptIn}, {shared, {4, 32, 0}, {}, 0}),
      FunctionCase("no clusters to a function with clusters of 2", "", {plain}, {of_two}),
      FunctionCase("a function with clusters of 2 to none", "", {of_two}, {plain}),
      FunctionCase("cluster attribute 2 to a function with clusters of 2", "",
                   {plain, {}, Cluster(2)}, {of_two}),
      FunctionCase("cluster attribute 4 to a function with clusters of 2", "",
                   {plain, {}, Cluster(4)}, {of_two}),
      FunctionCase("another function, cluster 2 to 4", "", {plain, {}, Cluster(2)},
                   {Symbol(Other), {}, Cluster(4)}),
      FunctionCase("another function, cluster 2 to none", "", {plain, {}, Cluster(2)},
                   {Symbol(Other)}),
      FunctionCase("another function, cluster 2 to 1", "", {plain, {}, Cluster(2)},
                   {Symbol(Other), {}, Cluster(1)}),
      FunctionCase("another function, cluster none to 2", "", {plain},
                   {Symbol(Other), {}, Cluster(2)}),
      FunctionCase("a function with clusters of 2 to one with cluster 1", "", {of_two},
                   {plain, {}, Cluster(1)}),
      FunctionCase("cluster 8 to 16, not portable", "", {plain, {16}, Cluster(8), -1, 1},
                   {plain, {16}, Cluster(16), -1, 1}),
      FunctionCase("cluster 8 to 16, allowed between", "", {plain, {16}, Cluster(8), -1, 0},
                   {plain, {16}, Cluster(16), -1, 1}),
      HandleCase("CUfunction to its CUkernel", plain, plain, true),
      HandleCase("CUfunction to another CUkernel", plain, Symbol(Other), true),
      HandleCase("CUkernel to another CUfunction", plain, Symbol(Other), false),
  };
}
