// The cases of graph_updates about the order in which the nodes and edges of a graph were added.
// Every kernel looks whether those that it depends on have ended, so that nodes that an update
// paired wrongly are seen.
#include <cstdio>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "graph_updates.h"

namespace {

__device__ void Step(unsigned* board, unsigned tag, unsigned id, unsigned needs) {
  if ((atomicAdd(board + kDone, 0) & needs) != needs) atomicAdd(board + kEarly, 1);
  board[kTested + id] = tag;
  unsigned long long start = 0;
  unsigned long long now = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(start));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - start < 50'000);  // long enough for one that starts too early to be noticed
  atomicOr(board + kDone, 1U << id);
}

__global__ void StepX(unsigned* board, unsigned tag, unsigned id, unsigned needs) {
  Step(board, tag, id, needs);
}

__global__ void StepY(unsigned* board, unsigned tag, unsigned id, unsigned needs) {
  Step(board, tag, id + 8, needs);
}

enum class Kind { kX, kY, kMemset };

// The number that a node stands for in kDone; what a memset did is not known.
unsigned Bit(unsigned id, Kind kind) {
  if (kind == Kind::kMemset) return 0;
  return 1U << (kind == Kind::kX ? id : id + 8);
}

struct Node {
  unsigned id = 0;  // below 6: kTested + 8 + id is a word for a tag
  Kind kind = Kind::kX;
};

struct Topology {
  std::vector<Node> nodes;                           // as they are added
  std::vector<std::pair<unsigned, unsigned>> edges;  // between ids, as they are added
};

// Roots depend on the tag before; the order of those edges is that of the nodes.
std::vector<CUgraphNode> AddTopology(const Device& device, CUgraph graph, CUgraphNode before,
                                     const Topology& topology, unsigned tag) {
  std::map<unsigned, unsigned> bits;
  std::map<unsigned, unsigned> needs;
  std::map<unsigned, bool> has_dependents;
  for (const Node& node : topology.nodes) bits[node.id] = Bit(node.id, node.kind);
  for (const auto& [from, to] : topology.edges) {
    needs[to] |= bits[from];
    has_dependents[from] = true;
  }
  std::map<unsigned, CUgraphNode> made;
  for (const Node& node : topology.nodes) {
    if (node.kind == Kind::kMemset) {
      CUDA_MEMSET_NODE_PARAMS params{};
      params.dst = device.data + node.id * sizeof(unsigned);
      params.value = tag;
      params.elementSize = sizeof(unsigned);
      params.width = params.height = 1;
      Check(cuGraphAddMemsetNode(&made[node.id], graph, nullptr, 0, &params, device.context),
            "cuGraphAddMemsetNode");
      continue;
    }
    const auto* const kernel = node.kind == Kind::kX ? reinterpret_cast<const void*>(StepX)
                                                     : reinterpret_cast<const void*>(StepY);
    made[node.id] =
        AddKernel(graph, {}, kernel, Shape{1, 1, 0}, device.board, tag, node.id, needs[node.id]);
  }
  std::map<unsigned, bool> has_dependencies;
  for (const auto& [from, to] : topology.edges) {
    Check(cuGraphAddDependencies(graph, &made[from], &made[to], nullptr, 1),
          "cuGraphAddDependencies");
    has_dependencies[to] = true;
  }
  std::vector<CUgraphNode> sinks;
  for (const Node& node : topology.nodes) {
    if (!has_dependencies[node.id]) {
      Check(cuGraphAddDependencies(graph, &before, &made[node.id], nullptr, 1),
            "cuGraphAddDependencies");
    }
    if (!has_dependents[node.id]) sinks.push_back(made[node.id]);
  }
  return sinks;
}

Run ReadsOrder() {
  return [](const Device& device, CUgraphExec exec) {
    Board board = LaunchAndRead(device, exec);
    char property[64];
    std::snprintf(property, sizeof(property), "ran %04x, %u too early", board[kDone],
                  board[kEarly]);
    return Seen{property, std::move(board)};
  };
}

Case TopologyCase(const std::string& name, const std::string& documented, const Topology& a,
                  const Topology& b) {
  Build build =
      Added([=](const Device& device, CUgraph graph, CUgraphNode before, bool is_b, unsigned tag) {
        return AddTopology(device, graph, before, is_b ? b : a, tag);
      });
  return {"topology", name, documented, std::move(build), ReadsOrder()};
}

}  // namespace

std::vector<Case> TopologyCases() {
  constexpr Kind kX = Kind::kX;
  constexpr Kind kY = Kind::kY;
  constexpr Kind kM = Kind::kMemset;
  const Topology chain{{{0, kX}, {1, kY}, {2, kX}}, {{0, 1}, {1, 2}}};
  const Topology chain_backwards{{{2, kX}, {1, kY}, {0, kX}}, {{1, 2}, {0, 1}}};
  const Topology diamond{{{0, kX}, {1, kX}, {2, kY}, {3, kX}}, {{0, 1}, {0, 2}, {1, 3}, {2, 3}}};
  const Topology diamond_backwards{{{3, kX}, {2, kY}, {1, kX}, {0, kX}},
                                   {{0, 1}, {0, 2}, {1, 3}, {2, 3}}};
  const Topology diamond_other_fork{{{0, kX}, {1, kX}, {2, kY}, {3, kX}},
                                    {{0, 2}, {0, 1}, {1, 3}, {2, 3}}};
  const Topology diamond_other_join{{{0, kX}, {1, kX}, {2, kY}, {3, kX}},
                                    {{0, 1}, {0, 2}, {2, 3}, {1, 3}}};
  const Topology diamond_all_other{{{0, kX}, {2, kY}, {1, kX}, {3, kX}},
                                   {{0, 2}, {0, 1}, {2, 3}, {1, 3}}};
  const Topology like{{{0, kX}, {1, kX}, {2, kX}, {3, kX}}, {{0, 1}, {2, 3}}};
  const Topology like_swapped{{{2, kX}, {3, kX}, {0, kX}, {1, kX}}, {{2, 3}, {0, 1}}};
  const Topology functions{{{0, kX}, {1, kY}, {2, kY}, {3, kX}}, {{0, 1}, {2, 3}}};
  const Topology functions_swapped{{{2, kY}, {3, kX}, {0, kX}, {1, kY}}, {{2, 3}, {0, 1}}};
  const Topology types{{{0, kX}, {1, kM}, {2, kM}, {3, kX}}, {{0, 1}, {2, 3}}};
  const Topology types_swapped{{{2, kM}, {3, kX}, {0, kX}, {1, kM}}, {{2, 3}, {0, 1}}};
  const Topology lengths{{{0, kX}, {1, kX}, {2, kX}, {3, kX}, {4, kX}}, {{0, 1}, {1, 2}, {3, 4}}};
  const Topology lengths_swapped{{{3, kX}, {4, kX}, {0, kX}, {1, kX}, {2, kX}},
                                 {{3, 4}, {0, 1}, {1, 2}}};
  const Topology fork{{{0, kX}, {1, kX}, {2, kX}}, {{0, 1}, {0, 2}}};
  const Topology line{{{0, kX}, {1, kX}, {2, kX}}, {{0, 1}, {1, 2}}};
  const Topology line_and_shortcut{{{0, kX}, {1, kX}, {2, kX}}, {{0, 1}, {1, 2}, {0, 2}}};
  const Topology longer{{{0, kX}, {1, kX}, {2, kX}, {3, kX}}, {{0, 1}, {1, 2}, {2, 3}}};
  const Topology memset_last{{{0, kX}, {1, kX}, {2, kM}}, {{0, 1}, {1, 2}}};
  const Topology even{{{0, kX}, {1, kX}, {2, kX}, {3, kX}, {4, kX}},
                      {{0, 1}, {0, 2}, {1, 3}, {2, 4}}};
  const Topology uneven{{{0, kX}, {1, kX}, {2, kX}, {3, kX}, {4, kX}},
                        {{0, 1}, {0, 2}, {1, 3}, {1, 4}}};
  return {
      TopologyCase("chain, nodes added last to first", "", chain, chain_backwards),
      TopologyCase("diamond, nodes added last to first", "", diamond, diamond_backwards),
      TopologyCase("diamond, edges of the fork in another order", "", diamond, diamond_other_fork),
      TopologyCase("diamond, edges of the join in another order", "", diamond, diamond_other_join),
      TopologyCase("diamond, branches and all their edges swapped", "", diamond, diamond_all_other),
      TopologyCase("branches of one function swapped", "", like, like_swapped),
      TopologyCase("branches of two functions swapped", "", functions, functions_swapped),
      TopologyCase("branches of kernels and memsets swapped", "", types, types_swapped),
      TopologyCase("branches of two lengths swapped", "", lengths, lengths_swapped),
      TopologyCase("fork to chain", "refused", fork, line),
      TopologyCase("one edge more that changes no order", "refused", line, line_and_shortcut),
      TopologyCase("one edge less that changes no order", "refused", line_and_shortcut, line),
      TopologyCase("one node more", "refused", line, longer),
      TopologyCase("one node less", "refused", longer, line),
      TopologyCase("kernel to memset", "refused", line, memset_last),
      TopologyCase("two branches to one and a fork", "refused", even, uneven),
  };
}
