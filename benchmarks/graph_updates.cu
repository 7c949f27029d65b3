// Which properties of a CUDA graph cuGraphExecUpdate carries over to an executable graph, which it
// refuses, and which it silently keeps. Started by graph_updates.py, once a case, since a case may
// hang the GPU or lose its context; every finding is printed as a line of JSON when it is made.
//
//     graph_updates list                   the cases
//     graph_updates device                 the GPU
//     graph_updates case GROUP NAME        an update from a to b, and each of the two alone
//     graph_updates control GROUP NAME     each of the two alone
//     graph_updates measure NAME [NODES]   graph_updates_costs.cu
#include <cuda_runtime_api.h>

#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>

#include "graph_updates.h"

__global__ void Tag(unsigned* word, unsigned tag) { *word = tag; }

void Say(const char* key, const std::string& value) {
  std::printf("{\"%s\": \"%s\"}\n", key, value.c_str());
  std::fflush(stdout);
}

std::string Name(CUresult result) {
  const char* name = nullptr;
  if (cuGetErrorName(result, &name) != CUDA_SUCCESS) return std::to_string(result);
  return name;
}

void Check(CUresult result, const char* call) {
  if (result == CUDA_SUCCESS) return;
  Say("error", std::string(call) + ": " + Name(result));
  // No destructor and no atexit handler: they would call a driver that may have lost its context.
  std::_Exit(3);
}

CUfunction Handle(const void* kernel) {
  cudaFunction_t function = nullptr;
  const cudaError_t error = cudaGetFuncBySymbol(&function, kernel);
  if (error != cudaSuccess) {
    Say("error", std::string("cudaGetFuncBySymbol: ") + cudaGetErrorName(error));
    std::_Exit(3);
  }
  return function;
}

void LaunchPacked(CUstream stream, CUfunction function, const Shape& shape,
                  const Attributes& attributes, void** arguments) {
  Attributes written = attributes;  // the driver writes into some
  CUlaunchConfig config{};
  config.gridDimX = shape.grid;
  config.gridDimY = config.gridDimZ = 1;
  config.blockDimX = shape.block;
  config.blockDimY = config.blockDimZ = 1;
  config.sharedMemBytes = shape.shared;
  config.hStream = stream;
  config.attrs = written.empty() ? nullptr : written.data();
  config.numAttrs = static_cast<unsigned>(written.size());
  Check(cuLaunchKernelEx(&config, function, arguments, nullptr), "cuLaunchKernelEx");
}

CUgraphNode AddKernelPacked(CUgraph graph, const std::vector<CUgraphNode>& after,
                            CUfunction function, const Shape& shape, void** arguments) {
  CUDA_KERNEL_NODE_PARAMS params{};
  params.func = function;
  params.gridDimX = shape.grid;
  params.gridDimY = params.gridDimZ = 1;
  params.blockDimX = shape.block;
  params.blockDimY = params.blockDimZ = 1;
  params.sharedMemBytes = shape.shared;
  params.kernelParams = arguments;
  CUgraphNode node = nullptr;
  Check(cuGraphAddKernelNode(&node, graph, after.data(), after.size(), &params),
        "cuGraphAddKernelNode");
  return node;
}

CUgraphNode AddTag(const Device& device, CUgraph graph, const std::vector<CUgraphNode>& after,
                   Word word, unsigned tag) {
  const Shape one{1, 1, 0};
  return AddKernel(graph, after, reinterpret_cast<const void*>(Tag), one,
                   device.board + word * sizeof(unsigned), tag);
}

// The flags of torch.cuda.CUDAGraph.
CUgraphExec Instantiate(CUgraph graph) {
  CUgraphExec exec = nullptr;
  Check(cuGraphInstantiate(&exec, graph,
                           CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH |
                               CUDA_GRAPH_INSTANTIATE_FLAG_USE_NODE_PRIORITY),
        "cuGraphInstantiate");
  return exec;
}

Build Captured(std::function<void(const Device&, CUstream stream, bool b, unsigned tag)> tested) {
  return [tested](const Device& device, bool b, unsigned tag) {
    const void* const kernel = reinterpret_cast<const void*>(Tag);
    const Shape one{1, 1, 0};
    CUgraph graph = nullptr;
    Check(cuStreamBeginCapture(device.stream, CU_STREAM_CAPTURE_MODE_RELAXED),
          "cuStreamBeginCapture");
    Launch(device.stream, kernel, one, {}, device.board + kBefore * sizeof(unsigned), tag);
    tested(device, device.stream, b, tag);
    Launch(device.stream, kernel, one, {}, device.board + kAfter * sizeof(unsigned), tag);
    Check(cuStreamEndCapture(device.stream, &graph), "cuStreamEndCapture");
    return graph;
  };
}

Build Added(std::function<std::vector<CUgraphNode>(const Device&, CUgraph graph, CUgraphNode before,
                                                   bool b, unsigned tag)>
                tested) {
  return [tested](const Device& device, bool b, unsigned tag) {
    CUgraph graph = nullptr;
    Check(cuGraphCreate(&graph, 0), "cuGraphCreate");
    const CUgraphNode before = AddTag(device, graph, {}, kBefore, tag);
    AddTag(device, graph, tested(device, graph, before, b, tag), kAfter, tag);
    return graph;
  };
}

Board LaunchAndRead(const Device& device, CUgraphExec exec) {
  Board board(kBoardWords);
  const size_t bytes = kBoardWords * sizeof(unsigned);
  Check(cuMemsetD8Async(device.board, 0, bytes, device.stream), "cuMemsetD8Async");
  Check(cuMemsetD8Async(device.data, 0, kDataBytes, device.stream), "cuMemsetD8Async");
  Check(cuGraphLaunch(exec, device.stream), "cuGraphLaunch");
  Check(cuStreamSynchronize(device.stream), "cuStreamSynchronize after the launch");
  Check(cuMemcpyDtoH(board.data(), device.board, bytes), "cuMemcpyDtoH");
  return board;
}

Run Reads(Word word) {
  return [word](const Device& device, CUgraphExec exec) {
    Board board = LaunchAndRead(device, exec);
    return Seen{std::to_string(board[word]), std::move(board)};
  };
}

namespace {

const char* const kUpdateResults[] = {"SUCCESS",           "ERROR",
                                      "TOPOLOGY_CHANGED",  "NODE_TYPE_CHANGED",
                                      "FUNCTION_CHANGED",  "PARAMETERS_CHANGED",
                                      "NOT_SUPPORTED",     "UNSUPPORTED_FUNCTION_CHANGE",
                                      "ATTRIBUTES_CHANGED"};

// "SUCCESS", or what the driver says is wrong.
std::string Update(CUgraphExec exec, CUgraph graph) {
  CUgraphExecUpdateResultInfo info{};
  const CUresult code = cuGraphExecUpdate(exec, graph, &info);
  const unsigned result = info.result;
  const size_t known = sizeof(kUpdateResults) / sizeof(kUpdateResults[0]);
  const std::string said = result < known ? kUpdateResults[result] : std::to_string(result);
  if (code == CUDA_SUCCESS && result == CU_GRAPH_EXEC_UPDATE_SUCCESS) return said;
  return Name(code) + ", " + said;
}

// Whose parameters the nodes of a launch were given: those of `latest`, of `earlier`, or a mixture.
std::string WhoseParameters(const Board& board, unsigned earlier, unsigned latest) {
  bool all_latest = true;
  bool all_earlier = true;
  std::string tags;
  for (unsigned word = 0; word < kTagsEnd; ++word) {
    if (board[word] == 0) continue;  // no such node
    all_latest = all_latest && board[word] == latest;
    all_earlier = all_earlier && board[word] == earlier;
    tags += (tags.empty() ? "" : " ") + std::to_string(board[word]);
  }
  if (tags.empty()) return "none";
  if (all_latest) return "new";
  return all_earlier ? "old" : "mixed: " + tags;
}

// A graph that nothing was updated to: what an observation should say.
void RunControl(const Device& device, const Case& one, bool b) {
  Say("at", b ? "b alone" : "a alone");
  const CUgraphExec exec = Instantiate(one.build(device, b, 1));
  Say(b ? "b" : "a", one.run(device, exec).property);
  Check(cuGraphExecDestroy(exec), "cuGraphExecDestroy");
}

void RunControls(const Device& device, const Case& one) {
  RunControl(device, one, false);
  RunControl(device, one, true);
  Say("at", "end");
}

// The update comes before the graphs alone: launching b alone could make room (local memory) that
// the update should have made. Each step builds a graph of its own: some may not be instantiated
// twice.
void RunCase(const Device& device, const Case& one) {
  Say("at", "building a");
  const CUgraph first = one.build(device, false, 1);
  const CUgraphExec exec = Instantiate(first);
  Say("at", "first launch");
  Say("first", one.run(device, exec).property);
  Say("at", "building b");
  const CUgraph b = one.build(device, true, 2);
  Say("told_apart_by", ToldApartBy(first, b));
  Say("at", "update");
  const std::string updated = Update(exec, b);
  Say("update", updated);
  Say("at", "launch after the update");
  const Seen after = one.run(device, exec);
  Say("after", after.property);
  Say("parameters", WhoseParameters(after.board, 1, 2));
  const unsigned earlier = updated == "SUCCESS" ? 2 : 1;
  Say("at", "building a again");
  const CUgraph a = one.build(device, false, 3);
  Say("at", "update back to a");
  Say("back", Update(exec, a));
  Say("at", "launch after the update back");
  const Seen back = one.run(device, exec);
  Say("back_after", back.property);
  Say("back_parameters", WhoseParameters(back.board, earlier, 3));
  Check(cuGraphExecDestroy(exec), "cuGraphExecDestroy");
  RunControls(device, one);
}

std::vector<Case> AllCases() {
  std::vector<Case> all;
  for (auto* cases : {LaunchCases, FunctionCases, NodeCases, TopologyCases}) {
    for (Case& one : cases()) all.push_back(std::move(one));
  }
  return all;
}

Device Open() {
  Device device;
  Check(cuInit(0), "cuInit");
  Check(cuDeviceGet(&device.device, 0), "cuDeviceGet");
  // The primary context is the one that the runtime registers this program's kernels with.
  Check(cuDevicePrimaryCtxRetain(&device.context, device.device), "cuDevicePrimaryCtxRetain");
  Check(cuCtxSetCurrent(device.context), "cuCtxSetCurrent");
  Check(cuStreamCreate(&device.stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  Check(cuStreamCreate(&device.side, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
  Check(cuMemAlloc(&device.board, kBoardWords * sizeof(unsigned)), "cuMemAlloc");
  Check(cuMemAlloc(&device.data, kDataBytes), "cuMemAlloc");
  Check(cuMemAlloc(&device.source, kDataBytes), "cuMemAlloc");
  Check(cuMemsetD8(device.source, 0x33, kDataBytes / 2), "cuMemsetD8");
  Check(cuMemsetD8(device.source + kDataBytes / 2, 0x44, kDataBytes / 2), "cuMemsetD8");
  void* pinned = nullptr;
  Check(cuMemAllocHost(&pinned, kDataBytes), "cuMemAllocHost");
  device.pinned = static_cast<unsigned char*>(pinned);
  std::memset(device.pinned, 0x11, kDataBytes / 2);
  std::memset(device.pinned + kDataBytes / 2, 0x22, kDataBytes / 2);
  device.pageable = new unsigned char[kDataBytes];  // the process's own, to its end
  std::memset(device.pageable, 0x55, kDataBytes);
  Check(cuCtxSynchronize(), "cuCtxSynchronize");
  return device;
}

void PrintDevice() {
  Check(cuInit(0), "cuInit");
  CUdevice device = 0;
  char name[128] = "";
  int driver = 0;
  Check(cuDeviceGet(&device, 0), "cuDeviceGet");
  Check(cuDeviceGetName(name, sizeof(name), device), "cuDeviceGetName");
  Check(cuDriverGetVersion(&driver), "cuDriverGetVersion");
  std::printf("{\"gpu\": \"%s\", \"cuda_driver\": \"%d.%d\", \"cuda_toolkit\": \"%d.%d\"}\n", name,
              driver / 1000, driver % 1000 / 10, CUDA_VERSION / 1000, CUDA_VERSION % 1000 / 10);
}

int Usage() {
  std::fprintf(stderr,
               "usage: graph_updates list | device | case GROUP NAME | control GROUP NAME | "
               "measure NAME [NODES]\n");
  return 2;
}

int Main(int count, char** words) {
  const std::string command = count > 1 ? words[1] : "";
  if (command == "list" && count == 2) {
    for (const Case& one : AllCases()) {
      std::printf("{\"group\": \"%s\", \"name\": \"%s\", \"documented\": \"%s\"}\n",
                  one.group.c_str(), one.name.c_str(), one.documented.c_str());
    }
    return 0;
  }
  if (command == "device" && count == 2) {
    PrintDevice();
    return 0;
  }
  if (command == "measure" && (count == 3 || count == 4)) {
    char* end = nullptr;
    const unsigned long nodes = count == 4 ? std::strtoul(words[3], &end, 10) : 0;
    if (count == 4 && (*end != '\0' || nodes == 0 || nodes > 100'000)) return Usage();
    return Measure(Open(), words[2], static_cast<unsigned>(nodes)) ? 0 : Usage();
  }
  if ((command == "case" || command == "control") && count == 4) {
    for (const Case& one : AllCases()) {
      if (one.group != words[2] || one.name != words[3]) continue;
      Say("at", "opening the GPU");
      const Device device = Open();
      command == "case" ? RunCase(device, one) : RunControls(device, one);
      return 0;
    }
  }
  return Usage();
}

}  // namespace

int main(int count, char** words) {
  try {
    return Main(count, words);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "graph_updates: %s\n", error.what());
    return 1;
  }
}
