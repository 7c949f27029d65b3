// Which graphs an executable can hold one after the other, as far as CUDA lets that be seen.
//
// The driver refuses an update that it knows to be impossible. But some of what an update does not
// carry over it silently leaves as it was: the launch would run with the cluster size of another
// graph. So the key holds all that an update does not carry over, refused or not.
// docs/graph_updates.md has the list, as tried on a GPU.
#include <array>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>
#include <vector>

#include "exec/cuda_graph_driver.h"

namespace cgp {
namespace {

// Attributes by their numbers, and who has them: asking a driver or GPU that has not is an error,
// which tools that watch for errors report. docs/graph_updates.md has the names.
struct Attributes {
  int first;
  int last;
  int since = 0;  // CUDA's version, of the driver
  int since_gpu = 0;
  bool by_function = false;  // the function stands for them if they are hidden all the same
};

constexpr int kUntried = 13010;  // newer than all drivers that were tried

// What a launch was asked for, and an update may not carry over. Nobody here knows the last ones.
constexpr std::array<Attributes, 8> kLaunchAttributes = {{
    {1, 2},
    {4, 5},
    {8, 10},
    {11, 11, 12080, 10, true},
    {13, 13, 12040},
    {15, 16, kUntried},
    {17, 18, 13020, 0, true},
    {19, 22, kUntried},
}};

// What a launch gets of this from its function.
constexpr std::array<Attributes, 3> kFunctionAttributes = {{
    {9, 15},
    {17, 17, 13040},
    {18, 21, kUntried},
}};

// Device memory; benchmarks/shared_execs.py measures 2.8 to 3.7 KiB.
constexpr uint64_t kExecBytesPerNode = 3072;

template <typename... Values>
requires(std::is_trivially_copyable_v<Values>&&...) void Append(std::string& key,
                                                                const Values&... values) {
  (key.append(reinterpret_cast<const char*>(&values), sizeof values), ...);
}

class KindReader {
 public:
  KindReader(CudaContext& context, CudaGraphDriver::Refused& refused, CUgraph graph)
      : context_(context), refused_(refused), graph_(graph) {
    context_.Call(api().cuDeviceGetAttribute, &gpu_, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR,
                  context_.cu_device());
  }

  GraphKind Read() {
    size_t count = 0;
    context_.Call(api().cuGraphGetNodes, graph_, nullptr, &count);
    std::vector<CUgraphNode> nodes(count);
    if (count != 0) context_.Call(api().cuGraphGetNodes, graph_, nodes.data(), &count);
    Append(kind_.key, count);
    for (const CUgraphNode node : nodes) AddNode(node);
    AddEdges(nodes);
    kind_.exec_bytes = count * kExecBytesPerNode;
    return std::move(kind_);
  }

 private:
  const CudaApi& api() const { return context_.api(); }

  // In the graph's order, by which an update pairs the nodes of two graphs.
  void AddEdges(const std::vector<CUgraphNode>& nodes) {
    size_t count = 0;
    context_.Call(api().cuGraphGetEdges, graph_, nullptr, nullptr, nullptr, &count);
    Append(kind_.key, count);
    std::vector<CUgraphNode> from(count);
    std::vector<CUgraphNode> to(count);
    std::vector<CUgraphEdgeData> data(count);
    context_.Call(api().cuGraphGetEdges, graph_, from.data(), to.data(), data.data(), &count);
    std::unordered_map<CUgraphNode, size_t> numbers;
    for (const CUgraphNode node : nodes) numbers.emplace(node, numbers.size());
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
        // Graphs within graphs, memory nodes, and whatever newer drivers have.
        kind_.alone = "it has nodes that an update may not carry over";
    }
  }

  void AddKernel(CUgraphNode node) {
    CUDA_KERNEL_NODE_PARAMS_v2 kernel{};
    context_.Call(api().cuGraphKernelNodeGetParams, node, &kernel);
    kind_.key += FunctionAttributes(kernel);
    const auto add = [&](int id) {
      CUlaunchAttributeValue value{};
      const CUresult code =
          api().cuGraphKernelNodeGetAttribute(node, static_cast<CUlaunchAttributeID>(id), &value);
      if (id == CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE) {
        if (value.deviceUpdatableKernelNode.deviceUpdatable == 0) return code;
        kind_.alone = "the device may update its kernels";
      }
      // An attribute that is not set reads as zeros.
      static constexpr CUlaunchAttributeValue kNotSet{};
      if (std::memcmp(value.pad, kNotSet.pad, sizeof value.pad) != 0) Append(kind_.key, id, value);
      return code;
    };
    const bool all_told =
        AddAll(kLaunchAttributes, api().cuGraphKernelNodeGetAttribute.name, 0, add);
    // No attribute has this number. Without an end mark, attributes could be read as the nodes that
    // follow.
    Append(kind_.key, CU_LAUNCH_ATTRIBUTE_IGNORE);
    // A library launches a function always with what suits that function.
    if (!all_told) Append(kind_.key, FunctionOf(kernel));
  }

  // Calls `add` for each attribute to ask for. Returns false if a function has to stand for some.
  template <typename Table, typename Add>
  bool AddAll(const Table& table, const char* call, int first_bit, const Add& add) {
    bool all_told = true;
    for (const Attributes& of : table) {
      if (api().version < of.since || gpu_ < of.since_gpu) continue;
      for (int id = of.first; id <= of.last; ++id) {
        const uint64_t bit = uint64_t{1} << (first_bit + id);
        const CUresult code = (refused_ & bit) != 0 ? CUDA_ERROR_INVALID_VALUE : add(id);
        if (of.since != 0 &&
            (code == CUDA_ERROR_INVALID_VALUE || code == CUDA_ERROR_NOT_SUPPORTED)) {
          refused_ |= bit;
          all_told = all_told && !of.by_function;
          continue;
        }
        context_.Check(call, code);
        if (&of == &table.back()) {
          kind_.alone = "the driver is too new: its " + std::string(call) + " tells attribute " +
                        std::to_string(id);
        }
      }
    }
    return all_told;
  }

  static const void* FunctionOf(const CUDA_KERNEL_NODE_PARAMS_v2& kernel) {
    if (kernel.func != nullptr) return kernel.func;
    return kernel.kern;
  }

  // Asked once for each function, since many nodes share one.
  const std::string& FunctionAttributes(const CUDA_KERNEL_NODE_PARAMS_v2& kernel) {
    const auto [found, is_new] = functions_.try_emplace(FunctionOf(kernel));
    std::string& key = found->second;
    if (!is_new) return key;
    const bool func = kernel.func != nullptr;
    const char* const name = func ? api().cuFuncGetAttribute.name : api().cuKernelGetAttribute.name;
    AddAll(kFunctionAttributes, name, 32, [&](int id) {
      const auto attribute = static_cast<CUfunction_attribute>(id);
      int value = 0;
      const CUresult code =
          func ? api().cuFuncGetAttribute(&value, attribute, kernel.func)
               : api().cuKernelGetAttribute(&value, attribute, kernel.kern, context_.cu_device());
      if (code == CUDA_SUCCESS) Append(key, value);
      return code;
    });
    return key;
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
  CudaGraphDriver::Refused& refused_;
  CUgraph const graph_;
  int gpu_ = 0;  // the major number of its compute capability
  GraphKind kind_;
  std::unordered_map<const void*, std::string> functions_;
};

}  // namespace

// Asking about a function that never ran loads it, which breaks captures where unsafe calls do.
GraphKind CudaGraphDriver::KindOf(Graph graph) {
  const Calling calling(context_);
  return KindReader(context_, refused_, reinterpret_cast<CUgraph>(graph)).Read();
}

}  // namespace cgp
