#include "torch/testing/adapter_fuzz_session.h"

#include <string_view>
#include <tuple>

namespace cgp::simulated {

Session::Session(uint64_t seed) : dice_(seed) {
  fake_cuda::around_driver = [](std::unique_ptr<Driver> made) {
    return std::make_unique<SimulatedDriver>(std::move(made));
  };
  for (size_t thread = 0, last = dice_.Below(3); thread <= last; ++thread) {
    workers_.push_back(std::make_unique<Worker>());
  }
  for (DeviceIndex device = 0; device < kDevices; ++device) fake_cuda::NextDevice();
  Set();
  most_ids_ = 1 + dice_.Below(3);
  two_devices_ = dice_.OneIn(3);
  fails_ = dice_.OneIn(3);
  if (dice_.OneIn(4)) faults_.push_back(faults::Kind::kDriver);
  if (dice_.OneIn(4)) faults_.push_back(faults::Kind::kMemory);
  bool draws_leases = false;  // others stay what they are without
  for (const Kind& kind : kKinds) {
    if (kind.leases && !std::exchange(draws_leases, true)) leases_ = dice_.OneIn(2);
    const bool none = (kind.leases && !leases_) || (kind.optional && dice_.OneIn(4));
    weights_.push_back(none ? 0 : 1 + static_cast<unsigned>(dice_.Below(2 * kind.weight)));
  }
}

void Session::Step(uint64_t seed) {
  dice_ = Dice(seed);
  thread_ = dice_.Below(workers_.size());
  (this->*kKinds[dice_.Weighted(weights_)].step)();
  if (!dice_.OneIn(8)) return;  // it takes longer than the step
  for (DevicePools* pools : DevicePools::All()) {
    try {
      pools->set.Check();
    } catch (const std::exception& error) {
      Complain("Check(): ", error.what());
    }
  }
}

bool Session::Call(StreamId stream, const std::function<void()>& entry, MayFail may_fail) {
  const bool arm = may_fail != MayFail::kNothing && !faults_.empty() && dice_.OneIn(5);
  const faults::Kind kind = arm ? dice_.Of(faults_) : faults::Kind::kBase;
  const auto number = static_cast<int64_t>(1 + dice_.Below(12));
  const bool for_good =
      may_fail == MayFail::kAll && kind == faults::Kind::kMemory && dice_.OneIn(3);
  bool done = false;
  workers_[thread_]->Do([&] {
    fake_cuda::current_stream = ToCuda(stream);
    fake_cuda::current_device = DeviceIndexOf(stream);
    if (arm) faults::Arm(kind, number, for_good);
    try {
      entry();
      faults::Disarm();
      done = true;
    } catch (const std::exception& error) {
      faults::Disarm();
      std::string_view text = error.what();
      text = text.substr(0, text.find('\n'));
      Log("  threw ", text);
      if (text.find("internal check") != std::string_view::npos) Complain(text);
    }
  });
  return done;
}

void Session::Allocate() {
  const DeviceIndex device = Device();
  StreamId stream = Stream(device);
  for (const StreamId other : StreamsOf(device)) {
    if (IsHeld(other) && dice_.OneIn(3)) stream = other;
  }
  Graph* const graph = GraphOn(stream);
  if (graph == nullptr ? IsHeld(stream) : graph->device != device) return;
  const bool elsewhere = std::ranges::any_of(graphs_, [&](const auto& other) {
    return !other->nested.empty() && other->thread == thread_ && other.get() != graph;
  });
  if (elsewhere) return;
  const Scope* scope = nullptr;
  for (const Scope& open : scopes_) {
    if (open.thread == thread_ && open.device == device) scope = &open;
  }
  if (graph != nullptr && scope != nullptr) return;
  // What no scope takes is the base's: only where that is short of memory does it matter.
  const bool of_base = graph == nullptr && scope == nullptr;
  if (of_base && (base_.largest != kLittle || !dice_.OneIn(4))) return;
  const std::array<uint64_t, 4> most{2000, fake_cuda::kPage, 5 * fake_cuda::kPage, 1500 * 512};
  const uint64_t bytes =
      dice_.OneIn(5) ? fake_cuda::kPage * (1 + dice_.Below(4)) : 1 + dice_.Below(dice_.Of(most));
  DataPtr data;
  if (!Call(stream, [&] { data = allocator_.allocate(bytes); })) return;
  const bool is_ours = DevicePools::At(data.get()).has_value();
  if (graph != nullptr) {
    const bool in_bases = std::ranges::any_of(
        graph->nested, [&](const MempoolId_t& id) { return !IsOurs(device, id); });
    if (graph->ours && !in_bases && !is_ours) Complain("eager memory for graph ", graph->number);
  } else if (scope != nullptr && scope->ours != is_ours && !scope->is_loan) {
    Complain("a scope's memory is ", is_ours ? "ours" : "the base's", " in pool ",
             scope->id.second);
  }
  if (is_ours) Adopt(std::move(data), stream, graph);
}

void Session::Adopt(DataPtr data, StreamId stream, Graph* graph) {
  const auto owned = DevicePools::At(data.get());
  const int number = static_cast<int>(tensors_.size()) + 1;
  if (!owned) return Complain("unknown to its pool: block ", number);
  Tensor& tensor = tensors_[number];
  tensor = {
      .number = number,
      .data = std::move(data),
      .device = owned->pools->device,
      .home = stream,
      .block = owned->block,
      .pieces = drivers.at(owned->pools->device)->Below(owned->block.address, owned->block.bytes),
      .pool = {owned->id.first, owned->id.second}};
  Log("allocates block ", number, " of ", tensor.block.bytes, " bytes in pool ", tensor.pool.first,
      ",", tensor.pool.second, " on ", stream,
      graph == nullptr ? "" : Text(", graph ", graph->number));
  if (tensor.pieces.empty()) Complain("not mapped: block ", number);
  for (const auto& [other, its] : tensors_) {
    if (other != number && its.live && Overlap(its.pieces, tensor.pieces)) {
      Complain("overlaps a live block: block ", number, " the block ", other);
    }
  }
  if (graph == nullptr) {
    tensor.last = timelines.Now(stream);
  } else {
    // Eager work on a graph's block has waited for replays, which may overwrite it.
    tensor.last = AllOf(tensor.device);
    tensor.graph = graph;
    tensor.last_in[graph->number] = dag.At(stream).nodes;
    graph->blocks.insert(number);
    graph->pools.insert(tensor.pool);
  }
  if (!dice_.OneIn(6)) Use(tensor, stream);
}

// Another stream than the block's home says that it uses the block, or the home waits for the use.
// So it does without a word where it is the stream behind a body, and nobody waits where it was a
// body's.
void Session::UseInGraph(Tensor& tensor, StreamId stream, Graph& graph) {
  const bool waits = GraphOn(tensor.home) == &graph;
  const bool knows = waits || (tensor.graph == &graph && !IsHeld(tensor.home)) ||
                     std::ranges::count(graph.bodies, tensor.home, &Body::outer) > 0;
  const bool says = stream != tensor.home && (!knows || dice_.OneIn(2));
  std::vector<Node>& last = tensor.last_in[graph.number];
  CaptureDag::Point behind{.capture = graph.capture, .nodes = {}};
  for (const Node node : last) {
    if (dag.CaptureOf(node) == graph.capture) {
      behind.nodes.push_back(node);
    } else if (!dag.RunsBehind(stream, {node})) {
      return;
    }
  }
  dag.Wait(stream, behind);
  if (says && !RecordUse(tensor, stream)) return;
  const Node node = dag.Launch(stream);
  Log("  uses block ", tensor.number, " on ", stream, says ? " and says so" : "", ", node ", node);
  for (const auto& [block, access] : graph.accesses) {
    // Nobody may replay the graph any more, as after any eager block's end.
    if (IsBorrowed(tensors_.at(block)) && !tensors_.at(block).live) continue;
    if (block != tensor.number && Overlap(tensors_.at(block).pieces, tensor.pieces) &&
        !dag.LastRunsBehind(stream, {access})) {
      Complain("a race in graph ", graph.number, ": block ", tensor.number, " with block ", block);
    }
  }
  graph.accesses.emplace_back(tensor.number, node);
  graph.blocks.insert(tensor.number);
  last = {node};
  if (stream != tensor.home && !says && waits) {
    dag.Wait(tensor.home, {.capture = graph.capture, .nodes = last});
  }
}

void Session::UseEagerly(Tensor& tensor, StreamId stream) {
  const bool says = stream != tensor.home && (IsHeld(tensor.home) || dice_.OneIn(2));
  if (says && !RecordUse(tensor, stream)) return;
  timelines.Wait(stream, tensor.last);
  const Clock behind = timelines.Now(stream);
  const uint64_t count = timelines.Submit(stream);
  Log("  uses block ", tensor.number, " on ", stream, says ? " and says so" : "", ", operation ",
      count);
  std::erase_if(accesses_, [](const Access& access) {
    return timelines.Passed({{access.stream, access.count}});
  });
  for (const Access& access : accesses_) {
    const auto waited = behind.find(access.stream);
    if (access.tensor != tensor.number &&
        (waited == behind.end() || waited->second < access.count) &&
        Overlap(tensors_.at(access.tensor).pieces, tensor.pieces)) {
      Complain("a race: block ", tensor.number, " with block ", access.tensor, ", operation ",
               access.count, " on ", access.stream);
    }
  }
  accesses_.push_back({tensor.number, stream, count});
  tensor.last = timelines.Now(stream);
  if (stream != tensor.home && !says) timelines.Wait(tensor.home, tensor.last);
}

void Session::Capture() {
  const DeviceIndex device = Device();
  const StreamId stream = Stream(device);
  if (IsHeld(stream) || (SomeOpen() != nullptr && !dice_.OneIn(4))) return;
  std::pair<DeviceIndex, MempoolId_t> pool{device, {0, 0}};
  if (ids_.empty() || (ids_.size() < most_ids_ && dice_.OneIn(3))) {
    pool.second = dice_.OneIn(3) ? MempoolId_t{next_id_++, 0} : MempoolId_t{0, next_id_++};
    ids_.push_back(pool.second);
  } else if (!mempools_.empty() && dice_.OneIn(3)) {
    pool = dice_.Of(mempools_);
  } else {
    pool.second = dice_.Of(ids_);
  }
  if (pool.first != device) return;
  // As torch does.
  timelines.FinishAll();
  Call(stream, [&] { allocator_.emptyCache(); });
  auto graph = std::make_unique<Graph>(Graph{.number = static_cast<int>(graphs_.size()),
                                             .device = device,
                                             .thread = thread_,
                                             .id = pool.second,
                                             .origin = stream,
                                             .pools = {pool.second}});
  if (!Begin(*graph, stream)) return;
  graph->capture = dag.Begin(stream);
  graph->streams.push_back(stream);
  fake_cuda::SetCapture(ToCuda(stream), graph->capture);
  Log("captures graph ", graph->number, " on ", stream, " into pool ", graph->id.first, ",",
      graph->id.second);
  // Of a graph without memory it is not decided whose its pool is.
  graph->ours = !dice_.OneIn(6);
  DataPtr probe;
  const auto allocate = [&] { probe = allocator_.allocate(512); };
  if (graph->ours && Call(stream, allocate, MayFail::kNothing)) {
    graph->ours = DevicePools::At(probe.get()).has_value();
    if (const auto owned = DevicePools::At(probe.get())) {
      graph->pools.insert({owned->id.first, owned->id.second});
    }
  }
  Call(
      stream, [&] { probe.clear(); }, MayFail::kOne);
  graphs_.push_back(std::move(graph));
}

void Session::EndCapture() {
  Graph* const graph = SomeOpen();
  if (graph == nullptr) return;
  const bool fails = graph->state == Graph::State::kInvalidated || (fails_ && dice_.OneIn(4));
  while (!fails && !graph->bodies.empty()) LeaveBody(*graph);
  if (!dice_.OneIn(6)) LeaveNested(*graph);
  for (;; graph->bodies.pop_back()) {
    EndStreams(*graph, !fails);
    if (graph->bodies.empty()) break;
    graph->capture = graph->bodies.back().capture;
    graph->streams = graph->bodies.back().streams;
  }
  Log(fails ? "fails to capture graph " : "captured graph ", graph->number);
  if (!fails) {
    graph->state = Graph::State::kCaptured;
    End(graph->origin, graph->id);
    if (leases_) NameCapture(*graph);
    if (dice_.OneIn(2)) Checkpoint(*graph);
  } else {
    // Its route stays: torch before 2.14 forgets it, and cudagraph_pool.graph tells of it.
    graph->state = Graph::State::kGone;
    graph->gone_before = static_cast<int>(graphs_.size());
    graph->holds_pool = false;
    graph->replayable = false;
    if (dice_.OneIn(2)) {
      Call(graph->origin, [&] {
        allocator_.scopes().EndFailed(graph->device, {graph->id.first, graph->id.second});
      });
    }
  }
  LeaveNested(*graph);
}

// It is launched when all before it is done; what comes after it is judged.
void Session::Replay() {
  NoteReturned();
  Graph* const graph = SomeGraph([this](const Graph& some) {
    const auto is_filled = [&](const MempoolId_t& pool) { return IsFilled(some.device, pool); };
    // Nobody may need what it overwrites.
    const auto is_needed = [&](const auto& entry) {
      const auto& [number, tensor] = entry;
      return tensor.live && !some.blocks.contains(number) && !IsBorrowed(tensor) &&
             std::ranges::any_of(some.blocks, [&, &pieces = tensor.pieces](int block) {
               return Overlap(tensors_.at(block).pieces, pieces);
             });
    };
    return some.state == Graph::State::kCaptured && some.replayable && some.ours &&
           std::ranges::none_of(some.pools, is_filled) && std::ranges::none_of(tensors_, is_needed);
  });
  if (graph == nullptr) return;
  const StreamId stream = Stream(graph->device);
  if (IsHeld(stream) || !BeginReplay(*graph, stream)) return;
  timelines.Wait(stream, AllOf(graph->device));
  const uint64_t count = timelines.Submit(stream);
  Log("replays graph ", graph->number, " on ", stream, ", operation ", count);
  for (const int number : graph->blocks) {
    Tensor& tensor = tensors_.at(number);
    if (drivers.at(tensor.device)->Below(tensor.block.address, tensor.block.bytes) !=
        tensor.pieces) {
      Complain("is mapped otherwise: graph ", graph->number, "'s block ", number);
    }
    accesses_.push_back({number, stream, count});
    if (!tensor.live) continue;
    tensor.last = timelines.Now(stream);
    if (!IsHeld(tensor.home)) {
      timelines.Wait(tensor.home, tensor.last);
    } else if (tensor.graph != graph) {
      timelines.Finish(tensor.last);
    }
  }
}

void Session::EnterScope() {
  Graph* const graph = SomeOpen();
  Scope scope{.thread = thread_, .device = graph == nullptr ? Device() : graph->device};
  if (!mempools_.empty() && (graph != nullptr || dice_.OneIn(3))) {
    std::tie(scope.device, scope.id) = dice_.Of(mempools_);
  } else if (graph == nullptr && !ids_.empty()) {
    scope.id = dice_.Of(ids_);
  }
  if (scope.id.second == 0) return;
  if (graph != nullptr && (graph->device != scope.device || graph->state != Graph::State::kOpen)) {
    return;
  }
  const StreamId stream = graph == nullptr ? Stream(scope.device) : graph->streams.front();
  if (graph == nullptr && IsHeld(stream)) return;
  const auto enter = [&] {
    const auto filter = [thread = std::this_thread::get_id()](cudaStream_t) {
      return std::this_thread::get_id() == thread;
    };
    allocator_.beginAllocateToPool(scope.device, scope.id, filter);
  };
  const bool pauses = graph != nullptr && dice_.OneIn(4);  // as SGLang does
  if (pauses) End(stream, graph->id);
  if (!Call(stream, enter)) {
    if (pauses) Resume(*graph, stream);
    return;
  }
  Log("enters pool ", scope.id.second, graph == nullptr ? "" : Text(" in graph ", graph->number),
      pauses ? ", which pauses" : "");
  if (graph != nullptr) {
    graph->nested.push_back(scope.id);
    graph->pools.insert(scope.id);
  } else {
    scope.ours = IsOurs(scope.device, scope.id);
    scopes_.push_back(scope);
  }
  Allocate();
  if (!pauses) return;
  LeaveNested(*graph, graph->nested.size() - 1);
  Resume(*graph, stream);
}

void Session::ExitScope() {
  Graph* const graph = SomeOpen();
  const size_t around = graph == nullptr || graph->bodies.empty() ? 0 : graph->bodies.back().nested;
  if (graph != nullptr && graph->nested.size() > around) {
    Log("leaves pool ", graph->nested.back().second, " in graph ", graph->number);
    LeaveNested(*graph, graph->nested.size() - 1);
    return;
  }
  const auto newest = std::find_if(scopes_.rbegin(), scopes_.rend(),
                                   [this](const Scope& scope) { return scope.thread == thread_; });
  if (newest == scopes_.rend()) return;
  const Scope scope = *newest;
  scopes_.erase(std::next(newest).base());
  if (scope.is_loan) return EndLoan(scope);
  Log("leaves pool ", scope.id.second);
  const StreamId stream = Stream(scope.device);
  End(stream, scope.id);
  Release(stream, scope.id);
}

const std::array<Session::Kind, 24> Session::kKinds{{
    {&Session::Allocate, 40, false},
    {&Session::Free, 25, false},
    {&Session::Use, 25, false},
    {&Session::Capture, 8, false},
    {&Session::EndCapture, 8, false},
    {&Session::Reset, 8},
    {&Session::Replay, 12},
    {&Session::Fork, 20},
    {&Session::Order, 4},
    {&Session::MakeMemPool, 4},
    {&Session::DropMemPool, 1},
    {&Session::EnterScope, 12},
    {&Session::ExitScope, 10},
    {&Session::Trim, 6},
    {&Session::Progress, 5},
    {&Session::Set, 2},
    {&Session::Invalidate, 2},
    {&Session::Restore, 8},
    {&Session::EnterBody, 6},
    {&Session::LeaveBody, 4},
    {&Session::Sleep, 5, true, true},
    {&Session::Wake, 5, true, true},
    {&Session::TrimToNeeds, 3, true, true},
    {&Session::BeginLoan, 30, true, true},
}};

}  // namespace cgp::simulated
