// A program of the adapter's fuzzer: captures, replays, checkpoints, MemPools and eager work on
// GraphAllocator, by several threads on several devices. No two owners of memory may touch it
// without an edge between them, and what a graph touches must be mapped as it was when the graph
// was captured: else it complains (adapter_fuzz_devices.h).
//
// What a program does keeps to what torch and its users have to: who frees a block has waited for
// its work, or said whose it is, and who replays a graph for what came before.
#pragma once

#include <c10/cuda/CUDAStream.h>
#include <c10/util/Exception.h>

#include <algorithm>
#include <array>
#include <cstdint>
#include <cstdio>
#include <functional>
#include <map>
#include <memory>
#include <semaphore>
#include <set>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "testing/step.h"
#include "testing/text.h"
#include "torch/graph_allocator.h"
#include "torch/testing/adapter_fuzz_devices.h"
#include "torch/testing/fake_base_allocator.h"
#include "torch/testing/fake_cuda.h"

namespace cgp::simulated {
using Node = CaptureDag::Node;
inline constexpr size_t kLittle = 1000;  // of the base's memory, while it is short of it

// A thread that does what it is told while who tells it waits.
class Worker {
 public:
  void Do(std::function<void()> job) {
    job_ = std::move(job);
    begun_.release();
    done_.acquire();
  }

 private:
  struct Silence final : c10::WarningHandler {
    void process(const c10::Warning&) override {}
  };
  void Run() {
    Silence silence;
    c10::WarningUtils::set_warning_handler(&silence);
    for (;; done_.release()) {
      begun_.acquire();
      job_();
    }
  }

  std::function<void()> job_;
  std::binary_semaphore begun_{0};
  std::binary_semaphore done_{0};
  std::thread thread_{[this] { Run(); }};
};

// A part of a graph that is captured by itself, on a stream of its own: what its capture was
// before, whose node `node` the body stands for.
struct Body {
  StreamId outer{};  // the stream that goes on behind it
  Node node{};
  CaptureId capture = kNoCapture;
  std::vector<StreamId> streams = {};
  size_t nested = 0;   // open scopes of MemPools
  size_t tensors = 0;  // that there were
};

struct Graph {
  // Until it is captured, or its capture has failed and it is gone; then until it is reset.
  enum class State : uint8_t { kOpen, kInvalidated, kCaptured, kGone };

  int number = 0;
  DeviceIndex device = 0;
  size_t thread = 0;
  MempoolId_t id{0, 0};
  StreamId origin{};
  CaptureId capture = kNoCapture;  // the body's, in one
  State state = State::kOpen;
  int gone_before = 0;  // the graph of this number
  bool ours = true;
  bool replayable = true;
  bool holds_pool = true;
  std::vector<MempoolId_t> nested = {};  // open scopes of MemPools
  std::set<MempoolId_t> pools = {};
  std::shared_ptr<cca::AllocatorState> checkpoint = {};  // of its pool, as it left it
  std::set<int> left = {};                               // what lived there
  std::vector<Body> bodies = {};                         // that are open
  std::vector<std::pair<int, Node>> accesses = {};       // of blocks, by nodes
  std::set<int> blocks = {};                             // all that it has or uses
  std::vector<StreamId> streams = {};                    // that its capture reached, from its first
  std::pair<uint64_t, uint64_t> name = {};               // CaptureScopes::NameCapture()

  bool open() const { return state == State::kOpen || state == State::kInvalidated; }
};

struct Tensor {
  int number = 0;
  DataPtr data;
  DeviceIndex device = 0;
  StreamId home{};
  const Graph* graph = nullptr;  // that it was captured in
  Block block;
  Pieces pieces = {};
  MempoolId_t pool{0, 0};
  bool live = true;
  bool is_away = false;                           // has died, and its pages were given away
  Clock last = {};                                // what eager work on it has to run behind
  std::map<int, std::vector<Node>> last_in = {};  // what a graph's has to, by graph
};

struct Scope {
  size_t thread = 0;
  DeviceIndex device = 0;
  MempoolId_t id{0, 0};
  bool ours = false;
  bool is_loan = false;
};

class Session {
 public:
  explicit Session(uint64_t seed);
  // Prints what it does.
  void Step(uint64_t seed);

 private:
  struct Kind {
    void (Session::*step)();
    unsigned weight;
    bool optional = true;
    bool leases = false;
  };
  static const std::array<Kind, 24> kKinds;

  template <typename... Parts>
  void Log(const Parts&... parts) {
    std::puts(Text("  thread ", thread_, ": ", parts...).c_str());
    std::fflush(stdout);
  }

  // --- Calls ---

  // Of what the entry calls: one of them, or all from one on that ask for the host's memory.
  enum class MayFail : uint8_t { kNothing, kOne, kAll };
  // Returns whether it went through.
  bool Call(StreamId stream, const std::function<void()>& entry, MayFail may_fail = MayFail::kAll);
  // torch ends and releases once; what it is told has failed may be tried again.
  void CallTwice(StreamId stream, const std::function<void()>& entry) {
    if (!Call(stream, entry)) Call(stream, entry, MayFail::kNothing);
  }
  bool Begin(Graph& graph, StreamId stream, MayFail may_fail = MayFail::kAll) {
    const auto begin = [&] {
      allocator_.beginAllocateToPool(graph.device, graph.id, [&graph](cudaStream_t asked) {
        const faults::Within spared;
        if (graph.state == Graph::State::kGone && graph.ours)
          Complain("a graph asked that is gone");
        return graph.capture != kNoCapture && fake_cuda::ActiveCapture(asked) == graph.capture;
      });
    };
    return Call(stream, begin, may_fail);
  }
  void End(StreamId stream, MempoolId_t id) {
    CallTwice(stream, [&] { allocator_.endAllocateToPool(fake_cuda::current_device, id); });
  }
  void Release(StreamId stream, MempoolId_t id) {
    CallTwice(stream, [&] { allocator_.releasePool(fake_cuda::current_device, id); });
  }

  // --- What there is ---

  DeviceIndex Device() { return two_devices_ && dice_.OneIn(3) ? 1 : 0; }
  StreamId Stream(DeviceIndex device) { return StreamOf(device, dice_.Below(kStreams)); }
  Graph* GraphOn(StreamId stream) {
    for (const auto& graph : graphs_) {
      if (dag.IsCaptured(stream) && graph->capture == dag.At(stream).capture) return graph.get();
    }
    return nullptr;
  }
  template <typename Fits>
  Graph* SomeGraph(const Fits& fits) {
    std::vector<Graph*> fitting;
    for (const auto& graph : graphs_) {
      if (fits(*graph)) fitting.push_back(graph.get());
    }
    return fitting.empty() ? nullptr : dice_.Of(fitting);
  }
  Graph* SomeOpen() {
    return SomeGraph(
        [this](const Graph& graph) { return graph.open() && graph.thread == thread_; });
  }
  // Mostly a new one.
  Tensor* SomeTensor() {
    std::vector<Tensor*> live;
    for (auto& [number, tensor] : tensors_) {
      if (tensor.live) live.push_back(&tensor);
    }
    return live.empty() ? nullptr : dice_.NewOf(live, 4);
  }
  bool IsInScope(DeviceIndex device, const MempoolId_t& id) const {
    return std::ranges::any_of(
        scopes_, [&](const Scope& scope) { return scope.device == device && scope.id == id; });
  }
  // Whether somebody allocates there, or may begin to: a graph that is open, or an eager scope.
  bool IsFilled(DeviceIndex device, const MempoolId_t& id) const {
    return IsInScope(device, id) || std::ranges::any_of(graphs_, [&](const auto& graph) {
             return graph->open() && graph->device == device && graph->pools.contains(id);
           });
  }
  static bool IsOurs(DeviceIndex device, const MempoolId_t& id) {
    DevicePools* const pools = DevicePools::Find(device);
    return pools != nullptr && pools->set.Contains({id.first, id.second});
  }

  // --- Blocks ---

  void Allocate();
  void Adopt(DataPtr data, StreamId stream, Graph* graph);
  void Free() {
    Tensor* const tensor = SomeTensor();
    if (tensor == nullptr) return;
    if (dice_.OneIn(2)) Use(*tensor, tensor->home);  // which is under way then
    Free(*tensor);
  }
  void Free(Tensor& tensor) {
    Log("frees block ", tensor.number);
    Forget(tensor);
    Call(
        StreamOf(tensor.device, 0), [&] { tensor.data.clear(); }, MayFail::kOne);
    if (DevicePools::At(reinterpret_cast<void*>(tensor.block.address))) {
      Complain("lives though it was freed: block ", tensor.number);
    }
  }
  // Who replays a graph fills its inputs first, where their addresses are kept for the graph: of
  // what died in its capture, and of what graphs left, in its own pool.
  void Forget(Tensor& tensor) {
    tensor.live = false;
    for (const auto& graph : graphs_) {
      const bool is_kept = graph->id == tensor.pool && (graph->open() || tensor.graph != nullptr);
      if (graph->blocks.contains(tensor.number) && tensor.graph != graph.get() && !is_kept) {
        graph->replayable = false;
      }
    }
  }
  bool RecordUse(const Tensor& tensor, StreamId stream) {
    const c10::Device device(c10::kCUDA, DeviceIndexOf(stream));
    const c10::Stream used(c10::Stream::UNSAFE, device, static_cast<c10::StreamId>(stream));
    return Call(tensor.home,
                [&] { allocator_.recordStream(tensor.data, c10::cuda::CUDAStream(used)); });
  }
  void Use() {
    Tensor* const tensor = SomeTensor();
    if (tensor == nullptr) return;
    const DeviceIndex device = dice_.OneIn(6) ? Device() : tensor->device;
    const Graph* const graph = GraphOn(tensor->home);
    const StreamId other = graph == nullptr ? Stream(device) : dice_.Of(graph->streams);
    Use(*tensor, dice_.OneIn(2) ? tensor->home : other);
  }
  void Use(Tensor& tensor, StreamId stream) {
    if (drivers.at(tensor.device)->Below(tensor.block.address, tensor.block.bytes) !=
        tensor.pieces) {
      Complain("is mapped otherwise: block ", tensor.number);
    }
    Graph* const graph = GraphOn(stream);
    const Graph* const owner = tensor.graph;
    if (owner != nullptr && owner != graph && owner->state != Graph::State::kCaptured) return;
    if (graph != nullptr) {
      if (graph->device == tensor.device) UseInGraph(tensor, stream, *graph);
    } else if (!IsHeld(stream)) {
      UseEagerly(tensor, stream);
    }
  }
  void UseInGraph(Tensor& tensor, StreamId stream, Graph& graph);
  void UseEagerly(Tensor& tensor, StreamId stream);

  // --- Graphs ---

  void Capture();
  void EndCapture();
  void LeaveNested(Graph& graph, size_t left = 0) {
    for (; graph.nested.size() > left; graph.nested.pop_back()) {
      End(graph.streams.front(), graph.nested.back());
      Release(graph.streams.front(), graph.nested.back());
    }
  }
  void Extend(Graph& graph, StreamId stream, StreamId to_follow) {
    dag.Wait(stream, dag.At(to_follow));
    fake_cuda::SetCapture(ToCuda(stream), graph.capture);
    if (std::ranges::count(graph.streams, stream) == 0) graph.streams.push_back(stream);
  }
  // The capture is over for its streams, which the first one has waited for if it went well.
  static void EndStreams(Graph& graph, bool join) {
    const StreamId first = graph.streams.front();
    for (const StreamId stream : graph.streams) {
      if (join && stream != first) dag.Wait(first, dag.At(stream));
      fake_cuda::SetCapture(ToCuda(stream), 0);
    }
    dag.End(graph.capture);
  }
  // The filter of a graph that is gone is not known to be, where a capture of before comes to its
  // stream.
  bool MayCome(const Graph& graph, StreamId stream) const {
    return std::ranges::none_of(graphs_, [&](const auto& other) {
      return other->origin == stream && graph.number < other->gone_before;
    });
  }
  void Fork() {
    Graph* const graph =
        SomeGraph([](const Graph& some) { return some.state == Graph::State::kOpen; });
    if (graph == nullptr) return;
    const StreamId from = dice_.Of(graph->streams);
    const StreamId to = Stream(dice_.OneIn(4) ? Device() : graph->device);
    if (from == to || (IsHeld(to) && GraphOn(to) != graph)) return;
    if (!MayCome(*graph, to)) return;
    if (!IsHeld(to)) timelines.Finish(timelines.Now(to));
    Extend(*graph, to, from);
    if (dice_.OneIn(2)) dag.Launch(from);
    Log("graph ", graph->number, ": stream ", to, " waits for ", from);
  }
  void Invalidate() {
    Graph* const graph = SomeOpen();
    if (graph == nullptr || graph->state != Graph::State::kOpen || !fails_) return;
    Log("graph ", graph->number, " is invalidated");
    dag.Invalidate(graph->capture);
    for (const StreamId stream : graph->streams) fake_cuda::Invalidate(ToCuda(stream));
    graph->state = Graph::State::kInvalidated;
  }
  void Reset() {
    Graph* const graph =
        SomeGraph([](const Graph& some) { return !some.open() && some.holds_pool; });
    if (graph == nullptr) return;
    // Or all of its pool: what outlives them is in a pool that is given back.
    const bool all = dice_.OneIn(2);
    for (const auto& other : graphs_) {
      if (other.get() != graph && !(all && other->id == graph->id)) continue;
      if (other->open() || !other->holds_pool) continue;
      Log("resets graph ", other->number);
      other->replayable = false;
      other->holds_pool = false;
      DropCapture(*other);
      Release(other->origin, other->id);
    }
    if (all) Trim();
  }
  void Replay();

  // --- Scopes and pools ---

  void MakeMemPool() {
    if (mempools_.size() == 3) return;
    const DeviceIndex device = Device();
    const MempoolId_t id{0, next_id_++};
    if (!Call(StreamOf(device, 0), [&] { allocator_.createOrIncrefPool(device, id); })) return;
    Call(StreamOf(device, 0), [&] {
      if (dice_.OneIn(2)) allocator_.setUseOnOOM(device, id, true);
      if (dice_.OneIn(6)) allocator_.setNoSplit(device, id);
    });
    mempools_.emplace_back(device, id);
    Log("makes MemPool ", id.second, " on device ", int{device});
  }
  void DropMemPool() {
    if (mempools_.empty()) return;
    const auto [device, id] = dice_.Of(mempools_);
    if (IsInScope(device, id)) return;
    Log("drops MemPool ", id.second);
    std::erase(mempools_, std::pair(device, id));
    const StreamId stream = StreamOf(device, 0);
    CallTwice(stream, [&, id = id, device = device] { allocator_.setUseOnOOM(device, id, false); });
    Release(stream, id);
    Call(stream, [&, id = id] { allocator_.emptyCache(id); });
  }
  void EnterScope();
  void ExitScope();
  // adapter_fuzz_bodies.cc
  // Its route is there again.
  void Resume(Graph& graph, StreamId stream) {
    if (!Begin(graph, stream) && !Begin(graph, stream, MayFail::kNothing)) {
      Complain("cannot go on: graph ", graph.number);
    }
  }
  void EnterBody();
  void LeaveBody(Graph& graph);
  void LeaveBody() {
    Graph* const graph = SomeOpen();
    if (graph != nullptr && graph->state == Graph::State::kOpen && !graph->bodies.empty()) {
      LeaveBody(*graph);
    }
  }
  // adapter_fuzz_leases.cc
  static bool IsBorrowed(const Tensor& tensor);
  std::pair<DeviceIndex, MempoolId_t> SomePool();  // {0, 0} if there is none
  void TakePages(const char* what, const CaptureScopes::Step& step);
  void Sleep();
  void TrimToNeeds();
  void Wake();
  void NoteReturned();
  bool IsLent(const std::set<int>& blocks) const;
  static bool LacksMemory(const Graph& graph);
  bool BeginReplay(Graph& graph, StreamId stream);
  void NameCapture(Graph& graph);
  void DropCapture(Graph& graph);
  void BeginLoan();
  void EndLoan(const Scope& scope);
  // adapter_fuzz_trees.cc
  std::set<int> LiveIn(const Graph& graph) const;
  void CheckLiveIn(const Graph& graph);
  void Checkpoint(Graph& graph);
  void Restore();
  void Trim() {
    Log("empties the cache");
    Call(StreamOf(0, 0), [&] { allocator_.emptyCache(); });
  }
  void Progress() {
    for (uint64_t steps = 1 + dice_.Below(12); steps > 0; --steps) {
      timelines.Progress(Stream(static_cast<DeviceIndex>(dice_.Below(kDevices))), 1);
    }
  }
  void Order() {
    const DeviceIndex device = Device();
    const StreamId waiting = Stream(device);
    const StreamId awaited = Stream(device);
    if (!IsHeld(waiting) && !IsHeld(awaited)) timelines.Wait(waiting, timelines.Now(awaited));
  }
  void Set() {
    if (dice_.OneIn(2)) base_.largest = dice_.OneIn(2) ? ~size_t{0} : kLittle;
    if (dice_.OneIn(2)) allocator_.scopes().shares_captures = dice_.OneIn(2);
    if (dice_.OneIn(2)) allocator_.scopes().takes_mempools = dice_.OneIn(2);
    // Before there are pools it would be taken out, and not be asked any more.
    if (!DevicePools::All().empty() && dice_.OneIn(3)) allocator_.scopes().takes_captures = false;
    if (dice_.OneIn(2)) allocator_.scopes().takes_captures = true;
    if (leases_) allocator_.scopes().lends_on_oom = dice_.OneIn(4);
  }

  Dice dice_;
  size_t thread_ = 0;  // that does the step
  bool two_devices_ = false;
  bool fails_ = false;  // captures do, and hold their pool for good
  bool leases_ = false;
  std::vector<faults::Kind> faults_;
  std::vector<unsigned> weights_;
  FakeBaseAllocator base_;
  GraphAllocator allocator_{base_};
  std::vector<std::unique_ptr<Worker>> workers_;
  std::vector<Scope> scopes_;  // eager ones that are open
  std::map<int, Tensor> tensors_;
  std::vector<std::unique_ptr<Graph>> graphs_;
  struct Access {
    int tensor;
    StreamId stream;
    uint64_t count;
  };
  std::vector<Access> accesses_;  // eager ones and replays that may be under way
  std::vector<MempoolId_t> ids_;  // of graphs
  std::vector<std::pair<DeviceIndex, MempoolId_t>> mempools_;
  size_t most_ids_ = 1;
  uint64_t next_id_ = 1;
};

}  // namespace cgp::simulated
