// What the driver says to memory that a capture names before anybody may access it: may access come
// later, from another thread, and what does that thread cost the one that captures?
//
//   nvcc -std=c++17 -O2 -arch=sm_90 benchmarks/driver_facts/deferred_access.cu -lcuda -o deferred_access
//   ./deferred_access
//
// README.md says what it printed. deferred_access.py asks the same of torch and Triton.
#include <cuda.h>
#include <cuda_runtime.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <vector>

namespace {

using Clock = std::chrono::steady_clock;
constexpr size_t kPage = size_t{2} << 20;
constexpr int kCount = 1024;  // words that each kernel writes

CUcontext context;
CUmemAllocationProp properties{};
std::vector<CUmemAccessDesc> everyone(1);
cudaStream_t stream;
int* ordinary;  // cudaMalloc memory that holds 0, 1, 2, ...
int* host;      // pinned

__global__ void AddOne(int* out, const int* in) {
  const int i = blockIdx.x * blockDim.x + threadIdx.x;
  if (i < kCount) out[i] = in[i] + 1;
}
void Launch(int* out, const int* in, cudaStream_t on = nullptr) {
  AddOne<<<4, 256, 0, on != nullptr ? on : stream>>>(out, in);
}

void Must(CUresult code, const char* what) {
  if (code == CUDA_SUCCESS) return;
  std::printf("%s failed: %d\n", what, code);
  std::exit(1);
}
const char* Name(cudaError_t error) {
  cudaGetLastError();
  return error == cudaSuccess ? "ok" : cudaGetErrorName(error);
}

// Four pages side by side; `state`: only reserved, mapped, or with access.
enum State { kReserved, kMapped, kAccess };
constexpr const char* kStates[] = {"reserved", "mapped without access", "with access"};
struct Memory {
  CUdeviceptr base = 0;
  CUmemGenericAllocationHandle handles[4];
  State state = kReserved;

  explicit Memory(State wanted) {
    Must(cuMemAddressReserve(&base, 4 * kPage, 0, 0, 0), "reserve");
    for (auto& handle : handles) Must(cuMemCreate(&handle, kPage, &properties, 0), "create");
    if (wanted >= kMapped) Map();
    if (wanted >= kAccess) Access();
  }
  void Map() {
    for (int i = 0; i < 4; ++i) Must(cuMemMap(base + i * kPage, kPage, 0, handles[i], 0), "map");
    state = kMapped;
  }
  void Access() {
    if (state == kReserved) Map();
    Must(cuMemSetAccess(base, 4 * kPage, everyone.data(), everyone.size()), "access");
    state = kAccess;
  }
  int* page(int i) const { return reinterpret_cast<int*>(base + i * kPage); }
};

// --- 1. Which operations can be captured, in each mode, and can the graph be instantiated? ---

void Operations(State state, cudaStreamCaptureMode mode, const char* mode_name) {
  Memory m(state);
  const std::vector<std::pair<const char*, std::function<cudaError_t()>>> operations = {
      {"kernel", [&] { return Launch(m.page(0), ordinary), cudaGetLastError(); }},
      {"memset", [&] { return cudaMemsetAsync(m.page(0), 7, 4096, stream); }},
      {"copy d2d", [&] { return cudaMemcpyAsync(m.page(0), ordinary, 4096, cudaMemcpyDeviceToDevice, stream); }},
      {"copy default", [&] { return cudaMemcpyAsync(m.page(1), m.page(0), 4096, cudaMemcpyDefault, stream); }},
      {"copy h2d", [&] { return cudaMemcpyAsync(m.page(0), host, 4096, cudaMemcpyHostToDevice, stream); }},
      {"copy d2h", [&] { return cudaMemcpyAsync(host, m.page(0), 4096, cudaMemcpyDeviceToHost, stream); }},
      {"copy 2d", [&] { return cudaMemcpy2DAsync(m.page(0), 256, m.page(1), 256, 128, 16, cudaMemcpyDeviceToDevice, stream); }},
      {"copy over an edge", [&] { return cudaMemcpyAsync(reinterpret_cast<char*>(m.page(1)) - 2048, ordinary, 4096, cudaMemcpyDeviceToDevice, stream); }},
      {"memset over an edge", [&] { return cudaMemsetAsync(reinterpret_cast<char*>(m.page(1)) - 2048, 7, 4096, stream); }},
  };
  std::string failed;
  for (const auto& [name, operation] : operations) {
    cudaStreamBeginCapture(stream, mode);
    const cudaError_t during = operation();
    cudaGraph_t graph = nullptr;
    const cudaError_t end = cudaStreamEndCapture(stream, &graph);
    cudaGraphExec_t exec = nullptr;
    const cudaError_t made = graph ? cudaGraphInstantiate(&exec, graph, 0) : cudaErrorUnknown;
    if (during || end || made) {
      failed += std::string("; ") + name + ": " + Name(during) + ", " + Name(end) + ", " + Name(made);
    }
    if (exec) cudaGraphExecDestroy(exec);
    if (graph) cudaGraphDestroy(graph);
  }
  std::printf("operations, %s, mode %s: %zu tried, failed%s\n", kStates[state], mode_name,
              operations.size(), failed.empty() ? ": none" : failed.c_str());
}

void PointerAttributes(State state) {
  Memory m(state);
  const auto ask = [&](CUpointer_attribute attribute) {
    unsigned long long value[4] = {};
    const CUresult code = cuPointerGetAttribute(value, attribute, m.base + 512);
    return std::to_string(code) + "=" + std::to_string(value[0] == m.base + 512 ? 1 : value[0] != 0 ? 2 : 0);
  };
  cudaPointerAttributes runtime{};
  const cudaError_t code = cudaPointerGetAttributes(&runtime, m.page(0));
  std::printf("attributes, %s: DEVICE_POINTER %s MEMORY_TYPE %s CONTEXT %s RANGE_START %s DEVICE_ORDINAL %s "
              "BUFFER_ID %s MEMPOOL %s; runtime %s type %d device %d (code=value: 0 none, 1 the address, 2 other)\n",
              kStates[state], ask(CU_POINTER_ATTRIBUTE_DEVICE_POINTER).c_str(), ask(CU_POINTER_ATTRIBUTE_MEMORY_TYPE).c_str(),
              ask(CU_POINTER_ATTRIBUTE_CONTEXT).c_str(), ask(CU_POINTER_ATTRIBUTE_RANGE_START_ADDR).c_str(),
              ask(CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL).c_str(), ask(CU_POINTER_ATTRIBUTE_BUFFER_ID).c_str(),
              ask(CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE).c_str(), Name(code), runtime.type, runtime.device);
}

// --- 2. Is a replay right whose memory became accessible only afterwards? ---

// Which of what is done with a graph is done before access is there.
enum Before { kCaptured, kInstantiated, kUploaded, kUpdated };
constexpr const char* kBefore[] = {"captured", "instantiated", "uploaded", "updated"};

cudaGraph_t CaptureChain(const Memory& m, cudaStreamCaptureMode mode) {
  cudaGraph_t graph = nullptr;
  cudaStreamBeginCapture(stream, mode);
  cudaMemcpyAsync(m.page(0), ordinary, 4096, cudaMemcpyDeviceToDevice, stream);
  Launch(m.page(1), m.page(0));
  cudaMemsetAsync(m.page(2), 0, 4096, stream);
  Launch(m.page(2), m.page(1));
  cudaMemcpyAsync(host, m.page(2), 4096, cudaMemcpyDeviceToHost, stream);
  cudaStreamEndCapture(stream, &graph);
  return graph;
}
int WrongWords(int plus) {
  int wrong = 0;
  for (int i = 0; i < kCount; ++i) wrong += host[i] != i + plus;
  std::fill(host, host + kCount, -1);
  return wrong;
}

void LaterAccess(State state, Before before, cudaStreamCaptureMode mode, const char* mode_name) {
  Memory m(state);
  Memory other(kAccess);
  cudaGraph_t graph = CaptureChain(m, mode);
  cudaGraphExec_t exec = nullptr;
  cudaError_t code = cudaSuccess;
  std::string said = graph ? "" : " no graph";
  if (graph && before == kUpdated) {
    cudaGraph_t like = CaptureChain(other, mode);
    code = cudaGraphInstantiate(&exec, like, 0);
    cudaGraphExecUpdateResultInfo info{};
    if (!code) code = cudaGraphExecUpdate(exec, graph, &info);
    said += std::string(" update ") + Name(code);
  } else if (graph && before >= kInstantiated) {
    code = cudaGraphInstantiate(&exec, graph, 0);
    said += std::string(" instantiate ") + Name(code);
    if (!code && before == kUploaded) {
      code = cudaGraphUpload(exec, stream);
      if (!code) code = cudaStreamSynchronize(stream);
      said += std::string(" upload ") + Name(code);
    }
  }
  m.Access();
  if (graph && !exec) code = cudaGraphInstantiate(&exec, graph, 0);
  if (exec) {
    code = cudaGraphLaunch(exec, stream);
    if (!code) code = cudaStreamSynchronize(stream);
    said += std::string(" launch ") + Name(code) + ", wrong " + std::to_string(WrongWords(2));
  }
  std::printf("later access, %s, %s before, mode %s:%s\n", kStates[state], kBefore[before], mode_name, said.c_str());
}

// The body of a conditional node is captured while its memory has no access.
void ConditionalBody(State state) {
  Memory m(state);
  cudaGraph_t graph = nullptr;
  cudaGraphCreate(&graph, 0);
  cudaGraphConditionalHandle handle{};
  cudaGraphConditionalHandleCreate(&handle, graph, 1, cudaGraphCondAssignDefault);
  cudaGraphNodeParams node{};
  node.type = cudaGraphNodeTypeConditional;
  node.conditional.handle = handle;
  node.conditional.type = cudaGraphCondTypeIf;
  node.conditional.size = 1;
  cudaGraphNode_t added = nullptr;
  cudaError_t code = cudaGraphAddNode(&added, graph, nullptr, nullptr, 0, &node);
  std::string said = std::string(" node ") + Name(code);
  cudaGraph_t body = node.conditional.phGraph_out[0];
  code = cudaStreamBeginCaptureToGraph(stream, body, nullptr, nullptr, 0, cudaStreamCaptureModeGlobal);
  Launch(m.page(0), ordinary);
  cudaMemsetAsync(m.page(1), 0, 4096, stream);
  Launch(m.page(1), m.page(0));
  cudaError_t end = cudaStreamEndCapture(stream, nullptr);
  said += std::string(" body ") + Name(code) + " " + Name(end);
  m.Access();
  cudaGraphExec_t exec = nullptr;
  code = cudaGraphInstantiate(&exec, graph, 0);
  if (!code) code = cudaGraphLaunch(exec, stream);
  if (!code) code = cudaMemcpyAsync(host, m.page(1), 4096, cudaMemcpyDeviceToHost, stream);
  if (!code) code = cudaStreamSynchronize(stream);
  std::printf("conditional body, %s:%s run %s, wrong %d\n", kStates[state], said.c_str(), Name(code), WrongWords(2));
}

void PeerCopy(State state) {
  int devices = 0;
  cudaGetDeviceCount(&devices);
  if (devices < 2) return;
  Memory m(state);
  int* there = nullptr;
  cudaSetDevice(1);
  cudaMalloc(&there, 4096);
  cudaMemcpy(there, ordinary, 4096, cudaMemcpyDefault);
  cudaSetDevice(0);
  cudaGraph_t graph = nullptr;
  cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
  const cudaError_t in = cudaMemcpyPeerAsync(m.page(0), 0, there, 1, 4096, stream);
  const cudaError_t out = cudaMemcpyPeerAsync(there, 1, m.page(0), 0, 4096, stream);
  cudaMemcpyAsync(host, there, 4096, cudaMemcpyDefault, stream);
  const cudaError_t end = cudaStreamEndCapture(stream, &graph);
  m.Access();
  cudaGraphExec_t exec = nullptr;
  cudaError_t code = graph ? cudaGraphInstantiate(&exec, graph, 0) : cudaErrorUnknown;
  if (!code) code = cudaGraphLaunch(exec, stream);
  if (!code) code = cudaStreamSynchronize(stream);
  std::printf("peer copy, %s: %s %s %s run %s, wrong %d\n", kStates[state], Name(in), Name(out), Name(end), Name(code), WrongWords(0));
}

// --- 3. Does a helper thread, in its default mode, break the capture of another thread? ---

void HelperBesideCapture(cudaStreamCaptureMode mode, const char* mode_name, bool relaxed_helper) {
  Memory m(kMapped);
  Memory fresh(kReserved);
  cudaStreamBeginCapture(stream, mode);
  Launch(m.page(0), ordinary);
  std::string said;
  std::thread helper([&] {
    cuCtxSetCurrent(context);
    cudaStreamCaptureMode exchanged = cudaStreamCaptureModeRelaxed;
    if (relaxed_helper) cudaThreadExchangeStreamCaptureMode(&exchanged);
    const CUresult access = cuMemSetAccess(m.base, 4 * kPage, everyone.data(), everyone.size());
    CUmemGenericAllocationHandle handle = 0;
    const CUresult create = cuMemCreate(&handle, kPage, &properties, 0);
    const CUresult map = cuMemMap(fresh.base, kPage, 0, handle, 0);
    said = "access " + std::to_string(access) + " create " + std::to_string(create) + " map " + std::to_string(map);
  });
  helper.join();
  Launch(m.page(1), m.page(0));
  cudaMemcpyAsync(host, m.page(1), 4096, cudaMemcpyDeviceToHost, stream);
  cudaGraph_t graph = nullptr;
  const cudaError_t end = cudaStreamEndCapture(stream, &graph);
  cudaGraphExec_t exec = nullptr;
  cudaError_t code = graph ? cudaGraphInstantiate(&exec, graph, 0) : cudaErrorUnknown;
  if (!code) code = cudaGraphLaunch(exec, stream);
  if (!code) code = cudaStreamSynchronize(stream);
  std::printf("helper (%s) beside a capture in mode %s: %s; end %s run %s, wrong %d\n", relaxed_helper ? "relaxed" : "default",
              mode_name, said.c_str(), Name(end), Name(code), WrongWords(2));
}

// --- 4. What does it cost beside each other? ---

struct Times {
  std::vector<double> us;
  void Print(const char* what, const char* beside) {
    if (us.empty()) return;
    std::sort(us.begin(), us.end());
    double sum = 0;
    for (const double one : us) sum += one;
    std::printf("cost: %-34s %-28s mean %7.2f  median %7.2f  99%% %7.2f  worst %8.2f us (%zu)\n", what, beside, sum / us.size(),
                us[us.size() / 2], us[us.size() * 99 / 100], us.back(), us.size());
  }
};
template <typename Function>
double Microseconds(Function&& function) {
  const auto begin = Clock::now();
  function();
  return std::chrono::duration<double, std::micro>(Clock::now() - begin).count();
}

// Keeps setting access to single pages, as long as `stop` is not set.
class Helper {
 public:
  Helper(int pages, int microseconds_between) {
    Must(cuMemAddressReserve(&base_, pages * kPage, 0, 0, 0), "reserve");
    for (int i = 0; i < pages; ++i) {
      CUmemGenericAllocationHandle handle = 0;
      Must(cuMemCreate(&handle, kPage, &properties, 0), "create");
      Must(cuMemMap(base_ + i * kPage, kPage, 0, handle, 0), "map");
      cuMemRelease(handle);
    }
    thread_ = std::thread([=, this] {
      cuCtxSetCurrent(context);
      for (int i = 0; i < pages && !stop_; ++i) {
        times.us.push_back(Microseconds([&] { cuMemSetAccess(base_ + i * kPage, kPage, everyone.data(), everyone.size()); }));
        ++done_;
        if (microseconds_between > 0) std::this_thread::sleep_for(std::chrono::microseconds(microseconds_between));
      }
      over_ = true;
    });
  }
  ~Helper() { Join(); }
  void Join() {
    stop_ = true;
    if (thread_.joinable()) thread_.join();
  }
  bool over() const { return over_; }
  Times times;

 private:
  CUdeviceptr base_ = 0;
  std::atomic<bool> stop_{false};
  std::atomic<bool> over_{false};
  std::atomic<int> done_{0};
  std::thread thread_;
};

// Each of these a number of times, alone and beside a helper that sets access all the time.
void Costs() {
  constexpr int kPages = 3000;
  CUdeviceptr room = 0;
  Must(cuMemAddressReserve(&room, 64ull * kPages * kPage, 0, 0, 0), "reserve");
  CUdeviceptr next = room;
  const auto burst = [&](Times* create, Times* map, int handles) {
    for (int i = 0; i < handles; ++i) {
      CUmemGenericAllocationHandle handle = 0;
      create->us.push_back(Microseconds([&] { cuMemCreate(&handle, kPage, &properties, 0); }));
      map->us.push_back(Microseconds([&] { cuMemMap(next, kPage, 0, handle, 0); }));
      next += kPage;
    }
  };
  for (const bool beside : {false, true}) {
    const char* const who = beside ? "beside set access" : "alone";
    const auto measure = [&](const char* what, int most, const std::function<void()>& call) {
      Times times;
      std::unique_ptr<Helper> helper;
      if (beside) helper = std::make_unique<Helper>(kPages, 0);
      while (static_cast<int>(times.us.size()) < most && !(helper && helper->over())) times.us.push_back(Microseconds(call));
      if (helper) helper->Join();
      times.Print(what, who);
      if (helper) helper->times.Print("  set access meanwhile", "");
    };
    {
      Times create, map;
      std::unique_ptr<Helper> helper;
      if (beside) helper = std::make_unique<Helper>(kPages, 0);
      for (int i = 0; i < 40 && !(helper && helper->over()); ++i) {
        burst(&create, &map, 16);
        std::this_thread::sleep_for(std::chrono::microseconds(300));
      }
      if (helper) helper->Join();
      create.Print("create, in bursts of 16", who);
      map.Print("map, in bursts of 16", who);
      if (helper) helper->times.Print("  set access meanwhile", "");
    }
    cudaGraph_t graph = nullptr;
    cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
    measure("captured launch", 30000, [&] { Launch(ordinary, ordinary); });
    measure("captured memset", 3000, [&] { cudaMemsetAsync(ordinary, 0, 4096, stream); });
    measure("captured copy d2d", 3000, [&] { cudaMemcpyAsync(ordinary, ordinary + 2048, 4096, cudaMemcpyDeviceToDevice, stream); });
    measure("asking for the capture", 30000, [&] { cudaStreamCaptureStatus status; cudaStreamIsCapturing(stream, &status); });
    cudaStreamEndCapture(stream, &graph);
    measure("instantiate a small graph", 50, [&] {
      cudaGraph_t small = CaptureChain(Memory(kMapped), cudaStreamCaptureModeGlobal);
      cudaGraphExec_t exec = nullptr;
      cudaGraphInstantiate(&exec, small, 0);
      cudaGraphExecDestroy(exec);
      cudaGraphDestroy(small);
    });
    measure("eager launch", 5000, [&] { Launch(ordinary, ordinary, cudaStreamPerThread); });
    cudaDeviceSynchronize();
    measure("set access again by this thread", 500, [&] { cuMemSetAccess(room, kPage, everyone.data(), everyone.size()); });
  }
  // A capture-like thread: a launch each 10 us, and for each tenth a page; access at once, or by a helper.
  for (const bool deferred : {false, true, false, true}) {
    std::atomic<int> queued{0};
    std::atomic<bool> stop{false};
    const CUdeviceptr first = next;
    std::thread helper([&] {
      cuCtxSetCurrent(context);
      for (int i = 0; deferred && !(stop && i == queued);) {
        if (i < queued) {
          cuMemSetAccess(first + i * kPage, kPage, everyone.data(), everyone.size());
          ++i;
        } else {
          std::this_thread::yield();
        }
      }
    });
    cudaGraph_t graph = nullptr;
    double drain = 0;
    const double us = Microseconds([&] {
      cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal);
      for (int i = 0; i < 5000; ++i) {
        Launch(ordinary, ordinary);
        const auto until = Clock::now() + std::chrono::microseconds(10);
        while (Clock::now() < until) {}
        if (i % 10 != 0) continue;
        CUmemGenericAllocationHandle handle = 0;
        cuMemCreate(&handle, kPage, &properties, 0);
        cuMemMap(next, kPage, 0, handle, 0);
        if (deferred) ++queued;
        else cuMemSetAccess(next, kPage, everyone.data(), everyone.size());
        next += kPage;
      }
      cudaStreamEndCapture(stream, &graph);
      drain = Microseconds([&] { stop = true; helper.join(); });
    });
    std::printf("cost: a capture of 5000 launches, 10 us apart, and 500 pages, access %s: %.1f ms, of which %.2f wait at its end\n",
                deferred ? "by a helper" : "at once", us / 1000, drain / 1000);
    cudaGraphDestroy(graph);
  }
}

}  // namespace

int main() {
  cudaFree(nullptr);
  cuCtxGetCurrent(&context);
  properties.type = CU_MEM_ALLOCATION_TYPE_PINNED;
  properties.location = {CU_MEM_LOCATION_TYPE_DEVICE, 0};
  everyone[0] = {properties.location, CU_MEM_ACCESS_FLAGS_PROT_READWRITE};
  int driver = 0;
  cuDriverGetVersion(&driver);
  cudaDeviceProp device{};
  cudaGetDeviceProperties(&device, 0);
  std::printf("%s, CUDA driver API %d\n", device.name, driver);
  cudaMalloc(&ordinary, kPage);
  cudaMallocHost(&host, kPage);
  for (int i = 0; i < kCount; ++i) host[i] = i;
  cudaMemcpy(ordinary, host, kCount * sizeof(int), cudaMemcpyHostToDevice);
  cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking);
  const std::pair<cudaStreamCaptureMode, const char*> modes[] = {{cudaStreamCaptureModeGlobal, "global"},
                                                                  {cudaStreamCaptureModeThreadLocal, "thread_local"},
                                                                  {cudaStreamCaptureModeRelaxed, "relaxed"}};
  for (const State state : {kReserved, kMapped, kAccess}) {
    PointerAttributes(state);
    for (const auto& [mode, name] : modes) Operations(state, mode, name);
  }
  for (const State state : {kReserved, kMapped}) {
    for (const Before before : {kCaptured, kInstantiated, kUploaded, kUpdated}) {
      LaterAccess(state, before, cudaStreamCaptureModeGlobal, "global");
    }
    ConditionalBody(state);
    PeerCopy(state);
  }
  for (const auto& [mode, name] : modes) {
    for (const bool relaxed : {false, true}) HelperBesideCapture(mode, name, relaxed);
  }
  Costs();
  std::printf("last error: %s\n", Name(cudaDeviceSynchronize()));
}
