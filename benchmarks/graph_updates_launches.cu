// The cases of graph_updates that come from launch attributes.
#include <cooperative_groups.h>

#include <string>
#include <utility>
#include <vector>

#include "graph_updates.h"

namespace {

__device__ unsigned ClusterSize() {
  unsigned blocks = 1;
#if __CUDA_ARCH__ >= 900
  asm volatile("mov.u32 %0, %%cluster_nctaid.x;" : "=r"(blocks));
#endif
  return blocks;
}

__device__ unsigned Multiprocessor() {
  unsigned number = 0;
  asm volatile("mov.u32 %0, %%smid;" : "=r"(number));
  return number;
}

__device__ unsigned long long Nanoseconds() {
  unsigned long long now = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  return now;
}

__device__ void Spin(unsigned nanoseconds) {
  const unsigned long long start = Nanoseconds();
  while (Nanoseconds() - start < nanoseconds) {
  }
}

// The largest cluster that any block stands in.
__global__ void Clusters(unsigned* board, unsigned tag) {
  if (threadIdx.x != 0) return;
  board[kTested] = tag;
  atomicMax(board + kCluster, ClusterSize());
}

// The multiprocessor of each block, counted from 1.
__global__ void Placement(unsigned* board, unsigned tag) {
  if (threadIdx.x == 0) {
    board[kTested] = tag;
    board[kPerBlock + blockIdx.x] = Multiprocessor() + 1;
  }
  Spin(50'000);  // all threads: a block keeps the room that it takes
}

__global__ void Cooperative(unsigned* board, unsigned tag) {
  if (threadIdx.x != 0) return;
  board[kTested] = tag;
  board[kValid] = cooperative_groups::this_grid().is_valid() ? 1 : 0;
}

// How many blocks at most are on one multiprocessor at once.
__global__ void Residency(unsigned* board, unsigned tag) {
  if (threadIdx.x != 0) return;
  board[kTested] = tag;
  unsigned* const here = board + kPerBlock + Multiprocessor();
  atomicMax(board + kPeak, atomicAdd(here, 1) + 1);
  Spin(100'000);
  atomicSub(here, 1);
}

// Waits, for 20 ms at most, for the kernel behind it to start.
__global__ void First(unsigned* board, unsigned tag) {
  board[kTested] = tag;
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
  const unsigned long long start = Nanoseconds();
  while (atomicAdd(board + kFlag, 0) == 0 && Nanoseconds() - start < 20'000'000) {
  }
  board[kOverlap] = atomicAdd(board + kFlag, 0);
}

__global__ void Second(unsigned* board, unsigned tag) {
  board[kTested + 1] = tag;
  atomicExch(board + kFlag, 1);
}

const char* const kGroup = "launch attribute";

struct Variant {
  Attributes attributes;
  Shape shape{};
};

Case LaunchCase(const std::string& name, const std::string& documented, const void* kernel,
                const Variant& a, const Variant& b, Run run) {
  Build build = Captured([=](const Device& device, CUstream stream, bool is_b, unsigned tag) {
    const Variant& variant = is_b ? b : a;
    Launch(stream, kernel, variant.shape, variant.attributes, device.board, tag);
  });
  return {kGroup, name, documented, std::move(build), std::move(run)};
}

CUlaunchAttribute Cluster(unsigned size) {
  return Attribute(CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION, [=](auto& value) {
    value.clusterDim.x = size;
    value.clusterDim.y = value.clusterDim.z = 1;
  });
}

CUlaunchAttribute PreferredCluster(unsigned size) {
  return Attribute(CU_LAUNCH_ATTRIBUTE_PREFERRED_CLUSTER_DIMENSION, [=](auto& value) {
    value.preferredClusterDim.x = size;
    value.preferredClusterDim.y = value.preferredClusterDim.z = 1;
  });
}

CUlaunchAttribute Scheduling(CUclusterSchedulingPolicy policy) {
  return Attribute(CU_LAUNCH_ATTRIBUTE_CLUSTER_SCHEDULING_POLICY_PREFERENCE,
                   [=](auto& value) { value.clusterSchedulingPolicyPreference = policy; });
}

CUlaunchAttribute Together(int on) {
  return Attribute(CU_LAUNCH_ATTRIBUTE_COOPERATIVE, [=](auto& value) { value.cooperative = on; });
}

CUlaunchAttribute Priority(int priority) {
  return Attribute(CU_LAUNCH_ATTRIBUTE_PRIORITY, [=](auto& value) { value.priority = priority; });
}

CUlaunchAttribute Domain(CUlaunchMemSyncDomain domain) {
  return Attribute(CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN,
                   [=](auto& value) { value.memSyncDomain = domain; });
}

CUlaunchAttribute DomainMap(unsigned char by_default, unsigned char remote) {
  return Attribute(CU_LAUNCH_ATTRIBUTE_MEM_SYNC_DOMAIN_MAP, [=](auto& value) {
    value.memSyncDomainMap.default_ = by_default;
    value.memSyncDomainMap.remote = remote;
  });
}

CUlaunchAttribute Carveout(unsigned percent) {
  return Attribute(CU_LAUNCH_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
                   [=](auto& value) { value.sharedMemCarveout = percent; });
}

CUlaunchAttribute NvlinkCentric(unsigned on) {
  return Attribute(CU_LAUNCH_ATTRIBUTE_NVLINK_UTIL_CENTRIC_SCHEDULING,
                   [=](auto& value) { value.nvlinkUtilCentricScheduling = on; });
}

CUlaunchAttribute DeviceUpdatable() {
  return Attribute(CU_LAUNCH_ATTRIBUTE_DEVICE_UPDATABLE_KERNEL_NODE,
                   [](auto& value) { value.deviceUpdatableKernelNode.deviceUpdatable = 1; });
}

CUlaunchAttribute StreamSerialization() {
  return Attribute(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
                   [](auto& value) { value.programmaticStreamSerializationAllowed = 1; });
}

Run CountsSharedMultiprocessors() {
  return [](const Device& device, CUgraphExec exec) {
    Board board = LaunchAndRead(device, exec);
    bool shared = false;
    for (size_t block = kPerBlock; block + 1 < board.size() && board[block] != 0; block += 2) {
      shared = shared || board[block] == board[block + 1];
    }
    return Seen{shared ? "some clusters on one multiprocessor" : "all clusters spread",
                std::move(board)};
  };
}

Run Overlaps() {
  return [](const Device& device, CUgraphExec exec) {
    Board board = LaunchAndRead(device, exec);
    return Seen{board[kOverlap] != 0 ? "overlap" : "in turn", std::move(board)};
  };
}

// The same by the function's own attribute, which the nodes do not have.
Case FunctionCarveoutCase(const Shape& shape) {
  Build build = Captured([=](const Device& device, CUstream stream, bool b, unsigned tag) {
    const auto* const kernel = reinterpret_cast<const void*>(Residency);
    Check(cuFuncSetAttribute(Handle(kernel), CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT,
                             b ? 10 : 100),
          "cuFuncSetAttribute");
    Launch(stream, kernel, shape, {}, device.board, tag);
  });
  return {kGroup, "the function's carveout 100 to 10 %", "", std::move(build), Reads(kPeak)};
}

Case StreamSerializationCase(const std::string& name, bool a, bool b) {
  Build build = Captured([=](const Device& device, CUstream stream, bool is_b, unsigned tag) {
    const Shape one{1, 1, 0};
    Attributes attributes;
    if (is_b ? b : a) attributes.push_back(StreamSerialization());
    Launch(stream, reinterpret_cast<const void*>(First), one, {}, device.board, tag);
    Launch(stream, reinterpret_cast<const void*>(Second), one, attributes, device.board, tag);
  });
  return {kGroup, name, "", std::move(build), Overlaps()};
}

// How the event between two kernels is recorded.
enum class Record { kPlain, kProgrammatic, kAtBlockStart, kLaunchCompletion };

Attributes Recording(Record record, CUevent event) {
  if (record == Record::kPlain) return {};
  if (record == Record::kLaunchCompletion) {
    return {Attribute(CU_LAUNCH_ATTRIBUTE_LAUNCH_COMPLETION_EVENT,
                      [=](auto& value) { value.launchCompletionEvent.event = event; })};
  }
  return {Attribute(CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_EVENT, [=](auto& value) {
    value.programmaticEvent.event = event;
    value.programmaticEvent.triggerAtBlockStart = record == Record::kAtBlockStart ? 1 : 0;
  })};
}

CUevent Event() {
  CUevent event = nullptr;
  Check(cuEventCreate(&event, CU_EVENT_DISABLE_TIMING), "cuEventCreate");
  return event;
}

Case EventCase(const std::string& name, Record a, Record b) {
  Build build = Captured([=](const Device& device, CUstream stream, bool is_b, unsigned tag) {
    const Record record = is_b ? b : a;
    const Shape one{1, 1, 0};
    const CUevent between = Event();
    const CUevent join = Event();
    Launch(stream, reinterpret_cast<const void*>(First), one, Recording(record, between),
           device.board, tag);
    if (record == Record::kPlain) Check(cuEventRecord(between, stream), "cuEventRecord");
    Check(cuStreamWaitEvent(device.side, between, 0), "cuStreamWaitEvent");
    Launch(device.side, reinterpret_cast<const void*>(Second), one, {}, device.board, tag);
    Check(cuEventRecord(join, device.side), "cuEventRecord");
    Check(cuStreamWaitEvent(stream, join, 0), "cuStreamWaitEvent");
  });
  return {kGroup, name, "", std::move(build), Overlaps()};
}

// On the first half of the data for a; on none or on the second half for b.
Case WindowCase(const std::string& name, bool b_has_one) {
  Build build = Captured([=](const Device& device, CUstream stream, bool is_b, unsigned tag) {
    Attributes attributes;
    if (!is_b || b_has_one) {
      attributes.push_back(Attribute(CU_LAUNCH_ATTRIBUTE_ACCESS_POLICY_WINDOW, [&](auto& value) {
        auto& window = value.accessPolicyWindow;
        const CUdeviceptr base = device.data + (is_b ? kDataBytes / 2 : 0);
        window.base_ptr = reinterpret_cast<void*>(base);
        window.num_bytes = kDataBytes / 2;
        window.hitRatio = 1;
        window.hitProp = CU_ACCESS_PROPERTY_PERSISTING;
        window.missProp = CU_ACCESS_PROPERTY_STREAMING;
      }));
    }
    Launch(stream, reinterpret_cast<const void*>(Clusters), Shape{}, attributes, device.board, tag);
  });
  return {kGroup, name, "", std::move(build), Reads(kCluster)};
}

}  // namespace

std::vector<Case> LaunchCases() {
  const auto* const clusters = reinterpret_cast<const void*>(Clusters);
  const auto* const cooperative = reinterpret_cast<const void*>(Cooperative);
  const auto* const placement = reinterpret_cast<const void*>(Placement);
  const auto* const residency = reinterpret_cast<const void*>(Residency);
  // Two blocks fill a multiprocessor, so that one can hold a whole cluster.
  const Shape full{264, 1024, 0};
  const Shape shared{1848, 64, 16 << 10};
  // Of other attributes than the cluster's this kernel says nothing: only whether the update is
  // taken is found out.
  const auto plain = [&](const std::string& name, const std::string& documented, Attributes a,
                         Attributes b) {
    return LaunchCase(name, documented, clusters, {std::move(a)}, {std::move(b)}, Reads(kCluster));
  };
  return {
      plain("cluster 1 to 2", "", {Cluster(1)}, {Cluster(2)}),
      plain("cluster 2 to 4", "", {Cluster(2)}, {Cluster(4)}),
      plain("cluster 2 to none", "", {Cluster(2)}, {}),
      plain("cluster none to 2", "", {}, {Cluster(2)}),
      plain("preferred cluster none to 4", "", {Cluster(2)}, {Cluster(2), PreferredCluster(4)}),
      LaunchCase("cluster scheduling, spread to balanced", "", placement,
                 {{Cluster(2), Scheduling(CU_CLUSTER_SCHEDULING_POLICY_SPREAD)}, full},
                 {{Cluster(2), Scheduling(CU_CLUSTER_SCHEDULING_POLICY_LOAD_BALANCING)}, full},
                 CountsSharedMultiprocessors()),
      LaunchCase("cooperative off to on", "refused", cooperative, {{}}, {{Together(1)}},
                 Reads(kValid)),
      LaunchCase("cooperative on to off", "refused", cooperative, {{Together(1)}}, {{}},
                 Reads(kValid)),
      plain("priority 0 to -1", "refused", {Priority(0)}, {Priority(-1)}),
      plain("priority none to -1", "refused", {}, {Priority(-1)}),
      plain("priority none to 0", "", {}, {Priority(0)}),
      WindowCase("access policy window, another", true),
      WindowCase("access policy window to none", false),
      plain("memory synchronisation domain", "", {Domain(CU_LAUNCH_MEM_SYNC_DOMAIN_DEFAULT)},
            {Domain(CU_LAUNCH_MEM_SYNC_DOMAIN_REMOTE)}),
      plain("memory synchronisation domain map", "", {DomainMap(0, 1)}, {DomainMap(1, 0)}),
      LaunchCase("shared memory carveout 100 to 10 %", "", residency, {{Carveout(100)}, shared},
                 {{Carveout(10)}, shared}, Reads(kPeak)),
      FunctionCarveoutCase(shared),
      plain("NVLink centric scheduling 0 to 1", "", {NvlinkCentric(0)}, {NvlinkCentric(1)}),
      plain("device-updatable off to on", "refused", {}, {DeviceUpdatable()}),
      plain("device-updatable on to off", "refused", {DeviceUpdatable()}, {}),
      plain("device-updatable on to on", "refused", {DeviceUpdatable()}, {DeviceUpdatable()}),
      StreamSerializationCase("programmatic serialization off to on", false, true),
      StreamSerializationCase("programmatic serialization on to off", true, false),
      EventCase("plain event to programmatic", Record::kPlain, Record::kProgrammatic),
      EventCase("programmatic event to plain", Record::kProgrammatic, Record::kPlain),
      EventCase("programmatic event to trigger at block start", Record::kProgrammatic,
                Record::kAtBlockStart),
      EventCase("plain event to launch completion", Record::kPlain, Record::kLaunchCompletion),
      EventCase("launch completion event to programmatic", Record::kLaunchCompletion,
                Record::kProgrammatic),
  };
}
