// Programs over several streams, executed: what a wrong reuse of memory does is seen as wrong data.
//
// A program allocates, writes, checks and frees blocks on several streams, as a user would: a stream waits for an event
// before it touches what another one wrote, and says so with RecordUse(). Captured, its kernels become the nodes of a
// graph, with the edges that streams and events give it; a replay runs them in a random order that the edges allow.
// Run eagerly, they are the work of streams that a random hand moves on. The program itself is right by construction,
// so every kernel that finds other data than was written is the pool's fault.
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <optional>
#include <random>
#include <vector>

#include "core/pool_checkpoint.h"
#include "core/pool_set.h"
#include "driver/host_driver.h"
#include "testing/capture_dag.h"
#include "testing/driver_watch.h"

namespace cgp {
namespace {

constexpr PoolId kPool{0, 1};
constexpr uint64_t kPage = 4096;

// Where the kernels of a program go.
class Machine {
 public:
  virtual ~Machine() = default;
  virtual void Launch(uint64_t stream, const Kernel& kernel) = 0;
  // What is launched on `stream` from now on runs after what was launched on `other` so far.
  virtual void Wait(uint64_t stream, uint64_t other) = 0;
};

// Collects kernels as the nodes of a graph that is captured.
class GraphMachine final : public Machine {
 public:
  void Begin(HostGraphs& graphs) {
    graphs_ = &graphs;
    capture_ = graphs.Begin(StreamId{0});
    dag_.Begin(StreamId{0}, capture_);
  }
  void End() { graphs_->End(capture_); }

  void Launch(uint64_t stream, const Kernel& kernel) override {
    graphs_->Launch(StreamId{stream});
    dag_.Launch(StreamId{stream}, kernel);
  }

  void Wait(uint64_t stream, uint64_t other) override {
    graphs_->Wait(StreamId{stream}, graphs_->Record(StreamId{other}));
    dag_.Wait(StreamId{stream}, dag_.At(StreamId{other}));
  }

  // Runs the graph in some order that its edges allow; returns the first node that finds wrong data.
  std::optional<CaptureDag::Node> Replay(std::mt19937_64& random) const {
    return dag_.Run(0, dag_.size(), dag_.SomeUrgency(0, dag_.size(), random));
  }

 private:
  HostGraphs* graphs_ = nullptr;
  CaptureId capture_ = kNoCapture;
  CaptureDag dag_;
};

// Runs kernels on the streams of the watch's device, now and then some of them.
class StreamMachine final : public Machine {
 public:
  StreamMachine(DriverWatch& watch, std::mt19937_64& random) : watch_(watch), random_(random) {}
  // What is submitted refers to this.
  ~StreamMachine() override { watch_.FinishAll(); }

  void Launch(uint64_t stream, const Kernel& kernel) override {
    watch_.Submit(StreamId{stream}, [this, kernel] {
      if (!kernel.Run()) ++wrong_;
    });
    if (random_() % 4 == 0) watch_.Progress(StreamId{random_() % 4}, 1 + random_() % 4);
  }

  void Wait(uint64_t stream, uint64_t other) override {
    const StreamId other_id{other};
    const uint64_t work = watch_.Submitted(other_id);
    watch_.Submit(StreamId{stream}, [this, other_id, work] { watch_.Finish(other_id, work); });
  }

  uint64_t wrong() const { return wrong_; }

 private:
  DriverWatch& watch_;
  std::mt19937_64& random_;
  uint64_t wrong_ = 0;
};

// A random program, as long as `steps`. Its blocks are allocated as it goes, and freed but for some that it leaves.
class Program {
 public:
  struct Options {
    uint64_t streams = 3;
    uint64_t steps = 120;
    uint64_t most_live = 10;
    uint64_t most_bytes = 5 * kPage;
    uint64_t scale = 1;  // of the larger blocks; all else is the same for any scale
  };

  Program(PoolSet& set, DriverWatch& watch, Machine& machine, std::mt19937_64& random,
          Options options)
      : set_(set), watch_(watch), machine_(machine), random_(random), options_(options) {}

  // pre: a scope is open. Returns the blocks that are still live, to be freed by the caller.
  std::vector<Kernel> Run() {
    // All streams fork from stream 0 and join it in the end, as a capture demands.
    for (uint64_t stream = 1; stream < options_.streams; ++stream) machine_.Wait(stream, 0);
    for (uint64_t step = 0; step < options_.steps; ++step) Step();
    while (live_.size() > 2) Free(random_() % live_.size());
    for (uint64_t stream = 1; stream < options_.streams; ++stream) machine_.Wait(0, stream);
    std::vector<Kernel> outputs;
    for (const Tensor& tensor : live_) outputs.push_back({tensor.block, tensor.word, false});
    return outputs;
  }

 private:
  struct Tensor {
    Block block;
    uint64_t home = 0;  // the stream it was allocated on
    uint64_t last =
        0;  // the stream whose kernel touched it last: it is ordered behind all others that did
    uint64_t word = 0;
    bool written = false;
  };

  void Step() {
    const uint64_t kind = random_() % 10;
    if (live_.empty() || (kind < 3 && live_.size() < options_.most_live)) {
      Allocate();
    } else if (kind < 5) {
      Free(random_() % live_.size());
    } else {
      Touch(live_[random_() % live_.size()]);
    }
  }

  void Allocate() {
    const uint64_t stream = random_() % options_.streams;
    const uint64_t bytes = random_() % 3 == 0
                               ? 1 + random_() % 1024
                               : options_.scale * (1 + random_() % options_.most_bytes);
    const Block block = set_.Allocate(kPool, bytes, StreamId{stream});
    watch_.MarkUsed();
    live_.push_back({block, stream, stream, 0, false});
    Touch(live_.back());
  }

  // A kernel on some stream checks what the last one wrote, and some write anew.
  void Touch(Tensor& tensor) {
    const uint64_t stream = random_() % 2 == 0 ? tensor.last : random_() % options_.streams;
    if (stream != tensor.last) machine_.Wait(stream, tensor.last);
    if (stream != tensor.home) set_.RecordUse(tensor.block.address, StreamId{stream});
    tensor.last = stream;
    if (tensor.written) machine_.Launch(stream, {tensor.block, tensor.word, false});
    if (!tensor.written || random_() % 2 == 0) {
      tensor.word = random_();
      tensor.written = true;
      machine_.Launch(stream, {tensor.block, tensor.word, true});
    }
  }

  void Free(size_t index) {
    set_.Free(live_[index].block.address);
    live_.erase(live_.begin() + static_cast<std::ptrdiff_t>(index));
  }

  PoolSet& set_;
  DriverWatch& watch_;
  Machine& machine_;
  std::mt19937_64& random_;
  const Options options_;
  std::vector<Tensor> live_;
};

class ExecutionTest : public ::testing::TestWithParam<uint64_t> {
 protected:
  Program::Options RandomOptions() {
    return {.streams = 1 + random_() % 4,
            .steps = 40 + random_() % 160,
            .most_live = 3 + random_() % 12,
            .most_bytes = kPage / 2 + random_() % (8 * kPage)};
  }

  std::vector<Kernel> Capture(GraphMachine& graph, std::mt19937_64& random,
                              const Program::Options& options) {
    set_.BeginScope(kPool, ScopeKind::kCapture);
    graph.Begin(host_.graphs());
    std::vector<Kernel> outputs = Program(set_, watch_, graph, random, options).Run();
    graph.End();
    set_.EndScope(kPool);
    return outputs;
  }

  HostDriver host_{{.granularity = kPage}};
  DriverWatch watch_{host_};
  PoolSet set_{watch_, {.page_bytes = kPage}};
  std::mt19937_64 random_{GetParam()};
};

// Graphs share a pool and never run at once; their outputs stay until they are freed, and hold while others replay.
// They are of several programs, or of one at growing sizes and once more at a small one: the larger captures are
// planned from the one before.
TEST_P(ExecutionTest, GraphsOfOnePoolReplayedInAnyOrder) {
  for (const bool one_program : {false, true}) {
    const Program::Options options = RandomOptions();
    const uint64_t seed = random_();
    std::vector<GraphMachine> graphs(6);
    std::vector<std::vector<Kernel>> outputs(graphs.size());
    for (size_t i = 0; i < graphs.size(); ++i) {
      constexpr std::array<uint64_t, 6> kScales = {1, 2, 4, 6, 3, 1};
      std::mt19937_64 same(seed);
      Program::Options scaled = one_program ? options : RandomOptions();
      if (one_program) scaled.scale = kScales[i];
      outputs[i] = Capture(graphs[i], one_program ? same : random_, scaled);
      // Half of the outputs are let go of: memory for the graphs that follow.
      if (one_program || random_() % 2 == 0) {
        for (const Kernel& output : outputs[i]) set_.Free(output.block.address);
        outputs[i].clear();
      }
      set_.Check();
    }
    // Whether a graph's outputs hold what its last replay wrote.
    std::vector<bool> replayed(graphs.size(), false);
    for (int round = 0; round < 20; ++round) {
      const size_t pick = random_() % graphs.size();
      ASSERT_EQ(graphs[pick].Replay(random_), std::nullopt)
          << "graph " << pick << " in round " << round;
      // Graphs captured later may have put an output where this one has passed by, as in PyTorch.
      std::fill(replayed.begin() + static_cast<std::ptrdiff_t>(pick), replayed.end(), false);
      replayed[pick] = true;
      for (size_t i = 0; i < graphs.size(); ++i) {
        if (!replayed[i]) continue;
        for (const Kernel& output : outputs[i]) {
          ASSERT_TRUE(output.Run()) << "graph " << pick << " overwrote an output of graph " << i;
        }
      }
    }
    for (const std::vector<Kernel>& kept : outputs) {
      for (const Kernel& output : kept) set_.Free(output.block.address);
    }
  }
}

// Warm-ups run eagerly in the pool, then captures take what they have done with; both are interleaved.
TEST_P(ExecutionTest, EagerWorkAndGraphsInTurn) {
  StreamMachine streams(watch_, random_);
  for (int round = 0; round < 6; ++round) {
    set_.BeginScope(kPool, ScopeKind::kEager);
    std::vector<Kernel> outputs = Program(set_, watch_, streams, random_, RandomOptions()).Run();
    set_.EndScope(kPool);
    if (random_() % 2 == 0) watch_.Progress(StreamId{random_() % 4}, random_() % 20);
    for (const Kernel& output : outputs) {
      if (random_() % 2 == 0) {
        set_.RecordUse(output.block.address, StreamId{0});
        streams.Launch(0, output);
      }
      set_.Free(output.block.address);
    }

    GraphMachine graph;
    outputs = Capture(graph, random_, RandomOptions());
    // Replayed on a stream that nobody synchronises with the warm-up's.
    ASSERT_EQ(graph.Replay(random_), std::nullopt) << "in round " << round;
    for (const Kernel& output : outputs) {
      ASSERT_TRUE(output.Run());
      set_.Free(output.block.address);
    }
  }
  watch_.FinishAll();
  EXPECT_EQ(streams.wrong(), 0U);
  EXPECT_TRUE(watch_.violations().empty());
  set_.Check();
}

// Graph trees: from any graph on, others are recorded, after a warm-up whose memory a restore lets go
// of while its work goes on. A path through the tree, replayed, finds and leaves what it should.
TEST_P(ExecutionTest, ATreeOfGraphsWithWarmUps) {
  struct Node {
    size_t parent = 0;
    GraphMachine graph;
    std::vector<Kernel> living;  // outputs of its own and of those before it
    PoolCheckpoint checkpoint;
  };
  StreamMachine streams(watch_, random_);
  std::vector<Node> tree(1);
  set_.Retain(kPool);
  tree[0].checkpoint = set_.Checkpoint(kPool);
  while (tree.size() < 10) {
    Node node{.parent = random_() % tree.size(), .graph = {}, .living = {}, .checkpoint = {}};
    const Node& parent = tree[node.parent];
    set_.Restore(kPool, parent.checkpoint);
    set_.BeginScope(kPool, ScopeKind::kEager);
    Program(set_, watch_, streams, random_, RandomOptions()).Run();
    set_.EndScope(kPool);
    if (random_() % 4 == 0) watch_.FinishAll();

    set_.Restore(kPool, parent.checkpoint);
    for (const Kernel& output : parent.living) {
      if (random_() % 3 == 0) {
        set_.Free(output.block.address);
      } else {
        node.living.push_back(output);
      }
    }
    const auto outputs = Capture(node.graph, random_, RandomOptions());
    node.living.insert(node.living.end(), outputs.begin(), outputs.end());
    node.checkpoint = set_.Checkpoint(kPool);
    set_.Check();
    // On a stream that nobody synchronises with the warm-ups'.
    ASSERT_EQ(node.graph.Replay(random_), std::nullopt) << "graph " << tree.size();
    tree.push_back(std::move(node));
  }
  watch_.FinishAll();
  EXPECT_EQ(streams.wrong(), 0U);
  for (int round = 0; round < 20; ++round) {
    const size_t end = random_() % tree.size();
    std::vector<size_t> path;
    for (size_t at = end; at != 0; at = tree[at].parent) path.insert(path.begin(), at);
    for (const size_t at : path) {
      ASSERT_EQ(tree[at].graph.Replay(random_), std::nullopt)
          << "graph " << at << " in round " << round;
    }
    for (const Kernel& output : tree[end].living) ASSERT_TRUE(output.Run()) << "graph " << end;
  }
  EXPECT_TRUE(watch_.violations().empty());
}

INSTANTIATE_TEST_SUITE_P(Seeds, ExecutionTest, ::testing::Range<uint64_t>(1, 61));

}  // namespace
}  // namespace cgp
