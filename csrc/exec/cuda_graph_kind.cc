// Which graphs an executable can hold in turn, as far as CUDA lets that be seen.
//
// An update of an executable is refused by the driver where it knows that it cannot be made, but
// some of what it does not carry over it keeps silently: the launch would run with the cluster size
// of another graph. So the key holds all that an update does not carry over, refused or not;
// docs/graph_updates.md has the list, as it was tried on a GPU.
#include <array>
#include <cstdint>
#include <cstring>
#include <set>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "exec/cuda_graph_driver.h"

namespace cgp {
namespace {

// What a launch was asked for and an update may not bring along.
constexpr std::array kLaunchAttributes = {
    CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW,
    CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
    CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
    CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE,
    CU_LAUNCH_ATTRIBUTE_PRIORITY,
    CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP,
    CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN,
    CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION,
    CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE,
};

// Newer than the drivers that are asked for.
constexpr auto kPreferredCluster = CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION;
constexpr auto kDeviceUpdatable = CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE;

// What a launch gets of the same from its function.
constexpr std::array kFunctionAttributes = {
    CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
    CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET,
    CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH,
    CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT,
    CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH,
    CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED,
    CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE,
};

// Of the key, for a node and its edge.
constexpr size_t kBytesPredicted = 64;
// Of device memory, as benchmarks/shared_execs.py measures it: 2.8 to 3.7 KiB.
constexpr uint64_t kExecBytesPerNode = 3072;

template <typename... Values>
requires(std::is_trivially_copyable_v<Values>&&...) void Append(std::string& key,
                                                                const Values&... values) {
  (key.append(reinterpret_cast<const char*>(&values), sizeof values), ...);
}

class KindReader {
 public:
  KindReader(CudaContext& context, CUgraph graph) : context_(context), graph_(graph) {
    int major = 0;
    context_.Call(api().cuDeviceGetAttribute, &major, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                  context.cu_device());
    has_preferred_clusters_ = major >= 10;
    // To ask another GPU is an error, which tools that watch for errors would report.
    if (!has_preferred_clusters_) unknown_.insert(kPreferredCluster);
  }

  GraphKind Read() {
    const std::vector<CUgraphNode> nodes = Nodes();
    kind_.key.reserve(nodes.size() * kBytesPredicted);
    Append(kind_.key, nodes.size());
    for (const CUgraphNode node : nodes) AddNode(node);
    AddEdges(nodes);
    kind_.exec_bytes = nodes.size() * kExecBytesPerNode;
    return std::move(kind_);
  }

 private:
  const CudaApi& api() const { return context_.api(); }

  std::vector<CUgraphNode> Nodes() const {
    size_t count = 0;
    context_.Call(api().cuGraphGetNodes, graph_, nullptr, &count);
    std::vector<CUgraphNode> nodes(count);
    if (count != 0) context_.Call(api().cuGraphGetNodes, graph_, nodes.data(), &count);
    return nodes;
  }

  // In the order that the graph has them: it is by that order that an update finds for each node
  // its like.
  void AddEdges(const std::vector<CUgraphNode>& nodes) {
    size_t count = 0;
    context_.Call(api().cuGraphGetEdges, graph_, nullptr, nullptr, nullptr, &count);
    Append(kind_.key, count);
    if (count == 0) return;
    std::vector<CUgraphNode> from(count);
    std::vector<CUgraphNode> to(count);
    std::vector<CUgraphEdgeData> data(count);
    context_.Call(api().cuGraphGetEdges, graph_, from.data(), to.data(), data.data(), &count);
    std::unordered_map<CUgraphNode, uint32_t> numbers;
    numbers.reserve(nodes.size());
    for (const CUgraphNode node : nodes) {
      numbers.emplace(node, static_cast<uint32_t>(numbers.size()));
    }
    for (size_t i = 0; i < count; ++i) {
      Append(kind_.key, numbers.at(from[i]), numbers.at(to[i]), data[i]);
    }
  }

  void AddNode(CUgraphNode node) {
    CUgraphNodeType type = CU_GRAPH_NODE_TYPE_EMPTY;
    context_.Call(api().cuGraphNodeGetType, node, &type);
    Append(kind_.key, type);
    switch (type) {
      case CU_GRAPH_NODE_TYPE_KERNEL:
        return AddKernel(node);
      case CU_GRAPH_NODE_TYPE_MEMCPY:
        return AddCopy(node);
      case CU_GRAPH_NODE_TYPE_MEMSET:
        return AddMemset(node);
      case CU_GRAPH_NODE_TYPE_HOST:
      case CU_GRAPH_NODE_TYPE_EMPTY:
      case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
      case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
        return;
      default:
        // Graphs within graphs, memory that a graph owns, and whatever newer drivers have.
        kind_.shareable = false;
    }
  }

  void AddKernel(CUgraphNode node) {
    CUDA_KERNEL_NODE_PARAMS_v2 kernel{};
    context_.Call(api().cuGraphKernelNodeGetParams, node, &kernel);
    kind_.key += FunctionAttributes(kernel);
    for (const CUlaunchAttributeID attribute : kLaunchAttributes) {
      if (!unknown_.contains(attribute)) AddAttribute(node, attribute);
    }
    // A driver may have it for launches and hide it in nodes. A library launches a function with
    // what suits that function.
    if (has_preferred_clusters_ && unknown_.contains(kPreferredCluster)) {
      Append(kind_.key, FunctionOf(kernel));
    }
  }

  void AddAttribute(CUgraphNode node, CUlaunchAttributeID id) {
    CUlaunchAttributeValue value{};
    const CUresult code = api().cuGraphKernelNodeGetAttribute(node, id, &value);
    const bool may_be_unknown = id == kPreferredCluster || id == kDeviceUpdatable;
    if (may_be_unknown && (code == CUDA_ERROR_INVALID_VALUE || code == CUDA_ERROR_NOT_SUPPORTED)) {
      unknown_.insert(id);
      return;
    }
    context_.Check("cuGraphKernelNodeGetAttribute", code);
    if (id == kDeviceUpdatable) {
      if (value.deviceUpdatableKernelNode.deviceUpdatable != 0) kind_.shareable = false;
      return;
    }
    // What is not set reads as nothing but zeros.
    static constexpr CUlaunchAttributeValue kNotSet{};
    if (std::memcmp(value.pad, kNotSet.pad, sizeof value.pad) == 0) return;
    Append(kind_.key, id, value);
  }

  static const void* FunctionOf(const CUDA_KERNEL_NODE_PARAMS_v2& kernel) {
    if (kernel.func != nullptr) return kernel.func;
    return kernel.kern;
  }

  // Asked once a function: many nodes have the same.
  const std::string& FunctionAttributes(const CUDA_KERNEL_NODE_PARAMS_v2& kernel) {
    const auto [found, is_new] = functions_.try_emplace(FunctionOf(kernel));
    if (!is_new) return found->second;
    for (const CUfunction_attribute attribute : kFunctionAttributes) {
      int value = 0;
      if (kernel.func != nullptr) {
        context_.Call(api().cuFuncGetAttribute, &value, attribute, kernel.func);
      } else {
        context_.Call(api().cuKernelGetAttribute, &value, attribute, kernel.kern,
                      context_.cu_device());
      }
      Append(found->second, value);
    }
    return found->second;
  }

  void AddCopy(CUgraphNode node) {
    CUDA_MEMCPY3D_v2 copy{};
    context_.Call(api().cuGraphMemcpyNodeGetParams, node, &copy);
    Append(kind_.key, copy.srcMemoryType, copy.dstMemoryType, copy.Height, copy.Depth);
    if (copy.Height > 1 || copy.Depth > 1) Append(kind_.key, copy.WidthInBytes);
  }

  void AddMemset(CUgraphNode node) {
    CUDA_MEMSET_NODE_PARAMS_v1 memset{};
    context_.Call(api().cuGraphMemsetNodeGetParams, node, &memset);
    Append(kind_.key, memset.height);
    if (memset.height > 1) Append(kind_.key, memset.width, memset.elementSize);
  }

  CudaContext& context_;
  CUgraph const graph_;
  bool has_preferred_clusters_ = false;
  GraphKind kind_{.key = {}, .shareable = true};
  std::unordered_map<const void*, std::string> functions_;
  std::set<CUlaunchAttributeID> unknown_;  // to the driver, which is slow to say so
};

}  // namespace

// Asking after a function that was never launched loads it, which breaks captures if unsafe calls
// do.
GraphKind CudaGraphDriver::KindOf(Graph graph) {
  const Calling calling(context_);
  return KindReader(context_, reinterpret_cast<CUgraph>(graph)).Read();
}

}  // namespace cgp
