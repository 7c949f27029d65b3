// The cases of graph_updates about nodes other than kernels.
#include <chrono>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "graph_updates.h"

namespace {

using Nodes = std::vector<CUgraphNode>;

__global__ void Write(unsigned* board, unsigned tag, unsigned function) {
  if (threadIdx.x != 0 || blockIdx.x != 0) return;
  board[kTested] = tag;
  board[kFunction] = function;
  board[kGrid] = gridDim.x;
}

__global__ void WriteOther(unsigned* board, unsigned tag, unsigned function) {
  if (threadIdx.x != 0 || blockIdx.x != 0) return;
  board[kTested] = tag;
  board[kFunction] = function + 100;
  board[kGrid] = gridDim.x;
}

// Writes the first and the last word of `memory` and reads them back.
__global__ void Touch(unsigned* board, unsigned tag, unsigned* memory, unsigned words) {
  atomicExch(memory, tag);
  atomicExch(memory + words - 1, tag);
  board[kErrors] = atomicAdd(memory, 0) != tag || atomicAdd(memory + words - 1, 0) != tag ? 1 : 0;
  board[kSize] = words;
  board[kTested] = tag;
}

constexpr size_t kHalf = kDataBytes / 2;

CUgraphNode AddWrite(const Device& device, CUgraph graph, const Nodes& after, unsigned tag,
                     unsigned function, unsigned grid = 1, bool other = false) {
  const auto* const kernel =
      other ? reinterpret_cast<const void*>(WriteOther) : reinterpret_cast<const void*>(Write);
  return AddKernel(graph, after, kernel, Shape{grid, 32, 0}, device.board, tag, function);
}

// Where the data is not 0.
Run ReadsData() {
  return [](const Device& device, CUgraphExec exec) {
    Board board = LaunchAndRead(device, exec);
    std::vector<unsigned char> data(kDataBytes);
    Check(cuMemcpyDtoH(data.data(), device.data, kDataBytes), "cuMemcpyDtoH");
    size_t first = kDataBytes;
    size_t last = 0;
    size_t bytes = 0;
    for (size_t i = 0; i < kDataBytes; ++i) {
      if (data[i] == 0) continue;
      if (bytes == 0) first = i;
      last = i;
      ++bytes;
    }
    if (bytes == 0) return Seen{"nothing", std::move(board)};
    std::string property = std::to_string(bytes) + " bytes of " + std::to_string(data[first]);
    property += " in " + std::to_string(first) + " to " + std::to_string(last);
    return Seen{std::move(property), std::move(board)};
  };
}

Run ReadsFunction() {
  return [](const Device& device, CUgraphExec exec) {
    Board board = LaunchAndRead(device, exec);
    std::string property = "function " + std::to_string(board[kFunction]);
    property += ", grid " + std::to_string(board[kGrid]);
    return Seen{std::move(property), std::move(board)};
  };
}

struct Memset {
  size_t offset = 0;
  size_t width = 4096;  // elements
  size_t height = 1;
  unsigned value = 1;
  unsigned element = 1;  // bytes
};

Case MemsetCase(const std::string& name, const std::string& documented, const Memset& a,
                const Memset& b) {
  Build build =
      Added([=](const Device& device, CUgraph graph, CUgraphNode before, bool is_b, unsigned) {
        const Memset& memset = is_b ? b : a;
        CUDA_MEMSET_NODE_PARAMS params{};
        params.dst = device.data + memset.offset;
        params.pitch = memset.height == 1 ? 0 : 1024;
        params.value = memset.value;
        params.elementSize = memset.element;
        params.width = memset.width;
        params.height = memset.height;
        CUgraphNode node = nullptr;
        Check(cuGraphAddMemsetNode(&node, graph, &before, 1, &params, device.context),
              "cuGraphAddMemsetNode");
        return Nodes{node};
      });
  return {"memset", name, documented, std::move(build), ReadsData()};
}

enum class From { kDevice, kPinned, kPageable };

struct Memcpy {
  From from = From::kDevice;
  size_t source_offset = 0;
  size_t offset = 0;
  size_t width = 4096;  // bytes
  size_t height = 1;
};

CUDA_MEMCPY3D MemcpyParams(const Device& device, const Memcpy& memcpy) {
  CUDA_MEMCPY3D params{};
  if (memcpy.from == From::kDevice) {
    params.srcMemoryType = CU_MEMORYTYPE_DEVICE;
    params.srcDevice = device.source + memcpy.source_offset;
  } else {
    params.srcMemoryType = CU_MEMORYTYPE_HOST;
    const unsigned char* const host =
        memcpy.from == From::kPinned ? device.pinned : device.pageable;
    params.srcHost = host + memcpy.source_offset;
  }
  params.dstMemoryType = CU_MEMORYTYPE_DEVICE;
  params.dstDevice = device.data + memcpy.offset;
  params.srcPitch = params.dstPitch = memcpy.height == 1 ? memcpy.width : 1024;
  params.srcHeight = params.dstHeight = memcpy.height;
  params.WidthInBytes = memcpy.width;
  params.Height = memcpy.height;
  params.Depth = 1;
  return params;
}

Case MemcpyCase(const std::string& name, const std::string& documented, const Memcpy& a,
                const Memcpy& b) {
  Build build =
      Added([=](const Device& device, CUgraph graph, CUgraphNode before, bool is_b, unsigned) {
        const CUDA_MEMCPY3D params = MemcpyParams(device, is_b ? b : a);
        CUgraphNode node = nullptr;
        Check(cuGraphAddMemcpyNode(&node, graph, &before, 1, &params, device.context),
              "cuGraphAddMemcpyNode");
        return Nodes{node};
      });
  return {"memcpy", name, documented, std::move(build), ReadsData()};
}

unsigned host_function = 0;
unsigned host_argument = 0;
unsigned host_arguments[] = {1, 2};

void CUDA_CB FirstCallback(void* argument) {
  host_function = 1;
  host_argument = *static_cast<unsigned*>(argument);
}

void CUDA_CB SecondCallback(void* argument) {
  host_function = 2;
  host_argument = *static_cast<unsigned*>(argument);
}

Case HostCase(const std::string& name, bool other_function) {
  Build build = Added([=](const Device&, CUgraph graph, CUgraphNode before, bool b, unsigned) {
    CUDA_HOST_NODE_PARAMS params{};
    params.fn = b && other_function ? SecondCallback : FirstCallback;
    params.userData = &host_arguments[b ? 1 : 0];
    CUgraphNode node = nullptr;
    Check(cuGraphAddHostNode(&node, graph, &before, 1, &params), "cuGraphAddHostNode");
    return Nodes{node};
  });
  Run run = [](const Device& device, CUgraphExec exec) {
    host_function = host_argument = 0;
    Board board = LaunchAndRead(device, exec);
    return Seen{
        "callback " + std::to_string(host_function) + " with " + std::to_string(host_argument),
        std::move(board)};
  };
  return {"host callback", name, "carried", std::move(build), std::move(run)};
}

// The events of a and b; made when first asked for, since that needs a context.
CUevent EventOf(bool b) {
  static CUevent events[2] = {nullptr, nullptr};
  CUevent& event = events[b ? 1 : 0];
  if (event == nullptr) Check(cuEventCreate(&event, CU_EVENT_DEFAULT), "cuEventCreate");
  return event;
}

// Which of the two events is newer than one that was recorded before the launch.
Seen SeesRecorded(const Device& device, CUgraphExec exec) {
  static CUevent start = nullptr;
  if (start == nullptr) Check(cuEventCreate(&start, CU_EVENT_DEFAULT), "cuEventCreate");
  for (const bool b : {false, true}) {
    Check(cuEventRecord(EventOf(b), device.stream), "cuEventRecord");
  }
  Check(cuStreamSynchronize(device.stream), "cuStreamSynchronize");
  std::this_thread::sleep_for(std::chrono::milliseconds(1));
  Check(cuEventRecord(start, device.stream), "cuEventRecord");
  Board board = LaunchAndRead(device, exec);
  std::string property;
  for (const bool b : {false, true}) {
    float milliseconds = 0;
    Check(cuEventElapsedTime(&milliseconds, start, EventOf(b)), "cuEventElapsedTime");
    if (milliseconds > 0) property += b ? "b recorded" : "a recorded";
  }
  return {property.empty() ? "none recorded" : property, std::move(board)};
}

// Which of the two events a launch waits for: one after the other is held back by a host callback
// on the other stream, for 100 ms.
Seen SeesWaited(const Device& device, CUgraphExec exec) {
  std::string property;
  for (const bool b : {false, true}) {
    Check(cuEventRecord(EventOf(b), device.stream), "cuEventRecord");
  }
  // The first launch of an executable may take longer than the others: nothing to wait for yet.
  Board board = LaunchAndRead(device, exec);
  for (const bool b : {false, true}) {
    const auto hold = [](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(100)); };
    Check(cuEventRecord(EventOf(!b), device.stream), "cuEventRecord");
    Check(cuStreamSynchronize(device.stream), "cuStreamSynchronize");
    Check(cuLaunchHostFunc(device.side, hold, nullptr), "cuLaunchHostFunc");
    Check(cuEventRecord(EventOf(b), device.side), "cuEventRecord");
    const auto start = std::chrono::steady_clock::now();
    board = LaunchAndRead(device, exec);
    const auto took = std::chrono::steady_clock::now() - start;
    if (took > std::chrono::milliseconds(50)) property += b ? "waits for b" : "waits for a";
    Check(cuStreamSynchronize(device.side), "cuStreamSynchronize");
  }
  return {property.empty() ? "waits for none" : property, std::move(board)};
}

Case EventCase(bool wait) {
  Build build = Added([=](const Device&, CUgraph graph, CUgraphNode before, bool b, unsigned) {
    CUgraphNode node = nullptr;
    const CUresult result = wait ? cuGraphAddEventWaitNode(&node, graph, &before, 1, EventOf(b))
                                 : cuGraphAddEventRecordNode(&node, graph, &before, 1, EventOf(b));
    Check(result, "cuGraphAddEventWaitNode or RecordNode");
    return Nodes{node};
  });
  return {"event", wait ? "wait, another event" : "record, another event", "", std::move(build),
          wait ? SeesWaited : SeesRecorded};
}

// What becomes of a node that does nothing.
Case EmptyCase(const std::string& name, const std::string& documented, bool kernel_in_a,
               bool kernel_in_b) {
  Build build =
      Added([=](const Device& device, CUgraph graph, CUgraphNode before, bool b, unsigned tag) {
        if (b ? kernel_in_b : kernel_in_a) {
          return Nodes{AddWrite(device, graph, {before}, tag, 1)};
        }
        CUgraphNode node = nullptr;
        Check(cuGraphAddEmptyNode(&node, graph, &before, 1), "cuGraphAddEmptyNode");
        return Nodes{node};
      });
  return {"empty", name, documented, std::move(build), ReadsFunction()};
}

// What a graph within a graph holds for a; for b one of these is different.
enum class Change { kNone, kArgument, kGrid, kFunction, kMoreNodes };

void FillInner(const Device& device, CUgraph graph, Change change, bool b, unsigned tag) {
  const Change now = b ? change : Change::kNone;
  const CUgraphNode node = AddWrite(device, graph, {}, tag, now == Change::kArgument ? 2 : 1,
                                    now == Change::kGrid ? 8 : 1, now == Change::kFunction);
  if (now == Change::kMoreNodes) AddWrite(device, graph, {node}, tag, 3);
}

Case ChildCase(const std::string& name, const std::string& documented, Change change) {
  Build build = Added([=](const Device& device, CUgraph graph, CUgraphNode before, bool b,
                          unsigned tag) {
    CUgraph child = nullptr;
    Check(cuGraphCreate(&child, 0), "cuGraphCreate");
    FillInner(device, child, change, b, tag);
    CUgraphNode node = nullptr;
    Check(cuGraphAddChildGraphNode(&node, graph, &before, 1, child), "cuGraphAddChildGraphNode");
    return Nodes{node};
  });
  return {"child graph", name, documented, std::move(build), ReadsFunction()};
}

Case ConditionalCase(const std::string& name, const std::string& documented, Change change,
                     unsigned default_in_b = 1) {
  Build build =
      Added([=](const Device& device, CUgraph graph, CUgraphNode before, bool b, unsigned tag) {
        CUgraphNodeParams params{};
        params.type = CU_GRAPH_NODE_TYPE_CONDITIONAL;
        Check(cuGraphConditionalHandleCreate(&params.conditional.handle, graph, device.context,
                                             b ? default_in_b : 1, CU_GRAPH_COND_ASSIGN_DEFAULT),
              "cuGraphConditionalHandleCreate");
        params.conditional.type = CU_GRAPH_COND_TYPE_IF;
        params.conditional.size = 1;
        params.conditional.ctx = device.context;
        CUgraphNode node = nullptr;
        Check(cuGraphAddNode(&node, graph, &before, nullptr, 1, &params), "cuGraphAddNode");
        FillInner(device, params.conditional.phGraph_out[0], change, b, tag);
        return Nodes{node};
      });
  return {"conditional", name, documented, std::move(build), ReadsFunction()};
}

// Memory that the graph itself allocates, uses and gives back.
Case MemoryCase(const std::string& name, size_t bytes_a, size_t bytes_b) {
  Build build =
      Added([=](const Device& device, CUgraph graph, CUgraphNode before, bool b, unsigned tag) {
        CUDA_MEM_ALLOC_NODE_PARAMS params{};
        params.poolProps.allocType = CU_MEM_ALLOCATION_TYPE_PINNED;
        params.poolProps.location.type = CU_MEM_LOCATION_TYPE_DEVICE;
        params.poolProps.location.id = device.device;
        params.bytesize = b ? bytes_b : bytes_a;
        CUgraphNode alloc = nullptr;
        Check(cuGraphAddMemAllocNode(&alloc, graph, &before, 1, &params), "cuGraphAddMemAllocNode");
        const auto words = static_cast<unsigned>(params.bytesize / sizeof(unsigned));
        const CUgraphNode touch = AddKernel(graph, {alloc}, reinterpret_cast<const void*>(Touch),
                                            Shape{1, 1, 0}, device.board, tag, params.dptr, words);
        CUgraphNode free = nullptr;
        Check(cuGraphAddMemFreeNode(&free, graph, &touch, 1, params.dptr), "cuGraphAddMemFreeNode");
        return Nodes{free};
      });
  Run run = [](const Device& device, CUgraphExec exec) {
    Board board = LaunchAndRead(device, exec);
    std::string property = std::to_string(board[kSize]) + " words";
    if (board[kErrors] != 0) property += ", WRONG";
    return Seen{std::move(property), std::move(board)};
  };
  return {"memory", name, "", std::move(build), std::move(run)};
}

}  // namespace

std::vector<Case> NodeCases() {
  const std::string carried = "carried";
  const std::string refused = "refused";
  return {
      MemsetCase("1D, another address", carried, {}, {kHalf}),
      MemsetCase("1D, 4 to 64 KiB", "may be refused", {}, {0, 64 << 10}),
      MemsetCase("1D, 64 to 4 KiB", "may be refused", {0, 64 << 10}, {}),
      MemsetCase("1D, another value", carried, {}, {0, 4096, 1, 2}),
      MemsetCase("1D, elements of 1 to 4 bytes", "may be refused", {}, {0, 1024, 1, 0x02020202, 4}),
      MemsetCase("2D, another address and value", carried, {0, 64, 16}, {kHalf, 64, 16, 2}),
      MemsetCase("2D, another width", refused, {0, 64, 16}, {0, 128, 16}),
      MemsetCase("2D, another height", refused, {0, 64, 16}, {0, 64, 32}),
      MemsetCase("1D to 2D", refused, {}, {0, 64, 16}),
      MemcpyCase("device to device, other addresses", carried, {}, {From::kDevice, kHalf, kHalf}),
      MemcpyCase("device to device, 4 to 64 KiB", "", {}, {From::kDevice, 0, 0, 64 << 10}),
      MemcpyCase("device to device, 64 to 4 KiB", "", {From::kDevice, 0, 0, 64 << 10}, {}),
      MemcpyCase("pinned host to device, other addresses", carried, {From::kPinned},
                 {From::kPinned, kHalf, kHalf}),
      MemcpyCase("pinned to pageable host memory", "", {From::kPinned}, {From::kPageable}),
      MemcpyCase("pageable to pinned host memory", "", {From::kPageable}, {From::kPinned}),
      MemcpyCase("device to device, to host to device", refused, {}, {From::kPinned}),
      MemcpyCase("2D, another width", "", {From::kDevice, 0, 0, 64, 16},
                 {From::kDevice, 0, 0, 128, 16}),
      MemcpyCase("2D, another height", "", {From::kDevice, 0, 0, 64, 16},
                 {From::kDevice, 0, 0, 64, 32}),
      MemcpyCase("1D to 2D", "", {}, {From::kDevice, 0, 0, 64, 16}),
      HostCase("another argument", false),
      HostCase("another function and argument", true),
      EventCase(false),
      EventCase(true),
      EmptyCase("empty to empty", carried, false, false),
      EmptyCase("empty to kernel", refused, false, true),
      EmptyCase("kernel to empty", refused, true, false),
      ChildCase("another argument", carried, Change::kArgument),
      ChildCase("another grid", carried, Change::kGrid),
      ChildCase("another function", carried, Change::kFunction),
      ChildCase("one node more", refused, Change::kMoreNodes),
      MemoryCase("allocation of the same size", 1 << 20, 1 << 20),
      MemoryCase("allocation of 1 to 16 MiB", 1 << 20, 16 << 20),
      ConditionalCase("another argument in the body", carried, Change::kArgument),
      ConditionalCase("another grid in the body", carried, Change::kGrid),
      ConditionalCase("another function in the body", carried, Change::kFunction),
      ConditionalCase("one node more in the body", refused, Change::kMoreNodes),
      ConditionalCase("default 1 to 0", carried, Change::kNone, 0),
  };
}
