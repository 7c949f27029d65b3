// What graph_updates measures: updates while launches are in flight, what updates cost beside
// instantiating, the device memory of executables, destroying one that runs, and what reading a
// graph costs. Times are CPU time, in microseconds or nanoseconds as a row's keys say; a row is a
// line of JSON.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "graph_updates.h"

namespace {

// With the parameters of a usual kernel; does next to nothing.
__global__ void Small(unsigned* board, unsigned value, float scale, unsigned long long count) {
  if (count == 0) board[0] = static_cast<unsigned>(static_cast<float>(value) * scale);
}

// The first word of a log counts what was written into it.
__global__ void Slow(unsigned* log, unsigned value, unsigned nanoseconds) {
  unsigned long long start = 0;
  unsigned long long now = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < nanoseconds);
  log[1 + atomicAdd(log, 1)] = value;
}

constexpr unsigned kSlowNodes = 4;

template <class Function>
double Microseconds(Function function) {
  const auto start = std::chrono::steady_clock::now();
  function();
  return std::chrono::duration<double, std::micro>(std::chrono::steady_clock::now() - start)
      .count();
}

double Median(std::vector<double> values) {
  if (values.empty()) return 0;
  const auto middle = values.begin() + static_cast<std::ptrdiff_t>(values.size() / 2);
  std::nth_element(values.begin(), middle, values.end());
  return *middle;
}

void Sync(const Device& device) {
  Check(cuStreamSynchronize(device.stream), "cuStreamSynchronize");
  Check(cuStreamSynchronize(device.side), "cuStreamSynchronize");
}

template <class Step>
CUgraph Chain(const Device& device, unsigned nodes, Step step) {
  CUgraph graph = nullptr;
  Check(cuStreamBeginCapture(device.stream, CU_STREAM_CAPTURE_MODE_RELAXED),
        "cuStreamBeginCapture");
  for (unsigned i = 0; i < nodes; ++i) step(i);
  Check(cuStreamEndCapture(device.stream, &graph), "cuStreamEndCapture");
  return graph;
}

CUgraph SmallChain(const Device& device, unsigned nodes, unsigned value) {
  return Chain(device, nodes, [&](unsigned i) {
    const unsigned long long count = 1 + i;
    Launch(device.stream, reinterpret_cast<const void*>(Small), Shape{1 + value, 32, 0}, {},
           device.board, value, 1.0F, count);
  });
}

CUgraph SlowChain(const Device& device, CUdeviceptr log, unsigned value, unsigned nanoseconds) {
  return Chain(device, kSlowNodes, [&](unsigned) {
    Launch(device.stream, reinterpret_cast<const void*>(Slow), Shape{1, 1, 0}, {}, log, value,
           nanoseconds);
  });
}

void Update(CUgraphExec exec, CUgraph graph) {
  CUgraphExecUpdateResultInfo info{};
  Check(cuGraphExecUpdate(exec, graph, &info), "cuGraphExecUpdate");
}

void ClearLog(const Device& device, CUdeviceptr log) {
  Check(cuMemsetD8Async(log, 0, sizeof(unsigned), device.stream), "cuMemsetD8Async");
  Sync(device);
}

// How many of `expected` are not what the log holds in their place.
unsigned Wrong(CUdeviceptr log, const std::vector<unsigned>& expected) {
  std::vector<unsigned> words(1 + expected.size());
  Check(cuMemcpyDtoH(words.data(), log, words.size() * sizeof(unsigned)), "cuMemcpyDtoH");
  if (words[0] != expected.size()) return static_cast<unsigned>(expected.size());
  unsigned wrong = 0;
  for (size_t i = 0; i < expected.size(); ++i) wrong += words[1 + i] != expected[i] ? 1 : 0;
  return wrong;
}

void PrintInFlight(unsigned streams, const std::string& launches, unsigned wrong, size_t all,
                   const std::vector<double>& updates, double queued) {
  std::printf(
      "{\"streams\": %u, \"launches\": \"%s\", \"wrong\": %u, \"kernels\": %zu, "
      "\"update_us\": %.1f, \"update_max_us\": %.1f, \"queued_us\": %.0f}\n",
      streams, launches.c_str(), wrong, all, Median(updates),
      *std::max_element(updates.begin(), updates.end()), queued);
  std::fflush(stdout);
}

// `launches` of a, an update, `launches` of b. In every second round a has certainly started.
void QueuedRow(const Device& device, CUdeviceptr log, unsigned streams, unsigned launches) {
  constexpr unsigned kNanoseconds = 100'000;
  constexpr unsigned kRounds = 6;
  const CUgraphExec exec = Instantiate(SlowChain(device, log, 0, kNanoseconds));
  const auto launch = [&] {
    for (unsigned i = 0; i < launches; ++i) {
      Check(cuGraphLaunch(exec, i % streams == 0 ? device.stream : device.side), "cuGraphLaunch");
    }
  };
  unsigned wrong = 0;
  size_t all = 0;
  std::vector<double> updates;
  for (unsigned round = 0; round < kRounds; ++round) {
    const CUgraph a = SlowChain(device, log, 2 * round + 1, kNanoseconds);
    const CUgraph b = SlowChain(device, log, 2 * round + 2, kNanoseconds);
    Update(exec, a);
    ClearLog(device, log);
    launch();
    if (round % 2 == 1) std::this_thread::sleep_for(std::chrono::microseconds(150));
    updates.push_back(Microseconds([&] { Update(exec, b); }));
    launch();
    Sync(device);
    const size_t half = static_cast<size_t>(launches) * kSlowNodes;
    std::vector<unsigned> expected(half, 2 * round + 1);
    expected.resize(2 * half, 2 * round + 2);
    wrong += Wrong(log, expected);
    all += expected.size();
    Check(cuGraphDestroy(a), "cuGraphDestroy");
    Check(cuGraphDestroy(b), "cuGraphDestroy");
  }
  const double queued = static_cast<double>(launches) * kSlowNodes * kNanoseconds / 1000;
  PrintInFlight(streams,
                std::to_string(launches) + " before, " + std::to_string(launches) + " after", wrong,
                all, updates, queued);
  Check(cuGraphExecDestroy(exec), "cuGraphExecDestroy");
}

// An update before each launch, and never a wait: a server that changes size at each step.
void AlternatingRow(const Device& device, CUdeviceptr log, unsigned streams, unsigned nanoseconds) {
  constexpr unsigned kTemplates = 16;
  constexpr unsigned kSteps = 256;
  std::vector<CUgraph> templates;
  for (unsigned i = 0; i < kTemplates; ++i) {
    templates.push_back(SlowChain(device, log, i + 1, nanoseconds));
  }
  const CUgraphExec exec = Instantiate(templates[0]);
  ClearLog(device, log);
  std::vector<unsigned> expected;
  std::vector<double> updates;
  for (unsigned step = 0; step < kSteps; ++step) {
    const unsigned which = step * 7 % kTemplates;
    updates.push_back(Microseconds([&] { Update(exec, templates[which]); }));
    Check(cuGraphLaunch(exec, step % streams == 0 ? device.stream : device.side), "cuGraphLaunch");
    expected.insert(expected.end(), kSlowNodes, which + 1);
  }
  Sync(device);
  PrintInFlight(streams,
                "1 after each update, kernels of " + std::to_string(nanoseconds / 1000) + " us",
                Wrong(log, expected), expected.size(), updates, 0);
  Check(cuGraphExecDestroy(exec), "cuGraphExecDestroy");
}

void MeasureInFlight(const Device& device) {
  // board: 8,192 words; the longest log is that of AlternatingRow, 1,025.
  for (const unsigned streams : {1U, 2U}) {
    QueuedRow(device, device.board, streams, 1);
    QueuedRow(device, device.board, streams, 8);
    QueuedRow(device, device.board, streams, 64);
    AlternatingRow(device, device.board, streams, 1'000);
    AlternatingRow(device, device.board, streams, 50'000);
  }
}

struct NodeParams {
  std::vector<CUgraphNode> nodes;
  std::vector<CUDA_KERNEL_NODE_PARAMS> params;
};

NodeParams ParamsOf(CUgraph graph, unsigned nodes) {
  NodeParams found{std::vector<CUgraphNode>(nodes), std::vector<CUDA_KERNEL_NODE_PARAMS>(nodes)};
  size_t count = nodes;
  Check(cuGraphGetNodes(graph, found.nodes.data(), &count), "cuGraphGetNodes");
  for (unsigned i = 0; i < nodes; ++i) {
    Check(cuGraphKernelNodeGetParams(found.nodes[i], &found.params[i]),
          "cuGraphKernelNodeGetParams");
  }
  return found;
}

struct Costs {
  std::vector<double> first, second;  // the change, and the launch behind it
};

// Makes the executable that of b and of a in turn, idle each time.
template <class Change>
Costs Switch(const Device& device, CUgraphExec exec, unsigned rounds, Change change) {
  Costs costs;
  for (unsigned round = 0; round < rounds; ++round) {
    Sync(device);
    costs.first.push_back(change(round % 2 == 0));
    costs.second.push_back(
        Microseconds([&] { Check(cuGraphLaunch(exec, device.stream), "cuGraphLaunch"); }));
  }
  Sync(device);
  return costs;
}

void MeasureCosts(const Device& device, unsigned nodes) {
  constexpr unsigned kRounds = 20;
  const CUgraph a = SmallChain(device, nodes, 0);
  const CUgraph b = SmallChain(device, nodes, 1);
  std::vector<double> instantiations;
  CUgraphExec exec = nullptr;
  for (unsigned i = 0; i < 6; ++i) {
    if (exec != nullptr) Check(cuGraphExecDestroy(exec), "cuGraphExecDestroy");
    instantiations.push_back(Microseconds([&] { exec = Instantiate(a); }));
  }
  const double first_instantiation = instantiations.front();
  instantiations.erase(instantiations.begin());
  // The first launch uploads; those behind it are launches of what is there.
  const Costs first = Switch(device, exec, 1, [](bool) { return 0.0; });
  const Costs again = Switch(device, exec, kRounds, [](bool) { return 0.0; });
  const auto update = [&](CUgraph graph) { return Microseconds([&] { Update(exec, graph); }); };
  const Costs updates =
      Switch(device, exec, kRounds, [&](bool to_b) { return update(to_b ? b : a); });
  // The executable is that of a now: nothing changes.
  const Costs same = Switch(device, exec, kRounds, [&](bool) { return update(a); });
  const auto upload = [&](bool to_b) {
    Update(exec, to_b ? b : a);
    const double took =
        Microseconds([&] { Check(cuGraphUpload(exec, device.stream), "cuGraphUpload"); });
    Sync(device);
    return took;
  };
  const Costs uploads = Switch(device, exec, kRounds, upload);
  Check(cuGraphExecDestroy(exec), "cuGraphExecDestroy");
  exec = Instantiate(a);
  const NodeParams of_a = ParamsOf(a, nodes);
  const NodeParams of_b = ParamsOf(b, nodes);
  // By the handles of the template that the executable was made of: it knows its nodes by those.
  const auto set = [&](bool to_b) {
    const NodeParams& from = to_b ? of_b : of_a;
    return Microseconds([&] {
      for (unsigned i = 0; i < nodes; ++i) {
        Check(cuGraphExecKernelNodeSetParams(exec, of_a.nodes[i], &from.params[i]),
              "cuGraphExecKernelNodeSetParams");
      }
    });
  };
  Switch(device, exec, 1, [](bool) { return 0.0; });
  const Costs sets = Switch(device, exec, kRounds, set);
  const double destroyed =
      Microseconds([&] { Check(cuGraphExecDestroy(exec), "cuGraphExecDestroy"); });
  std::printf(
      "{\"nodes\": %u, \"instantiate_first_us\": %.1f, \"instantiate_us\": %.1f, "
      "\"launch_first_us\": %.1f, \"launch_us\": %.1f, \"update_us\": %.1f, "
      "\"launch_after_update_us\": %.1f, \"update_same_us\": %.1f, "
      "\"launch_after_update_same_us\": %.1f, \"upload_us\": %.1f, "
      "\"launch_after_upload_us\": %.1f, \"set_params_us\": %.1f, "
      "\"launch_after_set_params_us\": %.1f, \"destroy_us\": %.1f}\n",
      nodes, first_instantiation, Median(instantiations), first.second[0], Median(again.second),
      Median(updates.first), Median(updates.second), Median(same.first), Median(same.second),
      Median(uploads.first), Median(uploads.second), Median(sets.first), Median(sets.second),
      destroyed);
}

size_t FreeBytes() {
  size_t free = 0;
  size_t total = 0;
  Check(cuMemGetInfo(&free, &total), "cuMemGetInfo");
  return free;
}

// KiB that the driver took since there were `before` bytes free; negative: it gave some back.
double TakenKib(size_t before) {
  return (static_cast<double>(before) - static_cast<double>(FreeBytes())) / 1024;
}

// In a process of its own: what a destroyed executable leaves is kept by the driver.
void MeasureMemory(const Device& device, unsigned nodes) {
  const unsigned count = nodes <= 100 ? 128 : nodes <= 360 ? 64 : 16;
  const CUgraph graph = SmallChain(device, nodes, 0);
  // Some memory is the first executable's alone, whatever its size.
  const CUgraphExec warm = Instantiate(SmallChain(device, 1, 0));
  Check(cuGraphLaunch(warm, device.stream), "cuGraphLaunch");
  Sync(device);
  const size_t start = FreeBytes();
  std::vector<CUgraphExec> execs(count);
  const auto make = [&] {
    for (CUgraphExec& exec : execs) exec = Instantiate(graph);
  };
  const auto launch = [&] {
    for (const CUgraphExec exec : execs) {
      Check(cuGraphLaunch(exec, device.stream), "cuGraphLaunch");
    }
    Sync(device);
  };
  make();
  const double instantiated = TakenKib(start);
  launch();
  const double launched = TakenKib(start);
  for (const CUgraphExec exec : execs) Check(cuGraphExecDestroy(exec), "cuGraphExecDestroy");
  const double destroyed = TakenKib(start);
  make();
  launch();
  const double again = TakenKib(start);
  std::printf(
      "{\"nodes\": %u, \"execs\": %u, \"instantiated_kib\": %.0f, \"launched_kib\": %.0f, "
      "\"destroyed_kib\": %.0f, \"again_kib\": %.0f}\n",
      nodes, count, instantiated, launched, destroyed, again);
}

// Destroys an executable whose launch is queued (even rounds) or runs (odd), and at once makes and
// launches another, which might be given the first one's memory.
void MeasureDestroy(const Device& device) {
  constexpr unsigned kNanoseconds = 500'000;
  constexpr unsigned kRounds = 20;
  const CUdeviceptr logs[] = {device.board, device.data};
  unsigned wrong = 0;
  unsigned all = 0;
  std::vector<double> times;
  std::vector<double> idle;
  for (unsigned round = 0; round < kRounds; ++round) {
    const unsigned value = 2 * round + 1;
    ClearLog(device, logs[0]);
    ClearLog(device, logs[1]);
    const CUgraph a = SlowChain(device, logs[0], value, kNanoseconds);
    const CUgraph b = SlowChain(device, logs[1], value + 1, kNanoseconds);
    const CUgraphExec running = Instantiate(a);
    Check(cuGraphLaunch(running, device.stream), "cuGraphLaunch");
    if (round % 2 == 1) std::this_thread::sleep_for(std::chrono::microseconds(700));
    times.push_back(
        Microseconds([&] { Check(cuGraphExecDestroy(running), "cuGraphExecDestroy"); }));
    const CUgraphExec next = Instantiate(b);
    Check(cuGraphLaunch(next, device.side), "cuGraphLaunch");
    Sync(device);
    idle.push_back(Microseconds([&] { Check(cuGraphExecDestroy(next), "cuGraphExecDestroy"); }));
    wrong += Wrong(logs[0], std::vector<unsigned>(kSlowNodes, value));
    wrong += Wrong(logs[1], std::vector<unsigned>(kSlowNodes, value + 1));
    all += 2 * kSlowNodes;
  }
  std::printf(
      "{\"wrong\": %u, \"kernels\": %u, \"destroy_running_us\": %.1f, "
      "\"destroy_running_max_us\": %.1f, \"destroy_idle_us\": %.1f, \"launch_takes_us\": %u}\n",
      wrong, all, Median(times), *std::max_element(times.begin(), times.end()), Median(idle),
      kSlowNodes * kNanoseconds / 1000);
}

// The time of a call, the median over some passes of `calls` of it, and what the last one returned.
template <class Call>
void PrintKey(const std::string& name, unsigned calls, Call call) {
  constexpr unsigned kPasses = 9;
  std::vector<double> times;
  CUresult result = CUDA_SUCCESS;
  for (unsigned pass = 0; pass < kPasses; ++pass) {
    times.push_back(Microseconds([&] {
      for (unsigned i = 0; i < calls; ++i) result = call(i);
    }));
  }
  std::printf("{\"call\": \"%s\", \"calls\": %u, \"ns\": %.1f, \"result\": \"%s\"}\n", name.c_str(),
              calls, Median(times) * 1000 / calls, Name(result).c_str());
}

void MeasureKeys(const Device& device, unsigned nodes) {
  const CUgraph graph = SmallChain(device, nodes, 0);
  const NodeParams all = ParamsOf(graph, nodes);
  std::vector<CUgraphNode> found(nodes);
  std::vector<CUgraphNode> to(nodes);
  std::vector<CUgraphEdgeData> data(nodes);
  PrintKey("cuGraphGetNodes, whole graph", 1, [&](unsigned) {
    size_t count = nodes;
    return cuGraphGetNodes(graph, found.data(), &count);
  });
  PrintKey("cuGraphGetEdges, whole graph", 1, [&](unsigned) {
    size_t count = nodes;  // a chain has one less
    return cuGraphGetEdges(graph, found.data(), to.data(), data.data(), &count);
  });
  PrintKey("cuGraphNodeGetDependencies", nodes, [&](unsigned i) {
    size_t count = 1;
    return cuGraphNodeGetDependencies(all.nodes[i], found.data(), data.data(), &count);
  });
  PrintKey("cuGraphNodeGetType", nodes, [&](unsigned i) {
    CUgraphNodeType type{};
    return cuGraphNodeGetType(all.nodes[i], &type);
  });
  PrintKey("cuGraphKernelNodeGetParams", nodes, [&](unsigned i) {
    CUDA_KERNEL_NODE_PARAMS params{};
    return cuGraphKernelNodeGetParams(all.nodes[i], &params);
  });
  for (const NamedAttribute& attribute : NodeAttributes()) {
    PrintKey(std::string("cuGraphKernelNodeGetAttribute ") + attribute.name, nodes,
             [&](unsigned i) {
               CUkernelNodeAttrValue value{};
               return cuGraphKernelNodeGetAttribute(all.nodes[i], attribute.id, &value);
             });
  }
  for (int id = CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK; id < CU_FUNC_ATTRIBUTE_MAX; ++id) {
    PrintKey("cuFuncGetAttribute " + std::to_string(id), nodes, [&](unsigned i) {
      int value = 0;
      return cuFuncGetAttribute(&value, static_cast<CUfunction_attribute>(id), all.params[i].func);
    });
  }
}

}  // namespace

bool Measure(const Device& device, const std::string& name, unsigned nodes) {
  if (name == "in_flight" && nodes == 0) {
    MeasureInFlight(device);
  } else if (name == "destroy" && nodes == 0) {
    MeasureDestroy(device);
  } else if (name == "costs" && nodes != 0) {
    MeasureCosts(device, nodes);
  } else if (name == "memory" && nodes != 0) {
    MeasureMemory(device, nodes);
  } else if (name == "keys" && nodes != 0) {
    MeasureKeys(device, nodes);
  } else {
    return false;
  }
  return true;
}
