// Which graphs are alike, of graphs that are made up.
#include <gtest/gtest.h>

#include <functional>
#include <set>
#include <string>
#include <utility>

#include "driver/cuda_driver_test_cuda.h"
#include "exec/cuda_graph_driver.h"

namespace cgp {
namespace {

using namespace made_up_cuda;

class GraphKindTest : public CudaDriverTest {
 protected:
  // A copy, a memset, and two kernels of which one is given by its function and one by its kernel.
  FakeGraph Plain() {
    FakeGraph graph;
    graph.nodes.resize(5);
    graph.nodes[0].type = CU_GRAPH_NODE_TYPE_MEMCPY;
    CUDA_MEMCPY3D_v2& copy = graph.nodes[0].copy;
    copy.srcMemoryType = CU_MEMORYTYPE_HOST;
    copy.srcHost = this;
    copy.dstMemoryType = CU_MEMORYTYPE_DEVICE;
    copy.dstDevice = kAddress;
    copy.WidthInBytes = 64;
    copy.Height = 1;
    copy.Depth = 1;
    graph.nodes[1].type = CU_GRAPH_NODE_TYPE_MEMSET;
    graph.nodes[1].memset = {
        .dst = kAddress, .pitch = 0, .value = 0, .elementSize = 4, .width = 16, .height = 1};
    graph.nodes[2].type = CU_GRAPH_NODE_TYPE_KERNEL;
    graph.nodes[2].kernel.func = reinterpret_cast<CUfunction>(&function_);
    graph.nodes[2].kernel.gridDimX = 8;
    graph.nodes[3].type = CU_GRAPH_NODE_TYPE_KERNEL;
    graph.nodes[3].kernel.kern = reinterpret_cast<CUkernel>(&kernel_);
    graph.nodes[4].type = CU_GRAPH_NODE_TYPE_EVENT_RECORD;
    for (size_t i = 0; i + 1 < graph.nodes.size(); ++i) graph.edges.push_back({i, i + 1});
    return graph;
  }

  GraphKind KindOf(FakeGraph graph) {
    const GraphKind kind = driver_.KindOf(Graph{reinterpret_cast<uintptr_t>(&graph)});
    EXPECT_TRUE(contexts.empty());
    EXPECT_EQ(capture_mode, CU_STREAM_CAPTURE_MODE_GLOBAL);
    return kind;
  }
  // Of the plain graph, changed.
  GraphKind KindWith(const std::function<void(FakeGraph&)>& change) {
    FakeGraph graph = Plain();
    change(graph);
    return KindOf(std::move(graph));
  }
  void ExpectOther(const std::string& what, const std::function<void(FakeGraph&)>& change) {
    const GraphKind kind = KindWith(change);
    EXPECT_EQ(kind.alone, "") << what;
    EXPECT_TRUE(keys_.insert(kind.key).second) << what << " makes no difference";
  }

  FakeFunction function_;
  FakeFunction kernel_;
  FakeFunction another_;
  CudaGraphDriver::Refused refused_ = 0;
  CudaGraphDriver driver_{0, api_, refused_};
  std::set<std::string> keys_;  // all different
};

CUlaunchAttributeValue Value(unsigned char byte) {
  CUlaunchAttributeValue value{};
  value.pad[0] = static_cast<char>(byte);
  return value;
}

TEST_F(GraphKindTest, GraphsAlikeButForSizesAddressesAndFunctionsAreOfOneKind) {
  const GraphKind plain = KindOf(Plain());
  EXPECT_EQ(plain.alone, "");
  EXPECT_EQ(KindOf(Plain()).key, plain.key) << "the handles of nodes and graphs must not matter";
  FakeFunction another_kernel;
  const GraphKind other = KindWith([&](FakeGraph& graph) {
    graph.nodes[0].copy.srcHost = &graph;
    graph.nodes[0].copy.dstDevice = kAddress + kGpuPage;
    graph.nodes[0].copy.WidthInBytes = 4096;
    graph.nodes[1].memset.dst = kAddress + kGpuPage;
    graph.nodes[1].memset.value = 7;
    graph.nodes[1].memset.width = 99;
    CUDA_KERNEL_NODE_PARAMS_v2& kernel = graph.nodes[2].kernel;
    kernel.gridDimX = 3;
    kernel.gridDimY = 4;
    kernel.blockDimX = 128;
    kernel.sharedMemBytes = 1024;
    kernel.kernelParams = reinterpret_cast<void**>(&graph);
    kernel.func = reinterpret_cast<CUfunction>(&another_);
    graph.nodes[3].kernel.kern = reinterpret_cast<CUkernel>(&another_kernel);
  });
  EXPECT_EQ(other.key, plain.key);
  EXPECT_EQ(other.alone, "");
}

TEST_F(GraphKindTest, NodesAndTheirOrderMakeADifference) {
  ExpectOther("nothing", [](FakeGraph&) {});
  ExpectOther("a node more", [](FakeGraph& g) { g.nodes.emplace_back(); });
  ExpectOther("no node", [](FakeGraph& g) { g = {}; });
  ExpectOther("order", [](FakeGraph& g) {
    std::swap(g.nodes[0], g.nodes[1]);
    g.edges = {};
  });
  ExpectOther("no edge", [](FakeGraph& g) { g.edges.clear(); });
  for (const CUgraphNodeType type :
       {CU_GRAPH_NODE_TYPE_HOST, CU_GRAPH_NODE_TYPE_EMPTY, CU_GRAPH_NODE_TYPE_WAIT_EVENT}) {
    ExpectOther("type " + std::to_string(type), [&](FakeGraph& g) { g.nodes[4].type = type; });
  }
}

TEST_F(GraphKindTest, EdgesTheirOrderAndTheirDataMakeADifference) {
  ExpectOther("nothing", [](FakeGraph&) {});
  ExpectOther("fewer", [](FakeGraph& g) { g.edges.pop_back(); });
  ExpectOther("another from", [](FakeGraph& g) { g.edges[3].from = 1; });
  ExpectOther("another to", [](FakeGraph& g) { g.edges[0].to = 3; });
  ExpectOther("order", [](FakeGraph& g) { std::swap(g.edges[0], g.edges[1]); });
  ExpectOther("from port", [](FakeGraph& g) {
    g.edges[2].data.from_port = CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC;
  });
  ExpectOther("to port", [](FakeGraph& g) { g.edges[2].data.to_port = 1; });
  ExpectOther("type",
              [](FakeGraph& g) { g.edges[2].data.type = CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC; });
}

TEST_F(GraphKindTest, WhatALaunchWasAskedForMakesADifference) {
  fake_.compute_major = 10;
  ExpectOther("nothing", [](FakeGraph&) {});
  for (const CUlaunchAttributeID id :
       {CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW, CU_LAUNCH_ATTRIBUTE_COOPERATIVE,
        CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
        CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE, CU_LAUNCH_ATTRIBUTE_PRIORITY,
        CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP, CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN,
        CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION}) {
    const std::string what = "attribute " + std::to_string(id);
    ExpectOther(what, [&](FakeGraph& g) { g.nodes[2].attributes[id] = Value(1); });
    ExpectOther(what + " of another value",
                [&](FakeGraph& g) { g.nodes[2].attributes[id] = Value(2); });
    ExpectOther(what + " of another node",
                [&](FakeGraph& g) { g.nodes[3].attributes[id] = Value(1); });
  }
  ExpectOther("the whole value", [](FakeGraph& g) {
    g.nodes[2].attributes[CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION].clusterDim = {1, 1, 2};
  });
}

TEST_F(GraphKindTest, WhereAPreferredClusterMayBeHiddenTheFunctionMakesADifference) {
  const auto with_another = [&](FakeGraph& g) {
    g.nodes[2].kernel.func = reinterpret_cast<CUfunction>(&another_);
  };
  for (const int major : {9, 10}) {
    for (const bool hidden : {false, true}) {
      fake_.compute_major = major;
      fake_.unknown_attributes.clear();
      if (hidden) fake_.unknown_attributes = {CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION};
      fake_.asked_attributes.clear();
      refused_ = 0;
      const bool differ = KindWith(with_another).key != KindOf(Plain()).key;
      EXPECT_EQ(differ, major == 10 && hidden) << major << " " << hidden;
      EXPECT_EQ(fake_.asked_attributes.contains(CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION),
                major == 10)
          << "an error where there is no such thing";
    }
  }
}

// What CUDA 13.5's header names beyond that of 13.0, and what nobody knows yet.
constexpr int kPortableClusterSizeMode = 17;
constexpr int kSharedMemoryMode = 18;
constexpr int kUnheardOf = 19;
constexpr int kFunctionSharedMemoryMode = 17;
constexpr int kUnheardOfFunction = 18;

CUlaunchAttributeID Launch(int id) { return static_cast<CUlaunchAttributeID>(id); }
CUfunction_attribute Function(int id) { return static_cast<CUfunction_attribute>(id); }

// A driver of the newest CUDA that is known: beyond, it has nothing.
class NewerDriverTest : public GraphKindTest {
 protected:
  NewerDriverTest() {
    api_.version = 13050;
    for (int id = 0; id < 8; ++id) {
      fake_.unknown_attributes.insert(kUnheardOf + id);
      fake_.unknown_function_attributes.insert(kUnheardOfFunction + id);
    }
  }

  std::string KeyWithAnotherFunction() {
    return KindWith([&](FakeGraph& g) {
             g.nodes[2].kernel.func = reinterpret_cast<CUfunction>(&another_);
           })
        .key;
  }
};

TEST_F(NewerDriverTest, WhatNewerDriversKnowMakesADifference) {
  ExpectOther("nothing", [](FakeGraph&) {});
  for (const int id : {15, 16, kPortableClusterSizeMode, kSharedMemoryMode}) {
    const std::string what = "attribute " + std::to_string(id);
    ExpectOther(what, [&](FakeGraph& g) { g.nodes[2].attributes[Launch(id)] = Value(1); });
    ExpectOther(what + " of another value",
                [&](FakeGraph& g) { g.nodes[2].attributes[Launch(id)] = Value(2); });
    ExpectOther(what + " of another node",
                [&](FakeGraph& g) { g.nodes[3].attributes[Launch(id)] = Value(1); });
  }
  another_.attributes = {{Function(kFunctionSharedMemoryMode), 4}};
  ExpectOther("the function's shared memory mode", [&](FakeGraph& g) {
    g.nodes[2].kernel.func = reinterpret_cast<CUfunction>(&another_);
  });
  ExpectOther("that of a kernel", [&](FakeGraph& g) {
    g.nodes[3].kernel.kern = reinterpret_cast<CUkernel>(&another_);
  });
}

TEST_F(NewerDriverTest, WhoTellsWhatNobodyHasHeardOfDoesNotShare) {
  for (const int id : {kUnheardOf, kUnheardOf + 3}) {
    fake_.unknown_attributes.erase(id);
    refused_ = 0;
    EXPECT_EQ(KindOf(Plain()).alone,
              "the driver is too new: its cuGraphKernelNodeGetAttribute tells attribute " +
                  std::to_string(id));
    EXPECT_EQ(KindWith([](FakeGraph& g) {
                g.nodes.resize(2);
                g.edges.resize(1);
              }).alone,
              "")
        << "without kernels there is nothing to keep";
    fake_.unknown_attributes.insert(id);
  }
  fake_.unknown_function_attributes.erase(kUnheardOfFunction);
  refused_ = 0;
  EXPECT_EQ(KindWith([](FakeGraph& g) { g.nodes[3].type = CU_GRAPH_NODE_TYPE_EMPTY; }).alone,
            "the driver is too new: its cuFuncGetAttribute tells attribute 18");
  EXPECT_EQ(KindWith([](FakeGraph& g) { g.nodes[2].type = CU_GRAPH_NODE_TYPE_EMPTY; }).alone,
            "the driver is too new: its cuKernelGetAttribute tells attribute 18");
}

TEST_F(NewerDriverTest, WhereAModeIsHiddenTheFunctionMakesADifference) {
  for (const int id : {15, 16, kPortableClusterSizeMode, kSharedMemoryMode}) {
    fake_.unknown_attributes.insert(id);
    for (const int version : {13010, 13020}) {
      api_.version = version;
      refused_ = 0;
      const bool stands_for_it = KeyWithAnotherFunction() != KindOf(Plain()).key;
      EXPECT_EQ(stands_for_it, version == 13020 && id >= kPortableClusterSizeMode) << id;
      EXPECT_EQ(KindOf(Plain()).alone, "");
    }
    fake_.unknown_attributes.erase(id);
  }
}

TEST_F(GraphKindTest, WhatAFunctionBringsAlongMakesADifference) {
  ExpectOther("nothing", [](FakeGraph&) {});
  for (const CUfunction_attribute attribute :
       {CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
        CU_FUNC_ATTRIBUTE_CLUSTER_SIZE_MUST_BE_SET, CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_WIDTH,
        CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_HEIGHT, CU_FUNC_ATTRIBUTE_REQUIRED_CLUSTER_DEPTH,
        CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED,
        CU_FUNC_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE}) {
    const std::string what = "function attribute " + std::to_string(attribute);
    another_.attributes = {{attribute, 1}};
    ExpectOther(what, [&](FakeGraph& g) {
      g.nodes[2].kernel.func = reinterpret_cast<CUfunction>(&another_);
    });
    ExpectOther(what + " of a kernel", [&](FakeGraph& g) {
      g.nodes[3].kernel.kern = reinterpret_cast<CUkernel>(&another_);
    });
  }
}

TEST_F(GraphKindTest, TheShapeOfCopiesAndMemsetsMakesADifference) {
  ExpectOther("nothing", [](FakeGraph&) {});
  ExpectOther("source", [](FakeGraph& g) { g.nodes[0].copy.srcMemoryType = CU_MEMORYTYPE_DEVICE; });
  ExpectOther("destination",
              [](FakeGraph& g) { g.nodes[0].copy.dstMemoryType = CU_MEMORYTYPE_HOST; });
  ExpectOther("copied height", [](FakeGraph& g) { g.nodes[0].copy.Height = 2; });
  ExpectOther("copied depth", [](FakeGraph& g) { g.nodes[0].copy.Depth = 2; });
  ExpectOther("copied height of several rows", [](FakeGraph& g) { g.nodes[0].copy.Height = 3; });
  ExpectOther("copied depth of several", [](FakeGraph& g) { g.nodes[0].copy.Depth = 3; });
  ExpectOther("copied width of several rows", [](FakeGraph& g) {
    g.nodes[0].copy.Height = 2;
    g.nodes[0].copy.WidthInBytes = 17;
  });
  ExpectOther("element of several rows", [](FakeGraph& g) {
    g.nodes[1].memset.height = 2;
    g.nodes[1].memset.elementSize = 1;
  });
  ExpectOther("set height", [](FakeGraph& g) { g.nodes[1].memset.height = 2; });
  ExpectOther("set height of several rows", [](FakeGraph& g) { g.nodes[1].memset.height = 3; });
  ExpectOther("set width of several rows", [](FakeGraph& g) {
    g.nodes[1].memset.height = 2;
    g.nodes[1].memset.width = 17;
  });
}

TEST_F(GraphKindTest, WhatAnUpdateCannotChangeIsNotShared) {
  for (const CUgraphNodeType type :
       {CU_GRAPH_NODE_TYPE_GRAPH, CU_GRAPH_NODE_TYPE_CONDITIONAL, CU_GRAPH_NODE_TYPE_MEM_ALLOC,
        CU_GRAPH_NODE_TYPE_MEM_FREE, CU_GRAPH_NODE_TYPE_EXT_SEMAS_SIGNAL,
        CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT, CU_GRAPH_NODE_TYPE_BATCH_MEM_OP,
        static_cast<CUgraphNodeType>(14)}) {
    EXPECT_EQ(KindWith([&](FakeGraph& g) { g.nodes[1].type = type; }).alone,
              "it has nodes that an update may not carry over")
        << type;
  }
  EXPECT_EQ(KindWith([](FakeGraph& g) {
              CUlaunchAttributeValue value{};
              value.deviceUpdatableKernelNode.deviceUpdatable = 1;
              g.nodes[3].attributes[CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE] = value;
            }).alone,
            "the device may update its kernels");
}

TEST_F(GraphKindTest, EachErrorOfCudaIsThrown) {
  for (const char* const function :
       {"cuGraphGetNodes", "cuGraphGetEdges", "cuGraphNodeGetType", "cuGraphKernelNodeGetParams",
        "cuGraphMemcpyNodeGetParams", "cuGraphMemsetNodeGetParams", "cuFuncGetAttribute",
        "cuKernelGetAttribute"}) {
    const DriverError error = Failing(function, CUDA_ERROR_INVALID_VALUE, [&] { KindOf(Plain()); });
    EXPECT_EQ(error.device(), 0);
  }
}

}  // namespace
}  // namespace cgp
