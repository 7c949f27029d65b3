// What can be read of a captured graph, which is all that a key of graphs that may share an
// executable can be made of. An attribute that an update keeps and that cannot be read is the worst
// there is.
#include <cstring>
#include <map>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "graph_updates.h"

const std::vector<NamedAttribute>& NodeAttributes() {
  static const std::vector<NamedAttribute> attributes = {
      {CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW, "ACCESS_POLICY_WINDOW"},
      {CU_LAUNCH_ATTRIBUTE_COOPERATIVE, "COOPERATIVE"},
      {CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, "CLUSTER_DIMENSION"},
      {CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE,
       "CLUSTER_SCHEDULING_POLICY_PREFERENCE"},
      {CU_LAUNCH_ATTRIBUTE_PRIORITY, "PRIORITY"},
      {CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP, "MEM_SYNC_DOMAIN_MAP"},
      {CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN, "MEM_SYNC_DOMAIN"},
      {CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION, "PREFERRED_CLUSTER_DIMENSION"},
      {CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE, "DEVICE_UPDATABLE_KERNEL_NODE"},
      {CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, "PREFERRED_SHARED_MEMORY_CARVEOUT"},
      {CU_LAUNCH_ATTRIBUTE_NVLINK_UTIL_CENTRIC_SCHEDULING, "NVLINK_UTIL_CENTRIC_SCHEDULING"},
  };
  return attributes;
}

namespace {

// By the name of what is read: its values, node by node.
using Readable = std::map<std::string, std::vector<std::string>>;

std::string Bytes(const void* value, size_t bytes) {
  return std::string(static_cast<const char*>(value), bytes);
}

void ReadKernel(CUgraphNode node, Readable& readable) {
  CUDA_KERNEL_NODE_PARAMS params{};
  Check(cuGraphKernelNodeGetParams(node, &params), "cuGraphKernelNodeGetParams");
  readable["function"].push_back(Bytes(&params.func, sizeof(params.func)) +
                                 Bytes(&params.kern, sizeof(params.kern)));
  const unsigned shape[] = {params.gridDimX,      params.gridDimY,  params.gridDimZ,
                            params.blockDimX,     params.blockDimY, params.blockDimZ,
                            params.sharedMemBytes};
  readable["shape"].push_back(Bytes(shape, sizeof(shape)));
  for (const NamedAttribute& attribute : NodeAttributes()) {
    CUkernelNodeAttrValue value;
    std::memset(&value, 0, sizeof(value));  // padding too: it is compared
    const CUresult result = cuGraphKernelNodeGetAttribute(node, attribute.id, &value);
    // The handle of an updatable node is another in each graph.
    if (attribute.id == CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE) {
      value.deviceUpdatableKernelNode.devNode = nullptr;
    }
    readable[attribute.name].push_back(result == CUDA_SUCCESS ? Bytes(&value, sizeof(value))
                                                              : Name(result));
  }
}

// In the order in which the driver lists them: graphs that add the same nodes or edges in another
// order may be told apart.
Readable Read(CUgraph graph) {
  Readable readable;
  size_t count = 0;
  Check(cuGraphGetNodes(graph, nullptr, &count), "cuGraphGetNodes");
  std::vector<CUgraphNode> nodes(count);
  Check(cuGraphGetNodes(graph, nodes.data(), &count), "cuGraphGetNodes");
  std::map<CUgraphNode, size_t> numbers;
  for (const CUgraphNode node : nodes) {
    numbers.emplace(node, numbers.size());
    CUgraphNodeType type{};
    Check(cuGraphNodeGetType(node, &type), "cuGraphNodeGetType");
    readable["types"].push_back(std::to_string(type));
    if (type == CU_GRAPH_NODE_TYPE_KERNEL) ReadKernel(node, readable);
  }
  // Room for every edge there can be: asking for their number alone, the driver may refuse where
  // edges have data.
  count *= count;
  std::vector<CUgraphNode> from(count);
  std::vector<CUgraphNode> to(count);
  std::vector<CUgraphEdgeData> data(count);
  Check(cuGraphGetEdges(graph, from.data(), to.data(), data.data(), &count), "cuGraphGetEdges");
  for (size_t i = 0; i < count; ++i) {
    readable["edges"].push_back(std::to_string(numbers[from[i]]) + " " +
                                std::to_string(numbers[to[i]]));
    readable["edge data"].push_back(Bytes(&data[i], sizeof(data[i])));
  }
  return readable;
}

}  // namespace

std::string ToldApartBy(CUgraph a, CUgraph b) {
  Readable of_a = Read(a);
  Readable of_b = Read(b);
  std::set<std::string> names;
  for (const auto& [name, values] : of_a) names.insert(name);
  for (const auto& [name, values] : of_b) names.insert(name);
  std::string different;
  for (const std::string& name : names) {
    if (of_a[name] == of_b[name]) continue;
    different += (different.empty() ? "" : ", ") + name;
  }
  return different.empty() ? "nothing" : different;
}
