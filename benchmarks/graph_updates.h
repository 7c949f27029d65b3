// What the sources of graph_updates share: the GPU they work on, how a case is described, and how
// graphs are built. graph_updates.py compiles them into one program and starts it once a case.
#pragma once

#include <cuda.h>

#include <functional>
#include <string>
#include <vector>

// Words of the board, a piece of device memory that kernels write down in what they saw. It is
// cleared before each launch.
enum Word : unsigned {
  // 0 to 15: the tag that each node was given as a parameter. A graph begins and ends with a node
  // of its own, so that an update that was made half is seen.
  kBefore = 0,
  kAfter = 1,
  kTested = 2,
  kTagsEnd = 16,
  // What was in effect.
  kCluster = 16,
  kGrid,
  kBlock,
  kShared,
  kFunction,
  kErrors,
  kFlag,
  kOverlap,
  kDone,
  kEarly,
  kValid,
  kSize,
  kPeak,
  kPerBlock = 1024,  // one word for each block, or for each multiprocessor
  kBoardWords = 8192,
};
using Board = std::vector<unsigned>;

constexpr size_t kDataBytes = 1 << 20;

struct Device {
  CUdevice device = 0;
  CUcontext context = nullptr;
  CUstream stream = nullptr;
  CUstream side = nullptr;
  CUdeviceptr board = 0;
  CUdeviceptr data = 0;               // kDataBytes, cleared before each launch
  CUdeviceptr source = 0;             // kDataBytes: 0x33, the second half 0x44
  unsigned char* pinned = nullptr;    // kDataBytes: 0x11, the second half 0x22
  unsigned char* pageable = nullptr;  // kDataBytes: 0x55
};

// What a launch of an executable graph did.
struct Seen {
  std::string property;  // in words: what was in effect of the property under test
  Board board;
};

using Build = std::function<CUgraph(const Device&, bool b, unsigned tag)>;
using Run = std::function<Seen(const Device&, CUgraphExec)>;

// A property of a graph with two values, a and b.
struct Case {
  std::string group;
  std::string name;
  std::string documented;  // what cuda.h says of an update: "carried", "refused", "" for nothing
  Build build;
  Run run;
};

std::vector<Case> LaunchCases();
std::vector<Case> FunctionCases();
std::vector<Case> NodeCases();
std::vector<Case> TopologyCases();

struct NamedAttribute {
  CUlaunchAttributeID id;
  const char* name;
};

// All that a kernel node may have, whether it can be read back or not.
const std::vector<NamedAttribute>& NodeAttributes();

// What of that which can be read of graphs is not the same of two: "nothing", or names. Of other
// nodes than kernels only the type is looked at, and no parameters.
std::string ToldApartBy(CUgraph a, CUgraph b);

// One measurement; `nodes` is the size of its graphs where there is a choice. False: no such name.
bool Measure(const Device& device, const std::string& name, unsigned nodes);

// Prints {"key": "value"} at once, so that what was found is known if the next step never ends.
void Say(const char* key, const std::string& value);

// Ends the process with exit code 3, having said what failed.
void Check(CUresult result, const char* call);
std::string Name(CUresult result);

using Attributes = std::vector<CUlaunchAttribute>;

struct Shape {
  unsigned grid = 4;
  unsigned block = 32;
  unsigned shared = 0;  // bytes
};

template <class Set>
CUlaunchAttribute Attribute(CUlaunchAttributeID id, Set set) {
  CUlaunchAttribute attribute{};
  attribute.id = id;
  set(attribute.value);
  return attribute;
}

// The driver's handle of a kernel of this program.
CUfunction Handle(const void* kernel);

void LaunchPacked(CUstream stream, CUfunction function, const Shape& shape,
                  const Attributes& attributes, void** arguments);
CUgraphNode AddKernelPacked(CUgraph graph, const std::vector<CUgraphNode>& after,
                            CUfunction function, const Shape& shape, void** arguments);

// The types of `arguments` must be exactly those of the kernel's parameters (CUdeviceptr for a
// pointer): the driver copies their bytes.
template <class... Arguments>
void Launch(CUstream stream, const void* kernel, const Shape& shape, const Attributes& attributes,
            Arguments... arguments) {
  void* packed[] = {&arguments...};
  LaunchPacked(stream, Handle(kernel), shape, attributes, packed);
}

template <class... Arguments>
CUgraphNode AddKernel(CUgraph graph, const std::vector<CUgraphNode>& after, const void* kernel,
                      const Shape& shape, Arguments... arguments) {
  void* packed[] = {&arguments...};
  return AddKernelPacked(graph, after, Handle(kernel), shape, packed);
}

// Writes `tag` into a word of the board.
CUgraphNode AddTag(const Device& device, CUgraph graph, const std::vector<CUgraphNode>& after,
                   Word word, unsigned tag);

CUgraphExec Instantiate(CUgraph graph);

// The graph of what `tested` does on the stream that it is given, between two tags.
Build Captured(std::function<void(const Device&, CUstream stream, bool b, unsigned tag)> tested);

// The graph of the nodes that `tested` adds behind `before`, between two tags; it returns those
// that nothing of its own depends on.
Build Added(std::function<std::vector<CUgraphNode>(const Device&, CUgraph graph, CUgraphNode before,
                                                   bool b, unsigned tag)>
                tested);

Board LaunchAndRead(const Device& device, CUgraphExec exec);

// What is in `word`.
Run Reads(Word word);
